//! One table of what a peer may do wrong at each receiver, whole and byte by byte: which fatal error and which byte its
//! answer names (NVMe/TCP 3.6.2.4, 3.6.2.5), and that it shows the header that it refused.

use headrace_host::testing::{Broken, Payload, Queue};
use headrace_media::{Media, MemoryMedia};
use headrace_sim::client::{bring_up, drain, encode, queue};
use headrace_sim::media::Handle;
use headrace_sim::pair::later;
use headrace_sim::{Client, Random, HOST, NQN};
use headrace_target::testing::{Bench, IN_CAPSULE_BYTES, MAX_H2C_DATA_BYTES};
use headrace_transfer::Buffer;
use headrace_wire::command::{Cqe, Sgl, Sqe};
use headrace_wire::pdu::{
    CommonHeader, DataHeader, Digests, IcReq, IcResp, Pdu, R2t, TermReq, FLAG_LAST_PDU, FLAG_SUCCESS,
};
use headrace_wire::{io, Status};
use proptest::prelude::*;
use std::sync::Arc;

const BLOCK: usize = 512;
const OFF: Digests = Digests {
    header: false,
    data: false,
};
const HEADER: Digests = Digests {
    header: true,
    data: false,
};

/// Where a PDU-specific field lies.
const CCCID: u32 = 8;
const TTAG: u32 = 10;
const DATAO: u32 = 12;
const DATAL: u32 = 16;
const RESP_CID: u32 = 20;

/// What it is, where it comes, the digests in force, the bytes; FES and FEI of the answer.
type Row<L> = (&'static str, L, Digests, Vec<u8>, u16, u32);

fn h2c(cccid: u16, ttag: u16, datao: u32, datal: u32, last: bool) -> Pdu {
    Pdu::H2cData(DataHeader {
        cccid,
        ttag,
        datao,
        datal,
        last,
        success: false,
    })
}

fn c2h(cccid: u16, datao: u32, datal: u32, last: bool) -> Pdu {
    Pdu::C2hData(DataHeader {
        cccid,
        ttag: 0,
        datao,
        datal,
        last,
        success: false,
    })
}

fn changed(mut bytes: Vec<u8>, at: usize, value: u8) -> Vec<u8> {
    assert_ne!(bytes[at], value);
    bytes[at] = value;
    bytes
}

// The target.

#[derive(Clone, Copy, PartialEq)]
enum Life {
    Fresh,
    /// ICReq and ICResp are through.
    Initialised,
    /// An I/O queue, with an R2T of `R2TL` bytes open for command 7, of which the first quarter has come.
    Pulling,
}

const R2TL: u32 = 4096;
const CAME: u32 = R2TL / 4;

/// What the target says to `bytes`, and the header that it shows.
fn target_says(life: Life, digests: Digests, bytes: &[u8], piece: usize) -> (u16, u32, Vec<u8>) {
    let media = MemoryMedia::new(64 * BLOCK as u64, BLOCK as u32).unwrap();
    let mut bench = Bench::new(NQN, Box::new(media));
    let mut client = Client::new(digests, 0);
    let peer = match life {
        Life::Fresh => bench.accept(),
        Life::Initialised => {
            let peer = bench.accept();
            bench.feed(peer, &client.hello());
            peer
        }
        Life::Pulling => {
            let (_admin, cntlid) = bring_up(&mut bench, NQN, HOST, 0);
            let peer = queue(&mut bench, &mut client, NQN, HOST, cntlid, 1);
            let write = Sqe::rw(io::WRITE, 7, 1, 0, 8).with_sgl(Sgl::Transport { length: R2TL });
            bench.feed(peer, &client.command(write, &[]));
            let r2t = drain(&mut bench, peer, &mut client).pop().map(|one| one.pdu);
            let expected = R2t {
                cccid: 7,
                ttag: 0,
                r2to: 0,
                r2tl: R2TL,
            };
            assert_eq!(r2t, Some(Pdu::R2t(expected)));
            let data = client.encode(&h2c(7, 0, 0, CAME, false), &[1; CAME as usize]);
            bench.feed(peer, &data);
            peer
        }
    };
    drain(&mut bench, peer, &mut client);
    assert!(bench.is_open(peer));
    for bytes in bytes.chunks(piece) {
        bench.feed(peer, bytes);
    }
    assert!(!bench.is_open(peer), "the connection goes on");
    assert_eq!(bench.memory_bytes(), 0, "memory stays taken");
    let said = drain(&mut bench, peer, &mut client);
    // Behind the answers to what was right.
    match said.last() {
        Some(one) => match one.pdu {
            Pdu::C2hTermReq(TermReq { fes, fei }) => (fes, fei, one.data.clone()),
            _ => panic!("{one:?}"),
        },
        None => panic!("it says nothing"),
    }
}

#[test]
fn what_the_target_refuses() {
    let ic_request = |hpda| {
        let pdu = Pdu::IcReq(IcReq {
            pfv: 0,
            hpda,
            digests: OFF,
            maxr2t: 0,
        });
        encode(&pdu, &[], OFF, 0)
    };
    let flush = encode(&Pdu::CapsuleCmd(Sqe::new(io::FLUSH, 9, 1)), &[], OFF, 0);
    let data = |pdu: Pdu, length: u32| encode(&pdu, &vec![2; length as usize], OFF, 0);
    let (next, rest) = (CAME, R2TL - CAME);
    let too_much = IN_CAPSULE_BYTES + 512;
    let capsule = Sqe::rw(io::WRITE, 9, 1, 0, too_much / 512).with_sgl(Sgl::InCapsule {
        offset: 0,
        length: too_much,
    });
    let response = encode(&Pdu::CapsuleResp(Cqe::new(7, Status::SUCCESS)), &[], OFF, 0);
    let with_digest = encode(&Pdu::CapsuleCmd(Sqe::new(io::FLUSH, 9, 1)), &[], HEADER, 0);
    let broken_digest = changed(with_digest.clone(), 72, !with_digest[72]);
    let small = |datao, datal, last| data(h2c(7, 0, datao, datal, last), datal);

    #[rustfmt::skip]
    let table: Vec<Row<Life>> = vec![
        ("no such PDU type", Life::Fresh, OFF, changed(ic_request(0), 0, 0x0B), 1, 0),
        ("ICReq with PFV 1", Life::Fresh, OFF, changed(ic_request(0), 8, 1), 6, 8),
        ("ICReq with HPDA 32", Life::Fresh, OFF, ic_request(32), 1, 10),
        ("ICReq with HLEN 24", Life::Fresh, OFF, changed(ic_request(0), 2, 24), 1, 2),
        ("ICReq with PLEN 129", Life::Fresh, OFF, changed(ic_request(0), 4, 129), 1, 4),
        ("a command before ICReq", Life::Fresh, OFF, flush.clone(), 2, 0),
        ("data before ICReq", Life::Fresh, OFF, small(0, 512, true), 2, 0),
        ("a second ICReq", Life::Initialised, OFF, ic_request(0), 2, 0),
        ("ICResp from a host", Life::Initialised, OFF, changed(ic_request(0), 0, 1), 1, 0),
        ("CapsuleResp from a host", Life::Initialised, OFF, response, 1, 0),
        ("C2HData from a host", Life::Pulling, OFF, data(c2h(7, 0, 512, true), 512), 1, 0),
        ("R2T from a host", Life::Pulling, OFF, encode(&Pdu::R2t(R2t { cccid: 7, ttag: 0, r2to: 0, r2tl: 1 }), &[], OFF, 0), 1, 0),
        ("a digest that is not in force", Life::Initialised, OFF, changed(flush.clone(), 1, 1), 1, 1),
        ("no digest where one is in force", Life::Pulling, HEADER, flush.clone(), 1, 1),
        ("a wrong header digest", Life::Pulling, HEADER, broken_digest, 3, 0),
        ("PDO inside of the header", Life::Pulling, OFF, changed(small(next, 512, false), 3, 20), 1, 3),
        ("PDO not aligned", Life::Pulling, OFF, changed(small(next, 512, false), 3, 25), 1, 3),
        ("more in the capsule than it may carry", Life::Pulling, OFF, encode(&Pdu::CapsuleCmd(capsule), &vec![0; too_much as usize], OFF, 0), 1, 4),
        ("data for another command", Life::Pulling, OFF, data(h2c(8, 0, next, 512, false), 512), 1, CCCID),
        ("data for no R2T", Life::Pulling, OFF, data(h2c(7, 1, next, 512, false), 512), 1, TTAG),
        ("data for no R2T, far off", Life::Pulling, OFF, data(h2c(7, 0xFFFF, next, 512, false), 512), 1, TTAG),
        ("no data", Life::Pulling, OFF, data(h2c(7, 0, next, 0, false), 0), 1, DATAL),
        ("DATAL beyond PLEN", Life::Pulling, OFF, data(h2c(7, 0, next, 513, false), 512), 1, DATAL),
        ("DATAL below PLEN", Life::Pulling, OFF, data(h2c(7, 0, next, 511, false), 512), 1, DATAL),
        ("a gap", Life::Pulling, OFF, small(next + 1, 512, false), 1, DATAO),
        ("again", Life::Pulling, OFF, small(0, next, false), 1, DATAO),
        ("an overlap", Life::Pulling, OFF, small(next - 1, 512, false), 1, DATAO),
        ("beyond the R2T", Life::Pulling, OFF, small(next, rest + 1, true), 4, 0),
        ("behind the R2T", Life::Pulling, OFF, small(R2TL, 512, true), 4, 0),
        ("DATAO and DATAL that overflow", Life::Pulling, OFF, small(u32::MAX, 512, false), 4, 0),
        ("more than MAXH2CDATA", Life::Pulling, OFF, small(next, MAX_H2C_DATA_BYTES + 4, true), 5, 0),
        ("LAST_PDU too early", Life::Pulling, OFF, small(next, 512, true), 1, 1),
        ("data after the last", Life::Pulling, OFF, [small(next, rest, true), small(R2TL, 512, true)].concat(), 1, TTAG),
        ("a TermReq that is too long", Life::Pulling, OFF, data(Pdu::H2cTermReq(TermReq { fes: 1, fei: 0 }), 129), 1, 4),
    ];
    for (name, life, digests, bytes, fes, fei) in table {
        for piece in [usize::MAX, 1, 5] {
            let said = std::panic::catch_unwind(|| target_says(life, digests, &bytes, piece));
            let said = said.unwrap_or_else(|_| panic!("{name}, in pieces of {piece}"));
            let (found_fes, found_fei, shown) = said;
            assert_eq!((found_fes, found_fei), (fes, fei), "{name}");
            let at = bytes.windows(shown.len()).position(|window| window == shown);
            assert!(
                at.is_some() && shown.len() >= 8,
                "{name}: another header is shown: {shown:?}"
            );
        }
    }
}

#[test]
fn the_hosts_own_end_is_taken_in_silence() {
    let mut bench = Bench::new(NQN, Box::new(MemoryMedia::new(4096, 512).unwrap()));
    let client = Client::new(OFF, 0);
    let peer = bench.accept();
    bench.feed(peer, &client.hello());
    bench.output(peer, usize::MAX);
    bench.feed(
        peer,
        &encode(&Pdu::H2cTermReq(TermReq { fes: 3, fei: 0 }), &[1; 24], OFF, 0),
    );
    assert!(!bench.is_open(peer) && !bench.has_output(peer));
}

// The host.

#[derive(Clone, Copy, PartialEq)]
enum Host {
    Fresh,
    /// CID 0 reads 4096 bytes, CID 1 writes 8192 by R2T, CID 2 has no data.
    Busy,
}

fn host_says(life: Host, digests: Digests, bytes: &[u8], piece: usize) -> (u16, u32) {
    let mut host = Queue::new(8, digests, (0, 0), 0);
    host.output(usize::MAX);
    let guarded = Buffer::from_vec(vec![0xC5; 3 * 4096]);
    if life == Host::Busy {
        let response = Pdu::IcResp(IcResp {
            pfv: 0,
            cpda: 0,
            digests,
            maxh2cdata: 4096,
        });
        host.deliver(&encode(&response, &[], OFF, 0)).unwrap();
        let inside = guarded.slice(4096, 4096).unwrap();
        assert!(host.submit(Sqe::rw(io::READ, 0, 1, 0, 8), Payload::Read(inside), 0, later()));
        let write = Payload::Write(Buffer::zeroed(8192));
        assert!(host.submit(Sqe::rw(io::WRITE, 0, 1, 0, 16), write, 1, later()));
        assert!(host.submit(Sqe::new(io::FLUSH, 0, 1), Payload::None, 2, later()));
        host.output(usize::MAX);
    }
    let mut result = Ok(());
    for bytes in bytes.chunks(piece) {
        result = host.deliver(bytes);
        if result.is_err() {
            break;
        }
    }
    assert!(matches!(result, Err(Broken::Violation(_))), "{result:?}");
    let mut all = vec![0; guarded.len()];
    guarded.copy_to(0, &mut all);
    assert!(
        all[..4096].iter().chain(&all[8192..]).all(|&byte| byte == 0xC5),
        "outside of the buffer"
    );
    // What it says: after what it was sending, if anything.
    let said = host.output(usize::MAX);
    let mut at = 0;
    loop {
        let first = said[at..].first_chunk::<8>().expect("a TermReq");
        let common = CommonHeader::decode(first, digests, 0).unwrap();
        let layout = common.layout(digests).unwrap();
        if let Pdu::H2cTermReq(term) = Pdu::decode(&common, &said[at..at + layout.header_bytes]).unwrap() {
            assert_eq!(said.len(), at + layout.plen());
            return (term.fes, term.fei);
        }
        at += layout.plen();
    }
}

#[test]
fn what_the_host_refuses() {
    let response = |maxh2cdata, digests| {
        let pdu = Pdu::IcResp(IcResp {
            pfv: 0,
            cpda: 0,
            digests,
            maxh2cdata,
        });
        encode(&pdu, &[], OFF, 0)
    };
    let cqe = |cid| encode(&Pdu::CapsuleResp(Cqe::new(cid, Status::SUCCESS)), &[], OFF, 0);
    let data = |cid, datao, datal: u32, last| {
        encode(&c2h(cid, datao, datal, last), &vec![3; datal as usize], OFF, 0)
    };
    let r2t = |cccid, r2to, r2tl| {
        let pdu = Pdu::R2t(R2t {
            cccid,
            ttag: 5,
            r2to,
            r2tl,
        });
        encode(&pdu, &[], OFF, 0)
    };
    let with_digest = encode(&Pdu::CapsuleResp(Cqe::new(2, Status::SUCCESS)), &[], HEADER, 0);
    let broken_digest = changed(with_digest.clone(), 24, !with_digest[24]);
    let success_alone = {
        let whole = data(0, 0, 512, false);
        changed(whole, 1, FLAG_SUCCESS)
    };
    assert_eq!(FLAG_LAST_PDU, 4);

    #[rustfmt::skip]
    let table: Vec<Row<Host>> = vec![
        ("an answer before ICResp", Host::Fresh, OFF, cqe(0), 2, 0),
        ("an R2T before ICResp", Host::Fresh, OFF, r2t(0, 0, 512), 2, 0),
        ("ICResp with PFV 1", Host::Fresh, OFF, changed(response(4096, OFF), 8, 1), 6, 8),
        ("ICResp with CPDA 32", Host::Fresh, OFF, changed(response(4096, OFF), 10, 32), 1, 10),
        ("ICResp that insists on a digest", Host::Fresh, OFF, response(4096, HEADER), 1, 11),
        ("ICResp that refuses a digest", Host::Fresh, HEADER, response(4096, OFF), 1, 11),
        ("MAXH2CDATA below 4096", Host::Fresh, OFF, response(4092, OFF), 1, 12),
        ("MAXH2CDATA not of dwords", Host::Fresh, OFF, response(4098, OFF), 1, 12),
        ("a second ICResp", Host::Busy, OFF, response(4096, OFF), 2, 0),
        ("no such PDU type", Host::Busy, OFF, changed(cqe(2), 0, 8), 1, 0),
        ("a command from a controller", Host::Busy, OFF, encode(&Pdu::CapsuleCmd(Sqe::new(0, 1, 1)), &[], OFF, 0), 1, 0),
        ("H2CData from a controller", Host::Busy, OFF, encode(&h2c(0, 0, 0, 512, true), &[0; 512], OFF, 0), 1, 0),
        ("a wrong header digest", Host::Busy, HEADER, broken_digest, 3, 0),
        ("no digest where one is in force", Host::Busy, HEADER, cqe(2), 1, 1),
        ("SUCCESS without LAST_PDU", Host::Busy, OFF, success_alone, 1, 1),
        ("an answer with data", Host::Busy, OFF, changed(cqe(2), 4, 28), 1, 4),
        ("an answer to nothing", Host::Busy, OFF, cqe(3), 1, RESP_CID),
        ("an answer to a CID that cannot be", Host::Busy, OFF, cqe(0xFFFF), 1, RESP_CID),
        ("a second answer", Host::Busy, OFF, [cqe(2), cqe(2)].concat(), 1, RESP_CID),
        ("data for nothing", Host::Busy, OFF, data(3, 0, 512, false), 1, CCCID),
        ("data for a write", Host::Busy, OFF, data(1, 0, 512, false), 1, CCCID),
        ("data for a command without", Host::Busy, OFF, data(2, 0, 512, false), 1, CCCID),
        ("no data", Host::Busy, OFF, data(0, 0, 0, false), 1, DATAL),
        ("DATAL beyond PLEN", Host::Busy, OFF, encode(&c2h(0, 0, 513, false), &[0; 512], OFF, 0), 1, DATAL),
        ("a gap", Host::Busy, OFF, data(0, 512, 512, false), 4, 0),
        ("again", Host::Busy, OFF, [data(0, 0, 512, false), data(0, 0, 512, false)].concat(), 4, 0),
        ("an overlap", Host::Busy, OFF, [data(0, 0, 512, false), data(0, 511, 512, false)].concat(), 4, 0),
        ("beyond the read", Host::Busy, OFF, data(0, 0, 4097, true), 4, 0),
        ("behind the read", Host::Busy, OFF, [data(0, 0, 4096, false), data(0, 4096, 4, true)].concat(), 4, 0),
        ("data after the last", Host::Busy, OFF, [data(0, 0, 512, true), data(0, 512, 512, true)].concat(), 4, 0),
        ("data after the answer", Host::Busy, OFF, [data(0, 0, 4096, true), cqe(0), data(0, 0, 512, false)].concat(), 1, CCCID),
        ("an R2T for nothing", Host::Busy, OFF, r2t(3, 0, 512), 1, CCCID),
        ("an R2T for a read", Host::Busy, OFF, r2t(0, 0, 512), 1, CCCID),
        ("an R2T of no bytes", Host::Busy, OFF, r2t(1, 0, 0), 1, DATAL),
        ("an R2T with a gap", Host::Busy, OFF, r2t(1, 4, 512), 4, 0),
        ("an R2T beyond the write", Host::Busy, OFF, r2t(1, 0, 8193), 4, 0),
        ("an R2T that overflows", Host::Busy, OFF, r2t(1, 0, u32::MAX), 4, 0),
    ];
    for (name, life, digests, bytes, fes, fei) in table {
        for piece in [usize::MAX, 1, 5] {
            let said = std::panic::catch_unwind(|| host_says(life, digests, &bytes, piece));
            let said = said.unwrap_or_else(|_| panic!("{name}, in pieces of {piece}"));
            assert_eq!(said, (fes, fei), "{name}");
        }
    }
}

// Ranges: any legal plan is taken, and one thing wrong anywhere in it is the right fault.

#[derive(Clone, Debug)]
enum Fault {
    None,
    Gap(u32),
    Overlap(u32),
    Overrun(u32),
    Cccid(u16),
    Ttag(u16),
    Empty,
    Early,
    After,
}

fn fault() -> impl Strategy<Value = Fault> {
    prop_oneof![
        2 => Just(Fault::None),
        1 => (1u32..5000).prop_map(Fault::Gap),
        1 => (1u32..5000).prop_map(Fault::Overlap),
        1 => (1u32..5000).prop_map(Fault::Overrun),
        1 => (1u16..).prop_map(Fault::Cccid),
        1 => (1u16..).prop_map(Fault::Ttag),
        1 => Just(Fault::Empty),
        1 => Just(Fault::Early),
        1 => Just(Fault::After),
    ]
}

fn pull(blocks: u32, cuts: &[u32], fault: &Fault, at: usize, digests: Digests, seed: u64) {
    const BLOCKS: u32 = 256;
    let mut random = Random::new(seed);
    let media = Arc::new(MemoryMedia::new(u64::from(BLOCKS) * BLOCK as u64, BLOCK as u32).unwrap());
    media
        .write(0, &vec![0xC5; (BLOCKS as usize) * BLOCK], false)
        .unwrap();
    let mut bench = Bench::new(NQN, Box::new(Handle(media.clone())));
    let (_admin, cntlid) = bring_up(&mut bench, NQN, HOST, 0);
    let mut client = Client::new(digests, 0);
    let peer = queue(&mut bench, &mut client, NQN, HOST, cntlid, 1);
    let total = blocks * BLOCK as u32;
    let first = 20u64;
    let write = Sqe::rw(io::WRITE, 7, 1, first, blocks).with_sgl(Sgl::Transport { length: total });
    bench.feed(peer, &client.command(write, &[]));
    let said = drain(&mut bench, peer, &mut client);
    assert!(
        matches!(said[..], [ref one] if matches!(one.pdu, Pdu::R2t(r2t) if r2t.r2tl == total && r2t.r2to == 0))
    );

    // Where the pieces end.
    let mut ends: Vec<u32> = cuts.iter().map(|cut| 1 + cut % total).collect();
    ends.push(total);
    ends.sort_unstable();
    ends.dedup();
    let at = at % ends.len();
    let mut from = 0;
    let mut expected = None;
    for (n, &end) in ends.iter().enumerate() {
        let (mut header, mut carried) = (
            DataHeader {
                cccid: 7,
                ttag: 0,
                datao: from,
                datal: end - from,
                last: end == total,
                success: false,
            },
            end - from,
        );
        if n == at {
            expected = match *fault {
                Fault::None | Fault::After => None,
                Fault::Gap(by) => {
                    header.datao += by;
                    Some(if header.datao + header.datal > total {
                        (4, 0)
                    } else {
                        (1, DATAO)
                    })
                }
                Fault::Overlap(by) => {
                    header.datao = from.wrapping_sub(by);
                    Some(if by > from { (4, 0) } else { (1, DATAO) })
                }
                Fault::Overrun(by) => {
                    carried = total - from + by;
                    header.datal = carried;
                    Some((if carried > MAX_H2C_DATA_BYTES { 5 } else { 4 }, 0))
                }
                Fault::Cccid(by) => {
                    header.cccid = header.cccid.wrapping_add(by);
                    Some((1, CCCID))
                }
                Fault::Ttag(by) => {
                    header.ttag = header.ttag.wrapping_add(by);
                    Some((1, TTAG))
                }
                Fault::Empty => {
                    (header.datal, carried) = (0, 0);
                    Some((1, DATAL))
                }
                Fault::Early => {
                    header.last = true;
                    (end < total).then_some((1, 1))
                }
            };
        }
        let bytes = client.encode(&Pdu::H2cData(header), &vec![9; carried as usize]);
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let step = random.range(1..=rest.len());
            bench.feed(peer, &rest[..step]);
            rest = &rest[step..];
        }
        if expected.is_some() {
            break;
        }
        from = end;
    }
    if matches!(fault, Fault::After) {
        let said = drain(&mut bench, peer, &mut client);
        assert!(
            matches!(said[..], [ref one] if matches!(one.pdu, Pdu::CapsuleResp(cqe) if cqe.status.is_success()))
        );
        bench.feed(peer, &client.encode(&h2c(7, 0, 0, 512, false), &[8; 512]));
        expected = Some((1, TTAG));
    }
    let said = drain(&mut bench, peer, &mut client);
    let Some(last) = said.last() else {
        panic!("nothing is said")
    };
    match (&last.pdu, expected) {
        (Pdu::CapsuleResp(cqe), None) => assert!(cqe.status.is_success()),
        (Pdu::C2hTermReq(term), Some((fes, fei))) => assert_eq!((term.fes, term.fei), (fes, fei)),
        (found, expected) => panic!("{found:?}, not {expected:?}"),
    }
    assert_eq!(said.len(), 1);
    let mut bytes = vec![0; BLOCKS as usize * BLOCK];
    media.read(0, &mut bytes).unwrap();
    for (number, block) in bytes.chunks(BLOCK).enumerate() {
        let inside = (first..first + u64::from(blocks)).contains(&(number as u64));
        let (old, new) = (
            block.iter().all(|&byte| byte == 0xC5),
            block.iter().all(|&byte| byte == 9),
        );
        assert!(
            if inside { old || new } else { old },
            "block {number} of the medium"
        );
        assert!(
            !inside || expected.is_some() || new,
            "block {number} was not written"
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: std::env::var("HEADRACE_CASES").ok().and_then(|text| text.parse().ok()).unwrap_or(400),
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn every_range_of_pulled_data(
        blocks in 1u32..200,
        cuts in proptest::collection::vec(any::<u32>(), 0..6),
        fault in fault(),
        at in any::<usize>(),
        header in any::<bool>(),
        data in any::<bool>(),
        seed in any::<u64>(),
    ) {
        pull(blocks, &cuts, &fault, at, Digests { header, data }, seed);
    }
}

//! One table for each PDU that a host sends: what is wrong with it, and the FES and FEI that it hears. Each case comes whole, byte
//! by byte and with more behind it. And each good PDU, cut at every byte.

use crate::common::{pattern, HOST, NQN};
use crate::testing::{Bench, IN_CAPSULE_BYTES, MAX_H2C_DATA_BYTES};
use headrace_media::MemoryMedia;
use headrace_wire::fabrics::{
    property_set, Connect, ConnectData, CATTR_NO_SQ_FLOW, CC_ENABLE, CNTLID_DYNAMIC,
};
use headrace_wire::pdu::{DataHeader, Digests, IcReq, Pdu, TermReq};
use headrace_wire::{crc32c, Sgl, Sqe};

const NONE: Digests = Digests {
    header: false,
    data: false,
};
const BOTH: Digests = Digests {
    header: true,
    data: true,
};

fn whole(pdu: &Pdu, data: &[u8], digests: Digests) -> Vec<u8> {
    let mut out = Vec::new();
    let layout = pdu.encode(data.len(), digests, 0, &mut out);
    out.extend_from_slice(data);
    if layout.data_digest_bytes > 0 {
        out.extend_from_slice(&crc32c(data).to_le_bytes());
    }
    out
}

fn icreq(digests: Digests) -> Vec<u8> {
    let request = IcReq {
        pfv: 0,
        hpda: 0,
        digests,
        maxr2t: 0,
    };
    whole(&Pdu::IcReq(request), &[], NONE)
}

fn connect(qid: u16, cntlid: u16, digests: Digests) -> Vec<u8> {
    let connect = Connect {
        recfmt: 0,
        qid,
        sqsize: 31,
        cattr: CATTR_NO_SQ_FLOW,
        kato_ms: 0,
    };
    let data = ConnectData {
        hostid: [7; 16],
        cntlid,
        subnqn: NQN.into(),
        hostnqn: HOST.into(),
    };
    whole(&Pdu::CapsuleCmd(connect.encode(1)), &data.encode(), digests)
}

/// A write of two blocks, with its data or without.
fn write(in_capsule: bool, digests: Digests) -> Vec<u8> {
    let length = 8192;
    let sqe = Sqe::rw(1, 10, 1, 0, 2);
    if in_capsule {
        let sqe = sqe.with_sgl(Sgl::InCapsule { offset: 0, length });
        return whole(&Pdu::CapsuleCmd(sqe), &pattern(8192, 1), digests);
    }
    whole(
        &Pdu::CapsuleCmd(sqe.with_sgl(Sgl::Transport { length })),
        &[],
        digests,
    )
}

/// What the write's R2T, the first one, asked for.
fn data(change: impl FnOnce(&mut DataHeader), bytes: usize, digests: Digests) -> Vec<u8> {
    let mut header = DataHeader {
        cccid: 10,
        ttag: 0,
        datao: 0,
        datal: bytes as u32,
        last: bytes == 8192,
        success: false,
    };
    change(&mut header);
    whole(&Pdu::H2cData(header), &pattern(bytes, 2), digests)
}

fn term(data: usize) -> Vec<u8> {
    whole(&Pdu::H2cTermReq(TermReq { fes: 2, fei: 0 }), &vec![4; data], NONE)
}

fn changed(mut bytes: Vec<u8>, at: usize, value: u8) -> Vec<u8> {
    bytes[at] = value;
    bytes
}

/// How far the connection is when the case's bytes come.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Stage {
    Fresh,
    Initialised,
    Queue,
    /// A write's R2T is out.
    Asked,
}

/// A target, a connection of it at that stage, and the admin connection that keeps its controller.
fn bench(stage: Stage, digests: Digests) -> (Bench, u64) {
    let mut bench = Bench::new(NQN, Box::new(MemoryMedia::new(8 << 20, 4096).unwrap()));
    let admin = bench.accept();
    let enable = property_set(2, 0x14, u64::from(CC_ENABLE), false);
    for bytes in [
        icreq(NONE),
        connect(0, CNTLID_DYNAMIC, NONE),
        whole(&Pdu::CapsuleCmd(enable), &[], NONE),
    ] {
        bench.feed(admin, &bytes);
    }
    let answer = bench.output(admin, usize::MAX);
    let cntlid = u16::from_le_bytes([answer[136], answer[137]]);
    let peer = bench.accept();
    let lead = [icreq(digests), connect(1, cntlid, digests), write(false, digests)];
    for bytes in &lead[..stage as usize] {
        bench.feed(peer, bytes);
    }
    bench.output(peer, usize::MAX);
    assert!(bench.is_open(peer), "{stage:?}");
    (bench, peer)
}

/// The bytes in pieces of `step`; what was answered.
fn feed(bench: &mut Bench, peer: u64, bytes: &[u8], step: usize) -> Vec<u8> {
    let mut answer = Vec::new();
    for piece in bytes.chunks(step) {
        bench.feed(peer, piece);
        answer.extend(bench.output(peer, usize::MAX));
    }
    answer
}

type Case = (&'static str, Vec<u8>, (u16, u32));

fn check(stage: Stage, digests: Digests, cases: Vec<Case>) {
    for (what, bytes, (fes, fei)) in cases {
        let trailing = [bytes.clone(), vec![0xFF; 300]].concat();
        for (how, bytes, step) in [
            ("whole", &bytes, usize::MAX),
            ("byte by byte", &bytes, 1),
            ("with more behind it", &trailing, usize::MAX),
            ("with more behind it, byte by byte", &trailing, 1),
        ] {
            let (mut bench, peer) = bench(stage, digests);
            let answer = feed(&mut bench, peer, bytes, step);
            let name = format!("{stage:?}, {digests:?}: {what}, {how}");
            assert!(!bench.is_open(peer), "{name}: the connection lives");
            // One C2HTermReq, nothing before and nothing behind, with the header that it is about.
            assert!(answer.len() > 24 && answer[0] == 3, "{name}: {answer:?}");
            let plen = u32::from_le_bytes([answer[4], answer[5], answer[6], answer[7]]) as usize;
            assert_eq!((answer.len(), answer[2]), (plen, 24), "{name}");
            let found = u16::from_le_bytes([answer[8], answer[9]]);
            let place = u32::from_le_bytes([answer[10], answer[11], answer[12], answer[13]]);
            assert_eq!((found, place), (fes, fei), "{name}");
            let copy = &answer[24..];
            assert!(copy.len() <= 128 && *copy == bytes[..copy.len()], "{name}");
            assert_eq!(bench.memory_bytes(), 0, "{name}: memory stays taken");
        }
    }
}

#[test]
fn icreq_cases() {
    let good = || icreq(NONE);
    check(
        Stage::Fresh,
        NONE,
        vec![
            ("unknown type", changed(good(), 0, 0x42), (1, 0)),
            ("type 8, which is not used", changed(good(), 0, 8), (1, 0)),
            ("ICResp", changed(good(), 0, 1), (1, 0)),
            ("HLEN of another", changed(good(), 2, 24), (1, 2)),
            ("HLEN 0", changed(good(), 2, 0), (1, 2)),
            ("PLEN below the header", changed(good(), 4, 127), (1, 4)),
            ("PLEN 0", changed(good(), 4, 0), (1, 4)),
            ("PLEN above the header", changed(good(), 4, 129), (1, 4)),
            ("PLEN of 4 GiB", changed(good(), 7, 0xFF), (1, 4)),
            ("header digest flag", changed(good(), 1, 1), (1, 1)),
            ("SUCCESS without LAST_PDU", changed(good(), 1, 8), (1, 1)),
            ("PFV low", changed(good(), 8, 1), (6, 8)),
            ("PFV high", changed(good(), 9, 1), (6, 8)),
            ("HPDA above 31", changed(good(), 10, 32), (1, 10)),
            ("a capsule first", write(false, NONE), (2, 0)),
            ("a capsule with data first", write(true, NONE), (2, 0)),
            ("data first", data(|_| {}, 8192, NONE), (2, 0)),
        ],
    );
    for digests in [NONE, BOTH] {
        for stage in [Stage::Initialised, Stage::Queue, Stage::Asked] {
            check(stage, digests, vec![("a second ICReq", icreq(digests), (2, 0))]);
        }
    }
}

#[test]
fn capsule_cases() {
    for digests in [NONE, BOTH] {
        let flags = if digests == BOTH { 3u8 } else { 0 };
        let good = || write(true, digests);
        let bare = || write(false, digests);
        // Data begin here; with the data digest behind them.
        let pdo = good()[3];
        let too_long = u32::from(pdo) + IN_CAPSULE_BYTES + 1 + if flags > 0 { 4 } else { 0 };
        let mut long = good();
        long[4..8].copy_from_slice(&too_long.to_le_bytes());
        let mut cases = vec![
            ("header digest flag", changed(good(), 1, flags ^ 1), (1, 1)),
            ("data digest flag", changed(good(), 1, flags ^ 2), (1, 1)),
            ("SUCCESS without LAST_PDU", changed(good(), 1, flags | 8), (1, 1)),
            ("HLEN", changed(good(), 2, 24), (1, 2)),
            ("PDO in the header", changed(good(), 3, 8), (1, 3)),
            ("PDO 0 with data", changed(good(), 3, 0), (1, 3)),
            ("PDO that is not aligned", changed(good(), 3, pdo + 1), (1, 3)),
            ("PLEN below the header", changed(bare(), 4, 71), (1, 4)),
            ("more data than IOCCSZ", long, (1, 4)),
            ("PLEN of 4 GiB", changed(good(), 7, 0xFF), (1, 4)),
            ("CapsuleResp", changed(bare(), 0, 5), (1, 2)),
        ];
        if digests == BOTH {
            cases.push(("header digest", changed(good(), 72, good()[72] ^ 1), (3, 0)));
            cases.push(("damaged header", changed(good(), 20, 1), (3, 0)));
            cases.push(("damaged header without data", changed(bare(), 20, 1), (3, 0)));
        }
        check(Stage::Queue, digests, cases);
    }
}

#[test]
fn h2c_data_cases() {
    for digests in [NONE, BOTH] {
        let flags = if digests == BOTH { 7u8 } else { 4 };
        let good = || data(|_| {}, 8192, digests);
        let pdo = good()[3];
        let digest = if digests == BOTH { 4 } else { 0 };
        let mut long = good();
        let too_long = u32::from(pdo) + MAX_H2C_DATA_BYTES + 4 + digest;
        long[4..8].copy_from_slice(&too_long.to_le_bytes());
        let mut cases = vec![
            ("header digest flag", changed(good(), 1, flags ^ 1), (1, 1)),
            ("data digest flag", changed(good(), 1, flags ^ 2), (1, 1)),
            ("HLEN", changed(good(), 2, 72), (1, 2)),
            ("PDO in the header", changed(good(), 3, 20), (1, 3)),
            ("PDO that is not aligned", changed(good(), 3, pdo + 2), (1, 3)),
            ("PLEN below the header", changed(good(), 4, 23), (1, 16)),
            ("more data than MAXH2CDATA", long, (5, 0)),
            ("C2HData", changed(good(), 0, 7), (1, 0)),
            ("R2T", changed(good(), 0, 9), (1, 4)),
            (
                "a TTAG that no R2T has",
                data(|d| d.ttag = 1, 8192, digests),
                (1, 10),
            ),
            ("TTAG FFFFh", data(|d| d.ttag = 0xFFFF, 8192, digests), (1, 10)),
            ("CCCID of another", data(|d| d.cccid = 11, 8192, digests), (1, 8)),
            ("a hole", data(|d| d.datao = 4, 4096, digests), (1, 12)),
            ("DATAL above PLEN", data(|d| d.datal += 4, 4096, digests), (1, 16)),
            ("DATAL below PLEN", data(|d| d.datal -= 4, 4096, digests), (1, 16)),
            ("DATAL 0", data(|d| d.datal = 0, 4096, digests), (1, 16)),
            ("beyond the R2T", data(|d| d.datao = 4100, 4096, digests), (4, 0)),
            ("longer than the R2T", data(|_| {}, 12288, digests), (4, 0)),
            (
                "an offset that overflows",
                data(|d| d.datao = u32::MAX - 3, 4096, digests),
                (4, 0),
            ),
            (
                "LAST_PDU too early",
                data(|d| d.last = true, 4096, digests),
                (1, 1),
            ),
        ];
        // PLEN 23 + 256 * 32 is a length, though not this PDU's.
        cases.retain(|(what, ..)| *what != "PLEN below the header");
        let mut short = good();
        short[4..8].copy_from_slice(&23u32.to_le_bytes());
        cases.push(("PLEN below the header", short, (1, 4)));
        if digests == BOTH {
            cases.push(("header digest", changed(good(), 24, good()[24] ^ 1), (3, 0)));
            cases.push(("damaged header", changed(good(), 20, 1), (3, 0)));
        }
        check(Stage::Asked, digests, cases);
        check(
            Stage::Queue,
            digests,
            vec![("data that nobody asked for", good(), (1, 10))],
        );
    }
}

#[test]
fn term_req_cases() {
    for stage in [Stage::Fresh, Stage::Initialised, Stage::Queue] {
        let good = || term(24);
        let cases = vec![
            ("header digest flag", changed(good(), 1, 1), (1, 1)),
            ("data digest flag", changed(good(), 1, 2), (1, 1)),
            ("HLEN", changed(good(), 2, 128), (1, 2)),
            ("PLEN below the header", changed(good(), 4, 20), (1, 4)),
            ("more than a header's copy", term(129), (1, 4)),
            ("C2HTermReq", changed(good(), 0, 3), (1, 0)),
        ];
        check(stage, NONE, cases);
    }
}

/// Cut at every byte, and then gone, or then the rest.
#[test]
fn good_pdus_cut_everywhere() {
    for digests in [NONE, BOTH] {
        for (stage, good) in [
            (Stage::Fresh, icreq(digests)),
            (Stage::Queue, write(false, digests)),
            (Stage::Queue, write(true, digests)),
            (Stage::Asked, data(|_| {}, 8192, digests)),
            (Stage::Queue, term(24)),
        ] {
            let (mut whole, peer) = bench(stage, digests);
            let expected = feed(&mut whole, peer, &good, usize::MAX);
            let lives = whole.is_open(peer);
            // Every byte of the header and of what is around the data's ends; the data's own bytes by a prime.
            let cuts = (0..good.len()).filter(|&at| at < 200 || at + 20 > good.len() || at % 211 == 0);
            for cut in cuts {
                let name = format!("{stage:?}, {digests:?}, type {} cut at {cut}", good[0]);
                let (mut bench, peer) = bench(stage, digests);
                let commands = bench.commands(peer);
                let early = feed(&mut bench, peer, &good[..cut], usize::MAX);
                assert!(early.is_empty(), "{name}: answered before it was whole");
                // The peer's TermReq counts from its header on.
                assert!(good[0] == 2 || bench.is_open(peer), "{name}");
                assert!(bench.commands(peer) <= commands, "{name}");
                let rest = feed(&mut bench, peer, &good[cut..], usize::MAX);
                assert!(rest == expected, "{name}: another answer");
                assert_eq!(bench.is_open(peer), lives, "{name}");
                bench.hang_up(peer);
                assert_eq!(bench.memory_bytes(), 0, "{name}: memory stays taken");
                let gone = bench.accept();
                let fresh = icreq(NONE);
                feed(&mut bench, gone, &fresh[..cut.min(127)], usize::MAX);
                bench.hang_up(gone);
            }
        }
    }
}

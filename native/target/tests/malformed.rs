//! What a peer must not do, and what it hears then.

mod common;

use common::{admin, io, pattern, start, Client};
use headrace_target::Target;
use headrace_wire::fabrics::CNTLID_DYNAMIC;
use headrace_wire::pdu::{DataHeader, Digests, Pdu, TermReq};
use headrace_wire::{Sgl, Sqe, Status};
use std::io::{Read, Write};
use std::time::Duration;

fn icreq() -> Vec<u8> {
    let mut b = vec![0; 128];
    b[2] = 128;
    b[4] = 128;
    b
}

/// FES, and FEI where it means something.
fn verdict(target: &Target, bytes: &[u8]) -> (u16, u32) {
    let mut client = Client::open(target.addresses()[0]);
    client.send(bytes);
    let TermReq { fes, fei } = client.term();
    (fes, fei)
}

#[test]
fn before_the_connection_is_initialised() {
    let target = start("");
    let change = |at: usize, value: u8| {
        let mut b = icreq();
        b[at] = value;
        b
    };
    for (what, bytes, expected) in [
        ("unknown type", change(0, 0x42), (1, 0)),
        ("type 8", change(0, 8), (1, 0)),
        ("wrong HLEN", change(2, 24), (1, 2)),
        ("PLEN below the header", change(4, 100), (1, 4)),
        ("PLEN above the header", change(4, 200), (1, 4)),
        ("huge PLEN", change(7, 0xFF), (1, 4)),
        ("header digest flag", change(1, 1), (1, 1)),
        ("format version", change(8, 1), (6, 8)),
        ("HPDA", change(10, 32), (1, 10)),
        ("SUCCESS without LAST_PDU", change(1, 8), (1, 1)),
    ] {
        assert_eq!(verdict(&target, &bytes), expected, "{what}");
    }
    // A command, and data, before ICReq.
    let mut capsule = vec![4, 0, 72, 0, 72, 0, 0, 0];
    capsule.resize(72, 0);
    assert_eq!(verdict(&target, &capsule).0, 2);
    let mut data = vec![6, 4, 24, 24, 28, 0, 0, 0];
    data.resize(28, 0);
    assert_eq!(verdict(&target, &data).0, 2);
    // What only a controller sends.
    let mut response = vec![5, 0, 24, 0, 24, 0, 0, 0];
    response.resize(24, 0);
    assert_eq!(verdict(&target, &response), (1, 0));
    // Twice.
    let twice = [icreq(), icreq()].concat();
    let mut client = Client::open(target.addresses()[0]);
    client.send(&twice);
    assert!(matches!(client.receive().unwrap().pdu, Pdu::IcResp(_)));
    assert_eq!(client.term().fes, 2);
}

#[test]
fn a_term_req_carries_the_offending_header() {
    let target = start("");
    let mut client = Client::open(target.addresses()[0]);
    let mut bytes = icreq();
    bytes[0] = 0x42;
    client.send(&bytes);
    let received = client.receive().unwrap();
    assert!(matches!(received.pdu, Pdu::C2hTermReq(_)));
    assert_eq!(received.data, bytes[..8]);
}

#[test]
fn capsules_that_lie_about_their_data() {
    let target = start("");
    let address = target.addresses()[0];
    let (_admin, cntlid) = admin(address);
    let fresh = || io(address, cntlid, Digests::default(), 0);
    // More data than IOCCSZ allows: refused by its first eight bytes.
    let mut queue = fresh();
    let sqe = Sqe::rw(1, 9, 1, 0, 8).with_sgl(Sgl::InCapsule {
        offset: 0,
        length: 32768,
    });
    let bytes = queue.encode(&Pdu::CapsuleCmd(sqe), &pattern(32768, 1));
    queue.send(&bytes[..8]);
    let term = queue.term();
    assert_eq!((term.fes, term.fei), (1, 4));
    wait_for_queue_end(&target);
    // PDO inside of the header, and behind the end.
    for pdo in [8u8, 255] {
        let mut queue = fresh();
        let sqe = Sqe::rw(1, 9, 1, 0, 1).with_sgl(Sgl::InCapsule {
            offset: 0,
            length: 64,
        });
        let mut bytes = queue.encode(&Pdu::CapsuleCmd(sqe), &[0; 64]);
        bytes[3] = pdo;
        queue.send(&bytes);
        let term = queue.term();
        assert_eq!((term.fes, term.fei), (1, 3));
        wait_for_queue_end(&target);
    }
    // The framing is right and the command is not: a status, and the queue lives on.
    let mut queue = fresh();
    let cases = [
        (
            Sgl::InCapsule {
                offset: 0,
                length: 8192,
            },
            Status::SGL_DATA_LENGTH,
        ),
        (
            Sgl::InCapsule {
                offset: 16,
                length: 4096,
            },
            Status::SGL_OFFSET,
        ),
        (Sgl::Transport { length: 4096 }, Status::SGL_DATA_LENGTH),
        (Sgl::None, Status::SGL_DATA_LENGTH),
    ];
    for (sgl, status) in cases {
        let cid = queue.cid();
        let cqe = queue
            .command(Sqe::rw(1, cid, 1, 0, 1).with_sgl(sgl), &[1; 4096])
            .cqe;
        assert_eq!(cqe.status, status.do_not_retry(), "{sgl:?}");
    }
    let cid = queue.cid();
    let mut prp = Sqe::rw(1, cid, 1, 0, 1).with_sgl(Sgl::InCapsule {
        offset: 0,
        length: 4096,
    });
    prp.0[1] = 0;
    assert_eq!(
        queue.command(prp, &[1; 4096]).cqe.status,
        Status::INVALID_FIELD.do_not_retry()
    );
    assert!(
        queue.read(0, 1, 4096).data.iter().all(|&b| b == 0),
        "a refused write was carried out"
    );
}

fn wait_for_queue_end(target: &Target) {
    common::eventually("the queue stays", || {
        target.status()["controllers"][0]["queues"] == serde_json::json!([0])
    });
}

#[test]
fn h2c_data_that_breaks_its_r2t() {
    let target = start(r#""max_h2c_data_bytes": 16384"#);
    let address = target.addresses()[0];
    let (_admin, cntlid) = admin(address);
    type Change = fn(&mut DataHeader);
    let cases: [(&str, Change, usize, (u16, u32)); 9] = [
        ("unknown TTAG", |d| d.ttag += 1, 8192, (1, 10)),
        ("TTAG out of the table", |d| d.ttag = 0xFFFF, 8192, (1, 10)),
        ("another command", |d| d.cccid += 1, 8192, (1, 8)),
        ("a hole", |d| d.datao = 4, 8192, (1, 12)),
        ("DATAL above PLEN", |d| d.datal += 4, 8192, (1, 16)),
        ("DATAL 0", |d| d.datal = 0, 8192, (1, 16)),
        ("beyond the R2T", |d| d.datao = 32768 - 4096, 8192, (4, 0)),
        (
            "an offset that overflows",
            |d| d.datao = u32::MAX - 3,
            8192,
            (4, 0),
        ),
        ("longer than MAXH2CDATA", |_| {}, 20480, (5, 0)),
    ];
    for (what, change, length, expected) in cases {
        let mut queue = io(address, cntlid, Digests::default(), 0);
        let sqe = queue.write_sqe(0, 8, 4096);
        queue.send_capsule(sqe, &[]);
        let r2t = queue.r2t();
        let mut header = DataHeader {
            cccid: r2t.cccid,
            ttag: r2t.ttag,
            datao: 0,
            datal: length as u32,
            last: false,
            success: false,
        };
        change(&mut header);
        queue.send_pdu(&Pdu::H2cData(header), &vec![0xAA; length]);
        let term = queue.term();
        let fei = if term.fes == 1 { term.fei } else { 0 };
        assert_eq!((term.fes, fei), expected, "{what}");
        wait_for_queue_end(&target);
    }
    // LAST_PDU too early; data for a command that asked for none.
    let mut queue = io(address, cntlid, Digests::default(), 0);
    let sqe = queue.write_sqe(0, 8, 4096);
    queue.send_capsule(sqe, &[]);
    let r2t = queue.r2t();
    let header = DataHeader {
        cccid: r2t.cccid,
        ttag: r2t.ttag,
        datao: 0,
        datal: 4,
        last: true,
        success: false,
    };
    queue.send_pdu(&Pdu::H2cData(header), &[0; 4]);
    assert_eq!(queue.term().fes, 1);
    wait_for_queue_end(&target);
    let mut queue = io(address, cntlid, Digests::default(), 0);
    queue.send_pdu(&Pdu::H2cData(DataHeader { ttag: 0, ..header }), &[0; 4]);
    assert_eq!(queue.term().fei, 10);
    wait_for_queue_end(&target);
    let mut queue = io(address, cntlid, Digests::default(), 0);
    assert!(
        queue.read(0, 8, 4096).data.iter().all(|&b| b == 0),
        "refused data reached the medium"
    );
}

#[test]
fn commands_out_of_turn() {
    let target = start("");
    let address = target.addresses()[0];
    let mut client = Client::open(address);
    client.initialise(Digests::default(), 0);
    let early = Status::SEQUENCE_ERROR.do_not_retry();
    let cid = client.cid();
    assert_eq!(
        client
            .command(Sqe::new(6, cid, 0).with_cdw(10, 1), &[])
            .cqe
            .status,
        early,
        "Identify before Connect"
    );
    assert_eq!(
        client.property(8, false).cqe.status,
        early,
        "Property Get before Connect"
    );
    let (mut first, cntlid) = admin(address);
    let mut queue = io(address, cntlid, Digests::default(), 0);
    // CID in use: the write waits for its data.
    let sqe = queue.write_sqe(0, 8, 4096);
    queue.send_capsule(sqe, &[]);
    let r2t = queue.r2t();
    let answer = queue.command(
        Sqe::rw(2, sqe.cid(), 1, 0, 1).with_sgl(Sgl::Transport { length: 4096 }),
        &[],
    );
    assert_eq!(answer.cqe.status, Status::CID_CONFLICT.do_not_retry());
    queue.send_data(&r2t, &pattern(32768, 1), 32768);
    assert!(queue.answer(sqe.cid()).cqe.status.is_success());
    assert_eq!(
        queue.property(8, false).cqe.status,
        Status::INVALID_FIELD.do_not_retry(),
        "a property by an I/O queue"
    );
    // Event requests: four are held, the fifth is refused.
    for n in 0..4 {
        first.send_capsule(Sqe::new(0x0C, 500 + n, 0), &[]);
    }
    let cqe = first.command(Sqe::new(0x0C, 504, 0), &[]).cqe;
    assert_eq!(cqe.status, Status::AER_LIMIT_EXCEEDED.do_not_retry());
    assert!(!first.abort(0, 499), "Abort: not aborted");
    // More commands than the queue has entries.
    for n in 0..40 {
        let sqe = Sqe::rw(1, 1000 + n, 1, 0, 1).with_sgl(Sgl::Transport { length: 4096 });
        queue.send_capsule(sqe, &[]);
    }
    assert_eq!(queue.term().fes, 2);
}

#[test]
fn a_hosts_term_req_ends_the_connection() {
    let target = start("");
    let address = target.addresses()[0];
    let (mut first, _) = admin(address);
    let term = Pdu::H2cTermReq(TermReq { fes: 2, fei: 0 });
    let mut bytes = Vec::new();
    term.encode(24, Digests::default(), 0, &mut bytes);
    bytes.extend([0; 24]);
    first.send(&bytes);
    first.expect_closed();
    common::eventually("the controller stays", || {
        target.status()["controllers"] == serde_json::json!([])
    });
}

#[test]
fn truncated_and_gone() {
    let target = start("");
    let address = target.addresses()[0];
    let (_admin, cntlid) = admin(address);
    let sqe = Sqe::rw(1, 9, 1, 0, 1).with_sgl(Sgl::InCapsule {
        offset: 0,
        length: 4096,
    });
    for cut in [0, 1, 7, 8, 40, 71, 72, 73, 2000, 4167] {
        let mut queue = io(address, cntlid, Digests::default(), 0);
        let bytes = queue.encode(&Pdu::CapsuleCmd(sqe), &[0x55; 4096]);
        queue.send(&bytes[..cut]);
        drop(queue);
        wait_for_queue_end(&target);
    }
    let mut queue = io(address, cntlid, Digests::default(), 0);
    assert!(
        queue.read(0, 1, 4096).data.iter().all(|&b| b == 0),
        "half a capsule was carried out"
    );
}

/// A write that stops in the middle leaves whole blocks: each as before or as written.
#[test]
fn half_a_write_is_whole_blocks() {
    let target = start("");
    let address = target.addresses()[0];
    let (_admin, cntlid) = admin(address);
    let old = pattern(16384, 1);
    let new = pattern(16384, 2);
    for cut in [1, 511, 4095, 4096, 4097, 10_000, 16_383] {
        let mut queue = io(address, cntlid, Digests::default(), 0);
        assert!(queue.write(0, &old, 4096, 16384).status.is_success());
        let sqe = queue.write_sqe(0, 4, 4096);
        queue.send_capsule(sqe, &[]);
        let r2t = queue.r2t();
        let header = DataHeader {
            cccid: r2t.cccid,
            ttag: r2t.ttag,
            datao: 0,
            datal: 16384,
            last: true,
            success: false,
        };
        let bytes = queue.encode(&Pdu::H2cData(header), &new);
        queue.send(&bytes[..24 + cut / 2]);
        std::thread::sleep(Duration::from_millis(2));
        queue.send(&bytes[24 + cut / 2..24 + cut]);
        drop(queue);
        wait_for_queue_end(&target);
        let mut queue = io(address, cntlid, Digests::default(), 0);
        let now = queue.read(0, 4, 4096).data;
        for (n, block) in now.chunks(4096).enumerate() {
            let at = n * 4096..(n + 1) * 4096;
            assert!(
                block == &old[at.clone()] || block == &new[at],
                "block {n} after {cut} bytes is torn"
            );
        }
        drop(queue);
        wait_for_queue_end(&target);
    }
}

#[test]
fn the_silent_are_dropped() {
    let target = start(r#""connect_timeout_ms": 500, "progress_timeout_ms": 500"#);
    let address = target.addresses()[0];
    // Nothing; ICReq without Connect.
    Client::open(address).expect_closed();
    let mut client = Client::open(address);
    client.initialise(Digests::default(), 0);
    client.expect_closed();
    // Half a PDU; an R2T without data.
    let (mut first, cntlid) = admin(address);
    let mut queue = io(address, cntlid, Digests::default(), 0);
    queue.send(&[4, 0, 72]);
    queue.expect_closed();
    wait_for_queue_end(&target);
    let mut queue = io(address, cntlid, Digests::default(), 0);
    let sqe = queue.write_sqe(0, 8, 4096);
    queue.send_capsule(sqe, &[]);
    queue.r2t();
    queue.expect_closed();
    wait_for_queue_end(&target);
    // Asks for more than the sockets hold and takes nothing.
    let mut queue = io(address, cntlid, Digests::default(), 0);
    for cid in 0..30 {
        queue.send_capsule(
            Sqe::rw(2, cid, 1, 0, 256).with_sgl(Sgl::Transport { length: 1 << 20 }),
            &[],
        );
    }
    wait_for_queue_end(&target);
    // One who is idle in order stays.
    std::thread::sleep(Duration::from_millis(1500));
    assert!(first.property(8, false).cqe.status.is_success());
    assert_eq!(target.status()["totals"]["connections_dropped_silent"], 5);
}

/// Whatever bytes come, the target neither panics nor stops serving others. The seed is printed where it fails.
#[test]
fn random_bytes_hurt_nobody() {
    let seed = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap()
        .subsec_nanos();
    println!("seed {seed}");
    let target = start(r#""connect_timeout_ms": 200, "progress_timeout_ms": 200"#);
    let address = target.addresses()[0];
    let (mut first, cntlid) = admin(address);
    for round in 0..150u64 {
        let noise = pattern(2000, u64::from(seed) + round);
        let mut client = Client::open(address);
        match round % 3 {
            // From the first byte; after ICReq with a likely type; in the middle of a connected queue.
            0 => {}
            1 => drop(client.initialise(Digests::default(), 0)),
            _ => {
                client.initialise(
                    Digests {
                        header: round % 2 == 0,
                        data: false,
                    },
                    0,
                );
                let qid = (round % 60 + 1) as u16;
                client.connect(qid, cntlid, |_, _| {});
            }
        }
        let mut bytes = noise.clone();
        if round % 3 > 0 {
            // Well-formed capsules with random commands, so that the noise gets behind the framing.
            bytes.clear();
            for sqe in noise.chunks_exact(64) {
                let mut entry = [0; 64];
                entry.copy_from_slice(sqe);
                entry[1] = 0x40;
                entry[0] = [0, 1, 2, 5, 8, 9, 6, 0x7F][usize::from(entry[0] % 8)];
                let nsid = entry[4] % 4;
                entry[4..8].copy_from_slice(&[nsid, 0, 0, 0]);
                entry[39] = [0x5A, 0x01][usize::from(entry[39] % 2)];
                bytes.extend(client.encode(&Pdu::CapsuleCmd(Sqe(entry)), &[]));
            }
            bytes.extend(&noise);
        }
        let _ = client.stream.write_all(&bytes);
        client
            .stream
            .set_read_timeout(Some(Duration::from_millis(5)))
            .unwrap();
        let mut sink = [0; 65536];
        while matches!(client.stream.read(&mut sink), Ok(n) if n > 0) {}
    }
    assert_eq!(target.status()["totals"]["panics"], 0, "seed {seed}");
    assert!(first.property(8, false).cqe.status.is_success(), "seed {seed}");
    let mut client = Client::open(address);
    client.initialise(Digests::default(), 0);
    assert!(client.connect(0, CNTLID_DYNAMIC, |_, _| {}).status.is_success());
}

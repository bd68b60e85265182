//! Fused Compare and Write: two commands, one effect.

mod common;

use common::{admin, io, pattern, start, Client};
use headrace_target::{Target, TargetConfig};
use headrace_wire::pdu::{Digests, Pdu};
use headrace_wire::{Cqe, Sgl, Sqe, Status};

const BLOCK: usize = 4096;

fn half(queue: &mut Client, opcode: u8, fuse: u8, slba: u64, blocks: u32, in_capsule: bool) -> Sqe {
    let cid = queue.cid();
    let length = blocks * BLOCK as u32;
    let mut sqe = Sqe::rw(opcode, cid, 1, slba, blocks).with_sgl(match in_capsule {
        true => Sgl::InCapsule { offset: 0, length },
        false => Sgl::Transport { length },
    });
    sqe.0[1] |= fuse;
    sqe
}

/// Both halves' statuses. The data travel in the capsule or not, each half for itself.
fn swap(
    queue: &mut Client,
    slba: u64,
    expected: &[u8],
    data: &[u8],
    in_capsule: (bool, bool),
) -> (Status, Status) {
    let blocks = (data.len() / BLOCK) as u32;
    let first = half(queue, 5, 1, slba, blocks, in_capsule.0);
    let second = half(queue, 1, 2, slba, blocks, in_capsule.1);
    queue.send_capsule(first, if in_capsule.0 { expected } else { &[] });
    queue.send_capsule(second, if in_capsule.1 { data } else { &[] });
    let mut answers: Vec<Cqe> = Vec::new();
    while answers.len() < 2 {
        match queue.receive().expect("closed").pdu {
            Pdu::R2t(r2t) if r2t.cccid == first.cid() => queue.send_data(&r2t, expected, 3000),
            Pdu::R2t(r2t) => queue.send_data(&r2t, data, 5000),
            Pdu::CapsuleResp(cqe) => answers.push(cqe),
            other => panic!("{other:?}"),
        }
    }
    let of = |sqe: Sqe| answers.iter().find(|cqe| cqe.cid == sqe.cid()).unwrap().status;
    (of(first), of(second))
}

#[test]
fn a_pair_writes_where_it_compares() {
    let target = start("");
    let address = target.addresses()[0];
    let (_first, cntlid) = admin(address);
    for data in [false, true] {
        let mut queue = io(address, cntlid, Digests { header: false, data }, 0);
        for in_capsule in [(true, true), (true, false), (false, true), (false, false)] {
            let (old, new) = (pattern(2 * BLOCK, 1), pattern(2 * BLOCK, 2));
            assert!(queue.write(7, &old, BLOCK as u32, 1 << 20).status.is_success());
            assert_eq!(
                swap(&mut queue, 7, &new, &old, in_capsule),
                (Status::COMPARE_FAILURE, Status::FAILED_FUSED)
            );
            assert!(queue.read(7, 2, BLOCK as u32).data == old, "written all the same");
            assert_eq!(
                swap(&mut queue, 7, &old, &new, in_capsule),
                (Status::SUCCESS, Status::SUCCESS)
            );
            assert!(queue.read(7, 2, BLOCK as u32).data == new, "not written");
        }
        drop(queue);
        common::eventually("the queue stays", || {
            target.status()["controllers"][0]["queues"] == serde_json::json!([0])
        });
    }
    common::eventually("buffers stay taken", || target.status()["buffer_bytes"] == 0);
}

/// What is no pair, and what each half hears.
#[test]
fn halves_that_do_not_fit() {
    let target = start(r#""progress_timeout_ms": 200"#);
    let address = target.addresses()[0];
    let (mut first, cntlid) = admin(address);
    let mut queue = io(address, cntlid, Digests::default(), 0);
    let data = vec![0xAA; BLOCK];
    let zeros = vec![0; BLOCK];
    let missing = Status::MISSING_FUSED.do_not_retry();
    let invalid = Status::INVALID_FIELD.do_not_retry();
    // A second without a first.
    let sqe = half(&mut queue, 1, 2, 0, 1, true);
    assert_eq!(queue.command(sqe, &data).cqe.status, missing);
    // Something else between them, another first for one.
    let compare = half(&mut queue, 5, 1, 0, 1, true);
    let between = half(&mut queue, 5, 1, 0, 1, true);
    let flush = Sqe::new(0, 900, 1);
    let write = half(&mut queue, 1, 2, 0, 1, true);
    queue.send_capsule(compare, &zeros);
    queue.send_capsule(between, &zeros);
    assert_eq!(queue.answer(compare.cid()).cqe.status, missing);
    queue.send_capsule(flush, &[]);
    assert_eq!(queue.answer(between.cid()).cqe.status, missing);
    assert!(queue.answer(900).cqe.status.is_success());
    assert_eq!(queue.command(write, &data).cqe.status, missing);
    // A first whose second never comes.
    let compare = half(&mut queue, 5, 1, 0, 1, true);
    assert_eq!(queue.command(compare, &zeros).cqe.status, missing);
    // Halves that are not what they must be: (opcodes, blocks of each, second's place), what each hears.
    let unit = Status::ATOMIC_WRITE_UNIT.do_not_retry();
    let failed = Status::FAILED_FUSED;
    for (opcodes, blocks, place, says) in [
        ((5, 1), (1, 1), 1, (invalid, invalid)),
        ((5, 1), (1, 2), 0, (invalid, invalid)),
        ((1, 1), (1, 1), 0, (invalid, failed)),
        ((5, 5), (1, 1), 0, (failed, invalid)),
        ((5, 1), (17, 17), 0, (unit, failed)),
        ((5, 1), (1, 17), 0, (failed, unit)),
    ] {
        let one = half(&mut queue, opcodes.0, 1, 0, blocks.0, false);
        let two = half(&mut queue, opcodes.1, 2, place, blocks.1, false);
        queue.send_capsule(one, &[]);
        queue.send_capsule(two, &[]);
        let mut heard = [Status::SUCCESS; 2];
        for _ in 0..2 {
            match queue.receive().unwrap().pdu {
                Pdu::CapsuleResp(cqe) => heard[usize::from(cqe.cid == two.cid())] = cqe.status,
                other => panic!("{opcodes:?} {blocks:?} {place}: {other:?}"),
            }
        }
        assert_eq!((heard[0], heard[1]), says, "{opcodes:?} {blocks:?} {place}");
    }
    let both = half(&mut queue, 1, 3, 0, 1, true);
    assert_eq!(queue.command(both, &data).cqe.status, invalid);
    let mut keep = Sqe::new(0x18, 40, 0);
    keep.0[1] |= 1;
    assert_eq!(first.command(keep, &[]).cqe.status, invalid, "on the admin queue");
    assert!(
        queue.read(0, 1, BLOCK as u32).data == zeros,
        "something was written"
    );
}

/// A half that came damaged takes the other one with it, and both may be sent again.
#[test]
fn a_damaged_half_fails_both() {
    let target = start("");
    let address = target.addresses()[0];
    let (_first, cntlid) = admin(address);
    let digests = Digests {
        header: false,
        data: true,
    };
    let mut queue = io(address, cntlid, digests, 0);
    let (zeros, data) = (vec![0; BLOCK], vec![7; BLOCK]);
    for damaged in [1, 2] {
        let one = half(&mut queue, 5, 1, 0, 1, true);
        let two = half(&mut queue, 1, 2, 0, 1, true);
        for (number, sqe, bytes) in [(1, one, &zeros), (2, two, &data)] {
            let mut pdu = queue.encode(&Pdu::CapsuleCmd(sqe), bytes);
            if number == damaged {
                *pdu.last_mut().unwrap() ^= 1;
            }
            queue.send(&pdu);
        }
        let mut heard = [Status::SUCCESS; 2];
        for _ in 0..2 {
            match queue.receive().unwrap().pdu {
                Pdu::CapsuleResp(cqe) => heard[usize::from(cqe.cid == two.cid())] = cqe.status,
                other => panic!("{other:?}"),
            }
        }
        let says = match damaged {
            1 => [Status::TRANSIENT_TRANSPORT, Status::FAILED_FUSED],
            _ => [Status::FAILED_FUSED, Status::TRANSIENT_TRANSPORT],
        };
        assert_eq!(heard, says, "half {damaged}");
    }
    assert!(queue.read(0, 1, BLOCK as u32).data == zeros);
    assert_eq!(
        swap(&mut queue, 0, &zeros, &data, (true, true)),
        (Status::SUCCESS, Status::SUCCESS)
    );
}

/// A first half whose second is not read any more keeps no drain waiting.
#[test]
fn a_lone_half_is_given_up_when_the_target_drains() {
    let target = start("");
    let address = target.addresses()[0];
    let (_first, cntlid) = admin(address);
    let mut queue = io(address, cntlid, Digests::default(), 0);
    let compare = half(&mut queue, 5, 1, 0, 1, true);
    queue.send_capsule(compare, &vec![0; BLOCK]);
    common::eventually("the compare does not come", || {
        target.status()["buffer_bytes"] != 0
    });
    let limit = std::time::Duration::from_secs(10);
    assert!(target.drain(limit), "it waits for the progress timeout");
    assert_eq!(
        queue.answer(compare.cid()).cqe.status,
        Status::MISSING_FUSED.do_not_retry()
    );
}

/// The longest pair, in as little memory as the configuration allows; and a pair that is aborted.
#[test]
fn a_pair_gets_its_memory_together_and_goes_together() {
    let target = start(r#""connection_memory_bytes": 262144, "memory_bytes": 262144, "mdts_bytes": 65536"#);
    let address = target.addresses()[0];
    let (mut first, cntlid) = admin(address);
    let mut queue = io(address, cntlid, Digests::default(), 0);
    let zeros = vec![0; 16 * BLOCK];
    let data = pattern(16 * BLOCK, 5);
    let mut pairs = Vec::new();
    for n in 0..3 {
        let pair = (
            half(&mut queue, 5, 1, n * 16, 16, false),
            half(&mut queue, 1, 2, n * 16, 16, false),
        );
        queue.send_capsule(pair.0, &[]);
        queue.send_capsule(pair.1, &[]);
        pairs.push(pair);
    }
    let (a, b) = (queue.r2t(), queue.r2t());
    assert_eq!((a.cccid, b.cccid), (pairs[0].0.cid(), pairs[0].1.cid()));
    // The second pair waits in line, the first for its data: each half takes the other along.
    assert!(first.abort(1, pairs[1].1.cid()));
    let mut heard = |pair: (Sqe, Sqe)| {
        let (one, two) = (queue.receive().unwrap().pdu, queue.receive().unwrap().pdu);
        match (one, two) {
            (Pdu::CapsuleResp(one), Pdu::CapsuleResp(two)) => {
                assert_eq!((one.cid, two.cid), (pair.0.cid(), pair.1.cid()));
                (one.status, two.status)
            }
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(heard(pairs[1]), (Status::FAILED_FUSED, Status::ABORT_REQUESTED));
    assert!(first.abort(1, pairs[0].0.cid()));
    assert_eq!(heard(pairs[0]), (Status::ABORT_REQUESTED, Status::FAILED_FUSED));
    // Their memory is free for the third.
    let (c, d) = (queue.r2t(), queue.r2t());
    queue.send_data(&a, &zeros, 1 << 20);
    queue.send_data(&b, &data, 1 << 20);
    queue.send_data(&d, &data, 1 << 20);
    queue.send_data(&c, &zeros, 1 << 20);
    for _ in 0..2 {
        match queue.receive().unwrap().pdu {
            Pdu::CapsuleResp(cqe) => assert!(cqe.status.is_success()),
            other => panic!("{other:?}"),
        }
    }
    assert!(
        queue.read(0, 16, BLOCK as u32).data == zeros,
        "an aborted pair wrote"
    );
    assert!(queue.read(32, 16, BLOCK as u32).data == data);
    common::eventually("buffers stay taken", || target.status()["buffer_bytes"] == 0);
}

/// A counter that several hosts increase, each with compare and write and nothing else: no step is lost. In memory, which
/// reactors write, and in a file, which workers write.
#[test]
fn no_step_of_a_shared_counter_is_lost() {
    const HOSTS: u64 = 4;
    const STEPS: u64 = 60;
    let path =
        std::path::PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("fused-{}", std::process::id()));
    let file = format!(r#"{{"kind": "file", "path": {path:?}, "create": true, "size_bytes": 1048576}}"#);
    for media in [r#"{"kind": "memory", "size_bytes": 1048576}"#, file.as_str()] {
        let text = format!(
            r#"{{"reactor_threads": 2, "subsystems": [{{"nqn": "{}", "namespaces": [{{"nsid": 1, "media": {media}}}]}}]}}"#,
            common::NQN
        );
        let target = Target::start(TargetConfig::from_json(&text).unwrap()).unwrap();
        let address = target.addresses()[0];
        let hosts: Vec<_> = (0..HOSTS)
            .map(|_| {
                std::thread::spawn(move || {
                    let (_first, cntlid) = admin(address);
                    let mut queue = io(address, cntlid, Digests::default(), 0);
                    let mut done = 0;
                    while done < STEPS {
                        let old = queue.read(3, 1, BLOCK as u32).data;
                        let count = u64::from_le_bytes(old[..8].try_into().unwrap());
                        let mut new = old.clone();
                        new[..8].copy_from_slice(&(count + 1).to_le_bytes());
                        new[BLOCK - 8..].copy_from_slice(&(count + 1).to_le_bytes());
                        match swap(&mut queue, 3, &old, &new, (true, done % 2 == 0)) {
                            (Status::SUCCESS, Status::SUCCESS) => done += 1,
                            (Status::COMPARE_FAILURE, Status::FAILED_FUSED) => {}
                            other => panic!("{other:?}"),
                        }
                    }
                })
            })
            .collect();
        hosts.into_iter().for_each(|host| host.join().unwrap());
        let (_first, cntlid) = admin(address);
        let data = io(address, cntlid, Digests::default(), 0)
            .read(3, 1, BLOCK as u32)
            .data;
        assert_eq!(data[..8], (HOSTS * STEPS).to_le_bytes(), "{media}");
        assert_eq!(data[BLOCK - 8..], (HOSTS * STEPS).to_le_bytes(), "{media}");
    }
    std::fs::remove_file(path).unwrap();
}

//! The host's queue pair against the target's connection, by plans that proptest makes and shortens: whatever is written,
//! read, compared and zeroed, in whatever sizes, with whatever digests, and however the stream is cut, exactly the right
//! bytes end in exactly the right places.

use headrace_host::testing::{Ended, Payload};
use headrace_media::{Media, MemoryMedia, VolatileCache};
use headrace_sim::media::Handle;
use headrace_sim::pair::later;
use headrace_sim::{Pair, Random, HOST, NQN};
use headrace_target::testing::Bench;
use headrace_transfer::Buffer;
use headrace_wire::pdu::Digests;
use headrace_wire::{io, Sqe, Status};
use proptest::prelude::*;
use std::sync::Arc;

const BLOCK: usize = 512;
const BLOCKS: usize = 1024;
const GUARD: usize = 64;
const CANARY: u8 = 0xC5;

#[derive(Clone, Debug)]
enum Op {
    Write,
    Read,
    Zero,
    /// `true`: of other bytes than are there.
    Compare(bool),
    Flush,
}

/// One round of commands that are under way together and do not overlap: each takes the next `blocks`.
type Round = Vec<(Op, usize)>;

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => Just(Op::Write),
        4 => Just(Op::Read),
        1 => Just(Op::Zero),
        1 => any::<bool>().prop_map(Op::Compare),
        1 => Just(Op::Flush),
    ]
}

fn blocks() -> impl Strategy<Value = usize> {
    prop_oneof![4 => 1usize..40, 1 => 200usize..300]
}

fn plan() -> impl Strategy<Value = (Vec<Round>, u8, u64)> {
    let round = proptest::collection::vec((op(), blocks()), 1..12);
    (proptest::collection::vec(round, 1..5), any::<u8>(), any::<u64>())
}

fn guarded(length: usize, fill: u8) -> (Buffer, Buffer) {
    let mut bytes = vec![CANARY; length + 2 * GUARD];
    bytes[GUARD..GUARD + length].fill(fill);
    let memory = Buffer::from_vec(bytes);
    let inside = memory.slice(GUARD, length).expect("it fits");
    (memory, inside)
}

fn taken_apart(memory: &Buffer) -> Vec<u8> {
    let mut bytes = vec![0; memory.len()];
    memory.copy_to(0, &mut bytes);
    let end = bytes.len() - GUARD;
    assert!(
        bytes[..GUARD]
            .iter()
            .chain(&bytes[end..])
            .all(|&byte| byte == CANARY),
        "a byte outside of a buffer"
    );
    bytes[GUARD..end].to_vec()
}

fn carry_out(rounds: &[Round], mode: u8, seed: u64) {
    let mut random = Random::new(seed);
    let size = (BLOCKS * BLOCK) as u64;
    let memory = MemoryMedia::new(size, BLOCK as u32).unwrap();
    let media: Arc<dyn Media> = if mode & 1 == 0 {
        Arc::new(memory)
    } else {
        Arc::new(VolatileCache::new(Box::new(memory), 64 << 10))
    };
    let digests = Digests {
        header: mode & 2 != 0,
        data: mode & 4 != 0,
    };
    let hpda = random.pick(&[0, 0, 1, 31]);
    let in_capsule = [0, 4096, 16384][usize::from(mode >> 3) % 3];
    let mut bench = Bench::new(NQN, Box::new(Handle(media.clone())));
    let (_admin, mut pair) = Pair::bring_up(&mut bench, NQN, HOST, (digests, hpda), in_capsule);
    let mut model = vec![0u8; BLOCKS * BLOCK];
    for round in rounds {
        let mut at = random.below(BLOCKS / 2);
        let mut under_way = Vec::new();
        for (op, blocks) in round {
            let blocks = (*blocks).min(BLOCKS - at);
            if blocks == 0 {
                break;
            }
            let range = at * BLOCK..(at + blocks) * BLOCK;
            let rw = |opcode| Sqe::rw(opcode, 0, 1, at as u64, blocks as u32);
            let (memory, inside) = guarded(range.len(), 0xEE);
            let (sqe, payload) = match op {
                Op::Write => {
                    let bytes: Vec<u8> = (0..range.len()).map(|_| random.draw() as u8).collect();
                    inside.copy_from(0, &bytes);
                    model[range.clone()].copy_from_slice(&bytes);
                    (rw(io::WRITE), Payload::Write(inside))
                }
                Op::Read => (rw(io::READ), Payload::Read(inside)),
                Op::Zero => {
                    model[range.clone()].fill(0);
                    (rw(io::WRITE_ZEROES), Payload::None)
                }
                Op::Compare(wrong) => {
                    inside.copy_from(0, &model[range.clone()]);
                    if *wrong {
                        inside.copy_from(range.len() - 1, &[!model[range.end - 1]]);
                    }
                    (rw(io::COMPARE), Payload::Write(inside))
                }
                Op::Flush => (Sqe::new(io::FLUSH, 0, 1), Payload::None),
            };
            let tag = under_way.len() as u64;
            assert!(pair.queue.submit(sqe, payload, tag, later()));
            under_way.push((op.clone(), range, memory));
            if !matches!(op, Op::Flush) {
                at += blocks;
            }
        }
        pair.exchange(&mut bench, Some(&mut random))
            .expect("both keep the protocol");
        let mut ended = vec![false; under_way.len()];
        while let Some((tag, end)) = pair.queue.completion() {
            let (op, range, memory) = &under_way[tag as usize];
            assert!(!std::mem::replace(&mut ended[tag as usize], true), "ended twice");
            let Ended::Answer(cqe) = end else {
                panic!("{op:?}: {end:?}");
            };
            let expected = match op {
                Op::Compare(true) => Status::COMPARE_FAILURE,
                _ => Status::SUCCESS,
            };
            assert_eq!(
                (cqe.status.sct, cqe.status.sc),
                (expected.sct, expected.sc),
                "{op:?}"
            );
            let bytes = taken_apart(memory);
            if matches!(op, Op::Read) {
                assert!(bytes == model[range.clone()], "other bytes were read");
            }
        }
        assert!(ended.iter().all(|&ended| ended), "a command never ends");
    }
    let mut bytes = vec![0; model.len()];
    media.read(0, &mut bytes).unwrap();
    assert!(bytes == model, "the medium holds something else");
    assert_eq!(bench.memory_bytes(), 0);
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: std::env::var("HEADRACE_CASES").ok().and_then(|text| text.parse().ok()).unwrap_or(200),
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn the_right_bytes_end_in_the_right_places((rounds, mode, seed) in plan()) {
        carry_out(&rounds, mode, seed);
    }
}

//! Invariant: whatever the split of the received stream, and however it is divided between the destination and the scratch,
//! the same commands complete with the same bytes; and nothing that a peer can send makes the queue pair panic or write
//! outside of the data of a read that is under way.

use super::*;
use headrace_wire::pdu::{CommonHeader, DataHeader, IcResp, R2t};
use headrace_wire::Status;
use std::time::Duration;

/// xorshift: seeded, so that a failure can be repeated.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
    fn below(&mut self, n: u64) -> usize {
        (self.next() % n) as usize
    }
}

const ALL: [Digests; 4] = [
    Digests {
        header: false,
        data: false,
    },
    Digests {
        header: true,
        data: false,
    },
    Digests {
        header: false,
        data: true,
    },
    Digests {
        header: true,
        data: true,
    },
];

fn later() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn encoded(pdu: Pdu, data: &[u8], digests: Digests) -> Vec<u8> {
    let mut bytes = Vec::new();
    let layout = pdu.encode(data.len(), digests, 0, &mut bytes);
    bytes.extend_from_slice(data);
    if layout.data_digest_bytes > 0 {
        bytes.extend_from_slice(&headrace_wire::crc32c(data).to_le_bytes());
    }
    bytes
}

impl Arrivals for usize {}

fn sent<T: Arrivals>(queue: &mut QueuePair<T>, random: &mut Random) -> Vec<u8> {
    let mut out = Vec::new();
    while queue.has_output() {
        let mut pieces = [IoSlice::new(&[]); PIECES_MAX];
        let count = queue.gather(&mut pieces);
        let all: Vec<u8> = pieces[..count].iter().flat_map(|piece| piece.to_vec()).collect();
        let step = 1 + random.below(all.len() as u64);
        out.extend_from_slice(&all[..step]);
        queue.sent(step);
    }
    out
}

fn ready(depth: u16, digests: Digests, maxh2cdata: u32) -> QueuePair<usize> {
    let mut queue = QueuePair::new(
        depth,
        Asked {
            digests,
            ..Default::default()
        },
        4096,
    );
    sent(&mut queue, &mut Random(1));
    let response = IcResp {
        pfv: 0,
        cpda: 0,
        digests,
        maxh2cdata,
    };
    queue
        .received(0, &encoded(Pdu::IcResp(response), &[], Digests::default()))
        .unwrap();
    queue
}

/// Deliver as a socket would: each read fills the destination first, then the scratch; sizes as `next` says.
fn deliver(
    queue: &mut QueuePair<usize>,
    mut bytes: &[u8],
    mut next: impl FnMut() -> usize,
) -> Result<(), Fault> {
    while !bytes.is_empty() {
        let step = next().clamp(1, bytes.len());
        let (now, rest) = bytes.split_at(step);
        bytes = rest;
        let destination = queue.destination();
        let direct = destination.len().min(now.len());
        destination[..direct].copy_from_slice(&now[..direct]);
        queue.received(direct, &now[direct..])?;
    }
    Ok(())
}

/// What a controller sends for four reads and two flushes, their data interleaved.
fn traffic(digests: Digests, random: &mut Random) -> (Vec<u8>, Vec<Vec<u8>>) {
    let contents: Vec<Vec<u8>> = [512, 4096, 9000, 70000]
        .iter()
        .map(|&length| (0..length).map(|_| random.next() as u8).collect())
        .collect();
    let mut at = [0usize; 4];
    let mut stream = Vec::new();
    let mut open: Vec<usize> = (0..4).collect();
    let mut flushes = vec![4u16, 5];
    while !open.is_empty() || !flushes.is_empty() {
        if !flushes.is_empty() && random.below(4) == 0 {
            let cid = flushes.pop().unwrap();
            stream.extend(encoded(
                Pdu::CapsuleResp(Cqe::new(cid, Status::SUCCESS)),
                &[],
                digests,
            ));
            continue;
        }
        if open.is_empty() {
            continue;
        }
        let i = open[random.below(open.len() as u64)];
        let left = contents[i].len() - at[i];
        let step = (1 + random.below(20000)).min(left);
        let last = step == left;
        let success = last && i % 2 == 0;
        let header = DataHeader {
            cccid: i as u16,
            ttag: 0,
            datao: at[i] as u32,
            datal: step as u32,
            last,
            success,
        };
        stream.extend(encoded(
            Pdu::C2hData(header),
            &contents[i][at[i]..at[i] + step],
            digests,
        ));
        at[i] += step;
        if last {
            open.retain(|&other| other != i);
            if !success {
                let cqe = Cqe::new(i as u16, Status::SUCCESS);
                stream.extend(encoded(Pdu::CapsuleResp(cqe), &[], digests));
            }
        }
    }
    (stream, contents)
}

fn with_commands(digests: Digests, contents: &[Vec<u8>]) -> (QueuePair<usize>, Vec<Buffer>) {
    let mut queue = ready(8, digests, 65536);
    let buffers: Vec<Buffer> = contents.iter().map(|bytes| Buffer::zeroed(bytes.len())).collect();
    for (i, buffer) in buffers.iter().enumerate() {
        let data = Data::Read(buffer.clone());
        assert!(queue.submit(Sqe::rw(2, 0, 1, 0, 1), data, i, later()).is_ok());
    }
    for i in 4..6 {
        assert!(queue.submit(Sqe::new(0, 0, 1), Data::None, i, later()).is_ok());
    }
    (queue, buffers)
}

fn check(queue: &mut QueuePair<usize>, buffers: &[Buffer], contents: &[Vec<u8>]) {
    let mut tags = Vec::new();
    while let Some(completion) = queue.completion() {
        assert!(matches!(completion.end, End::Answer(cqe) if cqe.status.is_success()));
        tags.push(completion.tag);
    }
    tags.sort_unstable();
    assert_eq!(tags, [0, 1, 2, 3, 4, 5]);
    for (buffer, content) in buffers.iter().zip(contents) {
        let mut bytes = vec![0; buffer.len()];
        buffer.copy_to(0, &mut bytes);
        assert!(bytes == *content);
    }
    assert_eq!(queue.room(), 8);
}

#[test]
fn every_split_of_the_stream_gives_the_same() {
    for (seed, digests) in ALL.into_iter().cycle().take(24).enumerate() {
        let mut random = Random(0x9E37_79B9 + seed as u64);
        let (stream, contents) = traffic(digests, &mut random);
        // Byte by byte, all at once, and at random.
        for mode in 0..4 {
            let (mut queue, buffers) = with_commands(digests, &contents);
            deliver(&mut queue, &stream, || match mode {
                0 => 1,
                1 => usize::MAX,
                2 => 1 + random.below(64),
                _ => 1 + random.below(50_000),
            })
            .unwrap();
            check(&mut queue, &buffers, &contents);
        }
    }
}

/// One bit turned anywhere: with both digests, nothing wrong is ever taken for right. Without, no panic.
#[test]
fn a_turned_bit_is_never_a_success_with_wrong_bytes() {
    let mut random = Random(77);
    for digests in [
        Digests {
            header: true,
            data: true,
        },
        Digests::default(),
    ] {
        let (stream, contents) = traffic(digests, &mut random);
        for _ in 0..1500 {
            let (mut queue, buffers) = with_commands(digests, &contents);
            let mut bad = stream.clone();
            let at = random.below(bad.len() as u64);
            bad[at] ^= 1 << random.below(8);
            let _ = deliver(&mut queue, &bad, || 1 + random.below(30_000));
            while let Some(completion) = queue.completion() {
                let success = matches!(completion.end, End::Answer(cqe) if cqe.status.is_success());
                if digests.data && success && completion.tag < 4 {
                    let buffer = &buffers[completion.tag];
                    let mut bytes = vec![0; buffer.len()];
                    buffer.copy_to(0, &mut bytes);
                    assert!(
                        bytes == contents[completion.tag],
                        "a bit at {at} of {}",
                        stream.len()
                    );
                }
            }
        }
    }
}

/// Random headers that are well formed but for what they say.
#[test]
fn arbitrary_pdus_never_write_outside_of_a_read() {
    let mut random = Random(4242);
    for round in 0..3000 {
        let mut queue = ready(4, Digests::default(), 4096);
        let memory = Buffer::from_vec(vec![0xEE; 3 * 4096]);
        let inside = memory.slice(4096, 4096).unwrap();
        assert!(queue
            .submit(Sqe::rw(2, 0, 1, 0, 8), Data::Read(inside), 0, later())
            .is_ok());
        assert!(queue
            .submit(
                Sqe::rw(1, 0, 1, 0, 8),
                Data::Write(Buffer::zeroed(8192)),
                1,
                later()
            )
            .is_ok());
        sent(&mut queue, &mut random);
        for _ in 0..6 {
            let cid = random.below(5) as u16;
            let (at, length) = (random.below(3) * 2048, random.below(6) * 1024);
            let last = random.below(2) == 0;
            let success = last && random.below(3) == 0;
            let pdu = match random.below(3) {
                0 => Pdu::R2t(R2t {
                    cccid: cid,
                    ttag: 5,
                    r2to: at as u32,
                    r2tl: length as u32,
                }),
                1 => Pdu::CapsuleResp(Cqe::new(cid, Status::from_field(random.below(4) as u16))),
                _ => Pdu::C2hData(DataHeader {
                    cccid: cid,
                    ttag: 0,
                    datao: at as u32,
                    datal: length as u32,
                    last,
                    success,
                }),
            };
            let data = vec![0x11; if matches!(pdu, Pdu::C2hData(_)) { length } else { 0 }];
            if deliver(&mut queue, &encoded(pdu, &data, Digests::default()), || {
                1 + random.below(5000)
            })
            .is_err()
            {
                break;
            }
            if random.below(2) == 0 {
                sent(&mut queue, &mut random);
            }
        }
        let mut bytes = vec![0; 3 * 4096];
        memory.copy_to(0, &mut bytes);
        assert!(
            bytes[..4096].iter().chain(&bytes[8192..]).all(|&b| b == 0xEE),
            "round {round}"
        );
    }
}

#[test]
fn r2ts_are_served_in_chunks_with_exact_headers() {
    for digests in ALL {
        let mut random = Random(5);
        let mut queue = ready(4, digests, 4096);
        let content: Vec<u8> = (0..20000).map(|_| random.next() as u8).collect();
        let data = Data::Write(Buffer::from_vec(content.clone()));
        assert!(queue.submit(Sqe::rw(1, 0, 1, 0, 8), data, 9, later()).is_ok());
        let capsule = sent(&mut queue, &mut random);
        assert_eq!(capsule.len(), 72 + if digests.header { 4 } else { 0 });
        // SGL: transport data block of the whole length.
        assert_eq!(
            (&capsule[8 + 32..8 + 36], capsule[8 + 39]),
            (&20000u32.to_le_bytes()[..], 0x5A)
        );
        let mut got = Vec::new();
        for (at, length) in [(0u32, 12288u32), (12288, 7712)] {
            let r2t = Pdu::R2t(R2t {
                cccid: 0,
                ttag: 0xBEEF,
                r2to: at,
                r2tl: length,
            });
            queue.received(0, &encoded(r2t, &[], digests)).unwrap();
            let bytes = sent(&mut queue, &mut random);
            let mut rest = &bytes[..];
            while !rest.is_empty() {
                let mut first = [0; 8];
                first.copy_from_slice(&rest[..8]);
                let common = CommonHeader::decode(&first, digests, 0).unwrap();
                let layout = common.layout(digests).unwrap();
                let Pdu::H2cData(header) = Pdu::decode(&common, &rest[..24]).unwrap() else {
                    panic!("not H2CData");
                };
                assert_eq!((header.ttag, header.datao as usize), (0xBEEF, got.len()));
                assert!(layout.data_bytes <= 4096);
                got.extend_from_slice(&rest[layout.pdo()..layout.pdo() + layout.data_bytes]);
                assert_eq!(header.last, got.len() == (at + length) as usize);
                rest = &rest[layout.plen()..];
            }
        }
        assert!(got == content);
        queue
            .received(
                0,
                &encoded(Pdu::CapsuleResp(Cqe::new(0, Status::SUCCESS)), &[], digests),
            )
            .unwrap();
        assert_eq!(queue.completion().map(|completion| completion.tag), Some(9));
    }
}

#[test]
fn an_early_answer_waits_until_the_data_are_sent() {
    let mut queue = ready(4, Digests::default(), 4096);
    assert!(queue
        .submit(
            Sqe::rw(1, 0, 1, 0, 8),
            Data::Write(Buffer::zeroed(8192)),
            1,
            later()
        )
        .is_ok());
    sent(&mut queue, &mut Random(3));
    let digests = Digests::default();
    let r2t = Pdu::R2t(R2t {
        cccid: 0,
        ttag: 1,
        r2to: 0,
        r2tl: 8192,
    });
    queue.received(0, &encoded(r2t, &[], digests)).unwrap();
    let refusal = Pdu::CapsuleResp(Cqe::new(0, Status::WRITE_FAULT));
    queue.received(0, &encoded(refusal, &[], digests)).unwrap();
    assert!(
        queue.completion().is_none(),
        "the buffer is still in the send queue"
    );
    sent(&mut queue, &mut Random(3));
    assert!(queue
        .completion()
        .is_some_and(|c| matches!(c.end, End::Answer(cqe) if !cqe.status.is_success())));
}

#[test]
fn a_success_without_all_data_of_a_write_is_no_success() {
    let mut queue = ready(4, Digests::default(), 4096);
    assert!(queue
        .submit(
            Sqe::rw(1, 0, 1, 0, 16),
            Data::Write(Buffer::zeroed(8192)),
            1,
            later()
        )
        .is_ok());
    sent(&mut queue, &mut Random(3));
    let cqe = Pdu::CapsuleResp(Cqe::new(0, Status::SUCCESS));
    queue.received(0, &encoded(cqe, &[], Digests::default())).unwrap();
    assert_eq!(
        queue.completion().map(|c| c.end),
        Some(End::Short {
            came: 0,
            wanted: 8192
        })
    );
}

/// A controller that answers twice, or sends data after its answer, must not end the next command of the slot, nor write
/// into its buffer: its answers would then be taken for those of others, one after the other.
#[test]
fn a_second_answer_does_not_end_the_next_command() {
    let answer = encoded(
        Pdu::CapsuleResp(Cqe::new(0, Status::SUCCESS)),
        &[],
        Digests::default(),
    );
    let data = Pdu::C2hData(DataHeader {
        cccid: 0,
        ttag: 0,
        datao: 0,
        datal: 512,
        last: true,
        success: false,
    });
    let data = encoded(data, &[0xEE; 512], Digests::default());
    for late in [&answer, &data] {
        let mut queue = ready(1, Digests::default(), 4096);
        assert!(queue.submit(Sqe::new(0, 0, 1), Data::None, 1, later()).is_ok());
        sent(&mut queue, &mut Random(3));
        queue.received(0, &answer).unwrap();
        assert_eq!(queue.completion().map(|c| c.tag), Some(1));
        let into = Buffer::zeroed(512);
        assert!(queue
            .submit(Sqe::rw(2, 0, 1, 0, 1), Data::Read(into.clone()), 2, later())
            .is_ok());
        sent(&mut queue, &mut Random(4));
        let fault = queue.received(0, late).unwrap_err();
        assert!(matches!(fault, Fault::Violation(_)), "{fault}");
        assert!(queue.completion().is_none());
        let mut bytes = [1; 512];
        into.copy_to(0, &mut bytes);
        assert_eq!(bytes, [0; 512]);
    }
}

/// Every CID that a slot has, for the largest queue too.
#[test]
fn the_commands_of_a_slot_have_other_cids() {
    for slot in [0, 1, 1023] {
        let mut cid = slot;
        let mut seen = std::collections::HashSet::new();
        while seen.insert(cid) {
            assert_eq!(usize::from(slot), slot_of(cid));
            cid = next_cid(cid);
        }
        assert_eq!((seen.len(), cid), (63, slot));
    }
}

#[test]
fn a_full_queue_hands_back_what_it_cannot_take() {
    let mut queue = ready(2, Digests::default(), 4096);
    for i in 0..2 {
        assert!(queue.submit(Sqe::new(0, 0, 1), Data::None, i, later()).is_ok());
    }
    assert!(matches!(
        queue.submit(Sqe::new(0, 0, 1), Data::None, 7, later()),
        Err((7, Data::None))
    ));
    assert_eq!(queue.room(), 0);
    assert_eq!(queue.abandon(Instant::now()).len(), 2);
}

#[test]
fn a_read_that_is_taken_back_leaves_its_memory_alone_and_is_still_answered() {
    for digests in ALL {
        // Before its data, and at every place within them.
        for before in [0, 1, 30, 500, 4096, 5000, usize::MAX] {
            let mut queue = ready(4, digests, 4096);
            let memory = Buffer::zeroed(8192);
            let read = Sqe::rw(headrace_wire::io::READ, 0, 1, 0, 16);
            let given = queue.submit(read, Data::Read(memory.clone()), 7, later());
            assert!(given.is_ok());
            sent(&mut queue, &mut Random(1));
            let data = vec![0x5a; 8192];
            let half = |at: usize| DataHeader {
                cccid: 0,
                ttag: 0,
                datao: at as u32,
                datal: 4096,
                last: at > 0,
                success: false,
            };
            let mut stream = encoded(Pdu::C2hData(half(0)), &data[..4096], digests);
            stream.extend(encoded(Pdu::C2hData(half(4096)), &data[4096..], digests));
            let (first, second) = stream.split_at(before.min(stream.len()));
            deliver(&mut queue, first, || 300).unwrap();
            let (mut tags, buffers): (Vec<_>, Vec<_>) =
                queue.recall(|&tag| Some(tag + 1)).into_iter().unzip();
            assert!(matches!((tags.pop(), &buffers[..]), (Some(7), [Data::Read(_)])));
            memory.copy_from(0, &[0xee; 8192]);
            deliver(&mut queue, second, || 300).unwrap();
            let answer = Pdu::CapsuleResp(Cqe::new(0, Status::SUCCESS));
            deliver(&mut queue, &encoded(answer, &[], digests), || 300).unwrap();
            let completion = queue.completion().unwrap();
            assert_eq!(completion.tag, 8);
            assert!(matches!(completion.end, End::Answer(cqe) if cqe.status.is_success()));
            let mut found = vec![0; 8192];
            memory.copy_to(0, &mut found);
            assert_eq!(found, [0xee; 8192]);
            assert_eq!(queue.room(), 4);
        }
    }
}

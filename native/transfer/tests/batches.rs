//! The engine over devices with every manner that the contract allows: completions from inside `submit`, from other
//! threads, in any order; errors; more requests than the window holds.

use headrace_transfer::{
    submit_read, submit_write, BlockDevice, Buffer, ChecksumSpec, DeviceInfo, ErrorKind, IoError, Op, Plan,
    Request, Segment,
};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{mpsc, Arc, Mutex};
use std::time::Duration;

const BLOCK: u64 = 512;
const LONG: Duration = Duration::from_secs(20);

/// Small and reproducible; the tests need variety, not quality.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Manner {
    /// Complete inside of `submit`.
    AtOnce,
    /// Complete on another thread, in an order that is not the order of submission.
    Shuffled,
}

struct Fake {
    bytes: Arc<Mutex<Vec<u8>>>,
    /// Requests with this number (counting from 1) and later fail; 0: none.
    fail_from: usize,
    seen: AtomicUsize,
    largest_batch: AtomicUsize,
    queue: Mutex<Option<mpsc::Sender<Request>>>,
    worker: Mutex<Option<std::thread::JoinHandle<()>>>,
}

fn perform(bytes: &Mutex<Vec<u8>>, op: Op, offset: u64) {
    let mut bytes = bytes.lock().unwrap();
    let at = offset as usize;
    match op {
        Op::Read { into } => {
            assert_eq!((offset % BLOCK, into.len() as u64 % BLOCK), (0, 0));
            into.copy_from(0, &bytes[at..at + into.len()]);
        }
        Op::Write { from, .. } => {
            assert_eq!((offset % BLOCK, from.len() as u64 % BLOCK), (0, 0));
            let end = at + from.len();
            from.copy_to(0, &mut bytes[at..end]);
        }
        Op::Flush | Op::Deallocate { .. } => {}
    }
}

fn finish(bytes: &Mutex<Vec<u8>>, request: Request) {
    let Request {
        op,
        offset,
        token,
        sink,
    } = request;
    perform(bytes, op, offset);
    sink.complete(token, Ok(()));
}

impl Fake {
    fn new(bytes: Vec<u8>, manner: Manner) -> Arc<Self> {
        Self::failing(bytes, manner, 0)
    }

    fn failing(bytes: Vec<u8>, manner: Manner, fail_from: usize) -> Arc<Self> {
        let bytes = Arc::new(Mutex::new(bytes));
        let (mut queue, mut worker) = (None, None);
        if manner == Manner::Shuffled {
            let (sender, receiver) = mpsc::channel::<Request>();
            let shared = bytes.clone();
            queue = Some(sender);
            worker = Some(std::thread::spawn(move || {
                let mut random = Random(99);
                let mut held: Vec<Request> = Vec::new();
                loop {
                    match if held.is_empty() {
                        receiver.recv().ok()
                    } else {
                        receiver.try_recv().ok()
                    } {
                        Some(request) => held.push(request),
                        None if held.is_empty() => return,
                        None => {
                            let index = random.below(held.len() as u64) as usize;
                            finish(&shared, held.swap_remove(index));
                        }
                    }
                }
            }));
        }
        Arc::new(Fake {
            bytes,
            fail_from,
            seen: AtomicUsize::new(0),
            largest_batch: AtomicUsize::new(0),
            queue: Mutex::new(queue),
            worker: Mutex::new(worker),
        })
    }
}

impl BlockDevice for Fake {
    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            size_bytes: self.bytes.lock().unwrap().len() as u64,
            block_bytes: BLOCK as u32,
            max_transfer_bytes: 1 << 20,
            volatile_cache: false,
            read_only: false,
        }
    }
    fn loss_count(&self) -> u64 {
        0
    }
    fn submit(&self, requests: Vec<Request>) {
        self.largest_batch.fetch_max(requests.len(), Ordering::Relaxed);
        for request in requests {
            let number = self.seen.fetch_add(1, Ordering::Relaxed) + 1;
            if self.fail_from != 0 && number >= self.fail_from {
                let Request { op, token, sink, .. } = request;
                drop(op);
                sink.complete(
                    token,
                    Err(IoError::new(ErrorKind::Failed, format!("request {number}"))),
                );
                continue;
            }
            let queue = self.queue.lock().unwrap().clone();
            match queue {
                Some(queue) => queue.send(request).unwrap(),
                None => finish(&self.bytes, request),
            }
        }
    }
    fn describe(&self) -> serde_json::Value {
        serde_json::json!({})
    }
    fn close(&self, _timeout: Duration) {
        self.queue.lock().unwrap().take();
        if let Some(worker) = self.worker.lock().unwrap().take() {
            worker.join().unwrap();
        }
    }
}

fn pattern(length: usize, seed: u64) -> Vec<u8> {
    let mut random = Random(seed);
    (0..length).map(|_| random.below(256) as u8).collect()
}

fn contents(buffer: &Buffer) -> Vec<u8> {
    let mut bytes = vec![0; buffer.len()];
    buffer.copy_to(0, &mut bytes);
    bytes
}

fn devices(fakes: &[Arc<Fake>]) -> Vec<Arc<dyn BlockDevice>> {
    fakes
        .iter()
        .map(|fake| fake.clone() as Arc<dyn BlockDevice>)
        .collect()
}

/// `count` segments side by side on two members, of random length and wanted part; the buffer is filled without gaps.
fn random_segments(count: u64, size: u64, random: &mut Random) -> (Vec<Segment>, usize) {
    let share = size / count.div_ceil(2) / BLOCK * BLOCK;
    let mut into = 0;
    let mut segments = Vec::new();
    for i in 0..count {
        let length = random.below(share + 1);
        let (skip, take) = match random.below(3) {
            0 => (0, length),
            1 => (length / 3, length / 3),
            _ => (0, random.below(length + 1)),
        };
        segments.push(Segment {
            offset: i / 2 * share,
            length,
            skip,
            take,
            buffer_offset: into,
            birth: 40 + i,
            first_block: random.below(1000),
            member: (i % 2) as u32,
            ..Segment::default()
        });
        into += take;
    }
    (segments, into as usize)
}

#[test]
fn what_was_written_is_read_back_with_any_manner_and_cut() {
    let mut random = Random(7);
    for manner in [Manner::AtOnce, Manner::Shuffled] {
        for checksum_block in [512, 4096, 65536] {
            for size in [64 << 10, 2 << 20] {
                let fakes = [
                    Fake::new(vec![0xee; size], manner),
                    Fake::new(vec![0xee; size], manner),
                ];
                let (mut segments, _) = random_segments(16, size as u64, &mut random);
                let reads = segments.clone();
                let mut total = 0;
                for segment in &mut segments {
                    segment.buffer_offset = total;
                    total += segment.length;
                }
                let written = pattern(total as usize, 3);
                let checksum = ChecksumSpec::new(checksum_block, [5; 16]);
                let count: u64 = segments.iter().map(|s| checksum.count(s.length)).sum();
                let sums = Buffer::zeroed(count as usize * 4);
                let plan = Plan {
                    devices: devices(&fakes),
                    segments: segments.clone(),
                    buffers: vec![Buffer::from_vec(written.clone())],
                    checksum,
                };
                submit_write(plan, Some(&sums))
                    .unwrap()
                    .wait(LONG)
                    .unwrap()
                    .unwrap();
                let sums: Vec<u32> = contents(&sums)
                    .chunks(4)
                    .map(|c| u32::from_ne_bytes(c.try_into().unwrap()))
                    .collect();

                // The padding of a last block is zeros.
                let short = segments.iter().find(|s| s.length % BLOCK != 0).unwrap();
                let bytes = fakes[short.member as usize].bytes.lock().unwrap();
                let end = (short.offset + short.length) as usize;
                assert!(bytes[end..end.next_multiple_of(BLOCK as usize)]
                    .iter()
                    .all(|&b| b == 0));
                drop(bytes);

                let into = Buffer::zeroed(total as usize);
                let plan = Plan {
                    devices: devices(&fakes),
                    segments: reads.clone(),
                    buffers: vec![into.clone()],
                    checksum,
                };
                submit_read(plan, Some(sums))
                    .unwrap()
                    .wait(LONG)
                    .unwrap()
                    .unwrap();
                let got = contents(&into);
                for (read, write) in reads.iter().zip(&segments) {
                    let wanted = &written[(write.buffer_offset + read.skip) as usize..][..read.take as usize];
                    assert_eq!(&got[read.buffer_offset as usize..][..read.take as usize], wanted);
                }
                for fake in &fakes {
                    fake.close(LONG);
                }
            }
        }
    }
}

#[test]
fn a_hundred_thousand_segments_pass_a_small_window() {
    for manner in [Manner::AtOnce, Manner::Shuffled] {
        let fake = Fake::new(pattern(1 << 20, 1), manner);
        let mut random = Random(5);
        // Odd skips, so that each segment is a request of its own.
        let segments: Vec<_> = (0..100_000)
            .map(|i| Segment {
                offset: random.below(2048) * BLOCK,
                length: BLOCK,
                skip: 1,
                take: 8,
                buffer_offset: i * 8,
                ..Segment::default()
            })
            .collect();
        let into = Buffer::zeroed(800_000);
        let plan = Plan {
            devices: devices(std::slice::from_ref(&fake)),
            segments: segments.clone(),
            buffers: vec![into.clone()],
            checksum: ChecksumSpec::new(0, [0; 16]),
        };
        submit_read(plan, None).unwrap().wait(LONG).unwrap().unwrap();
        assert_eq!(fake.seen.load(Ordering::Relaxed), 100_000);
        assert!(fake.largest_batch.load(Ordering::Relaxed) <= 512);
        let (got, bytes) = (contents(&into), fake.bytes.lock().unwrap());
        for (i, segment) in segments.iter().enumerate() {
            assert_eq!(got[i * 8..][..8], bytes[segment.offset as usize + 1..][..8]);
        }
        drop(bytes);
        fake.close(LONG);
    }
}

#[test]
fn the_first_error_ends_the_batch_and_names_its_segment() {
    for manner in [Manner::AtOnce, Manner::Shuffled] {
        let fake = Fake::failing(vec![0; 4 << 20], manner, 3);
        let segments: Vec<_> = (0..4096)
            .map(|i| Segment {
                offset: i * 1024,
                length: BLOCK,
                take: 1,
                buffer_offset: i,
                ..Segment::default()
            })
            .collect();
        let plan = Plan {
            devices: devices(std::slice::from_ref(&fake)),
            segments,
            buffers: vec![Buffer::zeroed(4096)],
            checksum: ChecksumSpec::new(0, [0; 16]),
        };
        let transfer = submit_read(plan, None).unwrap();
        let error = transfer.wait(LONG).unwrap().unwrap_err();
        assert_eq!((error.kind, &*error.what), (ErrorKind::Failed, "request 3"));
        assert_eq!(transfer.failed_segment(), Some(2));
        assert!(transfer.done());
        assert!(
            fake.seen.load(Ordering::Relaxed) < 4096,
            "nothing new is submitted after an error"
        );
        fake.close(LONG);
    }
}

#[test]
fn a_flipped_bit_is_found_wherever_it_is() {
    let (size, block) = (3 << 20, 4096u64);
    let fake = Fake::new(vec![0; size], Manner::AtOnce);
    let checksum = ChecksumSpec::new(block, [1; 16]);
    // Two neighbours that become one request, then one that is bounced at its end.
    let lengths = [8192u64, 8192, 2_000_001];
    let mut offset = 0;
    let segments: Vec<_> = (0..3)
        .map(|i| {
            let segment = Segment {
                offset,
                length: lengths[i],
                take: lengths[i],
                buffer_offset: offset,
                birth: i as u64,
                ..Segment::default()
            };
            offset += lengths[i];
            segment
        })
        .collect();
    let count: u64 = lengths.iter().map(|&length| checksum.count(length)).sum();
    let sums = Buffer::zeroed(count as usize * 4);
    let data = Buffer::from_vec(pattern(offset as usize, 8));
    let plan = |buffer: &Buffer| Plan {
        devices: devices(std::slice::from_ref(&fake)),
        segments: segments.clone(),
        buffers: vec![buffer.clone()],
        checksum,
    };
    submit_write(plan(&data), Some(&sums))
        .unwrap()
        .wait(LONG)
        .unwrap()
        .unwrap();
    let sums: Vec<u32> = contents(&sums)
        .chunks(4)
        .map(|c| u32::from_ne_bytes(c.try_into().unwrap()))
        .collect();
    for (at, segment) in [
        (0, 0),
        (8191, 0),
        (8192, 1),
        (16383, 1),
        (16384, 2),
        (1_500_000, 2),
        (2_016_384, 2),
    ] {
        fake.bytes.lock().unwrap()[at] ^= 0x10;
        let into = Buffer::zeroed(offset as usize);
        let transfer = submit_read(plan(&into), Some(sums.clone())).unwrap();
        let error = transfer.wait(LONG).unwrap().unwrap_err();
        assert_eq!(error.kind, ErrorKind::Checksum);
        assert_eq!(transfer.failed_segment(), Some(segment), "byte {at}: {error}");
        let in_segment = at as u64 - segments[segment].offset;
        assert!(
            error.place.ends_with(&format!("block {}", in_segment / block)),
            "byte {at}: {error}"
        );
        fake.bytes.lock().unwrap()[at] ^= 0x10;
    }
    // The same bytes under another identity do not pass.
    let mut other = plan(&Buffer::zeroed(offset as usize));
    other.segments[1].birth += 1;
    let transfer = submit_read(other, Some(sums)).unwrap();
    assert_eq!(
        transfer.wait(LONG).unwrap().unwrap_err().kind,
        ErrorKind::Checksum
    );
    assert_eq!(transfer.failed_segment(), Some(1));
}

#[test]
fn an_empty_batch_is_done_at_once() {
    let plan = Plan {
        devices: vec![],
        segments: vec![],
        buffers: vec![],
        checksum: ChecksumSpec::new(4096, [0; 16]),
    };
    let transfer = submit_read(plan, Some(vec![])).unwrap();
    assert!(transfer.done());
    transfer.wait(Duration::ZERO).unwrap_or(Ok(())).unwrap();
}

#[test]
fn what_cannot_be_is_refused_before_anything_moves() {
    let fake = Fake::new(vec![0; 8192], Manner::AtOnce);
    let good = Segment {
        length: 1024,
        take: 1024,
        ..Segment::default()
    };
    let cases = [
        (Segment { offset: 100, ..good }, "the offset is not aligned"),
        (Segment { offset: 8192, ..good }, "the range leaves the device"),
        (
            Segment {
                offset: u64::MAX - 511,
                ..good
            },
            "the range leaves the device",
        ),
        (
            Segment {
                length: u64::MAX,
                ..good
            },
            "the range leaves the device",
        ),
        (Segment { skip: 1, ..good }, "the wanted part leaves the segment"),
        (
            Segment {
                skip: u64::MAX,
                ..good
            },
            "the wanted part leaves the segment",
        ),
        (
            Segment {
                buffer_offset: 3073,
                ..good
            },
            "the segment leaves its buffer",
        ),
        (
            Segment {
                buffer_offset: u64::MAX,
                ..good
            },
            "the segment leaves its buffer",
        ),
        (Segment { member: 1, ..good }, "no such member"),
        (Segment { buffer: 1, ..good }, "no such buffer"),
    ];
    for (segment, what) in cases {
        let plan = Plan {
            devices: devices(std::slice::from_ref(&fake)),
            segments: vec![good, segment],
            buffers: vec![Buffer::zeroed(4096)],
            checksum: ChecksumSpec::new(0, [0; 16]),
        };
        let Err(error) = submit_read(plan, None) else {
            panic!("{what}: accepted")
        };
        assert_eq!((error.kind, &*error.what), (ErrorKind::Usage, what));
        assert!(error.place.starts_with("segment 1"), "{error}");
    }
    assert_eq!(fake.seen.load(Ordering::Relaxed), 0);
}

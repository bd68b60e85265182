//! Reads that are verified while they come: whatever a device says of arrivals, the batch ends well exactly where the
//! memory is right at its end. Writes whose checksums are taken as they go: whatever it says, they are of what went.

use headrace_transfer::{
    submit_read, submit_write, BlockDevice, Buffer, ChecksumSpec, DeviceInfo, ErrorKind, Op, Plan, Request,
    Segment, Transfer,
};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const BLOCK: usize = 4096;
const ID: [u8; 16] = *b"a volume's name!";
const BIRTH: u64 = 7;
const LENGTH: usize = 5 * BLOCK + 512;

/// Small and reproducible; the tests need variety, not quality.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % bound as u64) as usize
    }
}

/// Requests stay with it until the test answers them.
#[derive(Default)]
struct Held(Mutex<Vec<Request>>);

impl BlockDevice for Held {
    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            size_bytes: 1 << 20,
            block_bytes: 512,
            max_transfer_bytes: 1 << 20,
            volatile_cache: false,
            read_only: false,
        }
    }
    fn tells_departures(&self) -> bool {
        true
    }
    fn loss_count(&self) -> u64 {
        0
    }
    fn submit(&self, requests: Vec<Request>) {
        self.0.lock().unwrap().extend(requests);
    }
    fn describe(&self) -> serde_json::Value {
        serde_json::Value::Null
    }
    fn close(&self, _: Duration) {}
}

/// A verified read of `content`, in one request, whether it is one segment or several behind each other.
struct Reading {
    transfer: Transfer,
    request: Request,
    memory: Buffer,
    content: Vec<u8>,
}

impl Reading {
    fn of(lengths: &[usize]) -> Self {
        let content: Vec<u8> = (0..lengths.iter().sum())
            .map(|i: usize| (i / 5 % 251) as u8)
            .collect();
        let checksum = ChecksumSpec::new(BLOCK as u64, ID);
        let (mut segments, mut sums, mut at) = (Vec::new(), Vec::new(), 0);
        for &length in lengths {
            let first_block = 100 + at as u64;
            for (number, block) in content[at..at + length].chunks(BLOCK).enumerate() {
                sums.push(checksum.of(BIRTH, first_block + number as u64, block));
            }
            segments.push(Segment {
                offset: at as u64,
                length: length as u64,
                take: length as u64,
                buffer_offset: at as u64,
                birth: BIRTH,
                first_block,
                ..Segment::default()
            });
            at += length;
        }
        let (device, memory) = (Arc::new(Held::default()), Buffer::zeroed(content.len()));
        let plan = Plan {
            devices: vec![device.clone()],
            segments,
            buffers: vec![memory.clone()],
            checksum,
        };
        let transfer = submit_read(plan, Some(sums)).unwrap();
        let mut requests = std::mem::take(&mut *device.0.lock().unwrap());
        assert_eq!(requests.len(), 1);
        let request = requests.remove(0);
        assert!(request.sink.watches());
        Reading {
            transfer,
            request,
            memory,
            content,
        }
    }

    /// Bytes come, with one that is wrong or none; and that is said.
    fn comes(&self, at: usize, count: usize, wrong: Option<usize>) {
        self.changes(at, count, wrong);
        self.request.sink.arrived(self.request.token, at, count);
    }

    /// Bytes come, and nobody says so.
    fn changes(&self, at: usize, count: usize, wrong: Option<usize>) {
        let mut bytes = self.content[at..at + count].to_vec();
        if let Some(wrong) = wrong {
            bytes[wrong] ^= 0x10;
        }
        self.memory.copy_from(at, &bytes);
    }

    fn ends(self) -> Result<(), ErrorKind> {
        let Request { op, sink, token, .. } = self.request;
        assert!(matches!(op, Op::Read { .. }));
        drop(op);
        sink.complete(token, Ok(()));
        let result = self.transfer.wait(Duration::ZERO).expect("it has ended");
        result.map_err(|error| error.kind)
    }
}

#[test]
fn what_came_whole_is_verified_before_the_end() {
    for lengths in [&[LENGTH][..], &[BLOCK, 2 * BLOCK, 1024, BLOCK]] {
        let reading = Reading::of(lengths);
        let length = reading.content.len();
        for at in (0..length).step_by(1500) {
            reading.comes(at, 1500.min(length - at), None);
        }
        // Against the contract, and so the one way to see that nobody looks at these again.
        reading.changes(0, BLOCK, Some(17));
        assert_eq!(reading.ends(), Ok(()));
    }
}

#[test]
fn of_parts_in_the_wrong_order_the_first_is_verified_as_it_comes() {
    let reading = Reading::of(&[LENGTH]);
    reading.comes(3 * BLOCK, LENGTH - 3 * BLOCK, None);
    reading.comes(0, 3 * BLOCK, None);
    reading.changes(0, BLOCK, Some(17));
    assert_eq!(reading.ends(), Ok(()));
}

#[test]
fn what_nobody_spoke_of_is_verified_at_the_end() {
    for wrong in [None, Some(LENGTH - 1)] {
        let reading = Reading::of(&[LENGTH]);
        reading.comes(0, 2 * BLOCK, None);
        reading.changes(0, LENGTH, wrong);
        let expected = wrong.map_or(Ok(()), |_| Err(ErrorKind::Checksum));
        assert_eq!(reading.ends(), expected);
    }
}

#[test]
fn what_comes_again_is_verified_again() {
    // A part that was right comes again, wrong; and the other way round.
    for (first, second) in [(None, Some(30)), (Some(30), None)] {
        for from in [0, 1, BLOCK, 2 * BLOCK + 7] {
            let reading = Reading::of(&[LENGTH]);
            reading.comes(0, from, None);
            reading.comes(from, 3 * BLOCK, first);
            reading.comes(from, 3 * BLOCK, second);
            reading.comes(from + 3 * BLOCK, LENGTH - 3 * BLOCK - from, None);
            let expected = second.map_or(Ok(()), |_| Err(ErrorKind::Checksum));
            assert_eq!(reading.ends(), expected, "{first:?} {second:?} {from}");
        }
    }
}

#[test]
fn any_arrivals_in_any_order_end_as_the_memory_is() {
    let mut found = [0; 2];
    for seed in 1..3000 {
        let random = &mut Random(seed);
        random.below(2);
        let lengths: &[usize] = [&[LENGTH][..], &[BLOCK, 3 * BLOCK, 512]][random.below(2)];
        let reading = Reading::of(lengths);
        let length = reading.content.len();
        // Parts as commands are: each comes in ascending pieces, may stop anywhere, and then comes again from its start.
        let parts = 1 + random.below(3);
        let ends: Vec<usize> = (1..=parts).map(|part| length * part / parts).collect();
        let mut at: Vec<usize> = (0..parts).map(|part| length * part / parts).collect();
        let starts = at.clone();
        let mut right = vec![true; length];
        while let Some(part) = {
            let open: Vec<usize> = (0..parts).filter(|&part| at[part] < ends[part]).collect();
            (!open.is_empty()).then(|| open[random.below(open.len())])
        } {
            if random.below(6) == 0 {
                at[part] = starts[part];
            }
            let count = 1 + random.below((ends[part] - at[part]).min(3 * BLOCK));
            let wrong = (random.below(20) == 0).then(|| random.below(count));
            reading.comes(at[part], count, wrong);
            right[at[part]..at[part] + count].fill(true);
            if let Some(wrong) = wrong {
                right[at[part] + wrong] = false;
            }
            at[part] += count;
        }
        let good = right.iter().all(|&right| right);
        found[usize::from(good)] += 1;
        let expected = if good { Ok(()) } else { Err(ErrorKind::Checksum) };
        assert_eq!(reading.ends(), expected, "seed {seed}");
    }
    assert!(found.iter().all(|&count| count > 300), "{found:?}");
}

/// A write of `content` with checksums, of some segments behind each other.
struct Writing {
    transfer: Transfer,
    requests: Vec<Request>,
    memory: Buffer,
    sums: Buffer,
    lengths: Vec<usize>,
}

impl Writing {
    fn of(lengths: &[usize]) -> Self {
        let length: usize = lengths.iter().sum();
        let memory = Buffer::from_vec((0..length).map(|i| (i / 7 % 253) as u8).collect());
        let mut at = 0;
        let segments: Vec<_> = lengths
            .iter()
            .map(|&length| {
                let segment = Segment {
                    offset: (at as u64).next_multiple_of(512),
                    length: length as u64,
                    buffer_offset: at as u64,
                    birth: BIRTH,
                    first_block: 100 + at as u64,
                    ..Segment::default()
                };
                at += length;
                segment
            })
            .collect();
        let count: usize = lengths.iter().map(|length| length.div_ceil(BLOCK)).sum();
        let (device, sums) = (Arc::new(Held::default()), Buffer::zeroed(count * 4));
        let plan = Plan {
            devices: vec![device.clone()],
            segments,
            buffers: vec![memory.clone()],
            checksum: ChecksumSpec::new(BLOCK as u64, ID),
        };
        let transfer = submit_write(plan, Some(&sums)).unwrap();
        let requests = std::mem::take(&mut *device.0.lock().unwrap());
        Writing {
            transfer,
            requests,
            memory,
            sums,
            lengths: lengths.to_vec(),
        }
    }

    fn content(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.memory.len()];
        self.memory.copy_to(0, &mut bytes);
        bytes
    }

    /// What is known of `content` at the end.
    fn ends(self, content: &[u8]) -> bool {
        for request in self.requests {
            let Request { op, sink, token, .. } = request;
            drop(op);
            sink.complete(token, Ok(()));
        }
        self.transfer.wait(Duration::ZERO).expect("it has ended").unwrap();
        let (mut found, mut wanted, mut at) = (vec![0; self.sums.len()], Vec::new(), 0);
        self.sums.copy_to(0, &mut found);
        let spec = ChecksumSpec::new(BLOCK as u64, ID);
        for length in self.lengths {
            for (number, block) in content[at..at + length].chunks(BLOCK).enumerate() {
                let sum = spec.of(BIRTH, 100 + at as u64 + number as u64, block);
                wanted.extend_from_slice(&sum.to_ne_bytes());
            }
            at += length;
        }
        found == wanted
    }
}

fn length_of(request: &Request) -> usize {
    match &request.op {
        Op::Write { from, .. } => from.len(),
        _ => panic!("a write"),
    }
}

#[test]
fn checksums_are_of_what_went_whether_somebody_spoke_of_it_or_not() {
    for lengths in [
        &[LENGTH][..],
        &[BLOCK, 2 * BLOCK, 1024, BLOCK],
        &[2 * BLOCK + 100, 33],
    ] {
        for told in [true, false] {
            let writing = Writing::of(lengths);
            let content = writing.content();
            for request in writing.requests.iter().filter(|_| told) {
                assert!(request.sink.watches());
                let length = length_of(request);
                for at in (0..length).step_by(1500) {
                    request.sink.departed(request.token, at, 1500.min(length - at));
                }
            }
            // Who changes it from here on is found out when it is read: nobody looks at it again, where it was told.
            let other = [!content[0]];
            writing.memory.copy_from(0, &other);
            let changed = writing.content();
            let expected = if told { &content } else { &changed };
            assert!(writing.ends(expected), "{lengths:?} told {told}");
        }
    }
}

#[test]
fn what_goes_again_has_the_checksum_of_the_last_time() {
    for seed in 1..2000 {
        let random = &mut Random(seed);
        random.below(2);
        let lengths: &[usize] = [&[LENGTH][..], &[BLOCK, 3 * BLOCK, 512]][random.below(2)];
        let writing = Writing::of(lengths);
        assert_eq!(writing.requests.len(), 1);
        let request = &writing.requests[0];
        let length = length_of(request);
        let parts = 1 + random.below(3);
        for part in (0..parts).chain((0..parts).filter(|_| seed % 3 == 0)) {
            let (start, end) = (length * part / parts, length * (part + 1) / parts);
            // A command may stop anywhere, and then goes again from its start, with what is there then.
            let mut at = start;
            while at < end {
                if random.below(6) == 0 {
                    writing.memory.copy_from(start, &[random.below(256) as u8]);
                    at = start;
                }
                let count = 1 + random.below((end - at).min(3 * BLOCK));
                request.sink.departed(request.token, at, count);
                at += count;
            }
        }
        let content = writing.content();
        assert!(writing.ends(&content), "seed {seed}");
    }
}

//! What a connection still has to send: small pieces that were encoded, buffers that were read, and media memory that is
//! sent from where it lies. One `sendmsg` takes many of them.
//!
//! Media memory that a digest follows cannot be sent from where it lies: others may write to it between the sum and the sending, and
//! the host would take that for a broken network. Nor is it copied when the command is: many reads under way would be out
//! of the cache before they are sent. [`Output::stage`] copies and sums it a piece at a time, just before the socket gets it.

use crate::memory::{Allowance, Buffer};
use crate::system::Part;
use headrace_media::Mapping;
use headrace_wire::pdu::DIGEST_BYTES;
use headrace_wire::Digester;
use std::collections::VecDeque;
use std::sync::Arc;

/// A piece that is copied and summed at once: it comes from memory into the cache, and is summed and sent from there.
const PIECE_BYTES: usize = 64 << 10;
/// How much is made ready for the socket before it is asked: it stays in the cache of a core, and is so much that a host on the
/// same machine does not fall asleep after each (with half of it, it does).
const STAGE_BYTES: usize = 512 << 10;

enum Chunk {
    /// The next so many bytes of `small`.
    Small(usize),
    Buffer {
        buffer: Buffer,
        start: usize,
        length: usize,
    },
    Mapped {
        mapping: Arc<Mapping>,
        offset: usize,
        length: usize,
    },
    /// Not copied yet. The small bytes behind it begin with the digest of all of it.
    Summed {
        mapping: Arc<Mapping>,
        offset: usize,
        length: usize,
        sum: Digester,
    },
}

impl Chunk {
    fn len(&self) -> usize {
        match self {
            Chunk::Small(length)
            | Chunk::Buffer { length, .. }
            | Chunk::Mapped { length, .. }
            | Chunk::Summed { length, .. } => *length,
        }
    }
}

#[derive(Default)]
pub(crate) struct Output {
    small: Vec<u8>,
    /// Where the first unsent small byte lies.
    small_at: usize,
    /// Small bytes that belong to a chunk already.
    small_end: usize,
    chunks: VecDeque<Chunk>,
    bytes: usize,
    /// Chunks that are not copied yet.
    summed: usize,
    /// There was no buffer for the very next bytes.
    starved: bool,
}

impl Output {
    pub(crate) fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    pub(crate) fn chunk_count(&self) -> usize {
        self.chunks.len()
    }

    /// Give back what only a busy connection needs.
    pub(crate) fn rest(&mut self) {
        if self.is_empty() {
            *self = Output::default();
        }
    }

    /// Let `encode` append small bytes.
    pub(crate) fn small<T>(&mut self, encode: impl FnOnce(&mut Vec<u8>) -> T) -> T {
        if self.chunks.is_empty() && self.small_at > 0 {
            self.small.clear();
            self.small_at = 0;
            self.small_end = 0;
        }
        let result = encode(&mut self.small);
        let added = self.small.len() - self.small_end;
        self.small_end = self.small.len();
        self.bytes += added;
        match self.chunks.back_mut() {
            Some(Chunk::Small(length)) => *length += added,
            _ if added > 0 => self.chunks.push_back(Chunk::Small(added)),
            _ => {}
        }
        result
    }

    pub(crate) fn buffer(&mut self, buffer: Buffer) {
        let length = buffer.len();
        self.bytes += length;
        self.chunks.push_back(Chunk::Buffer {
            buffer,
            start: 0,
            length,
        });
    }

    /// The range must lie inside of the mapping.
    pub(crate) fn mapped(&mut self, mapping: Arc<Mapping>, offset: usize, length: usize) {
        self.bytes += length;
        self.chunks.push_back(Chunk::Mapped {
            mapping,
            offset,
            length,
        });
    }

    /// As [`mapped`](Self::mapped), with the digest of what is sent behind it. Offset and length are multiples of 8.
    pub(crate) fn summed(&mut self, mapping: Arc<Mapping>, offset: usize, length: usize) {
        self.bytes += length;
        self.summed += 1;
        self.chunks.push_back(Chunk::Summed {
            mapping,
            offset,
            length,
            sum: Digester::new(),
        });
        self.small(|out| out.extend_from_slice(&[0; DIGEST_BYTES]));
    }

    /// Make the next bytes ready to be sent, as far as there are buffers for those that have to be copied.
    pub(crate) fn stage(&mut self, allowance: &Arc<Allowance>) {
        self.starved = false;
        let mut ready = 0;
        let mut small_at = self.small_at;
        let mut index = 0;
        while self.summed > 0 && ready < STAGE_BYTES {
            let Some(chunk) = self.chunks.get_mut(index) else {
                return;
            };
            if let Chunk::Summed {
                mapping,
                offset,
                length,
                sum,
            } = chunk
            {
                let taken = PIECE_BYTES.min(*length);
                let Some(mut buffer) = allowance.take_read(taken) else {
                    self.starved = index == 0;
                    return;
                };
                mapping.copy_out(*offset, &mut buffer);
                sum.update(&buffer);
                *offset += taken;
                *length -= taken;
                let piece = Chunk::Buffer {
                    buffer,
                    start: 0,
                    length: taken,
                };
                if *length > 0 {
                    self.chunks.insert(index, piece);
                } else {
                    let digest = sum.value().to_le_bytes();
                    self.small[small_at..small_at + DIGEST_BYTES].copy_from_slice(&digest);
                    *chunk = piece;
                    self.summed -= 1;
                }
            }
            let length = self.chunks[index].len();
            if let Chunk::Small(_) = self.chunks[index] {
                small_at += length;
            }
            ready += length;
            index += 1;
        }
    }

    /// There is something to send, and [`stage`](Self::stage) had no buffer for even the first of it.
    pub(crate) fn is_starved(&self) -> bool {
        self.starved
    }

    /// The first unsent pieces that are ready, at most `count` of them.
    pub(crate) fn parts(&self, count: usize) -> Vec<Part<'_>> {
        let mut small_at = self.small_at;
        let mut parts = Vec::with_capacity(count.min(self.chunks.len()));
        for chunk in self.chunks.iter().take(count) {
            parts.push(match chunk {
                Chunk::Small(length) => {
                    small_at += length;
                    Part::slice(&self.small[small_at - length..small_at])
                }
                Chunk::Buffer {
                    buffer,
                    start,
                    length,
                } => Part::slice(&buffer[*start..*start + *length]),
                Chunk::Mapped {
                    mapping,
                    offset,
                    length,
                } => Part::mapped(mapping, *offset, *length),
                Chunk::Summed { .. } => break,
            });
        }
        parts
    }

    /// What `sendmsg` would take, copied; returns how much.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn copy_for_tests(&mut self, allowance: &Arc<Allowance>, into: &mut Vec<u8>) -> usize {
        self.stage(allowance);
        let mut small_at = self.small_at;
        let before = into.len();
        for chunk in &self.chunks {
            match chunk {
                Chunk::Small(length) => {
                    into.extend_from_slice(&self.small[small_at..small_at + length]);
                    small_at += length;
                }
                Chunk::Buffer {
                    buffer,
                    start,
                    length,
                } => into.extend_from_slice(&buffer[*start..*start + *length]),
                Chunk::Mapped {
                    mapping,
                    offset,
                    length,
                } => {
                    // Mappings are copied in whole words; what is left of one that was sent in part may begin inside of one.
                    let first = offset / 8 * 8;
                    let mut words = vec![0; (offset + length).next_multiple_of(8) - first];
                    mapping.copy_out(first, &mut words);
                    into.extend_from_slice(&words[offset - first..][..*length]);
                }
                Chunk::Summed { .. } => break,
            }
        }
        into.len() - before
    }

    /// `count` bytes were sent.
    pub(crate) fn sent(&mut self, mut count: usize) {
        self.bytes -= count;
        while count > 0 {
            let Some(chunk) = self.chunks.front_mut() else {
                return;
            };
            let taken = count.min(chunk.len());
            count -= taken;
            match chunk {
                Chunk::Small(length) => {
                    self.small_at += taken;
                    *length -= taken;
                }
                Chunk::Buffer { start, length, .. } => {
                    *start += taken;
                    *length -= taken;
                }
                Chunk::Mapped { offset, length, .. } => {
                    *offset += taken;
                    *length -= taken;
                }
                // Never offered.
                Chunk::Summed { .. } => return,
            }
            if chunk.len() == 0 {
                self.chunks.pop_front();
            }
        }
        // The arena starts again when it is empty, and is cut when its sent part has grown large.
        if self.small_at == self.small.len() || self.small_at > 64 << 10 {
            self.small.drain(..self.small_at);
            self.small_end -= self.small_at;
            self.small_at = 0;
            if self.small.is_empty() && self.small.capacity() > 64 << 10 {
                self.small = Vec::new();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common::pattern;
    use crate::memory::Memory;
    use crate::system::send;
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    /// Whatever sizes the socket takes, the bytes come out once and in order.
    #[test]
    fn every_partial_send_keeps_the_order() {
        for step in [1usize, 2, 3, 7, 64, 1000, 100_000] {
            let allowance = Memory::new(1 << 20).allowance(1 << 20);
            let mapping = Arc::new(Mapping::new(8192).unwrap());
            mapping.copy_in(4096, &[9; 4096]);
            let (near, mut far) = UnixStream::pair().unwrap();
            let mut output = Output::default();
            let long = Arc::new(Mapping::new(4 * PIECE_BYTES).unwrap());
            let noise = pattern(long.len(), step as u64);
            long.copy_in(0, &noise);
            let (mut expected, mut got) = (Vec::new(), Vec::new());
            for round in 0..9u8 {
                output.small(|b| b.extend([round; 24]));
                output.small(|b| b.extend([round + 100; 3]));
                let mut buffer = allowance.take(500).unwrap();
                buffer.fill(round + 50);
                output.buffer(buffer);
                output.mapped(mapping.clone(), 4095 - usize::from(round), 100);
                expected.extend([round; 24]);
                expected.extend([round + 100; 3]);
                expected.extend([round + 50; 500]);
                expected.extend(vec![0; usize::from(round) + 1]);
                expected.extend(vec![9; 99 - usize::from(round)]);
                // Less than a piece, in the last rounds two and some.
                let length = if round > 6 { 2 * PIECE_BYTES + 4096 } else { 512 };
                output.summed(long.clone(), 8 * usize::from(round), length);
                let bytes = &noise[8 * usize::from(round)..][..length];
                expected.extend(bytes);
                expected.extend(headrace_wire::crc32c(bytes).to_le_bytes());
                // Leave something behind in most rounds.
                let most = if round == 8 { usize::MAX } else { 400 };
                let mut sent = 0;
                while sent < most && !output.is_empty() {
                    output.stage(&allowance);
                    let parts: Vec<_> = output.parts(4);
                    let first = parts[0].first(step);
                    let one = [first];
                    let taken = send(&near, if step > 500 { &parts } else { &one }).unwrap();
                    output.sent(taken);
                    sent += taken;
                    let mut piece = vec![0; taken];
                    far.read_exact(&mut piece).unwrap();
                    got.extend(piece);
                }
            }
            assert_eq!(got, expected);
            assert!(output.is_empty() && output.chunk_count() == 0);
        }
    }

    /// A write between the pieces of a read tears it, as it may; the digest is that of the bytes that go out.
    #[test]
    fn a_digest_is_that_of_what_is_sent() {
        let allowance = Memory::new(4 << 20).allowance(4 << 20);
        let length = STAGE_BYTES + 3 * PIECE_BYTES + 512;
        let mapping = Arc::new(Mapping::new(length).unwrap());
        let mut output = Output::default();
        output.summed(mapping.clone(), 0, length);
        output.small(|b| b.extend([7; 3]));
        let mut got = Vec::new();
        while !output.is_empty() {
            output.stage(&allowance);
            // What is ready does not change any more.
            mapping.copy_in(0, &vec![(output.bytes % 255) as u8; length]);
            let taken = output.copy_for_tests(&allowance, &mut got).min(100_000);
            output.sent(taken);
            got.truncate(length + DIGEST_BYTES + 3 - output.bytes);
        }
        let (data, rest) = got.split_at(length);
        assert_eq!(
            rest,
            [&headrace_wire::crc32c(data).to_le_bytes()[..], &[7; 3]].concat()
        );
        assert!(data.iter().any(|byte| *byte != data[0]), "nothing was torn");
    }

    /// Without a buffer nothing is offered, and what is there already is; with one it goes on.
    #[test]
    fn waits_for_a_buffer() {
        let allowance = Memory::new(64 << 10).allowance(64 << 10);
        let mapping = Arc::new(Mapping::new(8192).unwrap());
        let mut output = Output::default();
        output.small(|b| b.extend([1; 24]));
        output.summed(mapping.clone(), 0, 8192);
        let other = allowance.take(64 << 10).unwrap();
        output.stage(&allowance);
        assert!(!output.is_starved() && output.parts(9).len() == 1);
        output.sent(24);
        output.stage(&allowance);
        assert!(output.is_starved() && !output.is_empty() && output.parts(9).is_empty());
        drop(other);
        output.stage(&allowance);
        assert!(!output.is_starved());
        assert_eq!(output.parts(9).iter().map(Part::len).sum::<usize>(), 8192 + 4);
        output.sent(8192 + 4);
        assert!(output.is_empty() && allowance.used_bytes() == 0);
    }
}

//! What a connection still has to send: small pieces that were encoded, buffers that were read, and media memory that is
//! sent from where it lies. One `sendmsg` takes many of them.

use crate::memory::Buffer;
use crate::system::Part;
use headrace_media::Mapping;
use std::collections::VecDeque;
use std::sync::Arc;

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
}

impl Chunk {
    fn len(&self) -> usize {
        match self {
            Chunk::Small(length) | Chunk::Buffer { length, .. } | Chunk::Mapped { length, .. } => *length,
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

    /// The first unsent pieces, at most `count` of them.
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
            });
        }
        parts
    }

    /// What `sendmsg` would take, copied; returns how much.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn copy_for_tests(&self, into: &mut Vec<u8>) -> usize {
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
                // Leave something behind in most rounds.
                let most = if round == 8 { usize::MAX } else { 400 };
                let mut sent = 0;
                while sent < most && !output.is_empty() {
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
}

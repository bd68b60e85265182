//! Write data that go from the socket into mapped media without a buffer between.
//!
//! A block is never left half written: whole blocks are received where they belong, and the parts of a block that is
//! split between two receives are put together in `tail` first. What a lost connection leaves is therefore some blocks of
//! the write, each whole, as a drive that loses power would.
//!
//! Not used with a data digest: damaged data must not reach the medium. The caller holds a [`crate::gate::Passage`] while
//! it receives or places.

use crate::memory::Buffer;
use crate::system::PartMut;
use headrace_media::Mapping;
use std::sync::Arc;

pub(crate) struct Direct {
    mapping: Arc<Mapping>,
    /// Where the command's data begin.
    offset: usize,
    /// The block that is incomplete, from its first byte.
    tail: Buffer,
}

impl Direct {
    /// `tail` has the length of a block; `offset` and the length of the command are multiples of it, and inside of the
    /// mapping.
    pub(crate) fn new(mapping: Arc<Mapping>, offset: usize, tail: Buffer) -> Self {
        Direct {
            mapping,
            offset,
            tail,
        }
    }

    /// Put the next bytes, which belong `at` bytes into the command's data.
    pub(crate) fn place(&mut self, mut at: usize, mut bytes: &[u8]) {
        let block = self.tail.len();
        while !bytes.is_empty() {
            let within = at % block;
            let whole = if within == 0 {
                bytes.len() / block * block
            } else {
                0
            };
            let taken = if whole > 0 {
                self.mapping.copy_in(self.offset + at, &bytes[..whole]);
                whole
            } else {
                let taken = bytes.len().min(block - within);
                self.tail[within..within + taken].copy_from_slice(&bytes[..taken]);
                self.complete(at, taken);
                taken
            };
            at += taken;
            bytes = &bytes[taken..];
        }
    }

    /// `taken` bytes came into the tail for byte `at` of the data; a complete block goes to the medium.
    fn complete(&mut self, at: usize, taken: usize) {
        let within = at % self.tail.len();
        if within + taken == self.tail.len() {
            self.mapping.copy_in(self.offset + at - within, &self.tail);
        }
    }

    /// Bytes of the tail, then of the medium, that the next `count` bytes at `at` go to; the medium takes whole blocks.
    fn split(&self, at: usize, count: usize) -> (usize, usize) {
        let block = self.tail.len();
        let first = count.min((block - at % block) % block);
        (first, (count - first) / block * block)
    }

    /// Where to receive the next bytes, of which `count` are there to be received.
    pub(crate) fn space(&mut self, at: usize, count: usize) -> (Vec<PartMut<'_>>, usize) {
        let (first, whole) = self.split(at, count);
        let within = at % self.tail.len();
        let mut parts = Vec::with_capacity(3);
        if first > 0 {
            parts.push(PartMut::slice(&mut self.tail[within..within + first]));
        }
        if whole > 0 {
            parts.push(PartMut::mapped(&self.mapping, self.offset + at + first, whole));
        }
        (parts, first + whole)
    }

    /// Of the space that was given for `count` bytes at `at`, the first `came` are filled.
    pub(crate) fn received(&mut self, at: usize, count: usize, came: usize) {
        let (first, _) = self.split(at, count);
        let in_tail = came.min(first);
        self.complete(at, in_tail);
        let block = self.tail.len();
        let end = at + came;
        if came > first && end % block != 0 {
            // Fewer bytes than were announced: the last block goes on in the tail.
            self.mapping
                .copy_out(self.offset + end / block * block, &mut self.tail);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common::pattern;
    use crate::memory::Memory;
    use crate::system::receive;
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    /// However the bytes arrive, by copying or by receiving, the same data end up in the same place.
    #[test]
    fn any_mixture_of_pieces() {
        for seed in 1..40u64 {
            let mapping = Arc::new(Mapping::new(64 << 10).unwrap());
            let tail = Memory::new(1 << 20).allowance(1 << 20).take(512).unwrap();
            let mut direct = Direct::new(mapping.clone(), 4096, tail);
            let data = pattern(20 * 512, seed);
            let mut state = seed;
            let mut random = |below: usize| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 40) as usize % below
            };
            let (mut near, far) = UnixStream::pair().unwrap();
            let mut at = 0;
            while at < data.len() {
                let length = (1 + random(2000)).min(data.len() - at);
                if random(2) == 0 {
                    direct.place(at, &data[at..at + length]);
                    at += length;
                    continue;
                }
                let (mut parts, room) = direct.space(at, length);
                // Sometimes fewer come than were announced.
                let came = if random(3) == 0 {
                    1 + random(length)
                } else {
                    length
                }
                .min(room);
                if came == 0 {
                    drop(parts);
                    direct.place(at, &data[at..at + length]);
                    at += length;
                    continue;
                }
                near.write_all(&data[at..at + came]).unwrap();
                assert_eq!(receive(&far, &mut parts).unwrap(), came);
                drop(parts);
                direct.received(at, length, came);
                at += came;
            }
            let mut found = vec![0; 64 << 10];
            mapping.copy_out(0, &mut found);
            assert!(found[4096..4096 + data.len()] == data, "seed {seed}");
            assert!(found[..4096]
                .iter()
                .chain(&found[4096 + data.len()..])
                .all(|&byte| byte == 0));
        }
    }
}

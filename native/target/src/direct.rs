//! Write data that go from the socket into mapped media without a buffer between.
//!
//! # What a lost connection leaves
//!
//! Some blocks of the write, each whole, old or new, as a drive leaves that loses power (AWUPF 0); the write itself was
//! never acknowledged. Whole blocks are received where they belong, but only as many as the kernel has announced to be there
//! (FIONREAD); the parts of a block that is still on its way are put together in `tail` first.
//!
//! It rests on this: Linux hands over all that it announced in one `recvmsg`, a reset that comes between the two
//! included, since what is in order in a TCP socket's queue leaves it only by being received. (The copy can stop early
//! only if the mapping's page cannot be had: then the process is being killed for want of memory, and the medium goes with
//! it.) Should a receive give fewer bytes all the same, the data still end up right ([`Direct::received`]), but one block
//! is part new, part old until its rest comes, and stays so if the connection is lost then; the target's notes say that it
//! happened. Receiving all data into a buffer first would need no such argument, for one more copy of every byte.
//!
//! A read of a block at the very time when it is received may see part of it.
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

    /// Of the space that was given for `count` bytes at `at`, the first `came` are filled. `false`: they end inside of a
    /// block of the medium, because fewer bytes came than were announced.
    pub(crate) fn received(&mut self, at: usize, count: usize, came: usize) -> bool {
        let (first, _) = self.split(at, count);
        let in_tail = came.min(first);
        self.complete(at, in_tail);
        let block = self.tail.len();
        let end = at + came;
        let torn = came > first && end % block != 0;
        if torn {
            // The block goes on in the tail.
            self.mapping
                .copy_out(self.offset + end / block * block, &mut self.tail);
        }
        !torn
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common::pattern;
    use crate::memory::Memory;
    use crate::system::{available, receive};
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
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
    /// What the module rests on: all that was announced comes in one receive, whenever the peer resets the connection; so
    /// each block is old or new.
    #[test]
    fn a_reset_leaves_whole_blocks() {
        const BLOCK: usize = 4096;
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut resets = 0;
        for seed in 1..=60u64 {
            let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (mut far, _) = listener.accept().unwrap();
            // A byte that the sender does not read: its close is a reset.
            far.write_all(&[1]).unwrap();
            let length = 17 * seed as usize * 1021;
            let sender = std::thread::spawn(move || {
                // Or the target's end has come first.
                pattern(length, seed)
                    .chunks(1 + seed as usize * 997)
                    .all(|piece| near.write_all(piece).is_ok())
            });
            let mapping = Arc::new(Mapping::new(length.next_multiple_of(BLOCK)).unwrap());
            let tail = Memory::new(1 << 20).allowance(1 << 20).take(BLOCK).unwrap();
            let mut direct = Direct::new(mapping.clone(), 0, tail);
            let mut at = 0;
            far.set_nonblocking(true).unwrap();
            loop {
                let announced = available(&far).unwrap();
                let (mut parts, room) = direct.space(at, announced);
                let mut scratch = vec![0; 2 * BLOCK];
                parts.push(PartMut::slice(&mut scratch));
                let came = match receive(&far, &mut parts) {
                    Ok(0) => break,
                    Ok(came) => came,
                    Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => continue,
                    Err(error) => {
                        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
                        resets += 1;
                        break;
                    }
                };
                drop(parts);
                assert!(
                    came >= announced.min(room),
                    "{came} bytes of {announced} announced"
                );
                let placed = came.min(room);
                if placed > 0 {
                    assert!(direct.received(at, announced, placed));
                }
                direct.place(at + placed, &scratch[..came - placed]);
                at += came;
            }
            sender.join().unwrap();
            let mut found = vec![0; mapping.len()];
            mapping.copy_out(0, &mut found);
            let data = pattern(length, seed);
            for (n, block) in found.chunks(BLOCK).enumerate() {
                let old = block.iter().all(|&byte| byte == 0);
                let new = data.get(n * BLOCK..(n + 1) * BLOCK) == Some(block);
                assert!(old || new, "block {n} of round {seed} is torn");
                assert!(
                    new || (n + 1) * BLOCK > at,
                    "block {n} of round {seed} is missing"
                );
            }
        }
        assert!(resets > 0, "no connection was reset");
    }
}

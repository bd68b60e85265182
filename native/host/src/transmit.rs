//! What waits to be sent on one connection: headers in one arena, data where the caller has them.
//!
//! ```text
//! segments   Head 72 | Head 72 + 24 | Data 131072 (cid 5) | Head 24 | Data ...
//! arena      [ sent already |  the bytes of all Heads, in order  ]
//! ```
//!
//! Neighbouring heads merge, so 32 commands are one piece of one `writev`. The arena is cut at the front from time to
//! time and keeps its capacity: a command costs no allocation.

use crate::memory;
use headrace_transfer::Buffer;
use std::collections::VecDeque;
use std::io::IoSlice;

/// Pieces of one `writev`.
pub(crate) const PIECES_MAX: usize = 64;
/// Sent bytes at the front of the arena that are worth a move.
const ARENA_SLACK: usize = 64 * 1024;

enum Segment {
    Head(usize),
    Data {
        buffer: Buffer,
        at: usize,
        left: usize,
        cid: u16,
        last: bool,
    },
}

#[derive(Default)]
pub(crate) struct Transmit {
    arena: Vec<u8>,
    sent: usize,
    segments: VecDeque<Segment>,
}

impl Transmit {
    pub fn is_empty(&self) -> bool {
        self.segments.is_empty()
    }

    /// Append to the arena: `write` gets it and pushes bytes at its end.
    pub fn head<R>(&mut self, write: impl FnOnce(&mut Vec<u8>) -> R) -> R {
        if self.sent >= ARENA_SLACK || (self.sent > 0 && self.sent == self.arena.len()) {
            self.arena.drain(..self.sent);
            self.sent = 0;
        }
        let before = self.arena.len();
        let result = write(&mut self.arena);
        let added = self.arena.len() - before;
        match self.segments.back_mut() {
            Some(Segment::Head(length)) => *length += added,
            _ if added > 0 => self.segments.push_back(Segment::Head(added)),
            _ => {}
        }
        result
    }

    /// `last`: the end of it is the end of something.
    pub fn data(&mut self, buffer: Buffer, at: usize, length: usize, cid: u16, last: bool) {
        self.segments.push_back(Segment::Data {
            buffer,
            at,
            left: length,
            cid,
            last,
        });
    }

    /// The next pieces to send, `most` bytes of them; returns how many of `pieces` were filled.
    pub fn gather<'a>(&'a self, pieces: &mut [IoSlice<'a>; PIECES_MAX], mut most: usize) -> usize {
        let mut head = self.sent;
        let mut count = 0;
        for (piece, segment) in pieces.iter_mut().zip(&self.segments) {
            if most == 0 {
                break;
            }
            let bytes = match segment {
                Segment::Head(length) => {
                    head += length;
                    &self.arena[head - length..head]
                }
                Segment::Data { buffer, at, left, .. } => memory::source(buffer, *at, *left),
            };
            let bytes = &bytes[..bytes.len().min(most)];
            most -= bytes.len();
            *piece = IoSlice::new(bytes);
            count += 1;
        }
        count
    }

    /// `count` bytes went out; calls `gone` with what of it were data: the CID, from where and how many, and whether a last
    /// segment is now sent whole.
    pub fn advance(&mut self, mut count: usize, mut gone: impl FnMut(u16, usize, usize, bool)) {
        while count > 0 {
            let Some(segment) = self.segments.front_mut() else {
                unreachable!("no more bytes are sent than were gathered");
            };
            match segment {
                Segment::Head(length) => {
                    let step = count.min(*length);
                    *length -= step;
                    self.sent += step;
                    count -= step;
                    if *length > 0 {
                        return;
                    }
                    self.segments.pop_front();
                }
                Segment::Data {
                    at, left, cid, last, ..
                } => {
                    let step = count.min(*left);
                    let (cid, from, whole) = (*cid, *at, step == *left);
                    let ended = whole && *last;
                    *at += step;
                    *left -= step;
                    count -= step;
                    if whole {
                        self.segments.pop_front();
                    }
                    gone(cid, from, step, ended);
                    if !whole {
                        return;
                    }
                }
            }
        }
    }

    /// Forget everything, the caller's memory included.
    pub fn clear(&mut self) {
        self.segments.clear();
        self.arena.clear();
        self.sent = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whatever the kernel takes at a time, and is offered, the same bytes go out; data are told of in order, as they go, and
    /// last segments end exactly once.
    #[test]
    fn any_split_sends_the_same() {
        for (step, most) in [(1, 8), (3, 300), (7, 300), (50, 60), (4096, 1000), (4096, 1)] {
            let mut tx = Transmit::default();
            let mut expected = Vec::new();
            let (mut got, mut ended) = (Vec::new(), Vec::new());
            let mut told: Vec<(u16, usize)> = Vec::new();
            let mut turn = |tx: &mut Transmit| {
                let mut pieces = [IoSlice::new(&[]); PIECES_MAX];
                let count = tx.gather(&mut pieces, most);
                let all: Vec<u8> = pieces[..count].concat_bytes();
                assert!(
                    all.len() <= most && (count == PIECES_MAX || all.len() == most || tx.len() == all.len())
                );
                let n = all.len().min(step);
                got.extend_from_slice(&all[..n]);
                tx.advance(n, |cid, at, count, end| {
                    told.extend((at..at + count).map(|at| (cid, at)));
                    if end {
                        assert_eq!(at + count, 110);
                        ended.push(cid);
                    }
                });
            };
            for round in 0..200u16 {
                let head = vec![round as u8; 1 + round as usize % 5];
                expected.extend_from_slice(&head);
                tx.head(|out| out.extend_from_slice(&head));
                if round % 3 == 0 {
                    let data: Vec<u8> = (0..=255).collect();
                    expected.extend_from_slice(&data[10..110]);
                    tx.data(Buffer::from_vec(data), 10, 100, round, round % 2 == 0);
                }
                turn(&mut tx);
            }
            while !tx.is_empty() {
                turn(&mut tx);
            }
            assert_eq!(got, expected);
            assert_eq!(ended, (0..200).step_by(6).collect::<Vec<u16>>());
            let data = (0..200)
                .step_by(3)
                .flat_map(|cid| (10..110).map(move |at| (cid, at)));
            assert!(told.into_iter().eq(data));
        }
    }

    impl Transmit {
        fn len(&self) -> usize {
            let of = |segment: &Segment| match segment {
                Segment::Head(length) => *length,
                Segment::Data { left, .. } => *left,
            };
            self.segments.iter().map(of).sum()
        }
    }

    trait ConcatBytes {
        fn concat_bytes(&self) -> Vec<u8>;
    }
    impl ConcatBytes for [IoSlice<'_>] {
        fn concat_bytes(&self) -> Vec<u8> {
            self.iter().flat_map(|piece| piece.iter().copied()).collect()
        }
    }
}

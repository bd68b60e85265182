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

    pub fn data(&mut self, buffer: Buffer, at: usize, length: usize, cid: u16) {
        self.segments.push_back(Segment::Data {
            buffer,
            at,
            left: length,
            cid,
        });
    }

    /// The next pieces to send; returns how many of `pieces` were filled.
    pub fn gather<'a>(&'a self, pieces: &mut [IoSlice<'a>; PIECES_MAX]) -> usize {
        let mut head = self.sent;
        let mut count = 0;
        for (piece, segment) in pieces.iter_mut().zip(&self.segments) {
            *piece = IoSlice::new(match segment {
                Segment::Head(length) => {
                    head += length;
                    &self.arena[head - length..head]
                }
                Segment::Data { buffer, at, left, .. } => memory::source(buffer, *at, *left),
            });
            count += 1;
        }
        count
    }

    /// `count` bytes went out; calls `ended` with the CID of every data segment that is now sent whole.
    pub fn advance(&mut self, mut count: usize, mut ended: impl FnMut(u16)) {
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
                Segment::Data { at, left, cid, .. } => {
                    let step = count.min(*left);
                    *at += step;
                    *left -= step;
                    count -= step;
                    if *left > 0 {
                        return;
                    }
                    let cid = *cid;
                    self.segments.pop_front();
                    ended(cid);
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

    /// Whatever the kernel takes at a time, the same bytes go out, and data segments end exactly once.
    #[test]
    fn any_split_sends_the_same() {
        for step in [1, 3, 7, 50, 4096] {
            let mut tx = Transmit::default();
            let mut expected = Vec::new();
            let (mut got, mut ended) = (Vec::new(), Vec::new());
            for round in 0..200u16 {
                let head = vec![round as u8; 1 + round as usize % 5];
                expected.extend_from_slice(&head);
                tx.head(|out| out.extend_from_slice(&head));
                if round % 3 == 0 {
                    let data: Vec<u8> = (0..=255).collect();
                    expected.extend_from_slice(&data[10..110]);
                    tx.data(Buffer::from_vec(data), 10, 100, round);
                }
                let mut pieces = [IoSlice::new(&[]); PIECES_MAX];
                let count = tx.gather(&mut pieces);
                let all: Vec<u8> = pieces[..count].concat_bytes();
                let n = all.len().min(step);
                got.extend_from_slice(&all[..n]);
                tx.advance(n, |cid| ended.push(cid));
            }
            while !tx.is_empty() {
                let mut pieces = [IoSlice::new(&[]); PIECES_MAX];
                let count = tx.gather(&mut pieces);
                let all: Vec<u8> = pieces[..count].concat_bytes();
                let n = all.len().min(step);
                got.extend_from_slice(&all[..n]);
                tx.advance(n, |cid| ended.push(cid));
            }
            assert_eq!(got, expected);
            assert_eq!(ended, (0..200).step_by(3).collect::<Vec<u16>>());
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

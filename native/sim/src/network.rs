//! One TCP connection as a bad network shows it: bytes stay in order, and everything else can happen.

use crate::random::Random;
use std::collections::VecDeque;

/// One direction: what was sent, and when it comes out. Times are milliseconds of virtual time.
#[derive(Default)]
pub struct Pipe {
    sent: VecDeque<(u64, Vec<u8>)>,
    /// Nothing before this.
    stalled_until: u64,
    /// Bytes go in and never come out, and nobody is told.
    black_hole: bool,
}

impl Pipe {
    /// Sent `now`; comes out within `delay` milliseconds, or after what was sent before it.
    pub fn send(&mut self, bytes: Vec<u8>, now: u64, delay: usize, random: &mut Random) {
        if bytes.is_empty() || self.black_hole {
            return;
        }
        let soonest = self.sent.back().map_or(now, |last| last.0);
        let at = soonest.max(now + random.below(delay + 1) as u64);
        self.sent.push_back((at, bytes));
    }

    /// What comes out now: never more than was sent, in pieces of any length.
    pub fn receive(&mut self, now: u64, random: &mut Random) -> Vec<u8> {
        if now < self.stalled_until {
            return Vec::new();
        }
        let Some((at, bytes)) = self.sent.front_mut() else {
            return Vec::new();
        };
        if *at > now {
            return Vec::new();
        }
        if bytes.len() > 1 && random.one_in(3) {
            let cut = random.range(1..=bytes.len() - 1);
            let rest = bytes.split_off(cut);
            return std::mem::replace(bytes, rest);
        }
        self.sent.pop_front().map(|(_, bytes)| bytes).unwrap_or_default()
    }

    pub fn is_empty(&self) -> bool {
        self.sent.is_empty()
    }

    /// All is said: the end of the connection comes through too, unless the network keeps it.
    pub fn is_over(&self, now: u64) -> bool {
        self.sent.is_empty() && now >= self.stalled_until && !self.black_hole
    }

    pub fn stall(&mut self, until: u64) {
        self.stalled_until = self.stalled_until.max(until);
    }

    pub fn swallow(&mut self) {
        self.black_hole = true;
        self.sent.clear();
    }

    /// The connection is cut: only some of what is under way still comes out, the last of it perhaps in part.
    pub fn cut(&mut self, random: &mut Random) {
        let kept = random.below(self.sent.len() + 1);
        self.sent.truncate(kept);
        if let Some((_, bytes)) = self.sent.back_mut() {
            bytes.truncate(random.range(1..=bytes.len()));
        }
    }
}

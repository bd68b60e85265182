//! Whose turn it is: devices that were refused wait in a row, and each turn is worth the same number of bytes.
//!
//! Deficit round robin (Shreedhar and Varghese, 1995): a device that reads 4 KiB at a time gets as many bytes as one that
//! reads 1 MiB at a time, and none waits for more than one turn of each other.

use std::collections::VecDeque;

/// A turn: the largest read that there is, so that each makes progress.
const QUANTUM_BYTES: u64 = 1 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Waiting {
    pub flow: usize,
    /// Bytes of the read that was refused.
    pub wants: u64,
    /// Left of its turn.
    credit: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Turns {
    row: VecDeque<Waiting>,
    /// Who sends now, as the first of the row.
    current: Option<Waiting>,
}

impl Turns {
    pub fn is_empty(&self) -> bool {
        self.row.is_empty()
    }

    /// Whether `flow` may send a read now, as far as the others in the row are concerned.
    pub fn may(&mut self, flow: usize, bytes: u64) -> bool {
        match &mut self.current {
            Some(current) if current.flow == flow => {
                let enough = current.credit >= bytes || self.row.is_empty();
                if enough {
                    current.credit = current.credit.saturating_sub(bytes);
                }
                enough
            }
            _ => self.row.is_empty(),
        }
    }

    /// `flow` has a read of so many bytes that may not go now.
    pub fn wait(&mut self, flow: usize, wants: u64) {
        if self.row.iter().any(|waiting| waiting.flow == flow) {
            return;
        }
        let current = self.current.take_if(|current| current.flow == flow);
        // What is left of a turn counts in the next.
        let credit = current.map_or(0, |current| current.credit);
        let waiting = Waiting { flow, wants, credit };
        if credit >= wants {
            // Its turn is not over: only the room is.
            self.row.push_front(waiting);
        } else {
            self.row.push_back(waiting);
        }
    }

    /// The first of the row gets its turn, if what it wants fits.
    pub fn next(&mut self, fits: impl FnOnce(u64) -> bool) -> Option<usize> {
        self.current = None;
        if !fits(self.row.front()?.wants) {
            return None;
        }
        let mut first = self.row.pop_front()?;
        if first.credit < first.wants {
            first.credit += QUANTUM_BYTES.max(first.wants);
        }
        self.current = Some(first);
        Some(first.flow)
    }

    /// Not there any more.
    pub fn forget(&mut self, flow: usize) {
        self.row.retain(|waiting| waiting.flow != flow);
        self.current.take_if(|current| current.flow == flow);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What each flow got after `rounds` reads of the link, each wanting more all the time.
    fn share(sizes: &[u64], rounds: usize) -> Vec<u64> {
        let mut turns = Turns::default();
        let mut got = vec![0; sizes.len()];
        for (flow, size) in sizes.iter().enumerate() {
            turns.wait(flow, *size);
        }
        let mut room = 0u64;
        for _ in 0..rounds {
            room += 1 << 20;
            while let Some(flow) = turns.next(|wants| wants <= room) {
                loop {
                    if sizes[flow] <= room && turns.may(flow, sizes[flow]) {
                        room -= sizes[flow];
                        got[flow] += sizes[flow];
                    } else {
                        turns.wait(flow, sizes[flow]);
                        break;
                    }
                }
            }
        }
        got
    }

    #[test]
    fn bytes_are_shared_alike_whatever_the_size_of_reads() {
        let got = share(&[4096, 1 << 20, 128 << 10, 600 << 10], 4000);
        let (least, most) = (got.iter().min().unwrap(), got.iter().max().unwrap());
        assert!(most - least <= 2 << 20, "{got:?}");
        assert!(*least > 900 << 20, "{got:?}");
    }

    #[test]
    fn who_comes_later_waits_behind_the_row() {
        let mut turns = Turns::default();
        assert!(turns.may(7, 4096), "nobody waits");
        turns.wait(1, 100);
        turns.wait(2, 100);
        turns.wait(1, 100);
        assert!(!turns.may(7, 4096));
        assert_eq!(turns.next(|_| false), None);
        assert_eq!(turns.next(|_| true), Some(1));
        assert!(turns.may(1, 100));
        assert!(!turns.may(2, 100), "not its turn");
        assert_eq!(turns.next(|_| true), Some(2));
        assert_eq!(turns.next(|_| true), None);
        assert!(turns.may(1, 100));
    }

    #[test]
    fn a_turn_without_room_is_kept() {
        let mut turns = Turns::default();
        turns.wait(1, 4096);
        turns.wait(2, 4096);
        assert_eq!(turns.next(|_| true), Some(1));
        assert!(turns.may(1, 4096));
        turns.wait(1, 4096);
        assert_eq!(turns.next(|_| true), Some(1), "its credit was not spent");
    }

    #[test]
    fn who_is_gone_is_not_waited_for() {
        let mut turns = Turns::default();
        turns.wait(1, 1);
        turns.wait(2, 1);
        turns.forget(1);
        assert_eq!(turns.next(|_| true), Some(2));
        turns.forget(2);
        assert!(turns.may(3, 1) && turns.is_empty());
    }
}

//! How much of a read's round trip is waiting, and how much of the waiting is ours.
//!
//! The shortest round trip of a device, by size of the read, is what the way and the medium take; what a read takes beyond it,
//! it waited. A target that is slow makes its own device wait. A link that is full makes *all* devices wait, since all their
//! answers come through it: so the delay that most devices share is taken for the link's, and one slow target among
//! fast ones, or one that was first seen while the link was full, does not decide for the others.

use std::time::Duration;

/// Sizes of reads that are told apart: powers of two from 4 KiB to 2 MiB.
const CLASSES: usize = 10;
const SMALLEST_LOG2: u32 = 12;

fn class(bytes: u64) -> usize {
    let log2 = bytes.max(1).ilog2();
    (log2.max(SMALLEST_LOG2) - SMALLEST_LOG2).min(CLASSES as u32 - 1) as usize
}

/// The shortest round trips of one device, of this generation and the one before.
#[derive(Clone, Debug)]
pub(crate) struct Base {
    current: [Duration; CLASSES],
    previous: [Duration; CLASSES],
}

impl Base {
    pub fn new() -> Self {
        Base {
            current: [Duration::MAX; CLASSES],
            previous: [Duration::MAX; CLASSES],
        }
    }

    /// What a read waited, given everything seen before.
    pub fn waited(&mut self, bytes: u64, round_trip: Duration) -> Duration {
        let class = class(bytes);
        self.current[class] = self.current[class].min(round_trip);
        round_trip - self.current[class].min(self.previous[class])
    }

    /// Begin a generation: routes and media change, so what was seen two generations ago no longer counts.
    pub fn rotate(&mut self) {
        self.previous = self.current;
        self.current = [Duration::MAX; CLASSES];
    }
}

/// The delay that most devices share: the lower quartile of what each saw at least. `None` for none.
pub(crate) fn shared(delays: &mut [Duration]) -> Option<Duration> {
    if delays.is_empty() {
        return None;
    }
    delays.sort_unstable();
    Some(delays[(delays.len() - 1) / 4])
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn waiting_is_what_goes_beyond_the_shortest_of_this_size() {
        let mut base = Base::new();
        assert_eq!(base.waited(1 << 20, 5 * MS), Duration::ZERO);
        assert_eq!(base.waited(1 << 20, 7 * MS), 2 * MS);
        assert_eq!(base.waited(1 << 20, 4 * MS), Duration::ZERO);
        assert_eq!(base.waited(1 << 20, 7 * MS), 3 * MS);
        // Small reads are quicker, and say nothing about large ones.
        assert_eq!(base.waited(4096, MS), Duration::ZERO);
        assert_eq!(base.waited(1 << 20, 7 * MS), 3 * MS);
    }

    #[test]
    fn a_base_lasts_for_two_generations() {
        let mut base = Base::new();
        base.waited(4096, MS);
        base.rotate();
        assert_eq!(base.waited(4096, 3 * MS), 2 * MS);
        base.rotate();
        assert_eq!(base.waited(4096, 4 * MS), MS);
    }

    #[test]
    fn every_size_has_a_class() {
        assert_eq!(class(0), 0);
        assert_eq!(class(4096), 0);
        assert_eq!(class(8192), 1);
        assert_eq!(class(1 << 20), 8);
        assert_eq!(class(u64::MAX), CLASSES - 1);
    }

    #[test]
    fn one_device_of_many_does_not_decide() {
        assert_eq!(shared(&mut []), None);
        assert_eq!(shared(&mut [5 * MS]), Some(5 * MS));
        // One of two is slow: the link is not.
        assert_eq!(shared(&mut [50 * MS, Duration::ZERO]), Some(Duration::ZERO));
        // All wait, but for one that was never seen without waiting.
        let mut delays = vec![5 * MS; 16];
        delays[3] = Duration::ZERO;
        assert_eq!(shared(&mut delays), Some(5 * MS));
    }
}

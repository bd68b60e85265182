//! Ranges of unknown fate: a write whose association was lost may still land, long after its resend was answered.
//!
//! The first copy may wait in the network, or in the controller that it was sent to, when its connection is given up. The
//! resend carries the same bytes, so no harm comes of it until somebody writes *other* bytes to the same place: then the
//! late copy would put the old ones back. This host cannot know when that danger has passed; whoever can (by waiting, by a
//! reservation that fences the old association, by the target's word) settles the range, and until then writes elsewhere.
//!
//! The list is bounded and never forgets: neighbours are merged where it would grow too long, so that it says too much
//! rather than too little.

use std::time::Instant;

/// Ranges kept apart.
const RANGES_MAX: usize = 1024;

/// A range that a write which was given up may still reach.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unsettled {
    pub offset: u64,
    pub length: u64,
    /// The portal of the lost association; several, where ranges were merged.
    pub path: String,
    /// Number of the loss, the device's losses in order; of the latest one where ranges were merged.
    pub generation: u64,
    /// When the association was given up.
    pub since: Instant,
}

#[derive(Default)]
pub(crate) struct Ghosts {
    /// By offset; no two overlap.
    ranges: Vec<Unsettled>,
    /// As [`RANGES_MAX`], smaller in tests.
    #[cfg(test)]
    max: Option<usize>,
}

impl Ghosts {
    fn max(&self) -> usize {
        #[cfg(test)]
        if let Some(max) = self.max {
            return max;
        }
        RANGES_MAX
    }

    pub fn add(&mut self, new: Unsettled) {
        let end = new.offset + new.length;
        // What it touches: all of these become one.
        let first = self.ranges.partition_point(|r| r.offset + r.length < new.offset);
        let last = self.ranges.partition_point(|r| r.offset <= end);
        let merged = self
            .ranges
            .splice(first..last, [])
            .fold(new, |whole, range| merge(range, whole));
        self.ranges.insert(first, merged);
        if self.ranges.len() > self.max() {
            self.merge_nearest();
        }
    }

    /// The two with the smallest gap become one that covers it, too.
    fn merge_nearest(&mut self) {
        let gap = |pair: &[Unsettled]| pair[1].offset - (pair[0].offset + pair[0].length);
        let nearest = self
            .ranges
            .windows(2)
            .enumerate()
            .min_by_key(|(_, pair)| gap(pair));
        if let Some((at, _)) = nearest {
            let second = self.ranges.remove(at + 1);
            let first = &mut self.ranges[at];
            *first = merge(first.clone(), second);
        }
    }

    pub fn list(&self) -> Vec<Unsettled> {
        self.ranges.clone()
    }

    /// Forget what was lost up to this generation; says how many ranges are left.
    pub fn settle(&mut self, generation: u64) -> usize {
        self.ranges.retain(|range| range.generation > generation);
        self.ranges.len()
    }

    pub fn len(&self) -> usize {
        self.ranges.len()
    }
}

/// One range that covers both and everything between, as late as the later of them.
fn merge(a: Unsettled, b: Unsettled) -> Unsettled {
    let offset = a.offset.min(b.offset);
    let end = (a.offset + a.length).max(b.offset + b.length);
    let path = if a.path == b.path {
        a.path
    } else {
        "several".into()
    };
    Unsettled {
        offset,
        length: end - offset,
        path,
        generation: a.generation.max(b.generation),
        since: a.since.max(b.since),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(offset: u64, length: u64, generation: u64) -> Unsettled {
        Unsettled {
            offset,
            length,
            path: "a:1".into(),
            generation,
            since: Instant::now(),
        }
    }

    fn short(ghosts: &Ghosts) -> Vec<(u64, u64, u64)> {
        let list = ghosts.list();
        list.iter().map(|r| (r.offset, r.length, r.generation)).collect()
    }

    #[test]
    fn what_touches_becomes_one_and_settles_with_its_latest() {
        let mut ghosts = Ghosts::default();
        ghosts.add(range(100, 10, 1));
        ghosts.add(range(300, 10, 2));
        ghosts.add(range(110, 10, 3));
        assert_eq!(short(&ghosts), [(100, 20, 3), (300, 10, 2)]);
        ghosts.add(range(90, 500, 1));
        assert_eq!(short(&ghosts), [(90, 500, 3)]);
        ghosts.add(range(0, 10, 4));
        assert_eq!(ghosts.settle(2), 2);
        assert_eq!(ghosts.settle(3), 1);
        assert_eq!(short(&ghosts), [(0, 10, 4)]);
    }

    #[test]
    fn too_many_are_merged_and_none_is_forgotten() {
        let mut ghosts = Ghosts {
            max: Some(4),
            ..Default::default()
        };
        let offsets = [0u64, 1000, 1100, 5000, 9000, 9050, 20000];
        for (at, offset) in offsets.into_iter().enumerate() {
            ghosts.add(range(offset, 10, at as u64));
            assert!(ghosts.len() <= 4);
        }
        for offset in offsets {
            let list = ghosts.list();
            assert!(
                list.iter()
                    .any(|r| r.offset <= offset && offset + 10 <= r.offset + r.length),
                "{offset} is missing in {list:?}"
            );
        }
        assert_eq!(ghosts.list()[0].offset, 0);
    }
}

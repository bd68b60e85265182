//! Latencies of one path, in buckets that grow with what they hold: 16 for each power of two, so a value is known to 6 %.
//!
//! ```text
//!  nanoseconds   0 1 2 ... 15 | 16 17 ... 31 | 32 34 ... 62 | 64 68 ...      one bucket each
//!  bucket        0 1 2 ... 15 | 16 17 ... 31 | 32 33 ... 47 | 48 49 ...
//! ```
//!
//! One thread counts, any may look; nothing is allocated after the start.

use crate::shared::count;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const SUB_BITS: u32 = 4;
const SUB: usize = 1 << SUB_BITS;
/// Up to 2^40 ns (18 minutes); what takes longer is in the last bucket.
const BUCKETS: usize = (40 - SUB_BITS as usize + 1) * SUB;

pub(crate) struct Histogram {
    buckets: Box<[AtomicU64]>,
    max_ns: AtomicU64,
}

/// What a histogram says, in seconds; all 0 where nothing was counted.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Latency {
    pub count: u64,
    pub p50_s: f64,
    pub p99_s: f64,
    pub max_s: f64,
}

fn bucket_of(ns: u64) -> usize {
    if ns < SUB as u64 {
        return ns as usize;
    }
    let shift = ns.ilog2() - SUB_BITS;
    let index = (shift as usize + 1) * SUB + ((ns >> shift) as usize & (SUB - 1));
    index.min(BUCKETS - 1)
}

/// The largest value of a bucket.
fn top_of(bucket: usize) -> u64 {
    if bucket < SUB {
        return bucket as u64;
    }
    let shift = bucket / SUB - 1;
    (((SUB + bucket % SUB + 1) as u64) << shift) - 1
}

impl Histogram {
    pub fn new() -> Self {
        Histogram {
            buckets: (0..BUCKETS).map(|_| AtomicU64::new(0)).collect(),
            max_ns: AtomicU64::new(0),
        }
    }

    pub fn count(&self, latency: Duration) {
        let ns = latency.as_nanos().min(u64::MAX.into()) as u64;
        count(&self.buckets[bucket_of(ns)], 1);
        if ns > self.max_ns.load(Ordering::Relaxed) {
            self.max_ns.store(ns, Ordering::Relaxed);
        }
    }

    /// What was counted: the largest value of each bucket that has any, in nanoseconds, and how many it has.
    pub fn buckets(&self) -> Vec<(u64, u64)> {
        let counts = self.buckets.iter().map(|bucket| bucket.load(Ordering::Relaxed));
        let filled = counts.enumerate().filter(|(_, count)| *count > 0);
        filled.map(|(bucket, count)| (top_of(bucket), count)).collect()
    }

    pub fn latency(&self) -> Latency {
        let counts: Vec<u64> = self.buckets.iter().map(|b| b.load(Ordering::Relaxed)).collect();
        let count: u64 = counts.iter().sum();
        let max = self.max_ns.load(Ordering::Relaxed);
        let at = |share: f64| {
            let wanted = (count as f64 * share).ceil().max(1.0) as u64;
            let mut seen = 0;
            let bucket = counts.iter().position(|count| {
                seen += count;
                seen >= wanted
            });
            bucket.map_or(0, |bucket| top_of(bucket).min(max)) as f64 / 1e9
        };
        Latency {
            count,
            p50_s: at(0.5),
            p99_s: at(0.99),
            max_s: max as f64 / 1e9,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_is_in_a_bucket_that_ends_at_most_a_sixteenth_above_it() {
        let mut last = 0;
        for power in 0..40 {
            for step in 0..64u64 {
                let ns = (1u64 << power) + (step << power >> 6);
                let bucket = bucket_of(ns);
                let top = top_of(bucket);
                assert!(
                    bucket >= last && top >= ns && top - ns <= ns / 16,
                    "{ns}: {bucket}, {top}"
                );
                last = bucket;
            }
        }
        assert_eq!(bucket_of(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn percentiles_are_of_what_was_counted() {
        let histogram = Histogram::new();
        assert_eq!(histogram.latency(), Latency::default());
        for us in 1..=1000 {
            histogram.count(Duration::from_micros(us));
        }
        let latency = histogram.latency();
        assert_eq!((latency.count, latency.max_s), (1000, 1e-3));
        assert!((480e-6..560e-6).contains(&latency.p50_s), "{latency:?}");
        let buckets = histogram.buckets();
        assert!(buckets.is_sorted() && buckets.last().is_some_and(|(top, _)| *top >= 1_000_000));
        assert_eq!(buckets.iter().map(|(_, count)| count).sum::<u64>(), 1000);
        assert!((980e-6..=1e-3).contains(&latency.p99_s), "{latency:?}");
    }
}

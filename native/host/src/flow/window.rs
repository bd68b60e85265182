//! How many bytes of reads may be under way: more while nothing waits, fewer as soon as all wait too long.
//!
//! The rule is that of delay-based congestion control (Vegas, LEDBAT, Swift): below the target the window grows, above it
//! shrinks in proportion to the excess, at most by half, once an epoch. A floor keeps the link busy and everybody alive.
//!
//! A standing queue hides the true base: after a while the shortest round trip seen *is* the queue's. So every generation
//! begins with one epoch at the floor, in which the queue drains and the base is seen anew.

use std::time::{Duration, Instant};

/// What all devices may wait for the link. Far below what makes a switch drop at common speeds, far above the noise of a
/// medium: at 100 Gb/s it is 12 MB, at 1 Gb/s the floor decides.
pub(crate) const TARGET: Duration = Duration::from_millis(1);
/// Reads of the largest kind: some on the link while the next are asked for, of targets that do not answer at once.
const FLOOR_READS: u64 = 4;
const FLOOR_BYTES: u64 = 1 << 20;
pub(crate) const CEILING_BYTES: u64 = 4 << 30;
/// Of the excess, how much is taken back at once (Swift's beta).
const DECREASE: f64 = 0.8;
/// How long a base counts, twice.
const GENERATION: Duration = Duration::from_secs(10);
/// The first is shorter: who comes while others are at it saw little but a queue.
const FIRST_GENERATION: Duration = Duration::from_secs(1);

#[derive(Clone, Debug)]
pub(crate) struct Window {
    bytes: u64,
    /// The largest read so far.
    largest: u64,
    /// The target was not passed yet: grow fast.
    searching: bool,
    probing: bool,
    generation_ends: Option<Instant>,
}

impl Window {
    pub fn new() -> Self {
        Window {
            bytes: FLOOR_BYTES,
            largest: 4096,
            searching: true,
            probing: false,
            generation_ends: None,
        }
    }

    /// Begin at the floor: what the first reads see is the way, not a queue of our own making.
    pub fn restart(&mut self, now: Instant) {
        self.bytes = self.floor();
        self.searching = true;
        self.generation_ends = Some(now + FIRST_GENERATION);
    }

    pub fn floor(&self) -> u64 {
        (self.largest * FLOOR_READS).max(FLOOR_BYTES)
    }

    pub fn largest(&self) -> u64 {
        self.largest
    }

    /// Bytes that may be under way now.
    pub fn limit(&self) -> u64 {
        if self.probing {
            self.floor()
        } else {
            self.bytes.max(self.floor())
        }
    }

    /// A read of this size is about to be sent.
    pub fn saw(&mut self, bytes: u64) {
        self.largest = self.largest.max(bytes);
    }

    /// An epoch ended in which all devices waited `delay` (`None`: nothing was answered); `limited`: reads were held
    /// back. `true`: a generation begins.
    pub fn adapt(&mut self, delay: Option<Duration>, limited: bool, now: Instant) -> bool {
        let probed = std::mem::take(&mut self.probing);
        let Some(delay) = delay else {
            return false;
        };
        if delay > TARGET {
            let excess = (delay - TARGET).as_secs_f64() / delay.as_secs_f64();
            self.bytes = (self.bytes as f64 * (1.0 - DECREASE * excess).max(0.5)) as u64;
            self.searching = false;
        } else if limited && !probed {
            self.bytes += match delay <= TARGET / 2 {
                true if self.searching => self.bytes / 2,
                true => (self.bytes / 8).max(self.largest / 2),
                false => self.largest / 2,
            };
        }
        self.bytes = self.bytes.clamp(self.floor(), CEILING_BYTES);
        let ends = *self.generation_ends.get_or_insert(now + FIRST_GENERATION);
        if now < ends {
            return false;
        }
        self.generation_ends = Some(now + GENERATION);
        self.probing = limited;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EPOCH: Duration = Duration::from_millis(10);
    const MIB: u64 = 1 << 20;

    /// A link of `rate` bytes a second and 100 us; as many reads of 1 MiB are asked for as the window lets through.
    fn on_a_link(rate: f64, epochs: usize) -> Vec<(u64, Duration)> {
        let mut window = Window::new();
        window.saw(MIB);
        let mut now = Instant::now();
        let base = Duration::from_secs_f64(MIB as f64 / rate) + Duration::from_micros(100);
        let mut seen = Vec::new();
        for _ in 0..epochs {
            let round_trip = Duration::from_secs_f64(window.limit() as f64 / rate).max(base);
            seen.push((window.limit(), round_trip - base));
            window.adapt(Some(round_trip - base), true, now);
            now += EPOCH;
        }
        seen
    }

    #[test]
    fn a_fast_link_is_filled_with_a_short_queue() {
        for rate in [1e9, 3e9, 12.5e9, 50e9] {
            let seen = on_a_link(rate, 400);
            let idle = |limit: u64| (limit as f64) < 0.8 * rate * 100e-6;
            for (limit, delay) in &seen[50..] {
                assert!(
                    *delay < TARGET * 2 || *limit == FLOOR_READS * MIB,
                    "{rate}: {delay:?} of {limit}"
                );
            }
            // Only to see the base.
            let idle = seen[50..].iter().filter(|(limit, _)| idle(*limit)).count();
            assert!(idle <= 1, "{rate}: idle in {idle} epochs");
            let delays = seen[200..].iter().map(|(_, delay)| delay.as_secs_f64());
            let usual = delays.sum::<f64>() / 200.0;
            let floor = FLOOR_READS as f64 * MIB as f64 / rate;
            assert!(usual < 1.5e-3f64.max(floor), "{rate}: {usual}");
        }
    }

    #[test]
    fn a_slow_link_gets_the_floor() {
        let seen = on_a_link(50e6, 50);
        assert_eq!(seen.last().unwrap().0, FLOOR_READS * MIB);
    }

    #[test]
    fn nothing_is_taken_for_a_short_delay_and_nothing_given_that_is_not_used() {
        let (mut window, now) = (Window::new(), Instant::now());
        let begun = window.limit();
        window.adapt(Some(Duration::ZERO), false, now);
        assert_eq!(window.limit(), begun);
        window.adapt(Some(TARGET), false, now);
        assert_eq!(window.limit(), begun);
        window.adapt(None, true, now);
        assert_eq!(window.limit(), begun);
        window.adapt(Some(Duration::ZERO), true, now);
        assert_eq!(window.limit(), begun * 3 / 2);
        window.restart(now);
        assert_eq!(window.limit(), begun);
    }

    #[test]
    fn it_stays_within_its_bounds_whatever_it_sees() {
        let (mut window, mut now) = (Window::new(), Instant::now());
        let mut random = 0x9E37_79B9_7F4A_7C15u64;
        for _ in 0..100_000 {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            window.saw(random % (2 << 20));
            let before = window.limit();
            let delay =
                Duration::from_nanos((random >> 8) % 20_000_000_000u64.min(1 << ((random >> 3) % 40 + 1)));
            window.adapt((random & 7 != 0).then_some(delay), random & 8 != 0, now);
            now += Duration::from_millis(random % 50);
            let limit = window.limit();
            assert!((window.floor()..=CEILING_BYTES).contains(&limit));
            assert!(
                limit == window.floor() || limit >= before / 2 || before > limit && limit == window.floor()
            );
        }
    }

    #[test]
    fn each_generation_begins_with_an_epoch_at_the_floor() {
        let (mut window, begun) = (Window::new(), Instant::now());
        let mut probes = 0;
        for epoch in 0..3000u32 {
            let new = window.adapt(Some(TARGET), true, begun + EPOCH * epoch);
            assert_eq!(new, window.limit() == window.floor());
            probes += u32::from(new);
        }
        // After 1, 11 and 21 s of 30.
        assert_eq!(probes, 3);
    }
}

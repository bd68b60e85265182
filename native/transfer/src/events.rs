//! What a device did lately: a ring of fixed size that is always on, and can be read at any time.
//!
//! One thread writes, or one at a time does: that is the [`Recorder`], of which a ring has one. Anybody reads, and nobody waits:
//! the writer never looks whether somebody reads. It writes event `n` over event `n - capacity`, so:
//!
//! ```text
//!   writer                                  reader
//!   head = n          (event n - 1 is there)    a = head                   acquire: events before a are there
//!   fence(release)                              copy events a - capacity .. a
//!   words of event n, over n - capacity         fence(acquire)
//!   head = n + 1      release                   b = head
//! ```
//!
//! Where a copied word is one of event `n`, written over event `n - capacity`, the two fences order the writer's `head = n`
//! before the reader's second look: `b >= n`. So an event that the reader took for `m` is whole where `m > b - capacity`, and
//! the others are left out. Words are atomics, so a copy that raced is a wrong number that nobody looks at, and no more.
//!
//! Memory: 32 bytes an event, taken in segments when they are first reached; a device that does little has little.

use std::sync::atomic::{fence, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// Of a ring: 2 MiB.
pub const EVENTS_DEFAULT: usize = 1 << 16;
/// 512 MiB.
pub const EVENTS_MAX: usize = 1 << 24;
const WORDS: usize = 4;
/// Events of a segment: 32 KiB.
const SEGMENT: usize = 1 << 10;
/// Bytes of an event as it is handed out.
pub const EVENT_BYTES: usize = 34;
/// Of what waits to be sent.
pub const NO_PATH: u16 = u16::MAX;

/// What this side makes of a command that no controller answered; what one answers is below, type and code.
pub mod status {
    pub const LOST: u16 = 0x8001;
    pub const OVERDUE: u16 = 0x8002;
    pub const DIGEST: u16 = 0x8003;
    pub const SHORT: u16 = 0x8004;
    pub const FAILED: u16 = 0x8005;
    pub const TAKEN_BACK: u16 = 0x8006;
}

/// As `headrace.device.events.EventKind` says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum EventKind {
    Read = 1,
    Write = 2,
    Flush = 3,
    Other = 4,
    Recalled = 5,
    WaitingRead = 6,
    WaitingWrite = 7,
    Connected = 8,
    NotConnected = 9,
    PathLost = 10,
    PathSlow = 11,
    PathWell = 12,
}

impl EventKind {
    const ALL: [EventKind; 12] = [
        EventKind::Read,
        EventKind::Write,
        EventKind::Flush,
        EventKind::Other,
        EventKind::Recalled,
        EventKind::WaitingRead,
        EventKind::WaitingWrite,
        EventKind::Connected,
        EventKind::NotConnected,
        EventKind::PathLost,
        EventKind::PathSlow,
        EventKind::PathWell,
    ];

    /// Of what waits to be sent: a read, or anything else.
    pub fn waiting(reads: bool) -> EventKind {
        if reads {
            EventKind::WaitingRead
        } else {
            EventKind::WaitingWrite
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// Of CLOCK_MONOTONIC.
    pub started_ns: u64,
    /// 0: it is under way.
    pub ended_ns: u64,
    pub offset: u64,
    /// More than fits is `u32::MAX`.
    pub bytes: u32,
    pub status: u16,
    pub kind: EventKind,
    /// Below 16 in a ring.
    pub path: u16,
    pub retries: u8,
}

impl Event {
    /// Nothing but when, and what.
    pub fn new(kind: EventKind, started: Instant, ended: Option<Instant>) -> Event {
        Event {
            started_ns: monotonic_ns(started),
            ended_ns: ended.map_or(0, monotonic_ns),
            offset: 0,
            bytes: 0,
            status: 0,
            kind,
            path: 0,
            retries: 0,
        }
    }

    fn pack(&self) -> [u64; WORDS] {
        let rest = u64::from(self.bytes)
            | u64::from(self.status) << 32
            | u64::from(self.retries) << 48
            | u64::from(self.kind as u8 & 15) << 56
            | u64::from(self.path & 15) << 60;
        [self.started_ns, self.ended_ns, self.offset, rest]
    }

    /// `None`: torn, or never written.
    fn unpack(words: [u64; WORDS]) -> Option<Event> {
        let [started_ns, ended_ns, offset, rest] = words;
        let kind = (rest >> 56) as u8 & 15;
        Some(Event {
            started_ns,
            ended_ns,
            offset,
            bytes: rest as u32,
            status: (rest >> 32) as u16,
            kind: EventKind::ALL.into_iter().find(|each| *each as u8 == kind)?,
            path: (rest >> 60) as u16,
            retries: (rest >> 48) as u8,
        })
    }

    /// As the dtype `headrace.device.events.EVENT` has it.
    pub fn encode(&self) -> [u8; EVENT_BYTES] {
        let mut bytes = [0; EVENT_BYTES];
        bytes[..8].copy_from_slice(&self.started_ns.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.ended_ns.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.offset.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.bytes.to_le_bytes());
        bytes[28..30].copy_from_slice(&self.path.to_le_bytes());
        bytes[30..32].copy_from_slice(&self.status.to_le_bytes());
        (bytes[32], bytes[33]) = (self.kind as u8, self.retries);
        bytes
    }
}

/// What a device says of itself.
#[derive(Clone, Debug, Default)]
pub struct Recorded {
    /// In the order in which they ended; then those under way, the oldest first.
    pub events: Vec<Event>,
    /// Since the device was opened, and of these how many are in `events` no more.
    pub recorded: u64,
    pub lost: u64,
    /// Why it is not known what is under way; empty where it is.
    pub trouble: String,
}

type Slot = [AtomicU64; WORDS];

pub struct Ring {
    segments: Box<[OnceLock<Box<[Slot]>>]>,
    /// Events recorded.
    head: AtomicU64,
}

/// Who writes into a [`Ring`]; there is one of each.
pub struct Recorder {
    ring: Arc<Ring>,
    next: u64,
}

impl Ring {
    /// A power of two.
    pub fn capacity(&self) -> u64 {
        (self.segments.len() * SEGMENT) as u64
    }

    /// What was recorded before event `until`, the oldest first.
    pub fn read(&self, until: u64) -> Recorded {
        let recorded = self.head.load(Ordering::Acquire).min(until);
        let from = recorded.saturating_sub(self.capacity());
        let mut events = Vec::with_capacity((recorded - from) as usize);
        for number in from..recorded {
            let at = (number & (self.capacity() - 1)) as usize;
            let Some(segment) = self.segments[at / SEGMENT].get() else {
                break;
            };
            let slot = &segment[at % SEGMENT];
            events.push(std::array::from_fn(|word| slot[word].load(Ordering::Relaxed)));
        }
        fence(Ordering::Acquire);
        let now = self.head.load(Ordering::Relaxed);
        let sound = (now + 1).saturating_sub(self.capacity()).max(from);
        let overtaken = ((sound - from) as usize).min(events.len());
        let events: Vec<_> = events.drain(overtaken..).filter_map(Event::unpack).collect();
        Recorded {
            lost: recorded - events.len() as u64,
            events,
            recorded,
            trouble: String::new(),
        }
    }
}

impl Recorder {
    /// With a ring of `events`, rounded up to a power of two of segments; `None` where that is zero.
    pub fn new(events: usize) -> Option<Recorder> {
        if events == 0 {
            return None;
        }
        let segments = events.min(EVENTS_MAX).div_ceil(SEGMENT).next_power_of_two();
        // So that no time is before it.
        let _ = base();
        let ring = Ring {
            segments: (0..segments).map(|_| OnceLock::new()).collect(),
            head: AtomicU64::new(0),
        };
        Some(Recorder {
            ring: Arc::new(ring),
            next: 0,
        })
    }

    pub fn ring(&self) -> Arc<Ring> {
        self.ring.clone()
    }

    /// How many there are.
    pub fn recorded(&self) -> u64 {
        self.next
    }

    pub fn record(&mut self, event: &Event) {
        let ring = &*self.ring;
        let at = (self.next & (ring.capacity() - 1)) as usize;
        let segment =
            ring.segments[at / SEGMENT].get_or_init(|| (0..SEGMENT).map(|_| Slot::default()).collect());
        let slot = &segment[at % SEGMENT];
        // `head` is this event's number since the last one: whoever sees a word of this one sees that, too.
        fence(Ordering::Release);
        for (place, word) in slot.iter().zip(event.pack()) {
            place.store(word, Ordering::Relaxed);
        }
        self.next += 1;
        ring.head.store(self.next, Ordering::Release);
    }
}

/// One moment by both clocks; `Instant` is CLOCK_MONOTONIC too, but does not say so.
fn base() -> (Instant, u64) {
    static BASE: OnceLock<(Instant, u64)> = OnceLock::new();
    *BASE.get_or_init(|| {
        let look = || {
            let before = Instant::now();
            let mut time = libc::timespec {
                tv_sec: 0,
                tv_nsec: 0,
            };
            // SAFETY: the kernel fills a timespec that lives through the call. This clock is there on every Linux.
            unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
            let ns = time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64;
            (before.elapsed(), (before, ns))
        };
        // The one of a few between which the least time lay.
        let found = (0..8).map(|_| look()).min_by_key(|(between, _)| *between);
        found.unwrap_or_else(look).1
    })
}

pub fn monotonic_ns(at: Instant) -> u64 {
    let (begin, ns) = base();
    match at.checked_duration_since(begin) {
        Some(after) => ns + after.as_nanos() as u64,
        None => ns.saturating_sub((begin - at).as_nanos() as u64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;
    use std::time::Duration;

    fn event(number: u64) -> Event {
        Event {
            started_ns: number,
            ended_ns: number ^ 0x5555_5555,
            offset: number << 20,
            bytes: number as u32,
            status: number as u16,
            kind: EventKind::ALL[number as usize % EventKind::ALL.len()],
            path: number as u16 & 15,
            retries: number as u8,
        }
    }

    #[test]
    fn the_last_ones_are_read_oldest_first_and_the_rest_is_counted() {
        let mut recorder = Recorder::new(1500).unwrap();
        let ring = recorder.ring();
        assert_eq!(ring.capacity(), 2048);
        assert!(ring.read(u64::MAX).events.is_empty());
        for number in 0..3000 {
            recorder.record(&event(number));
        }
        let found = ring.read(u64::MAX);
        // The slot that is written next counts as being written.
        assert_eq!((found.recorded, found.lost), (3000, 3000 - 2047));
        assert_eq!(found.events, (953..3000).map(event).collect::<Vec<_>>());
        assert_eq!(ring.read(1000).events, (953..1000).map(event).collect::<Vec<_>>());
        assert_eq!(recorder.recorded(), 3000);
        assert!(Recorder::new(0).is_none());
    }

    #[test]
    fn what_is_read_while_it_is_written_is_whole() {
        let mut recorder = Recorder::new(1024).unwrap();
        let ring = recorder.ring();
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // Also where the reader fails, or whoever reads sees nothing for ever: the scope waits for this thread.
                let deadline = Instant::now() + Duration::from_secs(60);
                let mut number = 0;
                while !over.load(Ordering::Relaxed) && (number & 0xFFFF != 0 || Instant::now() < deadline) {
                    recorder.record(&event(number));
                    number += 1;
                }
                over.store(true, Ordering::Relaxed);
            });
            let (mut looks, mut seen, mut wrong) = (0, 0, None);
            while (looks < 2000 || seen < 10_000) && wrong.is_none() && !over.load(Ordering::Relaxed) {
                let found = ring.read(u64::MAX);
                looks += 1;
                seen += found.events.len();
                let first = found.recorded - found.events.len() as u64;
                let expected = (first..).map(event);
                wrong = found
                    .events
                    .into_iter()
                    .zip(expected)
                    .find(|(each, as_written)| each != as_written);
            }
            over.store(true, Ordering::Relaxed);
            assert_eq!(wrong, None, "an event that was read, and as it was written");
            assert!(
                looks >= 2000 && seen >= 10_000,
                "{looks} looks in a minute saw {seen} events"
            );
        });
    }

    #[test]
    fn times_are_those_of_the_kernels_monotonic_clock() {
        let now = Instant::now();
        let uptime = std::fs::read_to_string("/proc/uptime").unwrap();
        let uptime: f64 = uptime.split(' ').next().unwrap().parse().unwrap();
        let found = monotonic_ns(now) as f64 / 1e9;
        // The uptime counts times of sleep, too.
        assert!(found > 0.0 && found < uptime + 1.0, "{found} and {uptime}");
        let earlier = now.checked_sub(Duration::from_secs(1)).unwrap();
        let between = monotonic_ns(now) - monotonic_ns(earlier);
        assert_eq!(between, 1_000_000_000);
    }
}

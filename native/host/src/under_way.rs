//! What a device has under way, and by which path, or waits to send: for messages that say what somebody waits for.

use crate::association::{Association, Tag};
use crate::device::NvmeTcpDevice;
use crate::errors::forked;
use crate::life::Core;
use crate::options::Portal;
use crate::shared::Latch;
use crate::work::Part;
use headrace_transfer::events::NO_PATH;
use headrace_transfer::{Event, EventKind, IoError, Recorded};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Commands in one answer; the oldest.
const MOST: usize = 256;
/// The same, of events.
const MOST_EVENTS: usize = 4096;
/// For the I/O thread, which never blocks.
const PATIENCE: Duration = Duration::from_secs(2);

/// A command, or a request that none was made of yet.
#[derive(Clone, Debug)]
pub struct UnderWay {
    /// The path that it was sent by; `None`: it waits to be sent.
    pub portal: Option<Portal>,
    pub reads: bool,
    /// Bytes of the namespace.
    pub offset: u64,
    pub length: u64,
    /// Since it was sent; zero where it waits.
    pub age: Duration,
    /// How often it was sent, this time included.
    pub sent: u32,
}

pub(crate) type Reply = Arc<Latch<Result<Vec<UnderWay>, IoError>>>;

impl Association {
    fn parts(&self) -> impl Iterator<Item = &Part> {
        let tags = self.connections.iter().flat_map(|each| each.queue.tags());
        tags.filter_map(|tag| match tag {
            Tag::Part(part) => Some(part),
            _ => None,
        })
    }

    /// When the command was sent that waits longest for its answer, of those that move data.
    pub fn oldest(&self) -> Option<Instant> {
        self.parts()
            .filter(|part| part.verb.moves_data())
            .filter_map(|part| part.trip.map(|trip| trip.sent_at))
            .min()
    }
}

impl Core {
    /// What touches these bytes of the namespace, the oldest first.
    pub fn under_way(&mut self, bytes: &Range<u64>, now: Instant) -> Vec<UnderWay> {
        let block = u64::from(self.block_bytes());
        let touches = |each: &UnderWay| each.offset < bytes.end && bytes.start < each.offset + each.length;
        let mut found = Vec::new();
        let options = self.options();
        self.each_association(|at, association| {
            let portal = &options.portals[at];
            found.extend(
                association
                    .parts()
                    .map(|part| UnderWay {
                        portal: Some(portal.clone()),
                        reads: part.verb == crate::work::Verb::Read,
                        offset: part.slba.saturating_mul(block),
                        length: part.blocks.saturating_mul(block),
                        age: part
                            .trip
                            .map_or(Duration::ZERO, |trip| now.saturating_duration_since(trip.sent_at)),
                        sent: part.tries.total() + 1,
                    })
                    .filter(touches),
            );
        });
        let waiting = self.works().iter().flat_map(|work| work.waiting_ranges());
        found.extend(
            waiting
                .map(|range| UnderWay {
                    portal: None,
                    reads: range.reads,
                    offset: range.slba.saturating_mul(block),
                    length: range.blocks.saturating_mul(block),
                    age: Duration::ZERO,
                    sent: range.sent,
                })
                .filter(touches),
        );
        found.sort_by_key(|each| std::cmp::Reverse(each.age));
        found.truncate(MOST);
        found
    }

    /// All that is under way or waits, as events without an end, the oldest [`MOST_EVENTS`] first.
    pub fn events_under_way(&mut self) -> Vec<Event> {
        let block = u64::from(self.block_bytes());
        let mut sent = Vec::new();
        self.each_association(|_, association| {
            let parts = association.parts();
            sent.extend(parts.filter_map(|part| part.event(block, None, None)));
        });
        let waiting = self.works().iter().flat_map(|work| work.waiting_ranges());
        sent.extend(waiting.filter_map(|range| {
            Some(Event {
                offset: range.slba.saturating_mul(block),
                bytes: range.blocks.saturating_mul(block).try_into().unwrap_or(u32::MAX),
                path: NO_PATH,
                retries: range.sent.try_into().unwrap_or(u8::MAX),
                ..Event::new(EventKind::waiting(range.reads), range.since?, None)
            })
        }));
        sent.sort_by_key(|each| each.started_ns);
        sent.truncate(MOST_EVENTS);
        sent
    }
}

impl NvmeTcpDevice {
    /// Commands under way, and requests that wait, that touch these bytes; the oldest [`MOST`] first.
    pub fn under_way(&self, bytes: Range<u64>) -> Result<Vec<UnderWay>, IoError> {
        let reply = Arc::new(Latch::new());
        if !self.ask_under_way(bytes, reply.clone()) {
            return Err(forked(self.place()));
        }
        self.wait_for(&reply, PATIENCE, Duration::ZERO)
    }

    /// The ring, and what is under way. Only for the latter the I/O thread is asked, which never blocks; where it does not
    /// answer all the same, that is said, and the ring is read without it.
    pub(crate) fn recorded(&self) -> Option<Recorded> {
        let ring = self.ring()?;
        let reply = Arc::new(Latch::new());
        if !self.ask_events(reply.clone()) {
            return Some(Recorded {
                trouble: forked(self.place()).to_string(),
                ..Recorded::default()
            });
        }
        let Some((under_way, until)) = reply.wait(PATIENCE) else {
            return Some(Recorded {
                trouble: format!(
                    "the I/O thread has not answered for {PATIENCE:?}: what is under way is not known"
                ),
                ..ring.read(u64::MAX)
            });
        };
        // What ended behind the answer is in it.
        let mut found = ring.read(until);
        found.events.extend(under_way);
        Some(found)
    }
}

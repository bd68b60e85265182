//! What is kept of commands and paths, for whoever asks later what went wrong: the ring of the device.

use super::Core;
use crate::queue::End;
use crate::work::{Part, Verb};
use headrace_transfer::events::status;
use headrace_transfer::{Event, EventKind};
use std::time::Instant;

impl Verb {
    pub fn event(self) -> EventKind {
        match self {
            Verb::Read => EventKind::Read,
            Verb::Write { .. } => EventKind::Write,
            Verb::Flush => EventKind::Flush,
            Verb::Deallocate | Verb::Zero => EventKind::Other,
        }
    }
}

/// How a command ended, in 16 bits.
pub(super) fn code(end: &End) -> u16 {
    match end {
        End::Answer(cqe) => u16::from(cqe.status.sct & 7) << 8 | u16::from(cqe.status.sc),
        End::DataDigest => status::DIGEST,
        End::Short { .. } => status::SHORT,
    }
}

impl Part {
    /// As it was sent last; `kind`: where its verb is not what counts.
    pub fn event(&self, block_bytes: u64, kind: Option<EventKind>, ended: Option<Instant>) -> Option<Event> {
        let trip = self.trip?;
        let kind = kind.unwrap_or_else(|| self.verb.event());
        Some(Event {
            offset: self.slba.saturating_mul(block_bytes),
            bytes: self
                .blocks
                .saturating_mul(block_bytes)
                .try_into()
                .unwrap_or(u32::MAX),
            path: trip.path.into(),
            retries: self.tries.total().try_into().unwrap_or(u8::MAX),
            ..Event::new(kind, trip.sent_at, ended)
        })
    }
}

impl Core {
    /// A sending of a command ended, one way or another.
    pub(super) fn record(&mut self, part: &Part, kind: Option<EventKind>, status: u16, now: Instant) {
        let block = u64::from(self.block_bytes());
        let Some(recorder) = &mut self.recorder else {
            return;
        };
        if let Some(event) = part.event(block, kind, Some(now)) {
            recorder.record(&Event { status, ..event });
        }
    }

    /// A path came, or went.
    pub(super) fn record_path(&mut self, at: usize, kind: EventKind, now: Instant) {
        let begun = match kind {
            EventKind::Connected | EventKind::NotConnected => self.paths[at].begun,
            _ => now,
        };
        if let Some(recorder) = &mut self.recorder {
            recorder.record(&Event {
                path: at as u16,
                ..Event::new(kind, begun, Some(now))
            });
        }
    }

    /// A path became slow, or is not so any more; `None`: neither.
    pub(super) fn record_pace(&mut self, at: usize, slow: Option<bool>, now: Instant) {
        match slow {
            Some(true) => self.record_path(at, EventKind::PathSlow, now),
            Some(false) => self.record_path(at, EventKind::PathWell, now),
            None => {}
        }
    }

    /// How many events there are.
    pub fn recorded(&self) -> u64 {
        self.recorder.as_ref().map_or(0, |recorder| recorder.recorded())
    }
}

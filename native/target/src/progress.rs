//! Whether a peer goes on with what it owes.

use std::time::{Duration, Instant};

/// Bytes that a peer which owes something must move within the progress timeout: fewer are a trickle that holds on to memory.
const PROGRESS_BYTES: u64 = 1024;
/// One direction of a connection, looked at by the clock.
pub(crate) struct Progress {
    pub(crate) bytes: u64,
    /// When it last was seen to owe nothing, or to have moved enough, and how many bytes that was at.
    mark: Instant,
    marked_bytes: u64,
}

impl Progress {
    pub(crate) fn new(now: Instant) -> Self {
        Progress {
            bytes: 0,
            mark: now,
            marked_bytes: 0,
        }
    }

    /// For how long what is owed has not gone on.
    pub(crate) fn stuck(&mut self, owing: bool, now: Instant) -> Duration {
        if !owing || self.bytes >= self.marked_bytes + PROGRESS_BYTES {
            self.mark = now;
            self.marked_bytes = self.bytes;
        }
        now.saturating_duration_since(self.mark)
    }
}

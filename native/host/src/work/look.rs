//! What waits to be sent, for whoever asks.

use super::{Verb, Work};
use headrace_transfer::Op;
use std::time::Instant;

/// Blocks that wait.
pub(crate) struct WaitingRange {
    pub reads: bool,
    pub slba: u64,
    pub blocks: u64,
    /// How often they were sent already.
    pub sent: u32,
    /// When they were handed over, or sent last.
    pub since: Option<Instant>,
}

impl Work {
    pub fn waiting_ranges(&self) -> impl Iterator<Item = WaitingRange> + '_ {
        let again = self.again.iter().map(|(part, _)| part);
        let delayed = self.delayed.iter().map(|(_, part, _)| part);
        let targeted = self.targeted.iter();
        let parts = again.chain(delayed).chain(targeted).map(|part| WaitingRange {
            reads: part.verb == Verb::Read,
            slba: part.slba,
            blocks: part.blocks,
            sent: part.tries.total(),
            since: part.trip.map(|trip| trip.sent_at),
        });
        let fresh = self.fresh.iter().filter_map(|&number| {
            let progress = self.requests.get(number as usize)?.as_ref()?;
            Some(WaitingRange {
                reads: matches!(progress.op, Op::Read { .. }),
                slba: progress.slba,
                blocks: progress.blocks,
                sent: 0,
                since: Some(progress.since),
            })
        });
        parts.chain(fresh)
    }
}

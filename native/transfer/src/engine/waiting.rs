//! What a batch waits for, for messages about one that does not end.

use super::{Shared, State, Transfer};

/// A request under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waiting {
    pub member: u32,
    /// On the member.
    pub offset: u64,
    pub length: u64,
    /// Requests under way, this one included.
    pub requests: usize,
}

impl Shared {
    /// The first of its requests under way, in the order of the segments.
    fn waiting(&self, state: &State) -> Option<Waiting> {
        let pieces = state.slots.iter().flatten().map(|slot| slot.piece);
        let first = pieces.min_by_key(|piece| (piece.segment, piece.start))?;
        let segment = &self.segments[first.segment];
        Some(Waiting {
            member: segment.member,
            offset: segment.offset + first.start,
            length: first.device_length,
            requests: state.in_flight,
        })
    }
}

impl Transfer {
    /// A request that it waits for: of the batch before it, where that has not ended. `None`: it has none under way.
    pub fn waiting(&self) -> Option<Waiting> {
        let before = self.before.upgrade();
        // Each lock by itself: whoever ends the first batch begins the other one.
        let of = |shared: &Shared| shared.waiting(&shared.lock());
        before.and_then(|before| of(&before)).or_else(|| of(&self.shared))
    }
}

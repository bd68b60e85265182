//! I/O queues by traffic class, so that one class never queues behind another.
//!
//! ```text
//!   granted by the controller:  [ feed ....... | checkpoint ... | metadata ]      (each `queues`, if there are enough)
//!   connected:                    at bring-up    when first used  when first used
//! ```
//!
//! The feed gets what it asked for first; a class for which nothing is left *shares* the feed's queues. A lane that opens
//! later has `connect_timeout` for it, and its commands wait meanwhile. A controller that refuses a queue which it granted
//! ends the association, and the next ones have that lane share from the start, until one of them has lived long.

use super::{Association, Failure, Step, Tag, ADMIN_SPARE};
use crate::lane::LANES;
use crate::queue::Data;
use crate::reactor::Turn;
use crate::work::{Part, Verb};
use headrace_transfer::{ErrorKind, IoError};
use headrace_wire::Sqe;
use std::time::Instant;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    Closed,
    Opening {
        awaited: u16,
        until: Instant,
    },
    Open,
    /// The feed's queues are this lane's, too.
    Shared,
}

/// Queues `first` to `first + count - 1`; a queue's number is its connection's.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Lane {
    state: State,
    first: usize,
    count: usize,
    next: usize,
}

/// What each class gets of `granted` queues, if it is to have `each`.
pub(super) fn share_out(granted: u16, each: u16) -> [u16; LANES] {
    let feed = granted.min(each);
    let mut left = granted - feed;
    let mut lanes = [0; LANES];
    lanes[0] = feed;
    for (at, lane) in lanes.iter_mut().enumerate().skip(1) {
        // One at least for each class behind this one, where that leaves one for it.
        let behind = (LANES - 1 - at) as u16;
        *lane = each.min(left.saturating_sub(behind).max(left.min(1)));
        left -= *lane;
    }
    lanes
}

impl Association {
    /// Begin to connect the lane's queues; done where it has none of its own.
    pub fn open_lane(&mut self, lane: usize, turn: &Turn<'_>) {
        if self.lanes[lane].state != State::Closed {
            return;
        }
        let first = self.connections.len();
        for _ in 0..self.facts.lanes[lane] {
            // What cannot even be begun (no descriptor is free) is done without.
            if self
                .connect_tcp(self.facts.depth, self.facts.in_capsule.max(1024), turn)
                .is_err()
            {
                break;
            }
        }
        let count = self.connections.len() - first;
        self.lanes[lane] = Lane {
            state: match count {
                0 => State::Shared,
                _ => State::Opening {
                    awaited: count as u16,
                    until: turn.now + self.options.connect_timeout,
                },
            },
            first,
            count,
            next: 0,
        };
    }

    /// This lane has no queues of its own on this controller.
    pub fn share_lane(&mut self, lane: usize) {
        self.facts.lanes[lane] = 0;
        self.lanes[lane].state = State::Shared;
    }

    /// A queue of some lane is connected; `true` when it was the last that the lane waited for.
    pub(super) fn lane_connected(&mut self, qid: u16) -> bool {
        let qid = usize::from(qid);
        let mut lanes = self.lanes.iter_mut();
        let Some(lane) = lanes.find(|lane| (lane.first..lane.first + lane.count).contains(&qid)) else {
            return false;
        };
        if let State::Opening { awaited, until } = lane.state {
            let awaited = awaited - 1;
            lane.state = match awaited {
                0 => State::Open,
                _ => State::Opening { awaited, until },
            };
        }
        lane.state == State::Open
    }

    /// The lane whose queues the controller does not let us have: that is why the association ends with `error`.
    pub fn lane_refused(&self, error: &IoError, now: Instant) -> Option<usize> {
        self.lanes.iter().position(|lane| match lane.state {
            State::Opening { until, .. } => error.kind == ErrorKind::Refused || until <= now,
            _ => false,
        })
    }

    pub(super) fn lanes_wake_at(&self) -> Option<Instant> {
        let until = self.lanes.iter().filter_map(|lane| match lane.state {
            State::Opening { until, .. } if self.step == Step::Running => Some(until),
            _ => None,
        });
        until.min()
    }

    pub(super) fn tick_lanes(&self, now: Instant) -> Result<(), Failure> {
        if self.lanes_wake_at().is_none_or(|until| until > now) {
            return Ok(());
        }
        let error = IoError::new(
            ErrorKind::Timeout,
            "the controller is silent: Connect of an I/O queue",
        )
        .at(self.options.address())
        .expected(format!("an answer within {:?}", self.options.connect_timeout))
        .next("check the target and the network");
        Err(error.into())
    }

    /// Which queues carry this lane's commands; nothing while they are being connected.
    fn queues_of(&self, lane: usize) -> std::ops::Range<usize> {
        let lane = match self.lanes[lane].state {
            State::Open => &self.lanes[lane],
            State::Shared => &self.lanes[0],
            State::Closed | State::Opening { .. } => return 0..0,
        };
        lane.first..lane.first + lane.count
    }

    /// Room for commands on the lane's queues.
    pub fn has_room(&self, lane: usize) -> bool {
        let queues = &self.connections[self.queues_of(lane)];
        queues.iter().any(|connection| connection.queue.room() > 0)
    }

    /// Put a part on its lane's next queue that has room; gives it back where none has.
    pub fn send_part(&mut self, part: Part, data: Data, now: Instant) -> Result<(), (Part, Data)> {
        let lane = usize::from(part.lane);
        let queues = self.queues_of(lane);
        for _ in queues.clone() {
            let at = queues.start + self.lanes[lane].next % queues.len();
            self.lanes[lane].next = self.lanes[lane].next.wrapping_add(1);
            if self.connections[at].queue.room() == 0 {
                continue;
            }
            let sqe = part.sqe(self.facts.nsid);
            let deadline = now + self.options.io_timeout;
            return match self.submit(at, sqe, data, Tag::Part(part), Some(deadline)) {
                Err((Tag::Part(part), data)) => Err((part, data)),
                _ => Ok(()),
            };
        }
        Err((part, data))
    }

    /// Take back the reads that were sent at `before` or earlier and are not answered.
    pub fn recall(&mut self, before: Instant) -> Vec<(Part, Data)> {
        let retagged = |tag: &Tag| match tag {
            Tag::Part(part) if part.verb == Verb::Read => {
                let sent_at = part.trip?.sent_at;
                (sent_at <= before).then_some(Tag::Recalled(sent_at))
            }
            _ => None,
        };
        let connections = self.connections.iter_mut();
        let recalled = connections.flat_map(|connection| connection.queue.recall(retagged));
        recalled
            .filter_map(|(tag, data)| match tag {
                Tag::Part(part) => Some((part, data)),
                _ => None,
            })
            .collect()
    }

    /// Put a command that is no part on the admin queue, or on a queue of the feed that has room.
    pub fn send_own(
        &mut self,
        admin: bool,
        sqe: Sqe,
        data: Data,
        tag: Tag,
        until: Instant,
    ) -> Result<(), (Tag, Data)> {
        let (mut queues, spare) = if admin {
            (0..1, ADMIN_SPARE)
        } else {
            (self.queues_of(0), 0)
        };
        let Some(at) = queues.find(|&at| self.connections[at].queue.room() > spare) else {
            return Err((tag, data));
        };
        self.submit(at, sqe, data, tag, Some(until))
    }
}

#[cfg(test)]
mod tests {
    use super::share_out;

    #[test]
    fn the_feed_comes_first_and_then_each_class_as_far_as_there_are_queues() {
        for (granted, each, lanes) in [
            (1, 1, [1, 0, 0]),
            (2, 1, [1, 1, 0]),
            (3, 1, [1, 1, 1]),
            (9, 1, [1, 1, 1]),
            (4, 4, [4, 0, 0]),
            (5, 4, [4, 1, 0]),
            (6, 4, [4, 1, 1]),
            (8, 4, [4, 3, 1]),
            (12, 4, [4, 4, 4]),
        ] {
            assert_eq!(
                share_out(granted, each),
                lanes,
                "{granted} granted, {each} wanted"
            );
        }
    }
}

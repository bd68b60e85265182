//! Which path takes the next command.
//!
//! Commands go to paths whose ANA state is optimized; only where there is none, to the others that take them. Among equals
//! the policy decides. A command that a path has failed for a reason that lies with the path avoids it while there is
//! another; so do all commands a path that is slow beside the others ([`super::pace`]).
//!
//! A flush is spread: see [`crate::life`].

use super::path::{Path, Phase};
use super::{Core, Loss};
use crate::options::Policy;
use crate::queue::Data;
use crate::reactor::Turn;
use crate::work::{Part, Target, Trip, Verb};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

impl Core {
    /// What the paths have come to: whether the device is usable, and who is told. `true` when commands may move now that
    /// could not before.
    pub(super) fn look(&mut self, now: Instant) -> bool {
        let mut lapsed = false;
        for path in &mut self.paths {
            lapsed |= path.lapse_hearsay(now);
            path.tell_use(now);
        }
        let usable = self.paths.iter().any(|path| path.tier(now).is_some());
        self.look_at_guard(usable && self.loss.is_some(), now);
        if usable {
            let back = self.loss.take().is_some();
            self.failing = None;
            if back {
                let mut status = self.shared.status();
                status.state = "connected";
                status.stalled = None;
            }
            return back || lapsed;
        }
        self.paths.iter_mut().for_each(|path| path.release(now));
        if self.loss.is_none() && self.opening.is_none() && self.closing.is_none() && !self.ended {
            self.stall(now);
        }
        self.fail_if_hopeless();
        false
    }

    /// The last usable path went.
    fn stall(&mut self, now: Instant) {
        let mut status = self.shared.status();
        status.state = "lost";
        status.stalled = Some(now);
        status.stalls += 1;
        // A controller that is about to change its state has ANATT for it.
        let change = self.paths.iter().filter_map(|path| path.change_until(now)).max();
        self.loss = Some(Loss {
            deadline: self
                .shared
                .options
                .loss_timeout
                .map(|timeout| (now + timeout).max(change.unwrap_or(now))),
        });
    }

    pub(super) fn ripen(&mut self, now: Instant) {
        for work in &mut self.works {
            if work.due().is_some_and(|at| at <= now) {
                work.ripen(now);
            }
        }
    }

    pub(super) fn pump(&mut self, turn: &Turn<'_>) {
        for lane in 0..self.works.len() {
            if self.works[lane].waiting() || self.works[lane].has_targeted() {
                self.pump_lane(lane, turn);
            }
        }
    }

    fn pump_lane(&mut self, lane: usize, turn: &Turn<'_>) {
        let now = turn.now;
        for path in &mut self.paths {
            if let Phase::Ready(association) = &mut path.phase {
                association.open_lane(lane, turn);
            }
        }
        for part in self.works[lane].take_targeted() {
            self.send_targeted(part, now);
        }
        while self.works[lane].waiting() {
            let flush = self.works[lane].at_flush();
            if flush && !self.spread_flush(lane, now) {
                return;
            }
            if flush {
                continue;
            }
            let writes = self.works[lane].next_changes();
            let Some(at) = self.choose(lane, self.works[lane].avoid(), writes, now) else {
                // Writes that wait for the guard do not hold up reads.
                if writes && self.read_ahead(lane, turn) {
                    continue;
                }
                return;
            };
            let Phase::Ready(association) = &mut self.paths[at].phase else {
                return;
            };
            let Some((part, data)) = self.works[lane].next(&association.facts) else {
                return;
            };
            if let Err((part, data)) = self.send_governed(at, part, data, turn) {
                self.works[lane].back(part, data);
                return;
            }
        }
    }

    /// Send it, unless it is a read and too much is under way already: then the reactor runs us when it is our turn.
    fn send_governed(
        &mut self,
        at: usize,
        part: Part,
        data: Data,
        turn: &Turn<'_>,
    ) -> Result<(), (Part, Data)> {
        if part.verb != Verb::Read {
            return self.send_on(at, part, data, turn.now);
        }
        let flow = self.flows[usize::from(part.lane)];
        let bytes = part.blocks * u64::from(self.facts.block_bytes);
        let mut governor = turn.governor.borrow_mut();
        if !governor.admit(flow, bytes, turn.now) {
            return Err((part, data));
        }
        let result = self.send_on(at, part, data, turn.now);
        if result.is_err() {
            governor.back(flow, bytes);
        }
        result
    }

    fn send_on(&mut self, at: usize, mut part: Part, data: Data, now: Instant) -> Result<(), (Part, Data)> {
        let path = &mut self.paths[at];
        let covers = path.written;
        let Phase::Ready(association) = &mut path.phase else {
            return Err((part, data));
        };
        part.trip = Some(Trip {
            path: at as u8,
            sent_at: now,
            covers,
        });
        association.send_part(part, data, now)?;
        path.under_way += 1;
        path.public().under_way.store(path.under_way, Ordering::Relaxed);
        Ok(())
    }

    /// Send the first read that waits, past the writes before it; `true` if there was one.
    fn read_ahead(&mut self, lane: usize, turn: &Turn<'_>) -> bool {
        let Some(at) = self.choose(lane, 0, false, turn.now) else {
            return false;
        };
        let Phase::Ready(association) = &self.paths[at].phase else {
            return false;
        };
        let Some((part, data)) = self.works[lane].next_read(&association.facts) else {
            return false;
        };
        match self.send_governed(at, part, data, turn) {
            Ok(()) => true,
            Err((part, data)) => {
                self.works[lane].back(part, data);
                false
            }
        }
    }

    /// The path for the next command, if there is one with room; for a write, one that the guard lets through.
    fn choose(&mut self, lane: usize, avoid: u16, writes: bool, now: Instant) -> Option<usize> {
        if let [only] = &self.paths[..] {
            only.tier(now).filter(|_| !writes || self.may_write(only.index))?;
            let Phase::Ready(association) = &only.phase else {
                return None;
            };
            return association.has_room(lane).then_some(0);
        }
        self.look_at_pace(now);
        let tier = |path: &Path| path.tier(now).filter(|_| !writes || self.may_write(path.index));
        let fault = |path: &Path| {
            let slow = path.pace.avoided(path.under_way, now);
            (avoid & 1 << path.index != 0, slow)
        };
        let usable = || self.paths.iter().filter(|path| tier(path).is_some());
        // Room does not count here: an optimized path that is full is waited for.
        let least = usable().map(fault).min()?;
        let eligible = |path: &&Path| fault(path) == least;
        let best = usable().filter(eligible).filter_map(tier).min()?;
        let room = |path: &&Path| match &path.phase {
            Phase::Ready(association) => association.has_room(lane),
            _ => false,
        };
        let candidates = || {
            self.paths
                .iter()
                .filter(|path| tier(path) == Some(best))
                .filter(eligible)
                .filter(room)
        };
        let (count, from) = (self.paths.len(), self.next_path);
        // Ties, and turns, go round.
        let turn = |path: &Path| (path.index + count - from % count) % count;
        let chosen = match self.shared.options.policy {
            Policy::RoundRobin => candidates().min_by_key(|path| turn(path)),
            Policy::QueueDepth => {
                let known = candidates().filter_map(|path| path.pace.recent(now)).min();
                let usual = known.unwrap_or(Duration::from_micros(100));
                let queues = |path: &Path| path.facts().map_or(1, |facts| facts.queues.into());
                candidates().min_by_key(|path| (path.cost(usual, queues(path), now), turn(path)))
            }
        }?
        .index;
        self.next_path = chosen + 1;
        Some(chosen)
    }

    // Flush.

    /// One Flush command for each association that answered writes which no flush covers; one for any, where there is
    /// none. `false`: not now.
    fn spread_flush(&mut self, lane: usize, now: Instant) -> bool {
        if self.paths.iter().all(|path| path.tier(now).is_none()) {
            return false;
        }
        let mut targets = Vec::new();
        for at in 0..self.paths.len() {
            let path = &self.paths[at];
            if !path.dirty() {
                continue;
            }
            if path.tier(now).is_some() {
                targets.push(Target {
                    path: at as u8,
                    generation: path.generation,
                });
            } else {
                self.surrender(at);
            }
        }
        self.works[lane].spread_flush(&targets, &self.facts);
        for part in self.works[lane].take_targeted() {
            self.send_targeted(part, now);
        }
        true
    }

    /// A flush that one association must answer. Where that is gone, the loss was counted, and any path will do.
    fn send_targeted(&mut self, mut part: Part, now: Instant) {
        let lane = usize::from(part.lane);
        let target = part
            .target
            .map(|target| (usize::from(target.path), target.generation));
        let Some((at, generation)) = target else {
            return self.works[lane].back(part, Data::None);
        };
        let path = &self.paths[at];
        if path.generation == generation && matches!(path.phase, Phase::Ready(_)) {
            if path.tier(now).is_none() {
                self.surrender(at);
            } else {
                if let Err((part, data)) = self.send_on(at, part, Data::None, now) {
                    self.works[lane].back(part, data);
                }
                return;
            }
        }
        part.target = None;
        self.works[lane].back(part, Data::None);
    }

    /// What this association answered cannot be flushed by it any more: as if it was lost.
    pub(super) fn surrender(&mut self, at: usize) {
        let path = &mut self.paths[at];
        if path.dirty() {
            path.flushed = path.written;
            self.shared.lost(at);
        }
    }
}

/// Whether a verb changes what the medium holds.
pub(super) fn changes(verb: Verb) -> bool {
    matches!(verb, Verb::Write { .. } | Verb::Deallocate | Verb::Zero)
}

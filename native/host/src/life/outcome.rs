//! What answers, and the lack of them, mean for commands: done, tried again, or given up.

use super::dispatch::changes;
use super::path::Phase;
use super::record::code;
use super::Core;
use crate::association::{ana_state, is_path_related, is_transient, Association, Failure, Tag};
use crate::errors::{command_broken, command_failed};
use crate::ghosts::Unsettled;
use crate::queue::{Data, End};
use crate::reactor::Turn;
use crate::shared::count;
use crate::work::{Ended, Part, Verb};
use headrace_transfer::events::status;
use headrace_transfer::{ErrorKind, EventKind, IoError};
use headrace_wire::Status;
use std::time::{Duration, Instant};

/// Attempts of one command, by what went wrong.
const STATUS_TRIES: u8 = 5;
const DIGEST_TRIES: u8 = 3;
/// Each path may be the one that is silent, and then one more.
const TIMEOUT_TRIES: u8 = 2;
const VIOLATION_TRIES: u8 = 3;
/// Associations that were lost before any command succeeded on them: this one may be what ends them.
/// It is given up after this many and `loss_timeout`.
const LOSS_TRIES: u8 = 4;
/// Between attempts of a command that got a transient status; doubles.
const STATUS_DELAY: Duration = Duration::from_millis(50);
/// Doublings of it at most.
const STATUS_DOUBLINGS: u8 = 5;

impl Core {
    pub(super) fn run_ready(
        &mut self,
        at: usize,
        mut association: Box<Association>,
        turn: &mut Turn<'_>,
    ) -> bool {
        let mut completed = std::mem::take(&mut self.completed);
        let result = association.turn(turn, &mut |completion| completed.push(completion));
        self.paths[at].phase = Phase::Ready(association);
        let now = if completed.is_empty() {
            turn.now
        } else {
            Instant::now()
        };
        let mut result = result;
        for completion in completed.drain(..) {
            if let Tag::Part(part) = completion.tag {
                self.account(&part, &completion.end, now, turn);
                if let Some(ended) = self.settle(at, part, completion.data, completion.end, now) {
                    ended.report();
                }
            } else if let Tag::Recalled(sent_at) = completion.tag {
                self.recalled_answered(at, sent_at, &completion.end, now);
            } else if let Err(error) = self.own_completed(at, completion, now) {
                result = result.and(Err(error.into()));
            }
        }
        self.completed = completed;
        if result.is_ok() && self.heed(at, turn) {
            return true;
        }
        match result {
            Ok(again) => again,
            Err(failure) => self.lose(at, failure, turn),
        }
    }

    /// Send what was queued for a ready path, and keep its time.
    pub(super) fn send(&mut self, at: usize, turn: &mut Turn<'_>) -> bool {
        let Phase::Ready(association) = &mut self.paths[at].phase else {
            return false;
        };
        let result = association.send().and_then(|more| {
            association.tick(turn.now)?;
            // A tick may have queued a Keep Alive.
            Ok(association.send()? || more)
        });
        match result {
            Ok(again) => again,
            Err(failure) => self.lose(at, failure, turn),
        }
    }

    /// A read is not under way any more.
    fn account(&self, part: &Part, end: &End, now: Instant, turn: &Turn<'_>) {
        if part.verb != Verb::Read {
            return;
        }
        let bytes = part.blocks * u64::from(self.facts.block_bytes);
        let flow = self.flows[usize::from(part.lane)];
        let mut governor = turn.governor.borrow_mut();
        match (part.trip, end) {
            (Some(trip), End::Answer(cqe)) if cqe.status.is_success() => {
                governor.done(flow, bytes, now.saturating_duration_since(trip.sent_at), now);
            }
            _ => governor.back(flow, bytes),
        }
    }

    /// Nothing was moved for a read that was admitted.
    pub(super) fn not_read(&self, part: &Part, turn: &Turn<'_>) {
        let bytes = part.blocks * u64::from(self.facts.block_bytes);
        let flow = self.flows[usize::from(part.lane)];
        turn.governor.borrow_mut().back(flow, bytes);
    }

    /// What an answer means for its part.
    fn settle(&mut self, at: usize, mut part: Part, data: Data, end: End, now: Instant) -> Option<Ended> {
        if let (Some(trip), End::Answer(_)) = (part.trip, &end) {
            self.answered(at, part.verb, now.saturating_duration_since(trip.sent_at), now);
        }
        self.record(&part, None, code(&end), now);
        let (counters, options) = (&self.shared.paths[at].counters, &*self.shared.options);
        let bytes = part.blocks * u64::from(self.facts.block_bytes);
        let path = &mut self.paths[at];
        path.one_less();
        let result = match end {
            End::Answer(cqe) if cqe.status.is_success() => {
                path.progress = true;
                match part.verb {
                    Verb::Read => {
                        count(&counters.reads, 1);
                        count(&counters.read_bytes, bytes);
                    }
                    Verb::Write { .. } => {
                        count(&counters.writes, 1);
                        count(&counters.written_bytes, bytes);
                    }
                    Verb::Flush => {
                        count(&counters.flushes, 1);
                        path.flushed = path.flushed.max(part.trip.map_or(0, |trip| trip.covers));
                    }
                    Verb::Deallocate | Verb::Zero => count(&counters.deallocates, 1),
                }
                path.written += u64::from(changes(part.verb) && part.verb != Verb::Write { fua: true });
                Ok(())
            }
            End::Answer(cqe) if is_path_related(cqe.status) => {
                return self.elsewhere(at, part, data, cqe.status, now);
            }
            End::Answer(cqe) => {
                let retry =
                    is_transient(cqe.status) && !cqe.status.dnr && part.tries.statuses + 1 < STATUS_TRIES;
                if retry {
                    let ours = STATUS_DELAY * (1 << part.tries.statuses);
                    let delay = self.facts.retry_delay(cqe.status.crd).unwrap_or(ours);
                    return self.retry(at, part, data, now + delay);
                }
                Err(command_failed(&part, options, cqe.status))
            }
            End::DataDigest if part.tries.statuses + 1 < DIGEST_TRIES => {
                return self.retry(at, part, data, now);
            }
            End::DataDigest => {
                part.tries.statuses += 1;
                let found = format!("another, {} times", part.tries.statuses);
                let expected = "the data digest that the controller sent";
                Err(command_broken(&part, options, ErrorKind::Failed, expected, found))
            }
            End::Short { came, wanted } => {
                let (expected, found) = (format!("{wanted} bytes"), format!("success after {came}"));
                Err(command_broken(
                    &part,
                    options,
                    ErrorKind::Protocol,
                    &expected,
                    found,
                ))
            }
        };
        if let Err(error) = &result {
            count(&counters.errors, 1);
            count(&counters.conflicts, u64::from(error.kind == ErrorKind::Conflict));
        }
        self.works[usize::from(part.lane)].finish(part, data, result)
    }

    fn retry(&mut self, at: usize, mut part: Part, data: Data, then: Instant) -> Option<Ended> {
        part.tries.statuses += 1;
        count(&self.shared.paths[at].counters.retries, 1);
        self.later(part, data, then)
    }

    /// Once more, unless I/O fails for now.
    fn later(&mut self, part: Part, data: Data, then: Instant) -> Option<Ended> {
        let refusal = self.refusal(part.verb == Verb::Read).cloned();
        let work = &mut self.works[usize::from(part.lane)];
        if let Some(error) = refusal {
            return work.finish(part, data, Err(error));
        }
        work.later(then, part, data);
        None
    }

    /// The status speaks of the path: another one takes the command at once. Where all have failed it so, they are tried
    /// again, for as long as I/O would wait for a lost target.
    fn elsewhere(
        &mut self,
        at: usize,
        mut part: Part,
        data: Data,
        status: Status,
        now: Instant,
    ) -> Option<Ended> {
        let shared = self.shared.clone();
        count(&shared.paths[at].counters.errors, 1);
        count(&shared.paths[at].counters.retries, 1);
        if part.verb == Verb::Flush {
            self.surrender(at);
            part.target = None;
        }
        if let Some(state) = ana_state(status) {
            self.paths[at].heard(state, now);
        }
        let first = *part.tries.failed_at.get_or_insert(now);
        part.tries.paths = part.tries.paths.saturating_add(1);
        part.tries.avoid |= 1 << at;
        let others = self
            .paths
            .iter()
            .any(|path| path.tier(now).is_some() && part.tries.avoid & 1 << path.index == 0);
        if others && self.refusal(part.verb == Verb::Read).is_none() {
            self.works[usize::from(part.lane)].again(vec![(part, data)]);
            return None;
        }
        let patience = shared.options.loss_timeout;
        if patience.is_some_and(|patience| now.saturating_duration_since(first) >= patience) {
            let error = command_failed(&part, &shared.options, status);
            return self.works[usize::from(part.lane)].finish(part, data, Err(error));
        }
        part.tries.avoid = 0;
        let delay = STATUS_DELAY * (1 << part.tries.paths.min(STATUS_DOUBLINGS));
        self.later(part, data, now + delay)
    }

    /// An association that was ready is over; `true`: others may go on with what it had under way.
    pub(super) fn lose(&mut self, at: usize, failure: Failure, turn: &Turn<'_>) -> bool {
        let Failure { error, violation, .. } = failure;
        let phase = std::mem::replace(&mut self.paths[at].phase, Phase::Between);
        let Phase::Ready(association) = phase else {
            self.paths[at].phase = phase;
            return false;
        };
        let refused = association.lane_refused(&error, turn.now);
        let parts = association.end(turn);
        for (part, ..) in parts.iter().filter(|(part, ..)| part.verb == Verb::Read) {
            self.not_read(part, turn);
        }
        // Whoever sees that the counter moved finds what it left behind.
        self.haunt(at, &parts, self.shared.losses() + 1, turn.now);
        for (part, _, overdue) in &parts {
            let status = if *overdue { status::OVERDUE } else { status::LOST };
            self.record(part, None, status, turn.now);
        }
        self.record_path(at, EventKind::PathLost, turn.now);
        self.shared.lost(at);
        self.shared.status().last_error = error.to_string();
        let now = turn.now;
        let others = self.paths.iter().any(|path| path.tier(now).is_some());
        let progress = self.paths[at].progress;
        let random = self.random();
        self.paths[at].lost(now, random, others, &error.to_string());
        if let Some(lane) = refused {
            self.paths[at].share_lane(lane);
        }
        let (mut keep, mut failed) = (Vec::new(), Vec::new());
        let timeout_tries = TIMEOUT_TRIES.max(self.paths.len() as u8 + 1);
        let shared = self.shared.clone();
        let (options, counters) = (&shared.options, &shared.paths[at].counters);
        for (mut part, data, overdue) in parts {
            let tries = &mut part.tries;
            // A network that breaks now and then is not the command's fault, as long as something gets through.
            tries.losses = tries.losses.saturating_add(u8::from(!progress));
            let lost_at = *tries.failed_at.get_or_insert(now);
            let patience = options.loss_timeout;
            let hopeless = tries.losses >= LOSS_TRIES
                && patience.is_some_and(|patience| now.duration_since(lost_at) >= patience);
            tries.timeouts += u8::from(overdue);
            tries.violations += u8::from(violation);
            part.target = None;
            let (kind, times, why) = if tries.timeouts >= timeout_tries {
                (ErrorKind::Timeout, tries.timeouts, "no answer in time")
            } else if tries.violations >= VIOLATION_TRIES {
                (ErrorKind::Protocol, tries.violations, "a broken protocol")
            } else if hopeless {
                (ErrorKind::Failed, tries.losses, "the association was lost")
            } else {
                count(&counters.resends, 1);
                keep.push((part, data));
                continue;
            };
            let expected = format!("an answer within {:?}", options.io_timeout);
            let found = format!("{why}, {times} times; last: {error}");
            let error = command_broken(&part, options, kind, &expected, found);
            count(&counters.errors, 1);
            failed.extend(self.works[usize::from(part.lane)].finish(part, data, Err(error)));
        }
        failed.extend(self.keep(keep));
        self.look(now);
        failed.into_iter().for_each(Ended::report);
        others
    }

    /// Send these again, unless I/O fails for now.
    pub(super) fn keep(&mut self, parts: Vec<(Part, Data)>) -> Vec<Ended> {
        let mut ended = Vec::new();
        let mut lanes: Vec<Vec<(Part, Data)>> = self.works.iter().map(|_| Vec::new()).collect();
        for (part, data) in parts {
            let lane = usize::from(part.lane);
            match self.refusal(part.verb == Verb::Read).cloned() {
                Some(error) => ended.extend(self.works[lane].finish(part, data, Err(error))),
                None => lanes[lane].push((part, data)),
            }
        }
        for (work, parts) in self.works.iter_mut().zip(lanes) {
            work.again(parts);
        }
        ended
    }

    /// Writes that were under way may land at any time from here on.
    fn haunt(&self, at: usize, parts: &[(Part, Data, bool)], generation: u64, now: Instant) {
        let block = u64::from(self.facts.block_bytes);
        let writes = parts.iter().filter(|(part, ..)| changes(part.verb));
        let ranges: Vec<_> = writes
            .map(|(part, ..)| (part.slba * block, part.blocks * block))
            .collect();
        if ranges.is_empty() {
            return;
        }
        let path = self.paths[at].portal().to_string();
        let mut ghosts = self.shared.ghosts();
        for (offset, length) in ranges {
            ghosts.add(Unsettled {
                offset,
                length,
                path: path.clone(),
                generation,
                since: now,
            });
        }
    }

    /// The device fails: what waits is told so.
    pub(super) fn fail(&mut self, error: IoError) {
        self.failing = Some(error.clone());
        if let Some(loss) = &mut self.loss {
            loss.deadline = None;
        }
        {
            let mut status = self.shared.status();
            status.state = "failing";
            status.last_error = error.to_string();
        }
        let works = self.works.iter_mut();
        let ended: Vec<_> = works.flat_map(|work| work.fail_waiting(&error, false)).collect();
        self.end_own(&error);
        ended.into_iter().for_each(Ended::report);
    }
}

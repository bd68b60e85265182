//! Commands that are not parts of requests: passed-through ones, and the guard's question on each new association.
//! See [`crate::passthrough`] and [`crate::guard`].

use super::path::Phase;
use super::Core;
use crate::association::{ana_state, is_path_related, is_transient, Tag};
use crate::errors::closed;
use crate::guard::{Guard, REPORT_BYTES};
use crate::passthrough::{Call, CALLS_MAX};
use crate::queue::{Completion, Data, End};
use crate::shared::Latch;
use headrace_transfer::{Buffer, ErrorKind, IoError};
use headrace_wire::reservation::{report_command, Report, ReservationType};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

type GuardReply = Arc<Latch<Result<(), IoError>>>;

#[derive(Default)]
pub(super) struct Own {
    calls: VecDeque<Call>,
    guard: Option<Guard>,
    guards: u64,
    /// Who waits for the first answer to the guard's question.
    replies: Vec<GuardReply>,
    /// What everything but reads is told, for good.
    fenced: Option<IoError>,
    /// No usable path has shown the reservation: how long writes wait for one.
    withheld: Option<Withheld>,
}

struct Withheld {
    /// `None`: for ever.
    deadline: Option<Instant>,
    /// What everything but reads is told, until a path has shown it.
    error: Option<IoError>,
}

/// What the guard knows of one association.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Asked {
    #[default]
    Not,
    /// By the guard of this number.
    By(u64),
    Passed(u64),
}

impl Core {
    pub fn call(&mut self, call: Call) {
        let error = match &self.failing {
            Some(error) => error.clone(),
            None if self.closing.is_some() || self.opening.is_some() => closed(&self.shared.place),
            None if self.own.calls.len() >= CALLS_MAX => {
                IoError::new(ErrorKind::Failed, "too many commands wait on this device")
                    .at(&*self.shared.place)
                    .expected(format!("at most {CALLS_MAX}"))
            }
            None => return self.own.calls.push_back(call),
        };
        call.fail(error);
    }

    /// A new guard, or none; a fence ends with the guard that raised it.
    pub fn set_guard(&mut self, guard: Option<(u64, ReservationType)>, reply: GuardReply) {
        self.own.guards += 1;
        let number = self.own.guards;
        self.own.fenced = None;
        self.own.withheld = None;
        self.own.guard = guard.map(|(key, kind)| Guard { number, key, kind });
        for earlier in self.own.replies.drain(..) {
            earlier.set(Err(closed(&self.shared.place)));
        }
        {
            let mut status = self.shared.status();
            status.guard.state = if guard.is_some() { "asking" } else { "off" };
            status.guard.key = guard.map_or(0, |(key, _)| key);
            status.guard.kind = guard.map_or("", |(_, kind)| kind.name());
            status.guard.passed = 0;
            status.guard.fenced = String::new();
        }
        match (&self.failing, guard) {
            (Some(error), Some(_)) => reply.set(Err(error.clone())),
            (_, Some(_)) => self.own.replies.push(reply),
            (_, None) => reply.set(Ok(())),
        }
    }

    /// Whether writes may go out on a path.
    pub(super) fn may_write(&self, at: usize) -> bool {
        match &self.own.guard {
            None => true,
            Some(guard) => self.own.fenced.is_none() && self.paths[at].guard == Asked::Passed(guard.number),
        }
    }

    /// What a command is told now in place of being sent, or sent again.
    pub(super) fn refusal(&self, reads: bool) -> Option<&IoError> {
        let withheld = self.own.withheld.as_ref().and_then(|it| it.error.as_ref());
        let writes = self.own.fenced.as_ref().or(withheld).filter(|_| !reads);
        self.failing.as_ref().or(writes)
    }

    /// Whether writes may go out at all. How long they may not is counted as the loss of all paths is, but also through
    /// associations that come up and do not show the reservation; `back`: a path is usable again, after a loss.
    pub(super) fn look_at_guard(&mut self, back: bool, now: Instant) {
        if self.own.guard.is_none() || self.own.fenced.is_some() {
            return;
        }
        let shown = |path: &super::Path| path.tier(now).is_some() && self.may_write(path.index);
        let shown = self.paths.iter().any(shown);
        let options = &self.shared.options;
        match &mut self.own.withheld {
            Some(_) if shown => {
                self.own.withheld = None;
                self.shared.status().guard.state = "passed";
            }
            // What comes now is told the answer of the path that came back.
            Some(withheld) if back && withheld.error.is_some() => {
                *withheld = Withheld {
                    deadline: Some(now + options.io_timeout),
                    error: None,
                };
            }
            None if !shown => {
                self.own.withheld = Some(Withheld {
                    deadline: options.loss_timeout.map(|timeout| now + timeout),
                    error: None,
                });
                self.shared.status().guard.state = "asking";
            }
            _ => {}
        }
    }

    /// Writes have waited long enough.
    pub(super) fn keep_guard_deadline(&mut self, now: Instant) {
        let Some(withheld) = &mut self.own.withheld else {
            return;
        };
        if withheld.error.is_some() || withheld.deadline.is_none_or(|at| at > now) {
            return;
        }
        let error = IoError::new(
            ErrorKind::Gone,
            "the target does not show the reservation that writes go out under",
        )
        .at(&*self.shared.place)
        .expected("an answer to Reservation Report on a path that is usable")
        .found(self.shared.status().last_error.clone())
        .next(
            "check the target; the device goes on asking, and writes go out again once a path has shown it",
        );
        withheld.error = Some(error.clone());
        self.refuse_writes(&error);
    }

    fn refuse_writes(&mut self, error: &IoError) {
        let works = self.works.iter_mut();
        let ended: Vec<_> = works.flat_map(|work| work.fail_waiting(error, true)).collect();
        ended.into_iter().for_each(crate::work::Ended::report);
    }

    /// Send what waits: the guard's questions first.
    pub(super) fn run_own(&mut self, now: Instant) {
        self.ask(now);
        let failing = self.failing.clone();
        for mut call in std::mem::take(&mut self.own.calls) {
            if let Some(error) = &failing {
                call.fail(error.clone());
                continue;
            }
            if call.until <= now {
                call.expire();
                continue;
            }
            let Some(at) = self.way(now) else {
                self.own.calls.push_back(call);
                continue;
            };
            let Phase::Ready(association) = &mut self.paths[at].phase else {
                continue;
            };
            let (admin, until) = (call.admin, call.until);
            let (sqe, data) = call.take(association.facts.nsid);
            let sent = association.send_own(admin, sqe, data, Tag::Call(Box::new(call)), until);
            if let Err((Tag::Call(mut call), data)) = sent {
                call.put_back(data);
                self.own.calls.push_back(*call);
            }
        }
    }

    /// A path for a command of its own: the best one, and any that is connected rather than none.
    fn way(&self, now: Instant) -> Option<usize> {
        self.paths
            .iter()
            .filter(|path| matches!(path.phase, Phase::Ready(_)))
            .min_by_key(|path| path.tier(now).unwrap_or(u8::MAX))
            .map(|path| path.index)
    }

    fn ask(&mut self, now: Instant) {
        let Some(guard) = self.own.guard.filter(|_| self.own.fenced.is_none()) else {
            return;
        };
        let timeout = self.shared.options.io_timeout;
        for path in &mut self.paths {
            if [Asked::By(guard.number), Asked::Passed(guard.number)].contains(&path.guard) {
                continue;
            }
            // A namespace that is not accessible this way answers nothing; nor are writes sent there.
            if path.tier(now).is_none() {
                continue;
            }
            let Phase::Ready(association) = &mut path.phase else {
                continue;
            };
            let length = REPORT_BYTES.min(association.facts.max_transfer_bytes());
            let sqe = report_command(0, association.facts.nsid, true, length as u32);
            let data = Data::Read(Buffer::zeroed(length as usize));
            let sent = association.send_own(false, sqe, data, Tag::Guard(guard.number), now + timeout);
            if sent.is_ok() {
                path.guard = Asked::By(guard.number);
            }
        }
    }

    /// An answer to one of these commands. `Err`: the association is of no use.
    pub(super) fn own_completed(
        &mut self,
        at: usize,
        completion: Completion<Tag>,
        now: Instant,
    ) -> Result<(), IoError> {
        let Completion { tag, data, end, .. } = completion;
        let state = match end {
            End::Answer(cqe) => ana_state(cqe.status),
            End::Short { .. } | End::DataDigest => None,
        };
        if let Some(state) = state {
            self.paths[at].heard(state, now);
        }
        match tag {
            Tag::Call(call) => {
                call.complete(data, end);
                Ok(())
            }
            // Asked again once the namespace is accessible this way.
            Tag::Guard(_) if state.is_some() => {
                self.paths[at].guard = Asked::Not;
                Ok(())
            }
            Tag::Guard(number) => self.guard_answered(at, number, data, end),
            _ => Ok(()),
        }
    }

    fn guard_answered(&mut self, at: usize, number: u64, data: Data, end: End) -> Result<(), IoError> {
        let Some(guard) = self.own.guard.filter(|guard| guard.number == number) else {
            return Ok(());
        };
        let shared = self.shared.clone();
        let refusal = |found: String| {
            IoError::new(
                ErrorKind::Failed,
                "Reservation Report failed, which the write guard needs",
            )
            .at(&*shared.place)
            .expected("Successful Completion")
            .found(found)
        };
        let shown = match (end, data) {
            (End::Answer(cqe), Data::Read(buffer)) if cqe.status.is_success() => {
                let mut bytes = vec![0; buffer.len()];
                buffer.copy_to(0, &mut bytes);
                let report = Report::decode(&bytes, true).unwrap_or_default();
                guard.check(&report, &shared.options.hostid)
            }
            // Another association may be told more.
            (End::Answer(cqe), _) if is_transient(cqe.status) || is_path_related(cqe.status) => {
                return Err(refusal(cqe.status.to_string()));
            }
            (End::Answer(cqe), _) => Err(format!("Reservation Report: {}", cqe.status)),
            (End::DataDigest, _) => return Err(refusal("a wrong data digest".into())),
            (End::Short { came, wanted }, _) => {
                return Err(refusal(format!("{came} bytes of {wanted}")));
            }
        };
        let result = match shown {
            Ok(()) => {
                self.paths[at].guard = Asked::Passed(number);
                let mut status = shared.status();
                status.guard.passed += 1;
                status.guard.state = "passed";
                Ok(())
            }
            Err(found) => {
                let error = guard.fence(found, &shared.place);
                {
                    let mut status = shared.status();
                    status.guard.state = "fenced";
                    status.guard.fenced = error.found.to_string();
                    status.last_error = error.to_string();
                }
                self.own.fenced = Some(error.clone());
                self.refuse_writes(&error);
                Err(error)
            }
        };
        self.own
            .replies
            .drain(..)
            .for_each(|reply| reply.set(result.clone()));
        Ok(())
    }

    /// No more commands, for good.
    pub(super) fn end_own(&mut self, error: &IoError) {
        self.own.calls.drain(..).for_each(|call| call.fail(error.clone()));
        self.own
            .replies
            .drain(..)
            .for_each(|reply| reply.set(Err(error.clone())));
    }

    pub(super) fn own_wake_at(&self) -> Option<Instant> {
        let withheld = self.own.withheld.as_ref().filter(|it| it.error.is_none());
        let calls = self.own.calls.iter().map(|call| call.until);
        calls.chain(withheld.and_then(|it| it.deadline)).min()
    }

    pub(super) fn own_is_empty(&self) -> bool {
        self.own.calls.is_empty()
    }
}

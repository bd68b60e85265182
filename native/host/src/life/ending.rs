//! What time decides: deadlines, failing while no path is usable, and the orderly close.

use super::path::Phase;
use super::Core;
use crate::association::{Association, Step, Tag};
use crate::errors::{closed, no_path};
use crate::paths::PathState;
use crate::queue::Completion;
use crate::reactor::Turn;
use crate::work::{Ended, Work};
use headrace_transfer::{ErrorKind, IoError};
use std::time::{Duration, Instant};

/// CC.SHN to CSTS.SHST, at most.
const SHUTDOWN_MAX: Duration = Duration::from_secs(2);

impl Core {
    pub(super) fn run_stopping(
        &mut self,
        at: usize,
        mut association: Box<Association>,
        turn: &mut Turn<'_>,
    ) -> bool {
        // What is passed through and answered now was not lost.
        let mut completed = |completion: Completion<Tag>| {
            if let Tag::Call(call) = completion.tag {
                call.complete(completion.data, completion.end);
            }
        };
        let result = association.turn(turn, &mut completed).and_then(|again| {
            association.tick(turn.now)?;
            Ok(association.send()? || again)
        });
        match result {
            Ok(again) if association.step != Step::Done => {
                self.paths[at].phase = Phase::Stopping(association);
                again
            }
            // Done, or the controller went first.
            _ => {
                association.end(turn);
                self.paths[at].phase = Phase::Over;
                true
            }
        }
    }

    /// No more I/O, for good.
    pub(super) fn end(&mut self, error: IoError, turn: &Turn<'_>) {
        for path in &mut self.paths {
            let phase = std::mem::replace(&mut path.phase, Phase::Over);
            if let Phase::Connecting(association) | Phase::Ready(association) | Phase::Stopping(association) =
                phase
            {
                // Parts that were under way end with their requests.
                drop(association.end(turn));
            }
            path.tell(PathState::Closed, "the device is closed");
            path.tell_use(turn.now);
        }
        let mut governor = turn.governor.borrow_mut();
        self.flows.iter().for_each(|flow| governor.reset(*flow));
        drop(governor);
        {
            let mut status = self.shared.status();
            status.state = "closed";
            status.stalled = None;
            if error.kind != ErrorKind::Closed {
                status.last_error = error.to_string();
            }
        }
        self.loss = None;
        self.failing = Some(error.clone());
        self.ended = true;
        let works = self.works.iter_mut();
        let ended: Vec<_> = works.flat_map(|work| work.fail_all(&error)).collect();
        ended.into_iter().for_each(Ended::report);
        self.end_own(&error);
        if let Some(opening) = self.opening.take() {
            opening.reply.set(Err(error));
            self.over = true;
        }
    }

    /// What time has decided; `true` when a phase changed.
    pub(super) fn keep_deadlines(&mut self, turn: &mut Turn<'_>) -> bool {
        let now = turn.now;
        if self
            .opening
            .as_ref()
            .is_some_and(|opening| opening.deadline <= now)
        {
            let error = self.silent(0, "the target did not come up in time");
            self.end(error, turn);
        }
        for at in 0..self.paths.len() {
            if self.opening.is_none() && self.paths[at].attempt_until <= now {
                self.give_up_attempt(at, turn);
            }
        }
        if self
            .loss
            .as_ref()
            .and_then(|loss| loss.deadline)
            .is_some_and(|at| at <= now)
        {
            let timeout = self.shared.options.loss_timeout.unwrap_or_default();
            let error = IoError::new(ErrorKind::Gone, "the target did not come back")
                .at(&self.shared.place)
                .expected(format!("a usable path within {timeout:?}"))
                .found(self.whys())
                .next("check the target and the network; the device goes on trying and works again once it is back");
            self.fail(error);
        }
        self.keep_guard_deadline(now);
        self.keep_closing(turn)
    }

    /// An attempt to connect that takes too long.
    fn give_up_attempt(&mut self, at: usize, turn: &Turn<'_>) {
        let error = match &self.paths[at].phase {
            Phase::Connecting(association) => {
                self.silent(at, &format!("no progress in {}", association.step.name()))
            }
            Phase::Resolving => self.silent(at, "the name is not resolved in time"),
            _ => return,
        };
        let phase = std::mem::replace(&mut self.paths[at].phase, Phase::Between);
        if let Phase::Connecting(association) = phase {
            association.end(turn);
        }
        self.paths[at].asked = None;
        self.attempt_failed(at, error.into(), turn);
    }

    /// Why none is used.
    fn whys(&self) -> String {
        let whys: Vec<_> = self.shared.path_infos();
        match &whys[..] {
            [only] => only.why.clone(),
            several => several
                .iter()
                .map(|path| format!("{}: {}", path.portal, path.why))
                .collect::<Vec<_>>()
                .join("; "),
        }
    }

    /// Every path was refused for good: there is nothing to wait for.
    pub(super) fn fail_if_hopeless(&mut self) {
        let refused = |phase: &Phase| matches!(phase, Phase::Refused);
        let all = self.paths.iter().all(|path| refused(&path.phase));
        if !all || self.failing.is_some() || self.opening.is_some() {
            return;
        }
        let causes: Vec<_> = self
            .paths
            .iter()
            .filter_map(|path| path.hopeless.clone())
            .collect();
        let mut error = no_path(&self.shared.options, &causes);
        error.kind = ErrorKind::Gone;
        self.fail(error);
    }

    fn silent(&self, at: usize, what: &str) -> IoError {
        let options = &self.shared.options;
        let (step, last) = match &self.paths[at].phase {
            Phase::Connecting(association) => (format!("at {}", association.step.name()), String::new()),
            Phase::Resolving => ("looking up the name".into(), String::new()),
            _ => (
                "waiting to try again".into(),
                self.shared.status().last_error.clone(),
            ),
        };
        let found = if last.is_empty() {
            format!("that it is still {step}")
        } else {
            format!("that it is still {step}, after: {last}")
        };
        IoError::new(ErrorKind::Timeout, what)
            .at(&self.shared.place)
            .expected(format!(
                "a controller that is ready within {:?}",
                options.connect_timeout
            ))
            .found(found)
            .next("check host and port, the network, and the target's log")
    }

    fn keep_closing(&mut self, turn: &mut Turn<'_>) -> bool {
        let Some(closing) = &self.closing else {
            return false;
        };
        let deadline = closing.deadline;
        let mut changed = false;
        if deadline <= turn.now {
            self.end(closed(&self.shared.place), turn);
        } else if !self.ended {
            // What waits for a path that is not there would wait for nothing but its deadline, which is ours to keep.
            if !self.works.iter().all(Work::is_empty) || !self.own_is_empty() {
                return false;
            }
            changed = self.take_leave(deadline, turn);
            if self
                .paths
                .iter()
                .any(|path| matches!(path.phase, Phase::Stopping(_)))
            {
                return changed;
            }
            self.end(closed(&self.shared.place), turn);
        }
        if let Some(closing) = self.closing.take() {
            closing.reply.set(());
        }
        self.over = true;
        changed
    }

    /// Begin the orderly end of every path that is ready; the others have no controller to take leave of.
    fn take_leave(&mut self, deadline: Instant, turn: &Turn<'_>) -> bool {
        let patience = deadline.duration_since(turn.now).min(SHUTDOWN_MAX);
        let mut changed = false;
        for path in &mut self.paths {
            path.phase = match std::mem::replace(&mut path.phase, Phase::Over) {
                Phase::Ready(mut association) => {
                    changed = true;
                    let begun = association
                        .shut_down(turn.now, patience)
                        .and_then(|()| association.send());
                    match begun {
                        Ok(_) => Phase::Stopping(association),
                        Err(_) => {
                            association.end(turn);
                            Phase::Over
                        }
                    }
                }
                Phase::Stopping(association) => Phase::Stopping(association),
                Phase::Connecting(association) => {
                    association.end(turn);
                    Phase::Over
                }
                _ => Phase::Over,
            };
        }
        changed
    }
}

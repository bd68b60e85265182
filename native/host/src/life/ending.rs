//! How a device ends: deadlines, loss for good, and the orderly close.

use super::{Core, Phase};
use crate::association::{Association, Step};
use crate::errors::closed;
use crate::reactor::Turn;
use crate::work::Ended;
use headrace_transfer::{ErrorKind, IoError};
use std::time::Duration;

/// CC.SHN to CSTS.SHST, at most.
const SHUTDOWN_MAX: Duration = Duration::from_secs(2);

impl Core {
    pub(super) fn run_stopping(&mut self, mut association: Box<Association>, turn: &mut Turn<'_>) -> bool {
        let result = association.turn(turn, &mut |_| {}).and_then(|again| {
            association.tick(turn.now)?;
            Ok(association.send()? || again)
        });
        match result {
            Ok(again) if association.step != Step::Done => {
                self.phase = Phase::Stopping(association);
                again
            }
            // Done, or the controller went first.
            _ => {
                association.end(turn);
                self.end(closed(&self.shared.place), turn);
                false
            }
        }
    }

    /// No more I/O, for good.
    pub(super) fn end(&mut self, error: IoError, turn: &Turn<'_>) {
        let phase = std::mem::replace(&mut self.phase, Phase::Ended(error.clone()));
        if let Phase::Connecting(association) | Phase::Ready(association) | Phase::Stopping(association) =
            phase
        {
            // Parts that were under way end with their requests.
            drop(association.end(turn));
        }
        {
            let mut status = self.shared.status();
            status.state = if error.kind == ErrorKind::Closed {
                "closed"
            } else {
                "gone"
            };
            if error.kind != ErrorKind::Closed {
                status.last_error = error.to_string();
            }
        }
        self.loss = None;
        self.work.fail_all(&error).into_iter().for_each(Ended::report);
        if let Some(opening) = self.opening.take() {
            opening.reply.set(Err(error));
            self.over = true;
        }
    }

    /// What time has decided; `true` when the phase changed.
    pub(super) fn keep_deadlines(&mut self, turn: &mut Turn<'_>) -> bool {
        let now = turn.now;
        if self
            .opening
            .as_ref()
            .is_some_and(|opening| opening.deadline <= now)
        {
            let error = self.silent("the target did not come up in time");
            self.end(error, turn);
        }
        if let Phase::Connecting(association) = &self.phase {
            if self.opening.is_none() && self.attempt_until <= now {
                let error = self.silent(&format!("no progress in {}", association.step.name()));
                if let Phase::Connecting(association) = std::mem::replace(&mut self.phase, Phase::Between) {
                    association.end(turn);
                }
                self.attempt_failed(error.into(), turn);
            }
        }
        if self.loss.as_ref().is_some_and(|loss| loss.deadline <= now) {
            if let Some(loss) = self.loss.take() {
                let error = IoError::new(ErrorKind::Gone, "the target did not come back")
                    .at(&self.shared.place)
                    .expected(format!(
                        "a connection within {:?}",
                        self.shared.options.loss_timeout
                    ))
                    .found(loss.cause.to_string())
                    .next("check the target and the network, then open the device again");
                self.end(error, turn);
            }
        }
        self.keep_closing(turn)
    }

    fn silent(&self, what: &str) -> IoError {
        let options = &self.shared.options;
        let (step, last) = match &self.phase {
            Phase::Connecting(association) => (association.step.name(), String::new()),
            _ => ("waiting to try again", self.shared.status().last_error.clone()),
        };
        let found = if last.is_empty() {
            step.to_string()
        } else {
            format!("{step}, after: {last}")
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
        let late = closing.deadline <= turn.now;
        match &self.phase {
            Phase::Ended(_) => {}
            Phase::Stopping(_) if !late => return false,
            _ if late => self.end(closed(&self.shared.place), turn),
            _ if !self.work.is_empty() => return false,
            Phase::Ready(_) => {
                let patience = closing.deadline.duration_since(turn.now).min(SHUTDOWN_MAX);
                let Phase::Ready(mut association) = std::mem::replace(&mut self.phase, Phase::Between) else {
                    return false;
                };
                return match association
                    .shut_down(turn.now, patience)
                    .and_then(|()| association.send())
                {
                    Ok(_) => {
                        self.phase = Phase::Stopping(association);
                        true
                    }
                    Err(_) => {
                        association.end(turn);
                        self.end(closed(&self.shared.place), turn);
                        true
                    }
                };
            }
            // Lost, and nothing to do: there is no controller to take leave of.
            _ => self.end(closed(&self.shared.place), turn),
        }
        if let Some(closing) = self.closing.take() {
            closing.reply.set(());
        }
        self.shared.status().state = "closed";
        self.over = true;
        false
    }
}

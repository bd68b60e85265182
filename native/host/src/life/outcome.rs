//! What answers, and the lack of them, mean for commands: done, tried again, or given up.

use super::{Core, Loss, BACKOFF_MIN, GOOD_LIFE};
use crate::association::{is_transient, Association, Failure};
use crate::errors::{command_broken, command_failed};
use crate::queue::{Data, End};
use crate::reactor::Turn;
use crate::shared::count;
use crate::work::{Ended, Part, Verb};
use headrace_transfer::ErrorKind;
use std::time::{Duration, Instant};

/// Attempts of one command, by what went wrong.
const STATUS_TRIES: u8 = 5;
const DIGEST_TRIES: u8 = 3;
const TIMEOUT_TRIES: u8 = 2;
const VIOLATION_TRIES: u8 = 3;
/// Associations that were lost before any command succeeded on them: this one may be what ends them.
/// It is given up after this many and `loss_timeout`.
const LOSS_TRIES: u8 = 4;
/// Between attempts of a command that got a transient status; doubles.
const STATUS_DELAY: Duration = Duration::from_millis(50);

impl Core {
    /// What an answer means for its part.
    pub(super) fn settle(&mut self, mut part: Part, data: Data, end: End, now: Instant) -> Option<Ended> {
        let shared = self.shared.clone();
        let (counters, options) = (&shared.counters, &*shared.options);
        let bytes = part.blocks * u64::from(self.facts.block_bytes);
        let result = match end {
            End::Answer(cqe) if cqe.status.is_success() => {
                self.progress = true;
                match part.verb {
                    Verb::Read => {
                        count(&counters.reads, 1);
                        count(&counters.read_bytes, bytes);
                    }
                    Verb::Write { .. } => {
                        count(&counters.writes, 1);
                        count(&counters.written_bytes, bytes);
                    }
                    Verb::Flush => count(&counters.flushes, 1),
                    Verb::Deallocate | Verb::Zero => count(&counters.deallocates, 1),
                }
                Ok(())
            }
            End::Answer(cqe) => {
                let retry =
                    is_transient(cqe.status) && !cqe.status.dnr && part.tries.statuses + 1 < STATUS_TRIES;
                if retry {
                    let ours = STATUS_DELAY * (1 << part.tries.statuses);
                    let delay = self.facts.retry_delay(cqe.status.crd).unwrap_or(ours);
                    return self.retry(part, data, now + delay);
                }
                Err(command_failed(&part, options, cqe.status))
            }
            End::DataDigest if part.tries.statuses + 1 < DIGEST_TRIES => return self.retry(part, data, now),
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
        if result.is_err() {
            count(&counters.errors, 1);
        }
        self.work.finish(part, data, result)
    }

    fn retry(&mut self, mut part: Part, data: Data, at: Instant) -> Option<Ended> {
        part.tries.statuses += 1;
        count(&self.shared.counters.retries, 1);
        self.work.later(at, part, data);
        None
    }

    pub(super) fn lose(&mut self, association: Box<Association>, failure: Failure, turn: &Turn<'_>) {
        let Failure { error, violation, .. } = failure;
        let parts = association.end(turn);
        self.shared.lost();
        {
            let mut status = self.shared.status();
            status.state = "lost";
            status.last_error = error.to_string();
        }
        let options = self.shared.options.clone();
        let (mut keep, mut failed) = (Vec::new(), Vec::new());
        for (mut part, data, overdue) in parts {
            let tries = &mut part.tries;
            // A network that breaks now and then is not the command's fault, as long as something gets through.
            tries.losses = tries.losses.saturating_add(u8::from(!self.progress));
            let lost_at = *tries.lost_at.get_or_insert(turn.now);
            let hopeless = tries.losses >= LOSS_TRIES
                && options
                    .loss_timeout
                    .is_some_and(|timeout| turn.now.duration_since(lost_at) >= timeout);
            tries.timeouts += u8::from(overdue);
            tries.violations += u8::from(violation);
            let (kind, times, why) = if tries.timeouts >= TIMEOUT_TRIES {
                (ErrorKind::Timeout, tries.timeouts, "no answer in time")
            } else if tries.violations >= VIOLATION_TRIES {
                (ErrorKind::Protocol, tries.violations, "a broken protocol")
            } else if hopeless {
                (ErrorKind::Failed, tries.losses, "the association was lost")
            } else {
                count(&self.shared.counters.resends, 1);
                keep.push((part, data));
                continue;
            };
            let expected = format!("an answer within {:?}", options.io_timeout);
            let found = format!("{why}, {times} times; last: {error}");
            let error = command_broken(&part, &options, kind, &expected, found);
            count(&self.shared.counters.errors, 1);
            failed.extend(self.work.finish(part, data, Err(error)));
        }
        self.work.again(keep);
        if turn.now.duration_since(self.ready_since) >= GOOD_LIFE {
            self.backoff = BACKOFF_MIN;
        }
        self.loss = Some(Loss {
            deadline: turn.now
                + options
                    .loss_timeout
                    .unwrap_or(Duration::from_secs(10 * 365 * 86400)),
            cause: error,
        });
        self.wait(turn.now);
        failed.into_iter().for_each(Ended::report);
    }
}

//! The life of one device, on the I/O thread: connect, run, lose, reconnect, end.
//!
//! ```text
//!                     fails (first time)
//!        Connecting ----------------------> Ended
//!         ^      |                             ^
//!   time  |      | ready                       | loss_timeout passed, or another namespace came back: Gone
//!         |      v                             |
//!        Waiting <------------- Ready ---------+
//!                  lost           |
//!                                 | close, nothing left to do
//!                                 v
//!                             Stopping (CC.SHN) --> Ended
//! ```
//!
//! # Loss
//!
//! An association ends when a connection breaks, the peer breaks the protocol, a Keep Alive or a command is not answered in
//! time. Then, in this order: the sockets are closed (no late answer can touch a buffer), *the loss counter moves*, the
//! commands under way go back to wait, those that have used up their attempts are reported. Nothing is sent before the
//! next association is ready, and every resend carries the same bytes to the same place.
//!
//! # Why equality of the loss counter can be trusted
//!
//! A caller reads the counter (c0), writes, waits, flushes, waits, and reads it again (c1). Say c0 = c1. Each association
//! that was ready and ended moved the counter when it ended, before its successor was begun, and only the I/O thread moves
//! it. Between the two reads none ended. So the association on which the flush was answered was not begun after the
//! end of another that answered a write: all of them ran on one association, and the flush covers the writes. If c0 was
//! read while no association was up, the loss was counted before, and the same holds for the next one. An attempt that
//! fails before it is ready carried no I/O and is not counted.

use crate::association::{is_transient, Association, Failure, Step, Tag};
use crate::errors::{closed, command_broken, command_failed};
use crate::facts::Facts;
use crate::queue::{Completion, Data, End};
use crate::reactor::{first_token, Turn};
use crate::shared::{count, Latch, Shared};
use crate::work::{reject, Ended, Part, Verb, Work};
use headrace_transfer::{DeviceInfo, ErrorKind, IoError, Request};
use std::hash::{BuildHasher, Hasher};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

const BACKOFF_MIN: Duration = Duration::from_millis(100);
const BACKOFF_MAX: Duration = Duration::from_secs(2);
/// An association that lived this long was a good one: the next loss starts with a short wait again.
const GOOD_LIFE: Duration = Duration::from_secs(5);
/// Attempts of one command, by what went wrong.
const STATUS_TRIES: u8 = 5;
const DIGEST_TRIES: u8 = 3;
const TIMEOUT_TRIES: u8 = 2;
const VIOLATION_TRIES: u8 = 3;
const LOSS_TRIES: u8 = 16;
/// Between attempts of a command that got a transient status; doubles.
const STATUS_DELAY: Duration = Duration::from_millis(50);
/// CC.SHN to CSTS.SHST, at most.
const SHUTDOWN_MAX: Duration = Duration::from_secs(2);

enum Phase {
    /// While a method has the association in its hands.
    Between,
    Connecting(Box<Association>),
    Ready(Box<Association>),
    Waiting(Instant),
    Stopping(Box<Association>),
    Ended(IoError),
}

/// Who waits for the first connection.
struct Opening {
    deadline: Instant,
    reply: Arc<Latch<Result<DeviceInfo, IoError>>>,
    addresses_left: usize,
}

struct Loss {
    deadline: Instant,
    cause: IoError,
}

struct Closing {
    deadline: Instant,
    reply: Arc<Latch<()>>,
}

/// What the reactor needs to know after a turn.
pub(crate) struct Next {
    /// There is more to do at once.
    pub again: bool,
    pub wake_at: Option<Instant>,
    /// Forget this core.
    pub over: bool,
}

pub(crate) struct Core {
    pub id: usize,
    shared: Arc<Shared>,
    addresses: Vec<SocketAddr>,
    attempt: usize,
    phase: Phase,
    work: Work,
    /// Of the first connection; the namespace must stay so.
    facts: Facts,
    opening: Option<Opening>,
    attempt_until: Instant,
    loss: Option<Loss>,
    backoff: Duration,
    ready_since: Instant,
    closing: Option<Closing>,
    over: bool,
    completed: Vec<Completion<Tag>>,
    random: u64,
}

impl Core {
    pub fn new(
        id: usize,
        shared: Arc<Shared>,
        addresses: Vec<SocketAddr>,
        deadline: Instant,
        reply: Arc<Latch<Result<DeviceInfo, IoError>>>,
    ) -> Self {
        let now = Instant::now();
        let addresses_left = addresses.len();
        Core {
            id,
            shared,
            addresses,
            attempt: 0,
            phase: Phase::Waiting(now),
            work: Work::default(),
            facts: Facts::default(),
            opening: Some(Opening {
                deadline,
                reply,
                addresses_left,
            }),
            attempt_until: deadline,
            loss: None,
            backoff: BACKOFF_MIN,
            ready_since: now,
            closing: None,
            over: false,
            completed: Vec::new(),
            random: std::collections::hash_map::RandomState::new()
                .build_hasher()
                .finish()
                | 1,
        }
    }

    pub fn event(&mut self, event: &mio::event::Event) {
        if let Phase::Connecting(association) | Phase::Ready(association) | Phase::Stopping(association) =
            &mut self.phase
        {
            association.event(event);
        }
    }

    pub fn submit(&mut self, requests: Vec<Request>) {
        for request in requests {
            let error = match &self.phase {
                Phase::Ended(error) => Some(error.clone()),
                _ if self.closing.is_some() || self.opening.is_some() => Some(closed(&self.shared.place)),
                _ => None,
            };
            let ended = match error {
                Some(error) => Some(reject(request, error)),
                None => self.work.accept(request, &self.facts, &self.shared.place),
            };
            if let Some(ended) = ended {
                ended.report();
            }
        }
    }

    pub fn close(&mut self, deadline: Instant, reply: Arc<Latch<()>>) {
        if let Some(closing) = &mut self.closing {
            // A second close: whoever waited first is let go, the earlier deadline counts.
            closing.reply.set(());
            closing.deadline = closing.deadline.min(deadline);
            closing.reply = reply;
            return;
        }
        self.closing = Some(Closing { deadline, reply });
    }

    /// Everything that can be done now.
    pub fn run(&mut self, turn: &mut Turn<'_>) -> Next {
        let mut again = match std::mem::replace(&mut self.phase, Phase::Between) {
            Phase::Connecting(association) => self.run_connecting(association, turn),
            Phase::Ready(association) => self.run_ready(association, turn),
            Phase::Stopping(association) => self.run_stopping(association, turn),
            Phase::Waiting(at) if at <= turn.now => self.begin(turn),
            other => {
                self.phase = other;
                false
            }
        };
        again |= self.keep_deadlines(turn);
        Next {
            again: again && !self.over,
            wake_at: self.wake_at(),
            over: self.over,
        }
    }

    /// The reactor stops: everything ends now.
    pub fn abort(&mut self, turn: &Turn<'_>) {
        let error = closed(&self.shared.place);
        self.end(error, turn);
        if let Some(opening) = self.opening.take() {
            opening.reply.set(Err(closed(&self.shared.place)));
        }
        if let Some(closing) = self.closing.take() {
            closing.reply.set(());
        }
    }

    // Connecting.

    fn begin(&mut self, turn: &Turn<'_>) -> bool {
        let address = self.addresses[self.attempt % self.addresses.len()];
        let token = first_token(self.id, self.attempt);
        self.attempt = self.attempt.wrapping_add(1);
        let options = self.shared.options.clone();
        self.attempt_until = turn.now + options.connect_timeout;
        {
            let mut status = self.shared.status();
            status.address = address.to_string();
            status.reconnect_attempts += u64::from(self.opening.is_none());
        }
        match Association::begin(options, address, token, turn) {
            Ok(association) => self.phase = Phase::Connecting(Box::new(association)),
            Err(failure) => self.attempt_failed(failure, turn),
        }
        false
    }

    fn run_connecting(&mut self, mut association: Box<Association>, turn: &mut Turn<'_>) -> bool {
        let result = association.turn(turn, &mut |_| {}).and_then(|again| {
            association.tick(turn.now)?;
            Ok(association.send()? || again)
        });
        match result {
            Ok(_) if association.step == Step::Running => self.ready(association, turn),
            Ok(again) => {
                self.phase = Phase::Connecting(association);
                again
            }
            Err(failure) => {
                association.end(turn);
                self.attempt_failed(failure, turn);
                false
            }
        }
    }

    fn attempt_failed(&mut self, failure: Failure, turn: &Turn<'_>) {
        self.shared.status().last_error = failure.error.to_string();
        if let Some(opening) = &mut self.opening {
            opening.addresses_left = opening.addresses_left.saturating_sub(1);
            let another = failure.transport && opening.addresses_left > 0;
            if another {
                self.phase = Phase::Waiting(turn.now);
            } else if failure.transient {
                opening.addresses_left = self.addresses.len();
                self.wait(turn.now);
            } else {
                self.end(failure.error, turn);
            }
            return;
        }
        self.wait(turn.now);
        if let Some(loss) = &mut self.loss {
            loss.cause = failure.error;
        }
    }

    /// Until the next attempt: doubling, with up to a quarter more or less, so that many hosts do not come at once.
    fn wait(&mut self, now: Instant) {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let share = 0.75 + (self.random % 1024) as f64 / 2048.0;
        self.phase = Phase::Waiting(now + self.backoff.mul_f64(share));
        self.backoff = (self.backoff * 2).min(BACKOFF_MAX);
    }

    fn ready(&mut self, association: Box<Association>, turn: &Turn<'_>) -> bool {
        let facts = &association.facts;
        if self.opening.is_none() {
            if let Some(difference) = self.facts.differs(facts) {
                let error = IoError::new(ErrorKind::Gone, "another namespace came back")
                    .at(&self.shared.place)
                    .expected("the namespace that was opened")
                    .found(difference)
                    .next("open the device again if the change was meant");
                association.end(turn);
                self.end(error, turn);
                return false;
            }
        } else {
            self.facts = facts.clone();
        }
        {
            let mut status = self.shared.status();
            status.state = "connected";
            status.facts = facts.clone();
            status.reconnects += u64::from(self.opening.is_none());
        }
        self.ready_since = turn.now;
        self.loss = None;
        let info = facts.info();
        self.phase = Phase::Ready(association);
        if let Some(opening) = self.opening.take() {
            opening.reply.set(Ok(info));
        }
        true
    }

    // Running.

    fn run_ready(&mut self, mut association: Box<Association>, turn: &mut Turn<'_>) -> bool {
        if self.work.due().is_some_and(|at| at <= turn.now) {
            self.work.ripen(turn.now);
        }
        self.pump(&mut association, turn.now);
        let mut completed = std::mem::take(&mut self.completed);
        let result = association.turn(turn, &mut |completion| completed.push(completion));
        for completion in completed.drain(..) {
            if let Tag::Part(part) = completion.tag {
                if let Some(ended) = self.settle(part, completion.data, completion.end, turn.now) {
                    ended.report();
                }
            }
        }
        self.completed = completed;
        let result = result.and_then(|again| {
            self.pump(&mut association, turn.now);
            let more = association.send()?;
            association.tick(turn.now)?;
            // A tick may have queued a Keep Alive.
            Ok(association.send()? || more || again)
        });
        match result {
            Ok(again) => {
                self.phase = Phase::Ready(association);
                again
            }
            Err(failure) => {
                self.lose(association, failure, turn);
                false
            }
        }
    }

    fn pump(&mut self, association: &mut Association, now: Instant) {
        while self.work.waiting() && association.has_room() {
            let Some((part, data)) = self.work.next(&association.facts) else {
                return;
            };
            if let Err(back) = association.send_part(part, data, now) {
                self.work.again(vec![back]);
                return;
            }
        }
    }

    /// What an answer means for its part.
    fn settle(&mut self, mut part: Part, data: Data, end: End, now: Instant) -> Option<Ended> {
        let shared = self.shared.clone();
        let (counters, options) = (&shared.counters, &*shared.options);
        let bytes = part.blocks * u64::from(self.facts.block_bytes);
        let result = match end {
            End::Answer(cqe) if cqe.status.is_success() => {
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
                    let delay = STATUS_DELAY * (1 << part.tries.statuses);
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

    fn lose(&mut self, association: Box<Association>, failure: Failure, turn: &Turn<'_>) {
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
            tries.losses += 1;
            tries.timeouts += u8::from(overdue);
            tries.violations += u8::from(violation);
            let (kind, times, why) = if tries.timeouts >= TIMEOUT_TRIES {
                (ErrorKind::Timeout, tries.timeouts, "no answer in time")
            } else if tries.violations >= VIOLATION_TRIES {
                (ErrorKind::Protocol, tries.violations, "a broken protocol")
            } else if tries.losses >= LOSS_TRIES {
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
            deadline: turn.now + options.loss_timeout,
            cause: error,
        });
        self.wait(turn.now);
        failed.into_iter().for_each(Ended::report);
    }

    // Ending.

    fn run_stopping(&mut self, mut association: Box<Association>, turn: &mut Turn<'_>) -> bool {
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
    fn end(&mut self, error: IoError, turn: &Turn<'_>) {
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
    fn keep_deadlines(&mut self, turn: &mut Turn<'_>) -> bool {
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

    fn wake_at(&self) -> Option<Instant> {
        let phase = match &self.phase {
            Phase::Connecting(association) => [association.wake_at(), Some(self.attempt_until)]
                .into_iter()
                .flatten()
                .min(),
            Phase::Ready(association) | Phase::Stopping(association) => association.wake_at(),
            Phase::Waiting(at) => Some(*at),
            Phase::Between | Phase::Ended(_) => None,
        };
        let due = matches!(self.phase, Phase::Ready(_))
            .then(|| self.work.due())
            .flatten();
        [
            phase,
            due,
            self.opening.as_ref().map(|opening| opening.deadline),
            self.loss.as_ref().map(|loss| loss.deadline),
            self.closing.as_ref().map(|closing| closing.deadline),
        ]
        .into_iter()
        .flatten()
        .min()
    }
}

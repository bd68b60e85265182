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

mod ending;
mod heed;
mod outcome;

use crate::association::{Association, Failure, Step, Tag};
use crate::errors::closed;
use crate::facts::Facts;
use crate::queue::Completion;
use crate::reactor::{first_token, Turn};
use crate::resolve::{ask, is_address, Answer};
use crate::shared::{Latch, Shared};
use crate::work::{reject, Ended, Work};
use headrace_transfer::{DeviceInfo, ErrorKind, IoError, Request};
use std::hash::{BuildHasher, Hasher};
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::{Duration, Instant};

const BACKOFF_MIN: Duration = Duration::from_millis(100);
const BACKOFF_MAX: Duration = Duration::from_secs(2);
/// An association that lived this long was a good one: the next loss starts with a short wait again.
const GOOD_LIFE: Duration = Duration::from_secs(5);

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
    /// A name that is being looked up again, since its addresses do not answer any more.
    asked: Option<Answer>,
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
    /// A command succeeded on this association.
    progress: bool,
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
            asked: None,
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
            progress: false,
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

    /// The last handle is gone: whatever was not closed is closed now.
    pub fn hurry(&mut self) {
        if self.closing.is_none() {
            self.close(Instant::now(), Arc::new(Latch::new()));
        }
    }

    // Connecting.

    fn begin(&mut self, turn: &Turn<'_>) -> bool {
        if let Some(answer) = self.asked.as_ref().and_then(|asked| asked.wait(Duration::ZERO)) {
            self.asked = None;
            // A name that does not resolve just now keeps its old addresses.
            self.addresses = answer
                .ok()
                .filter(|found| !found.is_empty())
                .unwrap_or_else(|| self.addresses.clone());
        }
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
        let options = self.shared.options.clone();
        if failure.transport && self.asked.is_none() && !is_address(&options.portals[0].host) {
            // The target may have come back elsewhere. Without a thread to ask, the old addresses are tried on.
            self.asked = ask(&options.portals[0].host, options.portals[0].port).ok();
        }
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
        // A short `loss_timeout` gets several attempts, too.
        let longest = BACKOFF_MAX.min(self.shared.options.loss_timeout.unwrap_or(Duration::MAX) / 4);
        self.backoff = (self.backoff * 2).min(longest);
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
        self.facts.size_bytes = facts.size_bytes;
        self.shared.size_bytes.store(facts.size_bytes, Ordering::Relaxed);
        {
            let mut status = self.shared.status();
            status.state = "connected";
            status.facts = facts.clone();
            status.reconnects += u64::from(self.opening.is_none());
        }
        self.ready_since = turn.now;
        self.progress = false;
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
        if let Err(error) = self.heed(&mut association) {
            association.end(turn);
            self.end(error, turn);
            return false;
        }
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

/// Normally there is nothing left to do here. If the I/O thread dies, nobody waits in vain.
impl Drop for Core {
    fn drop(&mut self) {
        let error = closed(&self.shared.place);
        // The association, and with it every pointer into the callers' buffers, goes first.
        self.phase = Phase::Ended(error.clone());
        self.completed.clear();
        self.work.fail_all(&error).into_iter().for_each(Ended::report);
        if let Some(opening) = self.opening.take() {
            opening.reply.set(Err(error));
        }
        if let Some(closing) = self.closing.take() {
            closing.reply.set(());
        }
    }
}

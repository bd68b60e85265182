//! The life of one device, on the I/O thread: open its paths, move commands over them, lose them, get them back, end.
//!
//! * [`path`]: the life of one path
//! * [`dispatch`]: which path takes the next command; [`pace`]: which are slow
//! * [`outcome`]: what answers, and the lack of them, mean; [`record`]: what is kept of them
//! * [`own`]: commands that are no parts of requests, and the guard of writes
//! * [`ending`]: deadlines, failing, the orderly close
//!
//! # The device
//!
//! ```text
//!   connecting --> connected <--------> lost: no path is usable, I/O waits
//!        |             |     usable       |
//!        | no path     |                  | loss_timeout passed, or every path is refused for good
//!        | came up     | close            v
//!        v             v     usable     failing: I/O fails at once; paths are tried all the same
//!      (ended) <---- closed
//! ```
//!
//! A path is *usable* when its association is ready and the ANA state of the namespace lets commands in.
//!
//! # Loss
//!
//! An association ends when a connection breaks, the peer breaks the protocol, a Keep Alive or a command is not answered in
//! time. Then, in this order: the sockets are closed (no late answer can touch a buffer), the ranges of writes under way
//! become unsettled ([`crate::ghosts`]), *the loss counter moves*, the commands under way go back to wait, those that have
//! used up their attempts are reported. They go out again, with the same bytes to the same place, on whichever path is
//! usable first.
//!
//! # Why equality of the loss counter can be trusted
//!
//! The counter is the sum over all paths. A caller reads it (c0), writes, waits, flushes, waits, and reads it again (c1). Say
//! c0 = c1, and let W be one of the writes, answered by association A of some path. Every association that was ready and
//! ended moved the counter when it ended, before anything that it had under way was sent again, and only the I/O thread
//! moves it. So A did not end between the answer and the second reading.
//!
//! The flush was *spread* when it was cut, which was after W was answered: one Flush command for each association that had
//! answered writes not yet covered. Either A was one of them; then its Flush ran on A, also where A had it sent again (a
//! part keeps its target while that lives), and the caller was told after all of them had succeeded. Or all that A had answered was covered, by a Flush that A itself
//! was sent after W was answered, and that succeeded. (`Path::written` counts answers; a Flush notes the count when it is
//! sent, and covers so many when it succeeds.) Or A was alive but took no Flush: its ANA state had changed, or it answered
//! the Flush with a path-related status. Then nobody can say what its cache will come to, so *the counter moves as if A was
//! lost*, which contradicts c0 = c1.
//!
//! In each case the flush covers W. A write with FUA needs no flush: its own answer says that it is durable, and a resend of
//! it is a write with FUA again. An attempt that fails before it is ready carried no I/O and is not counted.

mod dispatch;
mod ending;
mod heed;
mod outcome;
mod own;
mod pace;
mod path;
mod record;

use crate::association::{Association, Failure, Step, Tag};
use crate::errors::{closed, no_path};
use crate::facts::Facts;
use crate::flow::Governor;
use crate::lane::LANES;
use crate::options::HostOptions;
use crate::paths::PathState;
use crate::queue::Completion;
use crate::reactor::{first_token, path_of, Reactor, Turn};
use crate::resolve::{ask, literal, unknown};
use crate::shared::{Latch, Shared};
use crate::work::{reject, Ended, Work};
use headrace_transfer::{DeviceInfo, ErrorKind, EventKind, IoError, Op, Recorder, Request};
use own::Own;
use path::{Path, Phase};
use std::hash::{BuildHasher, Hasher};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Who waits for the first connection.
struct Opening {
    deadline: Instant,
    reply: Arc<Latch<Result<DeviceInfo, IoError>>>,
}

/// No path is usable.
struct Loss {
    /// I/O fails then; `None`: it waits for ever, or fails already.
    deadline: Option<Instant>,
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
    reactor: Weak<Reactor>,
    paths: Vec<Path>,
    /// One for each traffic class.
    works: [Work; LANES],
    /// Our numbers at the governor, one for each traffic class.
    flows: [usize; LANES],
    /// Of the first connection; the namespace must stay so.
    facts: Facts,
    opening: Option<Opening>,
    loss: Option<Loss>,
    /// What new requests are told: the device fails for now, or has ended.
    failing: Option<IoError>,
    ended: bool,
    closing: Option<Closing>,
    over: bool,
    next_path: usize,
    completed: Vec<Completion<Tag>>,
    recorder: Option<Recorder>,
    own: Own,
    random: u64,
}

impl Core {
    pub fn new(
        id: usize,
        shared: Arc<Shared>,
        recorder: Option<Recorder>,
        reactor: Weak<Reactor>,
        deadline: Instant,
        reply: Arc<Latch<Result<DeviceInfo, IoError>>>,
    ) -> Self {
        let now = Instant::now();
        let paths = (0..shared.paths.len()).map(|index| Path::new(index, shared.clone(), now, deadline));
        Core {
            id,
            paths: paths.collect(),
            shared,
            reactor,
            works: std::array::from_fn(|lane| Work::new(lane as u8)),
            flows: [usize::MAX; LANES],
            facts: Facts::default(),
            opening: Some(Opening { deadline, reply }),
            loss: None,
            failing: None,
            ended: false,
            closing: None,
            over: false,
            next_path: 0,
            completed: Vec::new(),
            recorder,
            own: Own::default(),
            random: std::collections::hash_map::RandomState::new()
                .build_hasher()
                .finish()
                | 1,
        }
    }

    /// The I/O thread has us.
    pub fn join(&mut self, governor: &mut Governor) {
        self.flows = std::array::from_fn(|_| governor.join(self.id, self.shared.options.inflight));
        let _ = self.shared.flow.set(governor.report());
    }

    pub fn block_bytes(&self) -> u32 {
        self.facts.block_bytes
    }

    pub fn works(&self) -> &[Work] {
        &self.works
    }

    pub fn options(&self) -> Arc<HostOptions> {
        self.shared.options.clone()
    }

    /// Of every path that has one, by its index.
    pub fn each_association(&mut self, mut look: impl FnMut(usize, &Association)) {
        for path in &mut self.paths {
            let at = path.index;
            if let Some(association) = path.association() {
                look(at, association);
            }
        }
    }

    pub fn leave(&self, governor: &mut Governor) {
        self.flows.iter().for_each(|flow| governor.leave(*flow));
    }

    pub fn event(&mut self, event: &mio::event::Event) {
        let path = self.paths.get_mut(path_of(event.token()));
        if let Some(association) = path.and_then(Path::association) {
            association.event(event);
        }
    }

    pub fn submit(&mut self, lane: usize, requests: Vec<Request>) {
        let now = Instant::now();
        for request in requests {
            let error = match self.refusal(matches!(request.op, Op::Read { .. })) {
                Some(error) => Some(error.clone()),
                None if self.closing.is_some() || self.opening.is_some() => Some(closed(&self.shared.place)),
                None => None,
            };
            let ended = match error {
                Some(error) => Some(reject(request, error)),
                None => self.works[lane].accept(request, &self.facts, &self.shared.place, now),
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

    /// Try refused, waiting and held-back paths at once.
    pub fn reconnect(&mut self) {
        let now = Instant::now();
        self.paths.iter_mut().for_each(|path| path.reconnect(now));
    }

    /// Everything that can be done now.
    pub fn run(&mut self, turn: &mut Turn<'_>) -> Next {
        let mut again = false;
        self.ripen(turn.now);
        self.run_own(turn.now);
        self.recall(turn);
        self.pump(turn);
        for at in 0..self.paths.len() {
            again |= self.run_path(at, turn);
        }
        again |= self.look(turn.now);
        self.run_own(turn.now);
        self.pump(turn);
        for at in 0..self.paths.len() {
            again |= self.send(at, turn);
        }
        again |= self.keep_deadlines(turn);
        Next {
            again: again && !self.over,
            wake_at: self.wake_at(turn.now),
            over: self.over,
        }
    }

    fn run_path(&mut self, at: usize, turn: &mut Turn<'_>) -> bool {
        match std::mem::replace(&mut self.paths[at].phase, Phase::Between) {
            Phase::Connecting(association) => self.run_connecting(at, association, turn),
            Phase::Ready(association) => self.run_ready(at, association, turn),
            Phase::Stopping(association) => self.run_stopping(at, association, turn),
            Phase::Waiting(then) if then <= turn.now => self.begin(at, turn),
            Phase::Resolving => self.resolved(at, turn),
            other => {
                self.paths[at].phase = other;
                false
            }
        }
    }

    /// The last handle is gone: whatever was not closed is closed now.
    pub fn hurry(&mut self) {
        if self.closing.is_none() {
            self.close(Instant::now(), Arc::new(Latch::new()));
        }
    }

    fn random(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }

    // Connecting.

    fn begin(&mut self, at: usize, turn: &Turn<'_>) -> bool {
        let timeout = self.shared.options.connect_timeout;
        let opening = self.opening.as_ref().map(|opening| opening.deadline);
        let path = &mut self.paths[at];
        path.attempt_until = opening.unwrap_or(turn.now + timeout);
        path.begun = turn.now;
        if path.addresses.is_empty() {
            let portal = path.portal().clone();
            if let Some(address) = literal(&portal) {
                path.addresses = vec![address];
            } else {
                return self.look_up(at, turn);
            }
            path.addresses_left = path.addresses.len();
        } else if let Some(answer) = path.asked.as_ref().and_then(|asked| asked.wait(Duration::ZERO)) {
            path.asked = None;
            // A name that does not resolve just now keeps its old addresses.
            if let Some(found) = answer.ok().filter(|found| !found.is_empty()) {
                path.addresses = found;
            }
        }
        self.connect(at, turn)
    }

    /// The addresses of a name, from a thread that then wakes us.
    fn look_up(&mut self, at: usize, turn: &Turn<'_>) -> bool {
        let portal = self.paths[at].portal().clone();
        let (reactor, id) = (self.reactor.clone(), self.id);
        let wake = move || {
            if let Some(reactor) = reactor.upgrade() {
                reactor.wake(id);
            }
        };
        match ask(&portal.host, portal.port, wake) {
            Ok(answer) => {
                self.paths[at].asked = Some(answer);
                self.paths[at].phase = Phase::Resolving;
                self.paths[at].tell_state(PathState::Connecting);
            }
            Err(error) => {
                let error = IoError::new(ErrorKind::Failed, "cannot start a thread to resolve a name")
                    .found(error.to_string());
                self.attempt_failed(at, error.into(), turn);
            }
        }
        false
    }

    fn resolved(&mut self, at: usize, turn: &Turn<'_>) -> bool {
        let path = &mut self.paths[at];
        path.phase = Phase::Resolving;
        let Some(answer) = path.asked.as_ref().and_then(|asked| asked.wait(Duration::ZERO)) else {
            return false;
        };
        path.asked = None;
        match answer {
            Ok(found) if !found.is_empty() => {
                path.addresses_left = found.len();
                path.addresses = found;
                return self.connect(at, turn);
            }
            Ok(_) => self.attempt_failed(at, self.unknown(at, "no address").into(), turn),
            Err(error) => self.attempt_failed(at, self.unknown(at, &error.to_string()).into(), turn),
        }
        true
    }

    fn unknown(&self, at: usize, found: &str) -> IoError {
        unknown(&self.paths[at].portal().host, found)
    }

    fn connect(&mut self, at: usize, turn: &Turn<'_>) -> bool {
        let path = &mut self.paths[at];
        let address = path.addresses[path.attempt % path.addresses.len()];
        let token = first_token(self.id, at, path.attempt);
        path.attempt = path.attempt.wrapping_add(1);
        path.tell_state(PathState::Connecting);
        {
            let mut status = path.public().status();
            status.address = address.to_string();
            status.attempts += 1;
        }
        match Association::begin(self.shared.options.clone(), at, address, token, turn) {
            Ok(association) => path.phase = Phase::Connecting(Box::new(association)),
            Err(failure) => self.attempt_failed(at, failure, turn),
        }
        false
    }

    fn run_connecting(&mut self, at: usize, mut association: Box<Association>, turn: &mut Turn<'_>) -> bool {
        let result = association.turn(turn, &mut |_| {}).and_then(|again| {
            association.tick(turn.now)?;
            Ok(association.send()? || again)
        });
        match result {
            Ok(_) if association.step == Step::Running => self.ready(at, association, turn),
            Ok(again) => {
                self.paths[at].phase = Phase::Connecting(association);
                again
            }
            Err(failure) => {
                association.end(turn);
                self.attempt_failed(at, failure, turn);
                true
            }
        }
    }

    fn attempt_failed(&mut self, at: usize, failure: Failure, turn: &Turn<'_>) {
        let random = self.random();
        let why = failure.error.to_string();
        self.shared.status().last_error = why.clone();
        self.record_path(at, EventKind::NotConnected, turn.now);
        let path = &mut self.paths[at];
        if failure.permanent {
            path.refuse(failure.error);
        } else if self.opening.is_some() {
            path.addresses_left = path.addresses_left.saturating_sub(1);
            if failure.transport && path.addresses_left > 0 {
                path.phase = Phase::Waiting(turn.now);
                path.tell(PathState::Waiting, why);
            } else {
                path.addresses_left = path.addresses.len();
                if !failure.transient {
                    path.hopeless = Some(failure.error);
                }
                path.wait(turn.now, random, &why);
            }
        } else {
            path.wait(turn.now, random, &why);
            let portal = path.portal().clone();
            if failure.transport && path.asked.is_none() && literal(&portal).is_none() {
                // The target may have come back elsewhere. Without a thread to ask, the old addresses are tried on.
                path.asked = ask(&portal.host, portal.port, || {}).ok();
            }
        }
        let hopeless: Vec<_> = self
            .paths
            .iter()
            .filter_map(|path| path.hopeless.clone())
            .collect();
        if self.opening.is_some() && hopeless.len() == self.paths.len() {
            let error = no_path(&self.shared.options, &hopeless);
            self.end(error, turn);
        }
    }

    fn ready(&mut self, at: usize, mut association: Box<Association>, turn: &Turn<'_>) -> bool {
        self.paths[at].share_lanes(&mut association);
        let facts = &association.facts;
        let first = self.opening.is_some();
        if !first {
            if let Some(difference) = self.facts.differs(facts) {
                let error = IoError::new(ErrorKind::Gone, "another namespace came back")
                    .at(format!("{}, by {}", self.shared.place, self.paths[at].portal()))
                    .expected("the namespace that was opened")
                    .found(difference)
                    .next("open the device again if the change was meant");
                association.end(turn);
                self.shared.status().last_error = error.to_string();
                self.paths[at].refuse(error);
                return true;
            }
        } else {
            self.facts = facts.clone();
        }
        self.facts.size_bytes = facts.size_bytes;
        self.shared.size_bytes.store(facts.size_bytes, Ordering::Relaxed);
        {
            let mut status = self.shared.status();
            status.facts = facts.clone();
            status.address = self.paths[at].public().status().address.clone();
        }
        let info = facts.info();
        let path = &mut self.paths[at];
        let back = path.generation > 0;
        path.became_ready(association, turn.now, !back);
        self.record_path(at, EventKind::Connected, turn.now);
        self.look(turn.now);
        if let Some(opening) = self.opening.take() {
            self.shared.status().state = "connected";
            opening.reply.set(Ok(info));
        }
        true
    }

    fn wake_at(&self, now: Instant) -> Option<Instant> {
        let usable = self.paths.iter().any(|path| path.tier(now).is_some());
        let due = self.works.iter().filter_map(Work::due).min().filter(|_| usable);
        let paths = self.paths.iter().filter_map(Path::wake_at).min();
        [
            paths,
            due,
            self.opening.as_ref().map(|opening| opening.deadline),
            self.loss.as_ref().and_then(|loss| loss.deadline),
            self.closing.as_ref().map(|closing| closing.deadline),
            self.own_wake_at(),
            self.look_due(),
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
        // The associations, and with them every pointer into the callers' buffers, go first.
        self.paths.iter_mut().for_each(|path| path.phase = Phase::Over);
        self.completed.clear();
        self.end_own(&error);
        let works = self.works.iter_mut();
        works
            .flat_map(|work| work.fail_all(&error))
            .collect::<Vec<_>>()
            .into_iter()
            .for_each(Ended::report);
        if let Some(opening) = self.opening.take() {
            opening.reply.set(Err(error));
        }
        if let Some(closing) = self.closing.take() {
            closing.reply.set(());
        }
    }
}

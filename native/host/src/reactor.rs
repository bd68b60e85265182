//! The I/O thread: one per process, for all devices, asleep when nothing is to be done.
//!
//! While commands of a device with `HostOptions::poll` are under way it looks for their answers for so long before it sleeps.
//!
//! Handles talk to it through an inbox; a wake-up (one write to an eventfd) is paid only when the thread sleeps. It starts
//! with the first device and ends with the last; the handle that goes last joins it, once every device had its orderly end.
//! Should the thread die of a defect of ours, everything that waits for it is told, and so is whoever comes later.
//!
//! # Fork
//!
//! Threads do not survive a fork. The current reactor is found by process id, in a list without locks that a fork could
//! leave locked for ever: a child finds no reactor of its own and starts one.

use crate::connection::SCRATCH_BYTES;
use crate::errors::closed;
use crate::flow::Governor;
use crate::life::Core;
use crate::passthrough::Call;
use crate::shared::Latch;
use crate::under_way;
use crate::work::reject;
use headrace_transfer::{ErrorKind, Event, IoError, Request};
use headrace_wire::reservation::ReservationType;
use mio::{Events, Poll, Registry, Token, Waker};
use std::cell::RefCell;
use std::collections::hash_map::RandomState;
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::hash::{BuildHasher, Hasher};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const WAKE: Token = Token(0);
const EVENTS: usize = 256;
/// Bits of a token for the connection, for the attempt, for the path; the rest is the core's number.
const CONNECTION_BITS: u32 = 9;
const ATTEMPT_BITS: u32 = 18;
const PATH_BITS: u32 = 4;

/// The token of the admin connection in a path's `attempt`th association; its I/O connections follow.
pub(crate) fn first_token(core: usize, path: usize, attempt: usize) -> usize {
    let attempt = attempt & ((1 << ATTEMPT_BITS) - 1);
    ((core << PATH_BITS | path) << ATTEMPT_BITS | attempt) << CONNECTION_BITS
}

fn core_of(token: Token) -> usize {
    token.0 >> (PATH_BITS + ATTEMPT_BITS + CONNECTION_BITS)
}

pub(crate) fn path_of(token: Token) -> usize {
    token.0 >> (ATTEMPT_BITS + CONNECTION_BITS) & ((1 << PATH_BITS) - 1)
}

const _: () = assert!(crate::options::PORTALS_MAX <= 1 << PATH_BITS);

/// What a core may use during its turn.
pub(crate) struct Turn<'a> {
    pub registry: &'a Registry,
    pub scratch: &'a mut [u8],
    pub now: Instant,
    /// How long to look for what comes before sleeping; raised by whoever has commands under way.
    pub poll: Duration,
    pub governor: &'a RefCell<Governor>,
}

pub(crate) enum Message {
    Open(Box<Core>),
    /// To a core, by this lane.
    Submit(usize, usize, Vec<Request>),
    /// Something that this core waits for has happened elsewhere.
    Wake(usize),
    /// Try every path again.
    Reconnect(usize),
    Call(usize, Box<Call>),
    Guard(
        usize,
        Option<(u64, ReservationType)>,
        Arc<Latch<Result<(), IoError>>>,
    ),
    UnderWay(usize, Range<u64>, under_way::Reply),
    /// What is under way, and how many events there are.
    Events(usize, Arc<Latch<(Vec<Event>, u64)>>),
    Close(usize, Instant, Arc<Latch<()>>),
    Stop,
}

impl Message {
    /// There is no thread to do it.
    fn return_to_sender(self) {
        let gone = || {
            IoError::new(ErrorKind::Failed, "the I/O thread of this process has ended")
                .next("this is a defect of headrace: report it with what was printed before")
        };
        match self {
            Message::Open(core) => drop(core),
            Message::Submit(_, _, requests) => requests
                .into_iter()
                .for_each(|request| reject(request, gone()).report()),
            Message::Close(_, _, reply) => reply.set(()),
            Message::Call(_, call) => call.fail(gone()),
            Message::Guard(_, _, reply) => reply.set(Err(gone())),
            Message::UnderWay(_, _, reply) => reply.set(Err(gone())),
            // Nothing is under way.
            Message::Events(_, reply) => reply.set((Vec::new(), u64::MAX)),
            Message::Wake(_) | Message::Reconnect(_) | Message::Stop => {}
        }
    }
}

struct Inbox {
    messages: Mutex<VecDeque<Message>>,
    /// The thread sleeps or is about to: whoever clears this wakes it.
    asleep: AtomicBool,
    /// The thread has ended. Changes under the lock of `messages`.
    dead: AtomicBool,
}

impl Inbox {
    fn lock(&self) -> MutexGuard<'_, VecDeque<Message>> {
        self.messages.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The way to the I/O thread.
pub(crate) struct Reactor {
    process: u32,
    inbox: Arc<Inbox>,
    waker: Waker,
    thread: Mutex<Option<JoinHandle<()>>>,
    next_core: AtomicUsize,
}

/// The reactor of each process in this chain of forks; the last is ours.
struct Slot {
    process: u32,
    current: Mutex<Weak<Reactor>>,
    child: OnceLock<Box<Slot>>,
}

static SLOTS: OnceLock<Slot> = OnceLock::new();

impl Slot {
    fn new(process: u32) -> Self {
        Slot {
            process,
            current: Mutex::new(Weak::new()),
            child: OnceLock::new(),
        }
    }

    fn ours() -> &'static Slot {
        let process = std::process::id();
        let mut slot = SLOTS.get_or_init(|| Slot::new(process));
        while slot.process != process {
            slot = slot.child.get_or_init(|| Box::new(Slot::new(process)));
        }
        slot
    }
}

impl Reactor {
    /// This process's, started if there is none.
    pub fn current() -> Result<Arc<Reactor>, IoError> {
        let mut current = Slot::ours()
            .current
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(reactor) = current.upgrade().filter(|reactor| !reactor.is_dead()) {
            return Ok(reactor);
        }
        let reactor = Arc::new(Self::start().map_err(|error| {
            IoError::new(ErrorKind::Failed, "cannot start the I/O thread")
                .found(error.to_string())
                .next("check the limits of open files and threads")
        })?);
        *current = Arc::downgrade(&reactor);
        Ok(reactor)
    }

    fn start() -> std::io::Result<Reactor> {
        let poll = Poll::new()?;
        let waker = Waker::new(poll.registry(), WAKE)?;
        let inbox = Arc::new(Inbox {
            messages: Mutex::default(),
            asleep: AtomicBool::new(false),
            dead: AtomicBool::new(false),
        });
        let thread = Thread {
            poll,
            inbox: inbox.clone(),
            cores: HashMap::new(),
            timers: BTreeSet::new(),
            scratch: vec![0; SCRATCH_BYTES],
            patience: Patience::default(),
            governor: RefCell::new(Governor::new(RandomState::new().build_hasher().finish())),
        };
        let handle = std::thread::Builder::new()
            .name("headrace-host".into())
            .spawn(move || thread.run())?;
        Ok(Reactor {
            process: std::process::id(),
            inbox,
            waker,
            thread: Mutex::new(Some(handle)),
            next_core: AtomicUsize::new(1),
        })
    }

    /// Whether this process is the one that the thread runs in.
    pub fn is_ours(&self) -> bool {
        self.process == std::process::id()
    }

    pub fn on_thread(&self) -> bool {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        thread
            .as_ref()
            .is_some_and(|thread| thread.thread().id() == std::thread::current().id())
    }

    pub fn next_core(&self) -> usize {
        self.next_core.fetch_add(1, Ordering::Relaxed)
    }

    pub fn wake(&self, core: usize) {
        self.send(Message::Wake(core));
    }

    fn is_dead(&self) -> bool {
        self.inbox.dead.load(Ordering::SeqCst)
    }

    pub fn send(&self, message: Message) {
        {
            let mut messages = self.inbox.lock();
            if self.is_dead() {
                drop(messages);
                return message.return_to_sender();
            }
            messages.push_back(message);
        }
        if self.inbox.asleep.swap(false, Ordering::SeqCst) {
            // An eventfd takes this until 2^64 wake-ups are pending.
            let _ = self.waker.wake();
        }
    }
}

impl Drop for Reactor {
    fn drop(&mut self) {
        let thread = self
            .thread
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if !self.is_ours() {
            // The thread is the parent's.
            std::mem::forget(thread);
            return;
        }
        self.send(Message::Stop);
        if let Some(thread) = thread {
            if thread.thread().id() != std::thread::current().id() {
                // It ends by the message; a panic there was printed by its hook.
                let _ = thread.join();
            }
        }
    }
}

struct Entry {
    core: Core,
    timer: Option<Instant>,
    /// See [`Turn::poll`]; of its last turn.
    poll: Duration,
}

/// Whether looking for an answer is worth its CPU time. Each time that nothing came while we looked doubles the number of
/// sleeps before we look again, so that a slow target costs a small part of the time spent waiting; an answer that came
/// starts anew.
#[derive(Default)]
struct Patience {
    misses: u32,
    skip: u32,
}

impl Patience {
    const MISSES_MAX: u32 = 6;

    fn try_now(&mut self) -> bool {
        let now = self.skip == 0;
        self.skip = self.skip.saturating_sub(1);
        now
    }

    fn hit(&mut self) {
        *self = Patience::default();
    }

    fn miss(&mut self) {
        self.misses = (self.misses + 1).min(Self::MISSES_MAX);
        self.skip = (1 << self.misses) - 1;
    }
}

struct Thread {
    poll: Poll,
    inbox: Arc<Inbox>,
    cores: HashMap<usize, Entry>,
    timers: BTreeSet<(Instant, usize)>,
    scratch: Vec<u8>,
    patience: Patience,
    /// Of what all cores have under way together.
    governor: RefCell<Governor>,
}

impl Thread {
    fn run(mut self) {
        let mut events = Events::with_capacity(EVENTS);
        let mut ready: Vec<usize> = Vec::new();
        let mut again: Vec<usize> = Vec::new();
        let mut stopping = false;
        loop {
            let messages = std::mem::take(&mut *self.inbox.lock());
            for message in messages {
                match message {
                    Message::Stop => {
                        stopping = true;
                        ready.extend(self.cores.keys());
                        self.cores.values_mut().for_each(|entry| entry.core.hurry());
                    }
                    other => ready.extend(self.take(other)),
                }
            }
            let now = Instant::now();
            while let Some((at, id)) = self.timers.first().copied().filter(|(at, _)| *at <= now) {
                self.timers.remove(&(at, id));
                if let Some(entry) = self.cores.get_mut(&id) {
                    entry.timer = None;
                }
                ready.push(id);
            }
            ready.sort_unstable();
            ready.dedup();
            for id in ready.drain(..) {
                if self.run_core(id) {
                    again.push(id);
                }
            }
            // Answers have made room for others. A turn may bring answers itself, so that turns could follow each other for
            // as long as data come: after one for each device sockets, timers and messages are looked at again.
            for left in (0..=self.cores.len()).rev() {
                let Some(id) = self.next_turn() else { break };
                if left == 0 || self.run_core(id) {
                    again.push(id);
                }
            }
            std::mem::swap(&mut ready, &mut again);
            if stopping && self.cores.is_empty() {
                return;
            }
            self.sleep(&mut events, !ready.is_empty());
            for event in &events {
                let id = core_of(event.token());
                if let Some(entry) = self.cores.get_mut(&id) {
                    entry.core.event(event);
                    ready.push(id);
                }
            }
        }
    }

    fn take(&mut self, message: Message) -> Option<usize> {
        match message {
            Message::Open(mut core) => {
                let id = core.id;
                core.join(&mut self.governor.borrow_mut());
                self.cores.insert(
                    id,
                    Entry {
                        core: *core,
                        timer: None,
                        poll: Duration::ZERO,
                    },
                );
                Some(id)
            }
            Message::Submit(id, lane, requests) => {
                match self.cores.get_mut(&id) {
                    Some(entry) => entry.core.submit(lane, requests),
                    None => requests
                        .into_iter()
                        .for_each(|request| reject(request, closed("")).report()),
                }
                Some(id)
            }
            Message::Close(id, deadline, reply) => {
                match self.cores.get_mut(&id) {
                    Some(entry) => entry.core.close(deadline, reply),
                    None => reply.set(()),
                }
                Some(id)
            }
            Message::Call(id, call) => {
                match self.cores.get_mut(&id) {
                    Some(entry) => entry.core.call(*call),
                    None => call.fail(closed("")),
                }
                Some(id)
            }
            Message::Guard(id, guard, reply) => {
                match self.cores.get_mut(&id) {
                    Some(entry) => entry.core.set_guard(guard, reply),
                    None => reply.set(Err(closed(""))),
                }
                Some(id)
            }
            Message::UnderWay(id, bytes, reply) => {
                reply.set(match self.cores.get_mut(&id) {
                    Some(entry) => Ok(entry.core.under_way(&bytes, Instant::now())),
                    None => Err(closed("")),
                });
                None
            }
            Message::Events(id, reply) => {
                reply.set(match self.cores.get_mut(&id) {
                    Some(entry) => (entry.core.events_under_way(), entry.core.recorded()),
                    None => (Vec::new(), u64::MAX),
                });
                None
            }
            Message::Wake(id) => Some(id),
            Message::Reconnect(id) => {
                if let Some(entry) = self.cores.get_mut(&id) {
                    entry.core.reconnect();
                }
                Some(id)
            }
            Message::Stop => None,
        }
    }

    fn next_turn(&self) -> Option<usize> {
        self.governor.borrow_mut().next()
    }

    fn run_core(&mut self, id: usize) -> bool {
        let Some(entry) = self.cores.get_mut(&id) else {
            return false;
        };
        let mut turn = Turn {
            registry: self.poll.registry(),
            scratch: &mut self.scratch,
            now: Instant::now(),
            poll: Duration::ZERO,
            governor: &self.governor,
        };
        let next = entry.core.run(&mut turn);
        entry.poll = turn.poll;
        if entry.timer != next.wake_at || next.over {
            if let Some(at) = entry.timer.take() {
                self.timers.remove(&(at, id));
            }
            if let Some(at) = next.wake_at.filter(|_| !next.over) {
                self.timers.insert((at, id));
                entry.timer = Some(at);
            }
        }
        if next.over {
            if let Some(entry) = self.cores.remove(&id) {
                entry.core.leave(&mut self.governor.borrow_mut());
            }
        }
        next.again
    }

    /// Look for events and messages for as long as the devices with commands under way want, without sleeping; `true`
    /// when something came.
    fn look(&mut self, events: &mut Events) -> bool {
        let wanted = self.cores.values().map(|entry| entry.poll).max();
        let Some(wanted) = wanted.filter(|wanted| !wanted.is_zero()) else {
            return false;
        };
        if !self.patience.try_now() {
            return false;
        }
        let begun = Instant::now();
        loop {
            // An error is the business of `sleep`, which comes next.
            if self.poll.poll(events, Some(Duration::ZERO)).is_ok() && !events.is_empty() {
                self.patience.hit();
                return true;
            }
            if !self.inbox.lock().is_empty() {
                return true;
            }
            let now = Instant::now();
            if now - begun >= wanted || self.timers.first().is_some_and(|(at, _)| *at <= now) {
                self.patience.miss();
                return false;
            }
            std::hint::spin_loop();
        }
    }

    /// Sleep until an event, a message or the next timer; not at all when `busy`.
    fn sleep(&mut self, events: &mut Events, busy: bool) {
        if !busy && self.look(events) {
            return;
        }
        let mut timeout = if busy {
            Some(Duration::ZERO)
        } else {
            let next = self.timers.first();
            next.map(|(at, _)| at.saturating_duration_since(Instant::now()))
        };
        // First announce, then look: a message that comes in between is seen here or wakes us.
        self.inbox.asleep.store(true, Ordering::SeqCst);
        if !self.inbox.lock().is_empty() {
            timeout = Some(Duration::ZERO);
        }
        if let Err(error) = self.poll.poll(events, timeout) {
            // Interrupted by a signal: the loop comes back here. Anything else would be a defect of ours.
            debug_assert_eq!(error.kind(), std::io::ErrorKind::Interrupted);
            events.clear();
        }
        self.inbox.asleep.store(false, Ordering::SeqCst);
    }
}

/// Also when the thread panics: cores end their requests as they are dropped.
impl Drop for Thread {
    fn drop(&mut self) {
        let rest = {
            let mut messages = self.inbox.lock();
            self.inbox.dead.store(true, Ordering::SeqCst);
            std::mem::take(&mut *messages)
        };
        self.cores.clear();
        rest.into_iter().for_each(Message::return_to_sender);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looking_in_vain_becomes_rare_and_an_answer_makes_it_usual_again() {
        let mut patience = Patience::default();
        let tries = |patience: &mut Patience, sleeps: u32, hit: bool| {
            (0..sleeps)
                .filter(|_| {
                    let now = patience.try_now();
                    match (now, hit) {
                        (true, true) => patience.hit(),
                        (true, false) => patience.miss(),
                        _ => {}
                    }
                    now
                })
                .count()
        };
        assert_eq!(tries(&mut patience, 100, true), 100);
        assert!(tries(&mut patience, 1000, false) < 25);
        assert!(tries(&mut patience, 64 + 100, true) >= 100);
    }
}

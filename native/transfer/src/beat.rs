//! A heartbeat: blocks that were made beforehand, of which one is written each interval, whatever the owner's own threads
//! do meanwhile. A training process may hold its interpreter's lock for minutes; its heart must not seem to have stopped.
//!
//! The thread knows nothing of what the blocks mean. It goes on over failures that may pass (others wait for the same
//! device), and halts where
//!
//! * the device says that another host has taken over (`ErrorKind::Conflict`),
//! * `confirm` is set and a place holds something that was not written here: then the owner has to look, and may `resume`,
//! * the device was closed.

use crate::{submit_one, BlockDevice, Buffer, ErrorKind, IoError, Op};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long one wait for the device lasts before it is begun again; nothing depends on it.
const SLICE: Duration = Duration::from_secs(1);

/// Where each beat is written, one place after another.
pub struct Place {
    pub device: Arc<dyn BlockDevice>,
    pub offset: u64,
}

/// What the owner should know.
#[derive(Clone, Debug)]
pub enum News {
    /// Fewer blocks are left than half of what was given last: give more.
    Low,
    /// The device refuses this host for good. Nothing is written any more.
    Fenced(IoError),
    /// A place holds other bytes. Nothing is written until `resume`.
    Changed,
    /// The thread has ended.
    Ended,
}

#[derive(Default)]
struct State {
    blocks: VecDeque<Box<[u8]>>,
    low: usize,
    /// Beats begun.
    written: u64,
    /// The last failure; none where the last beat succeeded.
    trouble: Option<IoError>,
    fenced: Option<IoError>,
    changed: bool,
    /// The owner has looked: what is there now is right.
    looked: bool,
    stop: bool,
    ended: bool,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    moved: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, guard: MutexGuard<'a, State>, timeout: Duration) -> MutexGuard<'a, State> {
        self.moved
            .wait_timeout(guard, timeout)
            .unwrap_or_else(PoisonError::into_inner)
            .0
    }
}

/// A heart. Dropping it stops it, without waiting for a beat that is under way.
pub struct Beat(Arc<Shared>);

impl Beat {
    /// `first` is what the places hold now. `confirm`: look before each beat that they hold what was written last.
    pub fn start(
        places: Vec<Place>,
        first: Vec<u8>,
        interval: Duration,
        confirm: bool,
    ) -> std::io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let thread = Thread {
            shared: shared.clone(),
            places,
            known: VecDeque::from([first.into_boxed_slice()]),
            confirm,
        };
        std::thread::Builder::new()
            .name("headrace-heart".into())
            .spawn(move || thread.run(interval))?;
        Ok(Beat(shared))
    }

    /// More beats, behind those that are left.
    pub fn feed(&self, blocks: Vec<Vec<u8>>) {
        let mut state = self.0.lock();
        state.low = blocks.len() / 2;
        state.blocks.extend(blocks.into_iter().map(Vec::into_boxed_slice));
        self.0.moved.notify_all();
    }

    /// Wait for news, at most `timeout`.
    pub fn news(&self, timeout: Duration) -> Option<News> {
        let deadline = Instant::now() + timeout;
        let mut state = self.0.lock();
        loop {
            if state.ended {
                return Some(News::Ended);
            }
            if let Some(error) = &state.fenced {
                return Some(News::Fenced(error.clone()));
            }
            if state.changed {
                return Some(News::Changed);
            }
            if state.blocks.len() <= state.low {
                return Some(News::Low);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            state = self.0.wait(state, left);
        }
    }

    /// After `News::Changed`: what the places hold is right, beat on.
    pub fn resume(&self) {
        let mut state = self.0.lock();
        state.changed = false;
        state.looked = true;
        self.0.moved.notify_all();
    }

    /// Begin no other beat. `true` where the last one has ended within `timeout`.
    pub fn stop(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        let mut state = self.0.lock();
        state.stop = true;
        self.0.moved.notify_all();
        while !state.ended {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            state = self.0.wait(state, left);
        }
        true
    }

    /// Beats begun so far.
    pub fn written(&self) -> u64 {
        self.0.lock().written
    }

    pub fn trouble(&self) -> Option<IoError> {
        self.0.lock().trouble.clone()
    }
}

impl Drop for Beat {
    fn drop(&mut self) {
        self.0.lock().stop = true;
        self.0.moved.notify_all();
    }
}

struct Thread {
    shared: Arc<Shared>,
    places: Vec<Place>,
    /// What the places may hold: the last beats, since one that failed may or may not have arrived.
    known: VecDeque<Box<[u8]>>,
    confirm: bool,
}

/// The end of the thread, however it comes.
struct End(Arc<Shared>);

impl Drop for End {
    fn drop(&mut self) {
        self.0.lock().ended = true;
        self.0.moved.notify_all();
    }
}

impl Thread {
    fn run(mut self, interval: Duration) {
        let _end = End(self.shared.clone());
        let mut due = Instant::now() + interval;
        while let Some(block) = self.next(due) {
            let began = Instant::now();
            if let Some(block) = block {
                match self.beat(block) {
                    Ok(()) => self.shared.lock().trouble = None,
                    Err(error) => {
                        let mut state = self.shared.lock();
                        match error.kind {
                            ErrorKind::Closed => return,
                            ErrorKind::Conflict => state.fenced = Some(error),
                            _ => state.trouble = Some(error),
                        }
                        self.shared.moved.notify_all();
                    }
                }
            }
            due = (due + interval).max(began);
        }
    }

    /// The next beat when its time has come; `Some(None)`: there is none, or none may be written. `None`: stop.
    fn next(&self, due: Instant) -> Option<Option<Box<[u8]>>> {
        let mut state = self.shared.lock();
        loop {
            if state.stop {
                return None;
            }
            let left = due.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            state = self.shared.wait(state, left);
        }
        if state.changed || state.fenced.is_some() {
            return Some(None);
        }
        let block = state.blocks.pop_front();
        state.written += u64::from(block.is_some());
        if state.blocks.len() <= state.low {
            self.shared.moved.notify_all();
        }
        Some(block)
    }

    fn beat(&mut self, block: Box<[u8]>) -> Result<(), IoError> {
        let looked = std::mem::take(&mut self.shared.lock().looked);
        if self.confirm && !looked && !self.unchanged(block.len())? {
            let mut state = self.shared.lock();
            // Not written after all: it comes again, or the owner ends.
            state.written -= 1;
            state.blocks.push_front(block);
            state.changed = true;
            self.shared.moved.notify_all();
            return Ok(());
        }
        self.known.push_back(block.clone());
        let mut ended = Ok(());
        for place in &self.places {
            let from = Buffer::from_vec(block.to_vec());
            let result = finish(place, Op::Write { from, fua: true });
            ended = ended.and(result);
        }
        if ended.is_ok() {
            self.known.clear();
            self.known.push_back(block);
        } else if self.known.len() > 64 {
            self.known.pop_front();
        }
        ended
    }

    fn unchanged(&self, length: usize) -> Result<bool, IoError> {
        for place in &self.places {
            let into = Buffer::zeroed(length);
            finish(place, Op::Read { into: into.clone() })?;
            let mut found = vec![0; length];
            into.copy_to(0, &mut found);
            if !self.known.iter().any(|known| **known == *found) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// One request, until its end: the device has a deadline of its own.
fn finish(place: &Place, op: Op) -> Result<(), IoError> {
    let pending = submit_one(place.device.as_ref(), op, place.offset);
    loop {
        if let Some(result) = pending.wait(SLICE) {
            return result;
        }
    }
}

//! The gate between one connection's commands and the media.
//!
//! Promise: once a connection was declared dead ([`Gate::close`] returned), no command of it *begins* to touch media,
//! whatever queue it still waits in; and once [`Gate::idle`] has then been seen true, none ever will or still does. A
//! host's new association, or new queue after a controller reset, is admitted only when all gates of its lost connections
//! and reset queues are closed and idle, so nothing that it sent before can land after what it sends next.
//!
//! Why it holds: a command counts itself in, then looks whether the gate is closed; closing sets the mark, then looks at
//! the count. Both orders are sequentially consistent, so either the command sees the mark and turns back, or the closer
//! sees the count and waits for it.
//!
//! A system call that was begun cannot be taken back (a write that hangs in a disk); admission then waits, up to a limit,
//! and after that the host is told that the controller is busy.

//!
//! A gate that stays open can be waited for, too ([`Gate::wait_out`]): commands count themselves in one of two sides, and
//! newcomers are sent to the other one while the old ones leave.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, TryLockError};
use std::time::{Duration, Instant};

/// How often who waits looks again.
const LOOK: Duration = Duration::from_micros(200);

#[derive(Default)]
pub(crate) struct Gate {
    closed: AtomicBool,
    inside: [AtomicUsize; 2],
    /// Where newcomers count themselves in, 0 or 1.
    side: AtomicUsize,
    /// One waits at a time: two would send newcomers to and fro.
    turn: Mutex<()>,
}

/// A command that is at the media now.
pub(crate) struct Passage(Arc<Gate>, usize);

impl Gate {
    pub(crate) fn enter(self: &Arc<Self>) -> Option<Passage> {
        let side = self.side.load(Ordering::Relaxed);
        self.inside[side].fetch_add(1, Ordering::SeqCst);
        let passage = Passage(self.clone(), side);
        (!self.closed.load(Ordering::SeqCst)).then_some(passage)
    }

    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
    }

    pub(crate) fn idle(&self) -> bool {
        self.inside
            .iter()
            .all(|inside| inside.load(Ordering::SeqCst) == 0)
    }

    /// Wait until every command that is inside now has left, whoever comes meanwhile. `false`: not by then.
    pub(crate) fn wait_out(&self, until: Instant, give_up: impl Fn() -> bool) -> bool {
        let wait = |done: &dyn Fn() -> bool| loop {
            if done() {
                return true;
            }
            if Instant::now() >= until || give_up() {
                return false;
            }
            std::thread::sleep(LOOK);
        };
        let _turn = loop {
            match self.turn.try_lock() {
                Ok(turn) => break turn,
                Err(TryLockError::Poisoned(turn)) => break turn.into_inner(),
                Err(TryLockError::WouldBlock) if Instant::now() >= until || give_up() => return false,
                Err(TryLockError::WouldBlock) => std::thread::sleep(LOOK),
            }
        };
        let side = self.side.load(Ordering::SeqCst);
        let empty = |side: usize| self.inside[side].load(Ordering::SeqCst) == 0;
        // A side that was seen empty once has none of the old ones any more.
        if !wait(&|| empty(1 - side)) {
            return false;
        }
        self.side.store(1 - side, Ordering::SeqCst);
        wait(&|| empty(side))
    }
}

impl Drop for Passage {
    fn drop(&mut self) {
        self.0.inside[self.1].fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_passes_a_closed_gate() {
        let gate = Arc::new(Gate::default());
        let inside = gate.enter().unwrap();
        gate.close();
        assert!(gate.enter().is_none());
        assert!(!gate.idle(), "the one inside is still there");
        drop(inside);
        assert!(gate.idle());
    }

    /// Commands that come without a pause do not keep it waiting; those that were there do.
    #[test]
    fn waiting_for_those_who_are_inside() {
        let gate = Arc::new(Gate::default());
        let soon = || Instant::now() + Duration::from_millis(30);
        for _ in 0..3 {
            let old = gate.enter().unwrap();
            assert!(!gate.wait_out(soon(), || false));
            // It sent newcomers to the other side; this one stays inside all the time.
            let newcomer = gate.enter().unwrap();
            assert!(!gate.wait_out(Instant::now() + Duration::from_secs(60), || true));
            drop(old);
            drop(newcomer);
            assert!(gate.wait_out(soon(), || false));
        }
        let stop = Arc::new(AtomicBool::new(false));
        let streams: Vec<_> = (0..2)
            .map(|_| {
                let (gate, stop) = (gate.clone(), stop.clone());
                std::thread::spawn(move || {
                    let mut inside = gate.enter();
                    while !stop.load(Ordering::Relaxed) {
                        // The next one is in before the last one is out.
                        let next = gate.enter();
                        inside = next;
                    }
                    drop(inside);
                })
            })
            .collect();
        for _ in 0..20 {
            assert!(gate.wait_out(Instant::now() + Duration::from_secs(20), || false));
        }
        stop.store(true, Ordering::Relaxed);
        streams.into_iter().for_each(|stream| stream.join().unwrap());
        assert!(gate.idle());
    }
}

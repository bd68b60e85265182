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

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::Arc;

#[derive(Default)]
pub(crate) struct Gate {
    closed: AtomicBool,
    inside: AtomicUsize,
}

/// A command that is at the media now.
pub(crate) struct Passage(Arc<Gate>);

impl Gate {
    pub(crate) fn enter(self: &Arc<Self>) -> Option<Passage> {
        self.inside.fetch_add(1, Ordering::SeqCst);
        let passage = Passage(self.clone());
        (!self.closed.load(Ordering::SeqCst)).then_some(passage)
    }

    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
    }

    pub(crate) fn idle(&self) -> bool {
        self.inside.load(Ordering::SeqCst) == 0
    }
}

impl Drop for Passage {
    fn drop(&mut self) {
        self.0.inside.fetch_sub(1, Ordering::SeqCst);
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
}

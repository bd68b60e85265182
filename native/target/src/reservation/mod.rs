//! Reservations of a namespace: who may write to it, kept by the target.
//!
//! # The promise
//!
//! Once a command that shuts a host out was answered, nothing that this host sends is let to the media any more; once a
//! *preempt and abort* was answered with success, nothing that it sent before is at the media any more either, nor ever
//! will be. The storage format above relies on it: a writer that lost its volume cannot overwrite what its successor writes.
//!
//! # How it holds
//!
//! A command takes a [`Claim`] when its capsule is there; a refused one ends then, before data move. Data may come much
//! later, so the claim is looked at again *when they go to the media*, with the connection's gate entered before
//! ([`crate::gate`]): a worker's write as a whole, data that go straight from the socket into memory piece by piece.
//! Who changes the state publishes it first and waits for the gates then. Both orders are sequentially consistent, so
//! either the write sees the change and turns back, or the change sees the write in its gate and waits for it.
//!
//! Without a reservation this costs one atomic load: `word` is the count of aborts so far and whether anything is held,
//! and where it is what the claim saw with nothing held, nothing can have changed.
//!
//! Commands that change the state run one after another on the namespace's [`desk`]: they sync a file and wait for gates,
//! which a reactor must not. Report reads the state where it is.

pub(crate) mod desk;
pub(crate) mod notice;
pub(crate) mod rules;
pub(crate) mod store;
#[cfg(test)]
mod tests;

use crate::controller::{Controller, HostKey};
use crate::subsystem::Namespace;
use desk::Desk;
use headrace_wire::reservation::{rescap, Change, Report};
use headrace_wire::Status;
use rules::{Access, Effects, State};
use std::collections::VecDeque;
use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use store::Store;

/// Aborted hosts that are remembered one by one.
const ABORTED_MAX: usize = 1024;

/// Bit 0 of `word`: a reservation is held.
const HELD: u64 = 1;

#[derive(Default)]
struct Inner {
    state: State,
    /// Hosts whose older commands must not run, with the abort that said so.
    aborted: VecDeque<(HostKey, u64)>,
    /// Commands of any host from before this abort must not run: it is no longer known whose they may be.
    forgotten: u64,
}

#[derive(Default)]
pub(crate) struct Reservations {
    /// Aborts so far, times two, plus [`HELD`].
    word: AtomicU64,
    inner: Mutex<Inner>,
    store: Store,
    /// Not offered.
    off: bool,
    pub(crate) desk: Desk,
}

impl Reservations {
    pub(crate) fn off() -> Self {
        Reservations {
            off: true,
            ..Reservations::default()
        }
    }

    pub(crate) fn are_off(&self) -> bool {
        self.off
    }

    /// With what was kept over a loss of power. The error says what is wrong with it.
    pub(crate) fn open(store: Store) -> Result<Self, String> {
        let state = store.load()?;
        let held = u64::from(state.held.is_some());
        Ok(Reservations {
            word: AtomicU64::new(held),
            inner: Mutex::new(Inner {
                state,
                ..Inner::default()
            }),
            store,
            off: false,
            desk: Desk::default(),
        })
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        // Each change is published whole, so a panic elsewhere leaves nothing half done.
        self.inner.lock().unwrap_or_else(|e| e.into_inner())
    }

    pub(crate) fn can_persist(&self) -> bool {
        self.store.can_persist()
    }

    /// RESCAP.
    pub(crate) fn capabilities(&self) -> u8 {
        if self.off {
            return 0;
        }
        let persist = if self.can_persist() { rescap::PERSIST } else { 0 };
        persist | rescap::ALL_TYPES | rescap::IEKEY_1_3
    }

    pub(crate) fn report(&self) -> Report {
        self.inner().state.report()
    }

    /// Carry out a command that changes the state, and keep it where it must outlive the process. Only the desk calls.
    fn change(&self, host: &HostKey, change: &Change) -> Result<Effects, Status> {
        let mut state = self.inner().state.clone();
        let effects = state.apply(host, change, self.can_persist())?;
        self.publish(state, &effects.abort)?;
        Ok(effects)
    }

    /// PTPL by feature 83h.
    fn set_persist(&self, persist: bool) -> Result<(), Status> {
        if self.off || (persist && !self.can_persist()) {
            return Err(Status::INVALID_FIELD.do_not_retry());
        }
        let mut state = self.inner().state.clone();
        state.persist = persist;
        self.publish(state, &[])
    }

    fn publish(&self, state: State, abort: &[HostKey]) -> Result<(), Status> {
        // Kept before anybody can see it: what was answered is never forgotten. Where keeping fails nothing changes here,
        // and the host is told so, though the next process may find either.
        let persisted = self.inner().state.persist;
        if self.store.keep(persisted, &state).is_err() {
            return Err(Status::INTERNAL_ERROR);
        }
        let mut inner = self.inner();
        let mut aborts = self.word.load(Ordering::SeqCst) / 2;
        if !abort.is_empty() {
            aborts += 1;
            inner.aborted.retain(|(host, _)| !abort.contains(host));
            for host in abort {
                if inner.aborted.len() == ABORTED_MAX {
                    let oldest = inner.aborted.pop_front().map_or(0, |(_, abort)| abort);
                    inner.forgotten = inner.forgotten.max(oldest);
                }
                inner.aborted.push_back((host.clone(), aborts));
            }
        }
        let held = u64::from(state.held.is_some());
        inner.state = state;
        self.word.store(aborts * 2 + held, Ordering::SeqCst);
        Ok(())
    }

    pub(crate) fn status(&self) -> serde_json::Value {
        let report = self.report();
        serde_json::json!({
            "generation": report.generation,
            "type": report.kind().map(|kind| kind.name()),
            "persistent": report.persistent,
            "offered": !self.off,
            "kept_in": self.store.describe(),
            "registrants": report.registrants.iter().take(16).map(|registrant| serde_json::json!({
                "hostid": crate::identity::hex(&registrant.hostid),
                "key": format!("{:#018x}", registrant.key),
                "holds": registrant.holds,
            })).collect::<Vec<_>>(),
            "registered": report.registered,
        })
    }
}

/// One host's right to do something to a namespace, as it was when its command came.
pub(crate) struct Claim {
    namespace: Arc<Namespace>,
    controller: Arc<Controller>,
    seen: u64,
}

impl Deref for Claim {
    type Target = Namespace;
    fn deref(&self) -> &Namespace {
        &self.namespace
    }
}

impl Claim {
    pub(crate) fn new(
        namespace: &Arc<Namespace>,
        controller: &Arc<Controller>,
        access: Option<Access>,
    ) -> Result<Claim, Status> {
        let claim = Claim {
            namespace: namespace.clone(),
            controller: controller.clone(),
            seen: namespace.reservations.word.load(Ordering::SeqCst),
        };
        match access {
            Some(access) => claim.check(access).map(|()| claim),
            None => Ok(claim),
        }
    }

    pub(crate) fn namespace(&self) -> &Arc<Namespace> {
        &self.namespace
    }

    pub(crate) fn host(&self) -> &HostKey {
        &self.controller.host
    }

    pub(crate) fn controller(&self) -> &Arc<Controller> {
        &self.controller
    }

    /// Does it still hold? To be asked with the connection's gate entered, and followed by the access.
    pub(crate) fn check(&self, access: Access) -> Result<(), Status> {
        let reservations = &self.namespace.reservations;
        let word = reservations.word.load(Ordering::SeqCst);
        if word & HELD == 0 && word == self.seen & !HELD {
            return Ok(());
        }
        let inner = reservations.inner();
        let mine = self.seen / 2;
        let aborted = inner
            .aborted
            .iter()
            .any(|(host, abort)| *abort > mine && *host == self.controller.host);
        if aborted || mine < inner.forgotten {
            return Err(Status::PREEMPT_ABORT.do_not_retry());
        }
        if !inner.state.permits(&self.controller.host, access) {
            crate::subsystem::count(&self.namespace.counters.conflicts, 1);
            return Err(Status::RESERVATION_CONFLICT.do_not_retry());
        }
        Ok(())
    }
}

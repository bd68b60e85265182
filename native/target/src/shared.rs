//! What all threads of one target share.

use crate::hosts::Hosts;
use crate::mailbox::Mailbox;
use crate::memory::Memory;
use crate::registry::Registry;
use crate::subsystem::Subsystem;
use crate::view::PortalId;
use crate::worker::Workers;
use headrace_media::Engine;
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The configuration's numbers, as the data path needs them; those of a subsystem's controllers are with the subsystem.
#[derive(Clone, Debug)]
pub(crate) struct Limits {
    pub(crate) max_h2c_data_bytes: u32,
    pub(crate) max_connections: usize,
    pub(crate) max_host_connections: usize,
    pub(crate) connection_memory_bytes: usize,
    pub(crate) connect_timeout: Duration,
    pub(crate) progress_timeout: Duration,
}

/// Where the target listens.
#[derive(Clone, Debug)]
pub(crate) struct Portal {
    pub(crate) name: String,
    pub(crate) address: SocketAddr,
    /// Only the discovery subsystem is served here.
    pub(crate) discovery: bool,
}

/// Lines kept for `status`.
const NOTES: usize = 64;

pub(crate) struct Shared {
    pub(crate) limits: Limits,
    pub(crate) subsystems: Vec<Arc<Subsystem>>,
    pub(crate) discovery: Arc<Subsystem>,
    pub(crate) registry: Registry,
    pub(crate) hosts: Hosts,
    pub(crate) memory: Arc<Memory>,
    pub(crate) workers: Arc<Workers>,
    pub(crate) mailboxes: Vec<Arc<Mailbox>>,
    pub(crate) portals: Vec<Portal>,
    /// GENCTR: moves with every change of what discovery tells somebody.
    pub(crate) discovery_generation: AtomicU64,
    /// No new connections, no new commands: those under way end.
    pub(crate) draining: AtomicBool,
    /// For files that are opened while it runs.
    pub(crate) engine: Engine,
    pub(crate) started: Instant,
    pub(crate) connections: AtomicUsize,
    pub(crate) totals: Totals,
    pub(crate) notes: Mutex<VecDeque<String>>,
}

#[derive(Default)]
pub(crate) struct Totals {
    pub(crate) accepted: AtomicU64,
    pub(crate) refused: AtomicU64,
    pub(crate) protocol_errors: AtomicU64,
    pub(crate) dropped_silent: AtomicU64,
    pub(crate) digest_errors: AtomicU64,
    pub(crate) panics: AtomicU64,
    pub(crate) commands: AtomicU64,
}

impl Shared {
    /// Which listener a connection came to, by its local address.
    pub(crate) fn portal_of(&self, local: SocketAddr) -> PortalId {
        let local = SocketAddr::new(local.ip().to_canonical(), local.port());
        let exact = |portal: &Portal| {
            SocketAddr::new(portal.address.ip().to_canonical(), portal.address.port()) == local
        };
        let wildcard =
            |portal: &Portal| portal.address.ip().is_unspecified() && portal.address.port() == local.port();
        let found = self.portals.iter().position(exact);
        found
            .or_else(|| self.portals.iter().position(wildcard))
            .unwrap_or(0)
    }

    pub(crate) fn portal_names(&self) -> Vec<String> {
        self.portals.iter().map(|portal| portal.name.clone()).collect()
    }

    pub(crate) fn subsystem(&self, nqn: &str) -> Option<&Arc<Subsystem>> {
        std::iter::once(&self.discovery)
            .chain(&self.subsystems)
            .find(|subsystem| subsystem.nqn == nqn)
    }

    pub(crate) fn ms(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.started).as_millis() as u64
    }

    /// A line for whoever asks for the status: what happened, not for each command.
    pub(crate) fn note(&self, line: String) {
        let at = self.started.elapsed().as_millis();
        let mut notes = self.notes.lock().unwrap_or_else(|e| e.into_inner());
        if notes.len() == NOTES {
            notes.pop_front();
        }
        notes.push_back(format!("{at} ms: {line}"));
    }
}

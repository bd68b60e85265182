//! What all threads of one target share.

use crate::mailbox::Mailbox;
use crate::memory::Memory;
use crate::registry::Registry;
use crate::subsystem::Subsystem;
use crate::worker::Workers;
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The configuration's numbers, as the data path needs them.
#[derive(Clone, Debug)]
pub(crate) struct Limits {
    pub(crate) mdts_bytes: u32,
    pub(crate) in_capsule_bytes: u32,
    pub(crate) max_h2c_data_bytes: u32,
    pub(crate) max_connections: usize,
    pub(crate) max_queue_entries: u16,
    pub(crate) max_io_queues: u16,
    pub(crate) connection_memory_bytes: usize,
    pub(crate) connect_timeout: Duration,
    pub(crate) progress_timeout: Duration,
}

/// Lines kept for `status`.
const NOTES: usize = 64;

pub(crate) struct Shared {
    pub(crate) limits: Limits,
    pub(crate) subsystems: Vec<Arc<Subsystem>>,
    pub(crate) discovery: Arc<Subsystem>,
    pub(crate) registry: Registry,
    pub(crate) memory: Arc<Memory>,
    pub(crate) workers: Arc<Workers>,
    pub(crate) mailboxes: Vec<Arc<Mailbox>>,
    pub(crate) addresses: Vec<SocketAddr>,
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
    pub(crate) fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
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

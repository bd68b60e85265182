//! What is known of each path of a device: kept by the I/O thread, looked at by anybody.

use crate::histogram::{Histogram, Latency};
use crate::options::Portal;
use crate::shared::Counters;
use headrace_wire::ana::AnaState;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathState {
    Connecting,
    /// Commands go this way, or could.
    Ready,
    /// Between two attempts.
    Waiting,
    /// It comes up and breaks again and again: not tried for a while, as long as another path is there.
    HeldBack,
    /// It is not tried again until somebody asks for it (`reconnect`).
    Refused,
    Closed,
}

impl PathState {
    pub fn name(self) -> &'static str {
        match self {
            PathState::Connecting => "connecting",
            PathState::Ready => "ready",
            PathState::Waiting => "waiting",
            PathState::HeldBack => "held back",
            PathState::Refused => "refused",
            PathState::Closed => "closed",
        }
    }
}

/// One path, as it was a moment ago.
#[derive(Clone, Debug)]
pub struct PathInfo {
    pub portal: Portal,
    /// The address in use or tried last; empty before the first attempt.
    pub address: String,
    pub state: PathState,
    pub since: Instant,
    /// Commands may go this way now.
    pub usable: bool,
    /// Why not; empty where they may.
    pub why: String,
    /// `None`: this controller does not report it.
    pub ana: Option<AnaState>,
    pub cntlid: u16,
    pub losses: u64,
    pub attempts: u64,
    pub reconnects: u64,
    pub reads: u64,
    pub read_bytes: u64,
    pub writes: u64,
    pub written_bytes: u64,
    /// Commands that this path failed: error statuses and broken associations.
    pub errors: u64,
    pub under_way: usize,
    /// Its answers take much longer than those of another path: commands go there while they can.
    pub slow: bool,
    /// How often that began.
    pub slow_times: u64,
    pub latency: Latency,
    /// Nanoseconds, and how many commands took no longer, and longer than the entry before.
    pub latencies: Vec<(u64, u64)>,
}

impl PathInfo {
    pub(crate) fn describe(&self) -> serde_json::Value {
        serde_json::json!({
            "portal": self.portal.to_string(),
            "address": self.address,
            "state": self.state.name(),
            "since_s": self.since.elapsed().as_secs_f64(),
            "usable": self.usable,
            "why": self.why,
            "ana": self.ana.map(AnaState::name),
            "cntlid": self.cntlid,
            "losses": self.losses,
            "attempts": self.attempts,
            "reconnects": self.reconnects,
            "reads": self.reads,
            "read_bytes": self.read_bytes,
            "writes": self.writes,
            "written_bytes": self.written_bytes,
            "errors": self.errors,
            "under_way": self.under_way,
            "slow": self.slow,
            "slow_times": self.slow_times,
            "latency": {
                "count": self.latency.count,
                "p50_s": self.latency.p50_s,
                "p99_s": self.latency.p99_s,
                "max_s": self.latency.max_s,
            },
        })
    }
}

#[derive(Clone)]
pub(crate) struct PathStatus {
    pub state: PathState,
    pub since: Instant,
    pub usable: bool,
    pub why: String,
    pub address: String,
    pub ana: Option<AnaState>,
    pub cntlid: u16,
    pub attempts: u64,
    pub reconnects: u64,
}

pub(crate) struct PathShared {
    pub portal: Portal,
    pub counters: Counters,
    pub losses: AtomicU64,
    pub under_way: AtomicUsize,
    pub slow: AtomicBool,
    pub slow_times: AtomicU64,
    pub latency: Histogram,
    status: Mutex<PathStatus>,
}

impl PathShared {
    pub fn new(portal: Portal) -> Self {
        PathShared {
            portal,
            counters: Counters::default(),
            losses: AtomicU64::new(0),
            under_way: AtomicUsize::new(0),
            slow: AtomicBool::new(false),
            slow_times: AtomicU64::new(0),
            latency: Histogram::new(),
            status: Mutex::new(PathStatus {
                state: PathState::Waiting,
                since: Instant::now(),
                usable: false,
                why: "no attempt has ended yet".into(),
                address: String::new(),
                ana: None,
                cntlid: 0,
                attempts: 0,
                reconnects: 0,
            }),
        }
    }

    pub fn status(&self) -> MutexGuard<'_, PathStatus> {
        self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn info(&self) -> PathInfo {
        let status = self.status().clone();
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &self.counters;
        PathInfo {
            portal: self.portal.clone(),
            address: status.address,
            state: status.state,
            since: status.since,
            usable: status.usable,
            why: status.why,
            ana: status.ana,
            cntlid: status.cntlid,
            losses: of(&self.losses),
            attempts: status.attempts,
            reconnects: status.reconnects,
            reads: of(&counters.reads),
            read_bytes: of(&counters.read_bytes),
            writes: of(&counters.writes),
            written_bytes: of(&counters.written_bytes),
            errors: of(&counters.errors),
            under_way: self.under_way.load(Ordering::Relaxed),
            slow: self.slow.load(Ordering::Relaxed),
            slow_times: of(&self.slow_times),
            latency: self.latency.latency(),
            latencies: self.latency.buckets(),
        }
    }
}

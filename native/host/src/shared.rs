//! What a device's handle and its core on the I/O thread both see.

use crate::facts::{hex, Ana, Facts};
use crate::flow::Report;
use crate::ghosts::{Ghosts, Unsettled};
use crate::guard::GuardStatus;
use crate::lane::TrafficClass;
use crate::options::HostOptions;
use crate::paths::{PathInfo, PathShared};
use headrace_transfer::Ring;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

#[derive(Default)]
pub(crate) struct Counters {
    pub reads: AtomicU64,
    pub read_bytes: AtomicU64,
    pub writes: AtomicU64,
    pub written_bytes: AtomicU64,
    pub flushes: AtomicU64,
    pub deallocates: AtomicU64,
    pub errors: AtomicU64,
    /// Of the errors: another host holds the reservation.
    pub conflicts: AtomicU64,
    pub retries: AtomicU64,
    pub resends: AtomicU64,
}

/// By the I/O thread only, so that it costs no locked instruction for each command.
pub(crate) fn count(counter: &AtomicU64, by: u64) {
    counter.store(counter.load(Ordering::Relaxed) + by, Ordering::Relaxed);
}

/// For `describe`.
#[derive(Clone, Default)]
pub(crate) struct Status {
    pub state: &'static str,
    pub facts: Facts,
    pub address: String,
    pub last_error: String,
    pub guard: GuardStatus,
    /// Asynchronous events so far, and the last one in words.
    pub events: u64,
    pub last_event: String,
    /// Since when no path is usable.
    pub stalled: Option<Instant>,
    pub stalls: u64,
}

pub(crate) struct Shared {
    pub options: Arc<HostOptions>,
    pub place: String,
    /// Of the namespace, as of now: it may change while the device is open.
    pub size_bytes: AtomicU64,
    pub paths: Vec<PathShared>,
    losses: AtomicU64,
    status: Mutex<Status>,
    ghosts: Mutex<Ghosts>,
    /// What the device did lately; the I/O thread writes.
    pub ring: Option<Arc<Ring>>,
    /// Of the I/O thread, once it has the device.
    pub flow: OnceLock<Arc<Mutex<Report>>>,
}

impl Shared {
    pub fn new(options: HostOptions, ring: Option<Arc<Ring>>) -> Self {
        let place = options.address();
        Shared {
            place,
            size_bytes: AtomicU64::new(0),
            paths: options.portals.iter().cloned().map(PathShared::new).collect(),
            options: Arc::new(options),
            losses: AtomicU64::new(0),
            status: Mutex::new(Status {
                state: "connecting",
                ..Default::default()
            }),
            ghosts: Mutex::default(),
            ring,
            flow: OnceLock::new(),
        }
    }

    pub fn losses(&self) -> u64 {
        self.losses.load(Ordering::SeqCst)
    }

    /// Before anything that happened on the next association, or on another path, can be seen.
    pub fn lost(&self, path: usize) {
        self.paths[path].losses.fetch_add(1, Ordering::Relaxed);
        self.losses.fetch_add(1, Ordering::SeqCst);
    }

    pub fn ghosts(&self) -> MutexGuard<'_, Ghosts> {
        self.ghosts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn unsettled(&self) -> Vec<Unsettled> {
        self.ghosts().list()
    }

    pub fn path_infos(&self) -> Vec<PathInfo> {
        self.paths.iter().map(PathShared::info).collect()
    }

    pub fn status(&self) -> MutexGuard<'_, Status> {
        self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Over all paths.
    fn counted(&self) -> serde_json::Value {
        let sum = |counter: fn(&Counters) -> &AtomicU64| -> u64 {
            let of = |path: &PathShared| counter(&path.counters).load(Ordering::Relaxed);
            self.paths.iter().map(of).sum()
        };
        serde_json::json!({
            "reads": sum(|c| &c.reads),
            "read_bytes": sum(|c| &c.read_bytes),
            "writes": sum(|c| &c.writes),
            "written_bytes": sum(|c| &c.written_bytes),
            "flushes": sum(|c| &c.flushes),
            "deallocates": sum(|c| &c.deallocates),
            "errors": sum(|c| &c.errors),
            "conflicts": sum(|c| &c.conflicts),
            "retries": sum(|c| &c.retries),
            "resends": sum(|c| &c.resends),
        })
    }

    fn flow_report(&self) -> Report {
        let report = self
            .flow
            .get()
            .map(|report| report.lock().unwrap_or_else(PoisonError::into_inner).clone());
        report.unwrap_or_default()
    }

    pub fn describe(&self) -> serde_json::Value {
        let status = self.status().clone();
        let (options, facts) = (&self.options, &status.facts);
        let paths = self.path_infos();
        serde_json::json!({
            "transport": "nvme+tcp",
            "engine": "headrace-host",
            "address": self.place,
            "peer": status.address,
            "host": options.portals[0].to_string(),
            "subsysnqn": options.subsysnqn,
            "hostnqn": options.hostnqn,
            "hostid": hex(&options.hostid),
            "nsid": facts.nsid,
            "cntlid": facts.cntlid,
            "model": facts.model,
            "serial": facts.serial,
            "firmware": facts.firmware,
            "uuid": hex(&facts.ids.uuid),
            "nguid": hex(&facts.ids.nguid),
            "digests": { "header": options.header_digest, "data": options.data_digest },
            "queues": facts.queues,
            "lanes": lanes(facts),
            "depth": facts.depth,
            "mdts_bytes": facts.mdts_bytes,
            "max_transfer_bytes": if facts.block_bytes > 0 { facts.max_transfer_bytes() } else { 0 },
            "ioccsz": facts.ioccsz,
            "in_capsule_bytes": facts.in_capsule,
            "maxh2cdata": facts.maxh2cdata,
            "link": link(options, facts),
            "flow": self.flow_report().describe(options.inflight),
            "ana": facts.ana.map(ana),
            "keep_alive_s": options.keep_alive.as_secs_f64(),
            "volatile_cache": facts.volatile_cache,
            "deallocate": facts.deallocation.name(),
            "state": status.state,
            "associations_lost": self.losses(),
            "reconnect_attempts": paths.iter().map(|path| path.attempts.saturating_sub(1)).sum::<u64>(),
            "reconnects": paths.iter().map(|path| path.reconnects).sum::<u64>(),
            "stalled": status.stalled.is_some(),
            "stalled_s": status.stalled.map_or(0.0, |since| since.elapsed().as_secs_f64()),
            "stalls": status.stalls,
            "unsettled": self.ghosts().len(),
            "policy": options.policy.name(),
            "paths": paths.iter().map(PathInfo::describe).collect::<Vec<_>>(),
            "last_error": status.last_error,
            "guard": status.guard.describe(),
            "rescap": facts.rescap,
            "events": { "count": status.events, "last": status.last_event, "asked_for": facts.events },
            "counters": self.counted(),
        })
    }
}

/// I/O queues of each traffic class on each path.
fn lanes(facts: &Facts) -> serde_json::Value {
    let entry = |class: TrafficClass| {
        let value = match facts.lanes[class as usize] {
            0 => "shares the feed's".into(),
            queues => queues.into(),
        };
        (class.name().to_string(), value)
    };
    serde_json::Value::Object(TrafficClass::ALL.into_iter().map(entry).collect())
}

/// How the connections are made.
fn link(options: &HostOptions, facts: &Facts) -> serde_json::Value {
    let route = &options.route;
    serde_json::json!({
        "hpda": options.hpda,
        "maxr2t": options.maxr2t,
        "host_traddr": route.host_traddr.map(|address| address.to_string()),
        "host_iface": route.host_iface,
        "tos": route.tos,
        "keep_alive_unit_s": facts.keep_alive_unit.as_secs_f64(),
        "traffic_keep_alive": facts.traffic_keep_alive,
    })
}

fn ana(ana: Ana) -> serde_json::Value {
    serde_json::json!({
        "group": ana.group,
        "state": ana.state.map_or("unknown", |state| state.name()),
        "change_count": ana.chgcnt,
    })
}

/// One value, set once, waited for with a deadline.
pub(crate) struct Latch<T> {
    value: Mutex<Option<T>>,
    set: Condvar,
}

impl<T> Latch<T> {
    pub fn new() -> Self {
        Latch {
            value: Mutex::new(None),
            set: Condvar::new(),
        }
    }

    pub fn set(&self, value: T) {
        *self.value.lock().unwrap_or_else(PoisonError::into_inner) = Some(value);
        self.set.notify_all();
    }

    pub fn wait(&self, timeout: Duration) -> Option<T> {
        let deadline = Instant::now() + timeout;
        let mut value = self.value.lock().unwrap_or_else(PoisonError::into_inner);
        while value.is_none() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            value = self
                .set
                .wait_timeout(value, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        value.take()
    }
}

//! The handle: what callers hold. Everything that happens, happens on the I/O thread.

use crate::errors::forked;
use crate::ghosts::Unsettled;
use crate::lane::TrafficClass;
use crate::life::Core;
use crate::options::HostOptions;
use crate::passthrough::Call;
use crate::paths::PathInfo;
use crate::reactor::{Message, Reactor};
use crate::shared::{Latch, Shared};
use crate::work::reject;
use headrace_transfer::{
    BlockDevice, DeviceInfo, ErrorKind, Event, IoError, Recorded, Recorder, Request, Ring,
};
use headrace_wire::reservation::ReservationType;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// For the I/O thread to answer after its own deadline has passed; it never needs it.
pub(crate) const GRACE: Duration = Duration::from_secs(5);
/// What `Drop` gives the orderly end.
const DROP_TIMEOUT: Duration = Duration::from_secs(1);

/// One namespace over NVMe/TCP, by one or several paths.
pub struct NvmeTcpDevice {
    shared: Arc<Shared>,
    reactor: Arc<Reactor>,
    core: usize,
    info: DeviceInfo,
}

impl NvmeTcpDevice {
    /// Connect and get ready, within `connect_timeout`.
    ///
    /// `Refused`: nobody listens, or the target refused this host or has no such subsystem or namespace. `Timeout`: it
    /// did not answer in time. `Protocol`: what answers is not a sound NVMe/TCP controller. `Usage`: a bad option.
    /// The first path that is ready makes the device ready; the others come up behind it.
    pub fn open(options: HostOptions) -> Result<Arc<NvmeTcpDevice>, IoError> {
        options.check()?;
        let deadline = Instant::now() + options.connect_timeout;
        let reactor = Reactor::current()?;
        let recorder = Recorder::new(options.events);
        let shared = Arc::new(Shared::new(options, recorder.as_ref().map(Recorder::ring)));
        let reply = Arc::new(Latch::new());
        let core = reactor.next_core();
        let opened = Core::new(
            core,
            shared.clone(),
            recorder,
            Arc::downgrade(&reactor),
            deadline,
            reply.clone(),
        );
        reactor.send(Message::Open(Box::new(opened)));
        let left = deadline.saturating_duration_since(Instant::now());
        let info = reply.wait(left + GRACE).unwrap_or_else(|| {
            Err(IoError::new(ErrorKind::Timeout, "the I/O thread does not answer").at(&shared.place))
        })?;
        Ok(Arc::new(NvmeTcpDevice {
            shared,
            reactor,
            core,
            info,
        }))
    }

    pub(crate) fn submit_as(&self, class: TrafficClass, requests: Vec<Request>) {
        if !self.reactor.is_ours() {
            for request in requests {
                reject(request, forked(&self.shared.place)).report();
            }
            return;
        }
        if !requests.is_empty() {
            self.reactor
                .send(Message::Submit(self.core, class as usize, requests));
        }
    }

    /// Every path of the device: its state, why it is not used, what went over it.
    pub fn paths(&self) -> Vec<PathInfo> {
        if self.reactor.is_ours() {
            self.shared.path_infos()
        } else {
            Vec::new()
        }
    }

    /// As in `describe`, and with every latency.
    pub fn describe_paths(&self) -> serde_json::Value {
        let whole = |path: &PathInfo| {
            let mut said = path.describe();
            said["latency"]["buckets"] = serde_json::json!(path.latencies);
            said
        };
        self.paths().iter().map(whole).collect()
    }

    /// Ranges that a write which was given up may still reach, although the write itself was answered since: see
    /// [`Unsettled`]. Other bytes than that write's must not be trusted to stay there until the range is settled.
    pub fn unsettled(&self) -> Vec<Unsettled> {
        if self.reactor.is_ours() {
            self.shared.unsettled()
        } else {
            Vec::new()
        }
    }

    /// Forget the ranges that were lost up to `generation`: the caller knows that nothing of them is under way any more.
    /// Says how many ranges are left.
    pub fn settle(&self, generation: u64) -> usize {
        if self.reactor.is_ours() {
            self.shared.ghosts().settle(generation)
        } else {
            0
        }
    }

    pub(crate) fn place(&self) -> &str {
        &self.shared.place
    }

    pub(crate) fn hostid(&self) -> [u8; 16] {
        self.shared.options.hostid
    }

    pub(crate) fn send_call(&self, call: Call) {
        if self.reactor.is_ours() {
            self.reactor.send(Message::Call(self.core, Box::new(call)));
        } else {
            call.fail(forked(&self.shared.place));
        }
    }

    pub(crate) fn send_guard(
        &self,
        guard: Option<(u64, ReservationType)>,
        reply: Arc<Latch<Result<(), IoError>>>,
    ) {
        if self.reactor.is_ours() {
            self.reactor.send(Message::Guard(self.core, guard, reply));
        } else {
            reply.set(Err(forked(&self.shared.place)));
        }
    }

    /// What the I/O thread answers within `timeout`.
    pub(crate) fn wait_for<T>(
        &self,
        reply: &Latch<Result<T, IoError>>,
        timeout: Duration,
        grace: Duration,
    ) -> Result<T, IoError> {
        reply.wait(timeout.saturating_add(grace)).unwrap_or_else(|| {
            Err(
                IoError::new(ErrorKind::Timeout, "no answer from any path in time")
                    .at(&self.shared.place)
                    .expected(format!("an answer within {timeout:?}"))
                    .next("check the target and the network; `describe()` says what the paths do"),
            )
        })
    }

    pub(crate) fn ring(&self) -> Option<&Ring> {
        self.shared.ring.as_deref()
    }

    /// `false`: this is not the process that the I/O thread runs in.
    pub(crate) fn ask_under_way(&self, bytes: std::ops::Range<u64>, reply: crate::under_way::Reply) -> bool {
        let ours = self.reactor.is_ours();
        if ours {
            self.reactor.send(Message::UnderWay(self.core, bytes, reply));
        }
        ours
    }

    /// As `ask_under_way`.
    pub(crate) fn ask_events(&self, reply: Arc<Latch<(Vec<Event>, u64)>>) -> bool {
        let ours = self.reactor.is_ours();
        if ours {
            self.reactor.send(Message::Events(self.core, reply));
        }
        ours
    }

    /// Try at once every path that is refused, held back or waiting.
    pub fn reconnect(&self) {
        if self.reactor.is_ours() {
            self.reactor.send(Message::Reconnect(self.core));
        }
    }
}

impl BlockDevice for NvmeTcpDevice {
    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            size_bytes: self.shared.size_bytes.load(Ordering::Relaxed),
            ..self.info.clone()
        }
    }

    fn tells_departures(&self) -> bool {
        true
    }

    fn loss_count(&self) -> u64 {
        self.shared.losses()
    }

    fn submit(&self, requests: Vec<Request>) {
        self.submit_as(TrafficClass::Feed, requests);
    }

    fn events(&self) -> Option<Recorded> {
        self.recorded()
    }

    fn describe(&self) -> serde_json::Value {
        if !self.reactor.is_ours() {
            // The parent's I/O thread may have held a lock when the process forked.
            return serde_json::json!({
                "transport": "nvme+tcp",
                "address": self.shared.place,
                "state": "closed",
                "last_error": forked(&self.shared.place).to_string(),
            });
        }
        self.shared.describe()
    }

    fn close(&self, timeout: Duration) {
        if !self.reactor.is_ours() {
            return;
        }
        let reply = Arc::new(Latch::new());
        let deadline = Instant::now() + timeout.min(Duration::from_secs(86400));
        self.reactor
            .send(Message::Close(self.core, deadline, reply.clone()));
        if !self.reactor.on_thread() {
            // The thread keeps the deadline; the grace is for a machine that is busy.
            let _ = reply.wait(timeout.min(Duration::from_secs(86400)) + GRACE);
        }
    }
}

impl Drop for NvmeTcpDevice {
    fn drop(&mut self) {
        self.close(DROP_TIMEOUT);
    }
}

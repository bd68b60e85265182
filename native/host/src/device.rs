//! The handle: what callers hold. Everything that happens, happens on the I/O thread.

use crate::errors::{forked, unreachable};
use crate::life::Core;
use crate::options::HostOptions;
use crate::reactor::{Message, Reactor};
use crate::shared::{Latch, Shared};
use crate::work::reject;
use headrace_transfer::{BlockDevice, DeviceInfo, ErrorKind, IoError, Request};
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// For the I/O thread to answer after its own deadline has passed; it never needs it.
const GRACE: Duration = Duration::from_secs(5);
/// What `Drop` gives the orderly end.
const DROP_TIMEOUT: Duration = Duration::from_secs(1);

/// One namespace of a controller over NVMe/TCP.
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
    pub fn open(options: HostOptions) -> Result<Arc<NvmeTcpDevice>, IoError> {
        options.check()?;
        let deadline = Instant::now() + options.connect_timeout;
        let addresses = resolve(&options.host, options.port, options.connect_timeout)?;
        let reactor = Reactor::current()?;
        let shared = Arc::new(Shared::new(options));
        let reply = Arc::new(Latch::new());
        let core = reactor.next_core();
        let opened = Core::new(core, shared.clone(), addresses, deadline, reply.clone());
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
}

/// Addresses of a name. The system's resolver cannot be called back, so a thread of its own waits for it.
pub(crate) fn resolve(host: &str, port: u16, timeout: Duration) -> Result<Vec<SocketAddr>, IoError> {
    if let Ok(address) = host.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(address, port)]);
    }
    let name = (host.to_string(), port);
    let answer = Arc::new(Latch::new());
    let to = answer.clone();
    std::thread::Builder::new()
        .name("headrace-resolve".into())
        .spawn(move || to.set(name.to_socket_addrs().map(Iterator::collect::<Vec<_>>)))
        .map_err(|error| {
            IoError::new(ErrorKind::Failed, "cannot start a thread to resolve a name")
                .found(error.to_string())
        })?;
    match answer.wait(timeout) {
        Some(Ok(addresses)) if !addresses.is_empty() => Ok(addresses),
        Some(Ok(_)) => Err(unknown(host, "no address")),
        Some(Err(error)) => Err(unknown(host, &error.to_string())),
        None => {
            let error = std::io::Error::from(std::io::ErrorKind::TimedOut);
            Err(unreachable(host, port, &error))
        }
    }
}

fn unknown(host: &str, found: &str) -> IoError {
    IoError::new(ErrorKind::Refused, "the name does not resolve")
        .at(host)
        .expected("an IPv4 or IPv6 address")
        .found(found)
        .next("check the name, or give an address")
}

impl BlockDevice for NvmeTcpDevice {
    fn info(&self) -> DeviceInfo {
        self.info.clone()
    }

    fn loss_count(&self) -> u64 {
        self.shared.losses()
    }

    fn submit(&self, requests: Vec<Request>) {
        if !self.reactor.is_ours() {
            for request in requests {
                reject(request, forked(&self.shared.place)).report();
            }
            return;
        }
        if !requests.is_empty() {
            self.reactor.send(Message::Submit(self.core, requests));
        }
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

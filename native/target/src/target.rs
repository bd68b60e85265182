//! A running target: its threads, from start to the last join.

use crate::config::TargetConfig;
use crate::hosts::Hosts;
use crate::identity::hex;
use crate::mailbox::{Mailbox, Message};
use crate::memory::Memory;
use crate::reactor::Reactor;
use crate::registry::Registry;
use crate::shared::{Limits, Portal, Shared, Totals};
use crate::subsystem::Subsystem;
use crate::system;
use crate::worker::Workers;
use serde_json::{json, Value};
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Connections unless the configuration says.
const CONNECTIONS: usize = 8192;
/// Descriptors for all else: media, listeners, pollers, the process's own.
const OTHER_DESCRIPTORS: usize = 256;
/// With fewer connections than this a target is not worth starting unasked.
const FEWEST_CONNECTIONS: usize = 64;
/// Connections that wait to be accepted.
const BACKLOG: i32 = 4096;

/// How many connections to take, given what the process may have open. What was asked for is had, or an error.
fn connection_limit(asked: Option<usize>) -> Result<usize, String> {
    let wanted = asked.unwrap_or(CONNECTIONS);
    let allowed = system::allow_descriptors(wanted + OTHER_DESCRIPTORS)
        .map_err(|e| format!("cannot ask for the limit of open files: {e}"))?;
    let room = allowed.saturating_sub(OTHER_DESCRIPTORS);
    if room < asked.unwrap_or(FEWEST_CONNECTIONS) {
        return Err(format!(
            "max_connections {wanted} needs {} open files, and this process may have {allowed}: lower max_connections, or \
             raise the hard limit (ulimit -Hn, LimitNOFILE= of systemd)",
            wanted + OTHER_DESCRIPTORS
        ));
    }
    Ok(wanted.min(room))
}

/// An NVMe/TCP target that serves from its own threads until it is stopped or dropped.
pub struct Target {
    pub(crate) shared: Arc<Shared>,
    threads: Mutex<Vec<(String, JoinHandle<()>)>>,
}

impl Target {
    /// Check the configuration, open all media, listen, serve. An error names the one thing that is wrong.
    pub fn start(config: TargetConfig) -> Result<Target, String> {
        config.validate()?;
        let (engine, portals) = (config.engine(), config.portal_names());
        let mut subsystems = Vec::with_capacity(config.subsystems.len());
        for subsystem in &config.subsystems {
            let limits = subsystem.limits(&config);
            subsystems.push(Arc::new(Subsystem::open(subsystem, limits, engine, &portals)?));
        }
        Self::serve(&config, subsystems)
    }

    /// Serve subsystems whose media are open.
    pub(crate) fn serve(config: &TargetConfig, subsystems: Vec<Arc<Subsystem>>) -> Result<Target, String> {
        let max_connections = connection_limit(config.max_connections)?;
        let max_host_connections = config
            .max_host_connections
            .unwrap_or((max_connections / 2).max(64))
            .min(max_connections);
        let (listeners, portals) = listen(config)?;
        let reactors = match config.reactor_threads {
            0 => std::thread::available_parallelism().map_or(1, |cores| if cores.get() < 4 { 1 } else { 2 }),
            count => count,
        };
        let mut mailboxes = Vec::with_capacity(reactors);
        for _ in 0..reactors {
            mailboxes.push(Arc::new(Mailbox::new().map_err(|e| format!("eventfd: {e}"))?));
        }
        let (workers, handles) = Workers::start(config.worker_threads)?;
        let shared = Arc::new(Shared {
            limits: Limits {
                max_h2c_data_bytes: config.max_h2c_data_bytes,
                max_connections,
                max_host_connections,
                connection_memory_bytes: config.connection_memory_bytes,
                connect_timeout: Duration::from_millis(config.connect_timeout_ms),
                progress_timeout: Duration::from_millis(config.progress_timeout_ms),
            },
            subsystems,
            discovery: Arc::new(Subsystem::discovery(config.limits())),
            registry: Registry::default(),
            hosts: Hosts::default(),
            memory: Memory::new(config.memory_bytes),
            workers,
            mailboxes,
            portals,
            discovery_generation: AtomicU64::new(1),
            draining: AtomicBool::new(false),
            engine: config.engine(),
            started: Instant::now(),
            connections: AtomicUsize::new(0),
            totals: Totals::default(),
            notes: Mutex::default(),
        });
        let threads = handles
            .into_iter()
            .map(|handle| ("a media thread".to_string(), handle))
            .collect();
        // From here on `Drop` ends whatever was started.
        let target = Target {
            shared: shared.clone(),
            threads: Mutex::new(threads),
        };
        let mut listeners = Some(listeners);
        for index in 0..reactors {
            let own = if index == 0 {
                listeners.take().unwrap_or_default()
            } else {
                Vec::new()
            };
            let reactor = Reactor::new(shared.clone(), index, own).map_err(|e| format!("epoll: {e}"))?;
            let handle = std::thread::Builder::new()
                .name(format!("target-reactor-{index}"))
                .spawn(move || reactor.run())
                .map_err(|e| format!("cannot start a reactor thread: {e}"))?;
            target.lock_threads().push((format!("reactor {index}"), handle));
        }
        Ok(target)
    }

    fn lock_threads(&self) -> std::sync::MutexGuard<'_, Vec<(String, JoinHandle<()>)>> {
        self.threads.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Where it listens, in the order of the configuration, with the ports that were found.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.shared.portals.iter().map(|portal| portal.address).collect()
    }

    /// Subsystems with their namespaces and engines, controllers with hosts and queues, counters, the last notes.
    pub fn status(&self) -> Value {
        let shared = &self.shared;
        let portals = shared.portal_names();
        let listening: Vec<Value> = shared
            .portals
            .iter()
            .map(|portal| {
                json!({
                    "name": portal.name,
                    "address": portal.address.to_string(),
                    "discovery": portal.discovery,
                })
            })
            .collect();
        let controllers: Vec<Value> = shared
            .registry
            .all()
            .iter()
            .map(|controller| {
                let queues: Vec<u16> = controller.state().queues.keys().copied().collect();
                json!({
                    "cntlid": controller.cntlid,
                    "subsystem": controller.subsystem.nqn,
                    "hostnqn": controller.host.hostnqn,
                    "hostid": hex(&controller.host.hostid),
                    "address": controller.peer.map(|peer| peer.to_string()),
                    "portal": portals.get(controller.portal),
                    "enabled": controller.enabled(),
                    "keep_alive_ms": controller.kato_ms.load(Ordering::Relaxed),
                    "queues": queues,
                })
            })
            .collect();
        let totals = &shared.totals;
        let get = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        json!({
            "addresses": shared.portals.iter().map(|p| p.address.to_string()).collect::<Vec<_>>(),
            "portals": listening,
            "draining": shared.draining.load(Ordering::Relaxed),
            "discovery_generation": get(&shared.discovery_generation),
            "uptime_s": shared.started.elapsed().as_secs_f64(),
            "subsystems": shared.subsystems.iter().map(|s| s.status(&shared.portals)).collect::<Vec<_>>(),
            "controllers": controllers,
            "connections": shared.connections.load(Ordering::Relaxed),
            "max_connections": shared.limits.max_connections,
            "max_host_connections": shared.limits.max_host_connections,
            "buffer_bytes": shared.memory.used_bytes(),
            "totals": {
                "connections_accepted": get(&totals.accepted),
                "connections_refused": get(&totals.refused),
                "connections_dropped_silent": get(&totals.dropped_silent),
                "protocol_errors": get(&totals.protocol_errors),
                "digest_errors": get(&totals.digest_errors),
                "panics": get(&totals.panics),
                "commands": get(&totals.commands),
                "controllers_created": shared.registry.created(),
                "controllers_expired": shared.registry.expired(),
            },
            "notes": shared.notes.lock().unwrap_or_else(|e| e.into_inner()).iter().cloned().collect::<Vec<_>>(),
        })
    }

    /// End all connections, join all threads, flush all media. The error names what did not end in time or was lost.
    /// Idempotent.
    pub fn stop(&self, timeout: Duration) -> Result<(), String> {
        let deadline = Instant::now() + timeout;
        let mut threads = self.lock_threads();
        if threads.is_empty() {
            return Ok(());
        }
        self.shared
            .mailboxes
            .iter()
            .for_each(|mailbox| mailbox.post(Message::Stop));
        self.shared.workers.stop();
        let mut late = Vec::new();
        for subsystem in &self.shared.subsystems {
            let view = subsystem.view();
            let retired = subsystem.retired().clone();
            let mut namespaces = view.namespaces().chain(&retired);
            if let Some(late) = namespaces.find(|n| !n.reservations.desk.stop(deadline)) {
                return Err(format!(
                    "the reservations of namespace {} did not end within {timeout:?}",
                    late.nsid
                ));
            }
        }
        for (name, handle) in threads.drain(..) {
            while !handle.is_finished() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(1));
            }
            if !handle.is_finished() {
                late.push((name, handle));
            } else if handle.join().is_err() {
                return Err(format!("{name} panicked"));
            }
        }
        if let Some((name, _)) = late.first() {
            let error = format!("{name} did not end within {timeout:?}: its media does not answer");
            *threads = late;
            return Err(error);
        }
        // An orderly end is a drive's shutdown: its cache goes down first.
        let mut lost = None;
        for subsystem in &self.shared.subsystems {
            let view = subsystem.view();
            let retired = std::mem::take(&mut *subsystem.retired());
            for namespace in view.namespaces().chain(&retired) {
                if let Err(error) = namespace.media.flush() {
                    let what = format!("namespace {}: flush at the end: {error}", namespace.nsid);
                    lost.get_or_insert(what);
                }
            }
        }
        lost.map_or(Ok(()), Err)
    }
}

/// Bind every listener. Beyond loopback only where each subsystem says who may connect, be it everybody: NVMe/TCP asks
/// nobody for a password. What a name resolved to counts, not how it reads.
fn listen(config: &TargetConfig) -> Result<(Vec<TcpListener>, Vec<Portal>), String> {
    let mut listeners = Vec::with_capacity(config.listen.len());
    let mut portals = Vec::with_capacity(config.listen.len());
    for (listen, name) in config.listen.iter().zip(config.portal_names()) {
        let place = if listen.host.contains(':') {
            format!("[{}]:{}", listen.host, listen.port)
        } else {
            format!("{}:{}", listen.host, listen.port)
        };
        let error = |e: std::io::Error| {
            let advice = match e.kind() {
                ErrorKind::AddrInUse => {
                    "; another process listens there: stop it, or take another port, 0 for a free one"
                }
                ErrorKind::AddrNotAvailable => {
                    "; take an address of this machine, or 0.0.0.0 for all of them"
                }
                ErrorKind::PermissionDenied => "; take a port above 1023",
                _ => "",
            };
            format!("cannot listen on {place}: {e}{advice}")
        };
        let listener = TcpListener::bind((listen.host.as_str(), listen.port)).map_err(error)?;
        listener.set_nonblocking(true).map_err(error)?;
        system::deepen_backlog(&listener, BACKLOG).map_err(error)?;
        let address = listener.local_addr().map_err(error)?;
        let open = config.subsystems.iter().find(|s| s.is_open_by_default());
        if let (false, Some(subsystem)) = (address.ip().to_canonical().is_loopback(), open) {
            return Err(format!(
                "listening on {place} ({}) lets other machines in, and subsystem {} says of no host that it may connect; \
                 name its hosts, or allow all",
                address.ip(),
                subsystem.nqn
            ));
        }
        portals.push(Portal {
            name,
            address,
            discovery: listen.discovery,
        });
        listeners.push(listener);
    }
    Ok((listeners, portals))
}

impl Drop for Target {
    fn drop(&mut self) {
        // Nobody is there to hear an error; a caller who wants it calls `stop`.
        let _ = self.stop(Duration::from_secs(10));
    }
}

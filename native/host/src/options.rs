//! What a caller chooses, checked before anything is opened.

use crate::facts::hex;
use crate::flow::Inflight;
use headrace_transfer::events::{EVENTS_DEFAULT, EVENTS_MAX};
use headrace_transfer::{ErrorKind, IoError};
use headrace_wire::{command::NSID_ALL, NQN_MAX};
use std::net::IpAddr;
use std::time::Duration;

/// Most I/O queues of one controller that we would ever ask for.
pub const QUEUES_MAX: u16 = 128;
/// Most commands under way on one queue.
pub const DEPTH_MAX: u16 = 1024;

/// Longest that the I/O thread may spin for more.
pub const POLL_MAX: Duration = Duration::from_millis(100);
/// Most portals of one device.
pub const PORTALS_MAX: usize = 16;

/// Where a subsystem listens. The addresses of one name are alternatives; several portals are paths, used at once.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Portal {
    /// Name or address, IPv4 or IPv6 (without brackets).
    pub host: String,
    pub port: u16,
}

impl Portal {
    pub fn new(host: impl Into<String>, port: u16) -> Self {
        Portal {
            host: host.into(),
            port,
        }
    }
}

impl std::fmt::Display for Portal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", authority(&self.host, self.port))
    }
}

/// Which of the usable paths takes the next command.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    RoundRobin,
    /// The path with the fewest commands under way for its share of queues, a slow one counting for more.
    #[default]
    QueueDepth,
}

impl Policy {
    pub fn name(self) -> &'static str {
        match self {
            Policy::RoundRobin => "round-robin",
            Policy::QueueDepth => "queue-depth",
        }
    }
}

/// Which namespace of the subsystem. A UUID or NGUID is looked for when the association comes up, among the active ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NamespaceKey {
    Nsid(u32),
    Uuid([u8; 16]),
    Nguid([u8; 16]),
}

impl NamespaceKey {
    /// In a sentence.
    pub(crate) fn words(&self) -> String {
        match self {
            NamespaceKey::Nsid(nsid) => format!("namespace {nsid}"),
            other => format!("namespace {other}"),
        }
    }
}

/// As in an address: `nsid=1`, `uuid=...`.
impl std::fmt::Display for NamespaceKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            NamespaceKey::Nsid(nsid) => write!(f, "nsid={nsid}"),
            NamespaceKey::Uuid(id) => {
                let h = hex(id);
                let (a, b, c, d, e) = (&h[..8], &h[8..12], &h[12..16], &h[16..20], &h[20..]);
                write!(f, "uuid={a}-{b}-{c}-{d}-{e}")
            }
            NamespaceKey::Nguid(id) => write!(f, "nguid={}", hex(id)),
        }
    }
}

/// How the sockets of a device are made: from which address, by which interface, with which mark on their packets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Route {
    /// [host_traddr] Our end of each connection.
    pub host_traddr: Option<IpAddr>,
    /// [host_iface] The network interface that packets must leave by (SO_BINDTODEVICE).
    pub host_iface: Option<String>,
    /// IP_TOS or IPV6_TCLASS: the whole byte, DSCP and ECN.
    pub tos: Option<u8>,
}

impl Route {
    fn check(&self) -> Result<(), IoError> {
        if let Some(iface) = &self.host_iface {
            // IFNAMSIZ counts a closing NUL.
            let sound = (1..16).contains(&iface.len()) && !iface.bytes().any(|b| b <= b' ' || b == b'/');
            if !sound {
                return Err(usage(
                    "host_iface",
                    "the name of an interface, 1 to 15 bytes",
                    format!("{iface:?}"),
                ));
            }
        }
        Ok(())
    }
}

/// How to reach one namespace over NVMe/TCP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostOptions {
    /// Of one subsystem: each is a path to the same namespace.
    pub portals: Vec<Portal>,
    pub policy: Policy,
    pub route: Route,
    pub subsysnqn: String,
    pub namespace: NamespaceKey,
    pub hostnqn: String,
    pub hostid: [u8; 16],
    /// Ask for CRC32C over PDU headers; a controller that does not agree is refused.
    pub header_digest: bool,
    /// Ask for CRC32C over data.
    pub data_digest: bool,
    /// I/O queues, each a TCP connection; the controller may grant fewer.
    pub queues: u16,
    /// Commands under way a queue, 1 to 1024; the controller's CAP.MQES may lower it.
    pub depth: u16,
    /// HPDA: data of C2HData begin at a multiple of (hpda + 1) * 4 bytes of the PDU; 0 to 31.
    pub hpda: u8,
    /// MAXR2T: R2Ts of one command that the controller may have outstanding, less one; 0 to 255.
    pub maxr2t: u8,
    /// What reads may have under way on this node, of all its targets together.
    pub inflight: Inflight,
    /// How long the I/O thread looks for answers before it sleeps while I/O commands are under way; zero: not at all. Never
    /// when idle, and less and less often where nothing comes so soon.
    pub poll: Duration,
    /// Between two looks at the namespace and its ANA state without an event, since events get lost.
    pub reconcile: Duration,
    /// KATO; a Keep Alive goes out at half of it. Zero: none.
    pub keep_alive: Duration,
    /// For the whole bring-up: name, TCP, controller, queues, namespace.
    pub connect_timeout: Duration,
    /// For one command, while connected.
    pub io_timeout: Duration,
    /// How long I/O waits while no path is usable before it fails; `None`: for ever.
    pub loss_timeout: Option<Duration>,
    /// Of the ring that says what the device did lately, 32 bytes each; 0: none.
    pub events: usize,
}

/// What a caller who names only portals and names gets.
impl Default for HostOptions {
    fn default() -> Self {
        HostOptions {
            portals: Vec::new(),
            policy: Policy::default(),
            route: Route::default(),
            subsysnqn: String::new(),
            namespace: NamespaceKey::Nsid(1),
            hostnqn: String::new(),
            hostid: [0; 16],
            header_digest: false,
            data_digest: false,
            queues: 1,
            depth: 128,
            hpda: 0,
            maxr2t: 0,
            inflight: Inflight::default(),
            poll: Duration::ZERO,
            reconcile: Duration::from_secs(30),
            keep_alive: Duration::from_secs(5),
            connect_timeout: Duration::from_secs(10),
            io_timeout: Duration::from_secs(30),
            loss_timeout: Some(Duration::from_secs(60)),
            events: EVENTS_DEFAULT,
        }
    }
}

/// Where to ask for the discovery log page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiscoverOptions {
    pub host: String,
    pub port: u16,
    pub route: Route,
    pub hostnqn: String,
    pub hostid: [u8; 16],
    pub connect_timeout: Duration,
}

fn usage(field: &str, expected: &str, found: impl ToString) -> IoError {
    IoError::new(ErrorKind::Usage, format!("bad option {field}"))
        .expected(expected)
        .found(found.to_string())
}

fn check_nqn(field: &str, nqn: &str) -> Result<(), IoError> {
    if nqn.is_empty() || nqn.len() > NQN_MAX || nqn.bytes().any(|b| b == 0) {
        return Err(usage(field, "an NQN of 1 to 223 bytes", format!("{nqn:?}")));
    }
    Ok(())
}

fn check_place(host: &str, port: u16) -> Result<(), IoError> {
    if host.is_empty() {
        return Err(usage("host", "a name or an address", "\"\""));
    }
    if port == 0 {
        return Err(usage("port", "1 to 65535", 0));
    }
    Ok(())
}

fn check_time(field: &str, time: Duration) -> Result<(), IoError> {
    // An upper bound keeps every later `Instant + Duration` from overflowing.
    if time.is_zero() || time > Duration::from_secs(10 * 365 * 86400) {
        return Err(usage(
            field,
            "more than 0 s, at most ten years",
            format!("{time:?}"),
        ));
    }
    Ok(())
}

impl HostOptions {
    pub fn check(&self) -> Result<(), IoError> {
        if !(1..=PORTALS_MAX).contains(&self.portals.len()) {
            return Err(usage("portals", "1 to 16", self.portals.len()));
        }
        for (at, portal) in self.portals.iter().enumerate() {
            check_place(&portal.host, portal.port)?;
            if self.portals[..at].contains(portal) {
                return Err(usage("portals", "each portal once", portal));
            }
        }
        check_nqn("subsysnqn", &self.subsysnqn)?;
        check_nqn("hostnqn", &self.hostnqn)?;
        self.route.check()?;
        match self.namespace {
            NamespaceKey::Nsid(0 | NSID_ALL) => {
                return Err(usage("nsid", "1 to 0xfffffffe", self.namespace));
            }
            NamespaceKey::Uuid(id) | NamespaceKey::Nguid(id) if id == [0; 16] => {
                return Err(usage(
                    "namespace",
                    "an identifier that is not zero",
                    self.namespace,
                ));
            }
            _ => {}
        }
        if !(1..=QUEUES_MAX).contains(&self.queues) {
            return Err(usage("queues", "1 to 128", self.queues));
        }
        if self.inflight == Inflight::AtMost(0) {
            return Err(usage("inflight", "auto, off, or a number of bytes", 0));
        }
        if !(1..=DEPTH_MAX).contains(&self.depth) {
            return Err(usage("depth", "1 to 1024", self.depth));
        }
        if self.hpda > 31 {
            return Err(usage("hpda", "0 to 31", self.hpda));
        }
        if self.poll > POLL_MAX {
            return Err(usage("poll", "at most 100 ms", format!("{:?}", self.poll)));
        }
        // In milliseconds on the wire, where 0 would mean none.
        if !self.keep_alive.is_zero() && self.keep_alive < Duration::from_millis(100) {
            return Err(usage(
                "keep_alive",
                "0, or at least 0.1 s",
                format!("{:?}", self.keep_alive),
            ));
        }
        if self.keep_alive > Duration::from_millis(u32::MAX.into()) {
            return Err(usage(
                "keep_alive",
                "at most 49 days",
                format!("{:?}", self.keep_alive),
            ));
        }
        if self.events > EVENTS_MAX {
            return Err(usage("events", "at most 16777216", self.events));
        }
        check_time("reconcile", self.reconcile)?;
        check_time("connect_timeout", self.connect_timeout)?;
        check_time("io_timeout", self.io_timeout)?;
        self.loss_timeout
            .map_or(Ok(()), |time| check_time("loss_timeout", time))
    }

    /// What a person would call this device; the address by which Python opens it again.
    pub fn address(&self) -> String {
        format!(
            "nvme+tcp://{}/{}?{}",
            self.portals
                .iter()
                .map(Portal::to_string)
                .collect::<Vec<_>>()
                .join(","),
            self.subsysnqn,
            self.namespace
        )
    }
}

impl DiscoverOptions {
    pub fn check(&self) -> Result<(), IoError> {
        check_place(&self.host, self.port)?;
        self.route.check()?;
        check_nqn("hostnqn", &self.hostnqn)?;
        check_time("connect_timeout", self.connect_timeout)
    }
}

/// HOST:PORT, with brackets around an IPv6 address.
pub(crate) fn authority(host: &str, port: u16) -> String {
    if host.contains(':') {
        format!("[{host}]:{port}")
    } else {
        format!("{host}:{port}")
    }
}

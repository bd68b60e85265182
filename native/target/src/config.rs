//! What a target serves: one JSON object, checked as a whole before anything is opened (module `check`).

mod check;

pub(crate) use check::is_nqn;

use crate::view::{ana_state, Group, HostAccess, Hosts};
use headrace_media::Engine;
use headrace_wire::ana::AnaState;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// See the fields; unknown names are refused, so that a spelling error never means a default.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TargetConfig {
    #[serde(default = "default_listen")]
    pub listen: Vec<ListenConfig>,
    #[serde(default)]
    pub subsystems: Vec<SubsystemConfig>,
    #[serde(default)]
    pub io_engine: IoEngine,
    /// MAXH2CDATA: the longest data PDU a host may send. A multiple of 4 from 4096. Longer ones cost fewer headers.
    #[serde(default = "mebibyte")]
    pub max_h2c_data_bytes: u32,
    /// Write data that may travel with the command, saving a round trip (IOCCSZ). A multiple of 16, at most 64 KiB.
    #[serde(default = "default_in_capsule")]
    pub in_capsule_bytes: u32,
    /// Longest single command: a power of two from 8192 to 16 MiB (MDTS).
    #[serde(default = "mebibyte")]
    pub mdts_bytes: u32,
    /// Connections in all, each a queue of a controller. Default: 8192, or as many as the process may have descriptors for.
    #[serde(default)]
    pub max_connections: Option<usize>,
    /// Of one host, and of one address before it has said which host it is. Default: half of all, but not less than 64.
    #[serde(default)]
    pub max_host_connections: Option<usize>,
    /// Largest queue in entries, 16 to 1024 (MQES).
    #[serde(default = "default_queue_entries")]
    pub max_queue_entries: u16,
    /// I/O queues that one controller may have, 1 to 128.
    #[serde(default = "default_io_queues")]
    pub max_io_queues: u16,
    /// Data buffers that all connections together may hold.
    #[serde(default = "default_memory")]
    pub memory_bytes: usize,
    /// Data buffers that one connection may hold; its next commands wait. At least two longest commands.
    #[serde(default = "default_connection_memory")]
    pub connection_memory_bytes: usize,
    /// A connection must be connected to a controller this soon, and a peer with data or answers under way must make
    /// progress this often, or it is dropped.
    #[serde(default = "default_connect_timeout")]
    pub connect_timeout_ms: u64,
    #[serde(default = "default_progress_timeout")]
    pub progress_timeout_ms: u64,
    /// Threads that move bytes between sockets and memory. 0: chosen from the number of cores (1 below four, else 2).
    #[serde(default)]
    pub reactor_threads: usize,
    /// Threads that wait for files.
    #[serde(default = "default_workers")]
    pub worker_threads: usize,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ListenConfig {
    /// A numeric address, or a name that resolves to one.
    pub host: String,
    /// 0: a free one, see `Target::addresses`.
    #[serde(default)]
    pub port: u16,
    /// What ANA groups call it; empty: its number, from 1.
    #[serde(default)]
    pub name: String,
    /// Only the discovery subsystem is served here.
    #[serde(default)]
    pub discovery: bool,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SubsystemConfig {
    pub nqn: String,
    /// At most 20 printable ASCII characters; default: derived from the NQN.
    #[serde(default)]
    pub serial: String,
    /// At most 40 printable ASCII characters.
    #[serde(default = "default_model")]
    pub model: String,
    /// Hosts that may connect.
    #[serde(default)]
    pub allow_hosts: Vec<HostConfig>,
    /// What a host may do that is not among them. Left out: nothing, or everything where the list is empty.
    #[serde(default)]
    pub other_hosts: Option<HostAccess>,
    /// Empty: group 1, optimized through every portal.
    #[serde(default)]
    pub ana_groups: Vec<AnaGroupConfig>,
    pub namespaces: Vec<NamespaceConfig>,
    /// Where given, in place of the target's.
    #[serde(default)]
    pub in_capsule_bytes: Option<u32>,
    #[serde(default)]
    pub mdts_bytes: Option<u32>,
    #[serde(default)]
    pub max_queue_entries: Option<u16>,
    #[serde(default)]
    pub max_io_queues: Option<u16>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostConfig {
    pub nqn: String,
    #[serde(default)]
    pub access: HostAccess,
}

impl From<&str> for HostConfig {
    fn from(nqn: &str) -> Self {
        HostConfig {
            nqn: nqn.into(),
            access: HostAccess::ReadWrite,
        }
    }
}

/// Namespaces that share their path states.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AnaGroupConfig {
    pub id: u32,
    /// Through each portal, by its name: `optimized`, `non-optimized`, `inaccessible`, `persistent-loss` or `change`.
    #[serde(default)]
    pub states: BTreeMap<String, String>,
    /// Through all other portals.
    #[serde(default = "default_state")]
    pub state: String,
}

/// What one controller of a subsystem may use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueueLimits {
    pub(crate) mdts_bytes: u32,
    pub(crate) in_capsule_bytes: u32,
    pub(crate) max_queue_entries: u16,
    pub(crate) max_io_queues: u16,
}

impl Default for QueueLimits {
    fn default() -> Self {
        QueueLimits {
            mdts_bytes: mebibyte(),
            in_capsule_bytes: default_in_capsule(),
            max_queue_entries: default_queue_entries(),
            max_io_queues: default_io_queues(),
        }
    }
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NamespaceConfig {
    pub nsid: u32,
    pub media: MediaConfig,
    #[serde(default = "default_block")]
    pub block_bytes: u32,
    /// More than 0: unflushed writes up to this many bytes live in this process's memory only and die with it.
    #[serde(default)]
    pub volatile_cache_bytes: u64,
    #[serde(default)]
    pub read_only: bool,
    /// Default: derived from the subsystem's NQN and the nsid, so that it stays the same over restarts.
    #[serde(default)]
    pub uuid: Option<String>,
    /// As the UUID.
    #[serde(default)]
    pub nguid: Option<String>,
    #[serde(default = "default_group")]
    pub ana_group: u32,
    /// Where reservations that survive a restart are kept. It must exist; an empty file is a beginning. Default: beside the
    /// media file, made when it is first needed.
    #[serde(default)]
    pub reservations_path: Option<PathBuf>,
    /// None are offered, and their commands are refused: for hosts that must not reserve.
    #[serde(default)]
    pub no_reservations: bool,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum MediaConfig {
    File {
        path: PathBuf,
        /// Needed with `create`; else, where given, the file must have this size.
        #[serde(default)]
        size_bytes: Option<u64>,
        /// Make the file, sparse, where it does not exist.
        #[serde(default)]
        create: bool,
        /// Past the page cache (O_DIRECT). `auto`: block devices, where the system allows it; not files. `on`: or not at all.
        #[serde(default)]
        direct: Direct,
    },
    Memory {
        size_bytes: u64,
    },
}

#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum Direct {
    #[default]
    Auto,
    On,
    Off,
}

#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum IoEngine {
    #[default]
    Auto,
    IoUring,
    Pread,
}

fn default_listen() -> Vec<ListenConfig> {
    vec![ListenConfig {
        host: "127.0.0.1".into(),
        port: 0,
        name: String::new(),
        discovery: false,
    }]
}
fn default_model() -> String {
    "headrace".into()
}
fn default_state() -> String {
    AnaState::Optimized.name().into()
}
fn default_group() -> u32 {
    1
}
fn default_block() -> u32 {
    4096
}
fn default_in_capsule() -> u32 {
    16 << 10
}
fn mebibyte() -> u32 {
    1 << 20
}
fn default_queue_entries() -> u16 {
    1024
}
fn default_io_queues() -> u16 {
    64
}
fn default_memory() -> usize {
    1 << 30
}
fn default_connection_memory() -> usize {
    64 << 20
}
fn default_connect_timeout() -> u64 {
    10_000
}
fn default_progress_timeout() -> u64 {
    30_000
}
fn default_workers() -> usize {
    4
}

impl TargetConfig {
    pub fn from_json(text: &str) -> Result<Self, String> {
        serde_json::from_str(text).map_err(|e| format!("target configuration: {e}"))
    }

    pub(crate) fn limits(&self) -> QueueLimits {
        QueueLimits {
            mdts_bytes: self.mdts_bytes,
            in_capsule_bytes: self.in_capsule_bytes,
            max_queue_entries: self.max_queue_entries,
            max_io_queues: self.max_io_queues,
        }
    }

    /// What ANA groups and the control plane call the listeners.
    pub(crate) fn portal_names(&self) -> Vec<String> {
        let name = |(index, listen): (usize, &ListenConfig)| match listen.name.as_str() {
            "" => (index + 1).to_string(),
            name => name.to_string(),
        };
        self.listen.iter().enumerate().map(name).collect()
    }

    pub(crate) fn engine(&self) -> Engine {
        match self.io_engine {
            IoEngine::Auto => Engine::Auto,
            IoEngine::IoUring => Engine::IoUring,
            IoEngine::Pread => Engine::Pread,
        }
    }
}

impl SubsystemConfig {
    pub(crate) fn limits(&self, target: &TargetConfig) -> QueueLimits {
        let all = target.limits();
        QueueLimits {
            mdts_bytes: self.mdts_bytes.unwrap_or(all.mdts_bytes),
            in_capsule_bytes: self.in_capsule_bytes.unwrap_or(all.in_capsule_bytes),
            max_queue_entries: self.max_queue_entries.unwrap_or(all.max_queue_entries),
            max_io_queues: self.max_io_queues.unwrap_or(all.max_io_queues),
        }
    }

    /// Nobody said who may connect, which means everybody.
    pub(crate) fn is_open_by_default(&self) -> bool {
        self.allow_hosts.is_empty() && self.other_hosts.is_none()
    }

    pub(crate) fn hosts(&self) -> Hosts {
        let everybody = self.allow_hosts.is_empty().then_some(HostAccess::ReadWrite);
        Hosts {
            others: self.other_hosts.or(everybody),
            named: self
                .allow_hosts
                .iter()
                .map(|host| (host.nqn.clone(), host.access))
                .collect(),
        }
    }

    /// With a state for each portal.
    pub(crate) fn groups(&self, portals: &[String]) -> BTreeMap<u32, Group> {
        let state = |name: &str| ana_state(name).unwrap_or(AnaState::Optimized);
        let given = self.ana_groups.iter().map(|group| {
            let states = portals
                .iter()
                .map(|portal| state(group.states.get(portal).unwrap_or(&group.state)))
                .collect();
            (group.id, Group { states, changes: 0 })
        });
        let mut groups: BTreeMap<u32, Group> = given.collect();
        if groups.is_empty() {
            let states = vec![AnaState::Optimized; portals.len()];
            groups.insert(default_group(), Group { states, changes: 0 });
        }
        groups
    }
}

//! What a target serves: one JSON object, checked as a whole before anything is opened.

use crate::reservation::{store::Store, Reservations};
use crate::subsystem::{MAX_ANA_GROUPS, MAX_NAMESPACES, MAX_NSID};
use crate::view::{ana_state, Group, HostAccess, Hosts};
use headrace_media::{check_geometry, Cache, Engine, FileMedia, Media, MemoryMedia, VolatileCache};
use headrace_wire::ana::AnaState;
use headrace_wire::{DISCOVERY_NQN, NQN_MAX};
use serde::Deserialize;
use std::collections::{BTreeMap, HashSet};
use std::io::ErrorKind;
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

impl QueueLimits {
    fn validate(&self, place: &str) -> Result<(), String> {
        within(
            &format!("{place}in_capsule_bytes"),
            self.in_capsule_bytes,
            0,
            64 << 10,
        )?;
        if self.in_capsule_bytes % 16 != 0 {
            return Err(format!(
                "{place}in_capsule_bytes must be a multiple of 16, found {}",
                self.in_capsule_bytes
            ));
        }
        // The field is an exponent of 4 KiB pages, and exponent 0 means "no limit": one page cannot be said.
        within(&format!("{place}mdts_bytes"), self.mdts_bytes, 8192, 16 << 20)?;
        if !self.mdts_bytes.is_power_of_two() {
            return Err(format!(
                "{place}mdts_bytes must be a power of two, found {}",
                self.mdts_bytes
            ));
        }
        within(
            &format!("{place}max_queue_entries"),
            self.max_queue_entries,
            16,
            1024,
        )?;
        within(&format!("{place}max_io_queues"), self.max_io_queues, 1, 128)
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

/// An NQN: `nqn.` and at most 223 bytes, printable, no spaces.
pub(crate) fn is_nqn(text: &str) -> bool {
    text.starts_with("nqn.") && text.len() <= NQN_MAX && text.bytes().all(|b| b.is_ascii_graphic())
}

fn printable(text: &str, longest: usize) -> bool {
    text.len() <= longest && text.bytes().all(|b| b == b' ' || b.is_ascii_graphic())
}

fn within<T: PartialOrd + std::fmt::Display>(name: &str, value: T, low: T, high: T) -> Result<(), String> {
    if value < low || value > high {
        return Err(format!("{name} must be from {low} to {high}, found {value}"));
    }
    Ok(())
}

impl TargetConfig {
    pub fn from_json(text: &str) -> Result<Self, String> {
        serde_json::from_str(text).map_err(|e| format!("target configuration: {e}"))
    }

    /// Everything that can be said without opening a file or a socket.
    pub fn validate(&self) -> Result<(), String> {
        if self.listen.is_empty() {
            return Err("listen must name at least one address".into());
        }
        within("max_h2c_data_bytes", self.max_h2c_data_bytes, 4096, 1 << 30)?;
        if self.max_h2c_data_bytes % 4 != 0 {
            return Err(format!(
                "max_h2c_data_bytes must be a multiple of 4, found {}",
                self.max_h2c_data_bytes
            ));
        }
        self.limits().validate("")?;
        within("max_connections", self.max_connections.unwrap_or(1), 1, 65536)?;
        within(
            "max_host_connections",
            self.max_host_connections.unwrap_or(1),
            1,
            65536,
        )?;
        within("reactor_threads", self.reactor_threads, 0, 64)?;
        within("worker_threads", self.worker_threads, 1, 64)?;
        within("connect_timeout_ms", self.connect_timeout_ms, 10, 600_000)?;
        within("progress_timeout_ms", self.progress_timeout_ms, 10, 600_000)?;
        let longest = self.subsystems.iter().filter_map(|s| s.mdts_bytes);
        // Two of the longest commands, or a fused pair beside in-capsule data.
        let least = 2 * (longest.fold(self.mdts_bytes.max(128 << 10), u32::max) as usize);
        within(
            "connection_memory_bytes",
            self.connection_memory_bytes,
            least,
            1 << 40,
        )?;
        within(
            "memory_bytes",
            self.memory_bytes,
            self.connection_memory_bytes,
            1 << 44,
        )?;
        let portals = self.portal_names();
        if let Some(twice) = portals
            .iter()
            .enumerate()
            .find(|(i, n)| portals[..*i].contains(n))
        {
            return Err(format!("two portals have the name {:?}", twice.1));
        }
        if self.listen.iter().all(|listen| listen.discovery) && !self.subsystems.is_empty() {
            return Err("every portal is for discovery only: no subsystem could be reached".into());
        }
        let mut nqns = HashSet::new();
        let mut paths = HashSet::new();
        for subsystem in &self.subsystems {
            if !nqns.insert(subsystem.nqn.as_str()) {
                return Err(format!("subsystem {:?} is given twice", subsystem.nqn));
            }
            subsystem.validate(&portals, &mut paths)?;
            subsystem
                .limits(self)
                .validate(&format!("subsystem {}: ", subsystem.nqn))?;
        }
        Ok(())
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
    fn validate<'a>(&'a self, portals: &[String], paths: &mut HashSet<&'a PathBuf>) -> Result<(), String> {
        if !is_nqn(&self.nqn) || self.nqn == DISCOVERY_NQN {
            return Err(format!(
                "a subsystem's nqn must begin with \"nqn.\", be printable, at most {NQN_MAX} bytes, and not the discovery \
                 subsystem's, found {:?}",
                self.nqn
            ));
        }
        let place = format!("subsystem {}", self.nqn);
        if !printable(&self.serial, 20) {
            return Err(format!(
                "{place}: serial must be at most 20 printable characters, found {:?}",
                self.serial
            ));
        }
        if !printable(&self.model, 40) {
            return Err(format!(
                "{place}: model must be at most 40 printable characters, found {:?}",
                self.model
            ));
        }
        let mut hosts = HashSet::new();
        for host in &self.allow_hosts {
            if !is_nqn(&host.nqn) {
                return Err(format!("{place}: hosts must be host NQNs, found {:?}", host.nqn));
            }
            if !hosts.insert(&host.nqn) {
                return Err(format!("{place}: host {} is given twice", host.nqn));
            }
        }
        let mut groups = HashSet::new();
        for group in &self.ana_groups {
            let place = format!("{place}, ANA group {}", group.id);
            within(&format!("{place}: id"), group.id, 1, MAX_ANA_GROUPS)?;
            if !groups.insert(group.id) {
                return Err(format!("{place} is given twice"));
            }
            if let Some(portal) = group.states.keys().find(|name| !portals.contains(name)) {
                return Err(format!(
                    "{place}: there is no portal {portal:?}, only {}",
                    portals.join(", ")
                ));
            }
            if let Some(bad) = group
                .states
                .values()
                .chain([&group.state])
                .find(|state| ana_state(state).is_none())
            {
                return Err(format!(
                    "{place}: a state must be optimized, non-optimized, inaccessible, persistent-loss or change, \
                     found {bad:?}"
                ));
            }
        }
        if groups.is_empty() {
            groups.insert(default_group());
        }
        if self.namespaces.len() > MAX_NAMESPACES {
            return Err(format!(
                "{place}: at most {MAX_NAMESPACES} namespaces, found {}",
                self.namespaces.len()
            ));
        }
        let mut nsids = HashSet::new();
        for namespace in &self.namespaces {
            if !nsids.insert(namespace.nsid) {
                return Err(format!("{place}: namespace {} is given twice", namespace.nsid));
            }
            namespace.validate().map_err(|e| format!("{place}, {e}"))?;
            if !groups.contains(&namespace.ana_group) {
                return Err(format!(
                    "{place}, namespace {}: there is no ANA group {}",
                    namespace.nsid, namespace.ana_group
                ));
            }
            if let MediaConfig::File { path, .. } = &namespace.media {
                if !paths.insert(path) {
                    return Err(format!(
                        "{place}, namespace {}: {} is given twice",
                        namespace.nsid,
                        path.display()
                    ));
                }
            }
        }
        Ok(())
    }

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

impl NamespaceConfig {
    /// Everything that can be said without its subsystem.
    pub(crate) fn validate(&self) -> Result<(), String> {
        let place = format!("namespace {}", self.nsid);
        within(&format!("{place}: nsid"), self.nsid, 1, MAX_NSID)?;
        if self.block_bytes != 512 && self.block_bytes != 4096 {
            return Err(format!(
                "{place}: a block must have 512 or 4096 bytes, found {}",
                self.block_bytes
            ));
        }
        for (what, id) in [("uuid", &self.uuid), ("nguid", &self.nguid)] {
            if let Some(id) = id.as_ref().filter(|id| parse_uuid(id).is_none()) {
                return Err(format!(
                    "{place}: {what} must be 32 hexadecimal digits, found {id:?}"
                ));
            }
        }
        let geometry = |size: u64| {
            check_geometry(size, self.block_bytes).map_err(|_| {
                format!(
                    "{place}: the size must be a positive multiple of the block, {} bytes, found {size}",
                    self.block_bytes
                )
            })
        };
        match &self.media {
            MediaConfig::Memory { .. } if self.reservations_path.is_some() => Err(format!(
                "{place}: reservations_path is for files and block devices"
            )),
            MediaConfig::Memory { size_bytes } => geometry(*size_bytes),
            MediaConfig::File {
                path,
                create,
                size_bytes: None,
                ..
            } if *create => Err(format!("{place}: a size is needed to create {}", path.display())),
            MediaConfig::File { size_bytes, .. } => size_bytes.map_or(Ok(()), geometry),
        }
    }

    /// What is known of who may write.
    pub(crate) fn reservations(&self, uuid: [u8; 16]) -> Result<Reservations, String> {
        let store = match &self.media {
            MediaConfig::Memory { .. } => Store::default(),
            MediaConfig::File { .. } if self.read_only => Store::None("the namespace is read-only".into()),
            MediaConfig::File { path, .. } => Store::beside(path, self.reservations_path.as_deref(), uuid)?,
        };
        Reservations::open(store)
    }

    /// Open, or create, what holds the bytes.
    pub(crate) fn open(&self, engine: Engine) -> Result<Box<dyn Media>, String> {
        let media: Box<dyn Media> = match &self.media {
            MediaConfig::Memory { size_bytes } => Box::new(
                MemoryMedia::new(*size_bytes, self.block_bytes)
                    .map_err(|e| format!("namespace {}: memory of {size_bytes} bytes: {e}", self.nsid))?,
            ),
            MediaConfig::File {
                path,
                size_bytes,
                create,
                direct,
            } => {
                let error = |e: std::io::Error| {
                    let advice = match e.kind() {
                        ErrorKind::WouldBlock => {
                            "; stop the other one (`headrace target stop`), or serve another file"
                        }
                        ErrorKind::NotFound => "; to make it, give its size",
                        ErrorKind::PermissionDenied => {
                            "; make it readable and writable for this user, or serve it read-only"
                        }
                        _ => "",
                    };
                    format!("namespace {}: {}: {e}{advice}", self.nsid, path.display())
                };
                if let (true, Some(size), false) = (*create, size_bytes, path.exists()) {
                    FileMedia::create(path, *size).map_err(error)?;
                }
                let cache = match direct {
                    Direct::Auto => Cache::Auto,
                    Direct::On => Cache::Bypass,
                    Direct::Off => Cache::Use,
                };
                let media = FileMedia::open_as(path, self.block_bytes, self.read_only, engine, cache);
                let media = media.map_err(error)?;
                media.lock().map_err(error)?;
                if let Some(size) = size_bytes.filter(|size| *size != media.size_bytes()) {
                    return Err(format!(
                        "namespace {}: {} has {} bytes, the configuration says {size}",
                        self.nsid,
                        path.display(),
                        media.size_bytes()
                    ));
                }
                Box::new(media)
            }
        };
        Ok(match self.volatile_cache_bytes {
            0 => media,
            limit => Box::new(VolatileCache::new(media, limit)),
        })
    }
}

/// 32 hexadecimal digits, hyphens anywhere.
pub(crate) fn parse_uuid(text: &str) -> Option<[u8; 16]> {
    let digits: Vec<u8> = text
        .chars()
        .filter(|&c| c != '-')
        .map(|c| c.to_digit(16).map(|d| d as u8))
        .collect::<Option<_>>()?;
    let mut uuid = [0; 16];
    if digits.len() != 32 {
        return None;
    }
    for (byte, pair) in uuid.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = pair[0] << 4 | pair[1];
    }
    Some(uuid)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"{"subsystems": [{"nqn": "nqn.2026-01.io.x:a", "namespaces":
        [{"nsid": 1, "media": {"kind": "memory", "size_bytes": 1048576}}]}]}"#;

    #[test]
    fn a_small_configuration_is_enough() {
        let config = TargetConfig::from_json(GOOD).unwrap();
        config.validate().unwrap();
        assert_eq!(config.listen[0].host, "127.0.0.1");
    }

    #[test]
    fn each_mistake_has_one_sentence() {
        for (find, replace, says) in [
            ("\"nqn.2026-01.io.x:a\"", "\"a\"", "nqn must begin"),
            (
                "\"nqn.2026-01.io.x:a\"",
                "\"nqn.2014-08.org.nvmexpress.discovery\"",
                "discovery",
            ),
            ("\"nsid\": 1", "\"nsid\": 0", "nsid must be from 1 to"),
            ("\"nsid\": 1", "\"nsid\": 1, \"ana_group\": 2", "no ANA group 2"),
            ("\"nsid\": 1", "\"nsid\": 1, \"nguid\": \"12\"", "nguid must be"),
            ("1048576", "1048577", "multiple of the block"),
            ("\"nsid\": 1", "\"nsid\": 1, \"block_bytes\": 1024", "512 or 4096"),
            ("\"nsid\": 1", "\"nsid\": 1, \"uuid\": \"12\"", "uuid"),
            (
                "\"nsid\": 1",
                "\"nsid\": 1, \"colour\": 2",
                "unknown field `colour`",
            ),
            (
                "\"subsystems\"",
                "\"mdts_bytes\": 9000, \"subsystems\"",
                "power of two",
            ),
            ("\"subsystems\"", "\"mdts_bytes\": 4096, \"subsystems\"", "8192"),
            (
                "\"subsystems\"",
                "\"in_capsule_bytes\": 70000, \"subsystems\"",
                "in_capsule_bytes",
            ),
            ("\"subsystems\"", "\"listen\": [], \"subsystems\"", "listen"),
            ("\"kind\": \"memory\"", "\"kind\": \"tape\"", "tape"),
        ] {
            let text = GOOD.replace(find, replace);
            let error = TargetConfig::from_json(&text)
                .and_then(|c| c.validate())
                .unwrap_err();
            assert!(error.contains(says), "{error:?} does not say {says:?}");
        }
    }

    #[test]
    fn uuids() {
        let uuid = parse_uuid("00112233-4455-6677-8899-aabbccddeeff").unwrap();
        assert_eq!((uuid[1], uuid[15]), (0x11, 0xff));
        assert!(parse_uuid("0011").is_none() && parse_uuid("zz112233445566778899aabbccddeeff").is_none());
    }
}

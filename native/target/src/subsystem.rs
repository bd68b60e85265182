//! What is served: subsystems and their namespaces.

use crate::config::{Direct, MediaConfig, NamespaceConfig, QueueLimits, SubsystemConfig};
use crate::identity::{fnv128, hex, Identity};
use crate::reservation::store::Store;
use crate::reservation::Reservations;
use crate::shared::Portal;
use crate::view::{HostAccess, Hosts, View};
use headrace_media::{Cache, Engine, FileMedia, Mapping, Media, MemoryMedia, VolatileCache};
use headrace_wire::DISCOVERY_NQN;
use serde_json::json;
use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// NN: the largest nsid.
pub(crate) const MAX_NSID: u32 = 4096;
/// MNAN: how many namespaces a subsystem may have.
pub(crate) const MAX_NAMESPACES: usize = 1024;
/// ANAGRPMAX: the largest ANA group identifier, and how many groups there may be.
pub(crate) const MAX_ANA_GROUPS: u32 = 64;

#[derive(Default)]
pub(crate) struct Counters {
    pub(crate) reads: AtomicU64,
    pub(crate) read_bytes: AtomicU64,
    pub(crate) writes: AtomicU64,
    pub(crate) written_bytes: AtomicU64,
    pub(crate) flushes: AtomicU64,
    pub(crate) media_errors: AtomicU64,
    /// Commands that a reservation refused.
    pub(crate) conflicts: AtomicU64,
}

pub(crate) fn count(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Ordering::Relaxed);
}

pub(crate) struct Namespace {
    pub(crate) nsid: u32,
    pub(crate) media: Box<dyn Media>,
    /// The file behind it, for people who look at the status; nothing for memory.
    path: Option<PathBuf>,
    /// The media's bytes, where they can be sent from where they lie.
    pub(crate) mapping: Option<Arc<Mapping>>,
    pub(crate) identity: Identity,
    pub(crate) ana_group: u32,
    pub(crate) counters: Counters,
    /// A sync failed: answered writes may be lost, and no flush succeeds any more.
    pub(crate) degraded: AtomicBool,
    pub(crate) reservations: Reservations,
    /// See [`crate::fused`].
    writers: RwLock<()>,
    /// One change of size at a time.
    pub(crate) resizing: Mutex<()>,
    /// After its removal: its media is closed, and this became of the last flush.
    pub(crate) closed: Arc<OnceLock<std::io::Result<()>>>,
}

impl Namespace {
    pub(crate) fn new(nsid: u32, nqn: &str, media: Box<dyn Media>) -> Self {
        Namespace {
            nsid,
            mapping: media.mapping(),
            media,
            path: None,
            identity: Identity::derived(nqn, nsid),
            ana_group: 1,
            counters: Counters::default(),
            degraded: AtomicBool::new(false),
            reservations: Reservations::default(),
            writers: RwLock::new(()),
            resizing: Mutex::default(),
            closed: Arc::default(),
        }
    }

    /// Held while a write touches the media.
    pub(crate) fn beside_others(&self) -> RwLockReadGuard<'_, ()> {
        self.writers.read().unwrap_or_else(|e| e.into_inner())
    }

    /// Held while nobody else's write may touch the media.
    pub(crate) fn alone(&self) -> RwLockWriteGuard<'_, ()> {
        self.writers.write().unwrap_or_else(|e| e.into_inner())
    }

    /// Open its media.
    pub(crate) fn open(config: &NamespaceConfig, nqn: &str, engine: Engine) -> Result<Self, String> {
        let mut namespace = Namespace::new(config.nsid, nqn, config.open_media(engine)?);
        namespace.identity = Identity::of(config, nqn);
        namespace.ana_group = config.ana_group;
        namespace.path = match &config.media {
            MediaConfig::File { path, .. } => {
                Some(std::path::absolute(path).unwrap_or_else(|_| path.clone()))
            }
            MediaConfig::Memory { .. } => None,
        };
        namespace.reservations = config
            .open_reservations(namespace.identity.uuid)
            .map_err(|e| format!("namespace {}: {e}", config.nsid))?;
        Ok(namespace)
    }

    pub(crate) fn block_bytes(&self) -> u64 {
        u64::from(self.media.block_bytes())
    }

    pub(crate) fn blocks(&self) -> u64 {
        self.media.size_bytes() / self.block_bytes()
    }

    fn status(&self) -> serde_json::Value {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        json!({
            "nsid": self.nsid,
            "uuid": hex(&self.identity.uuid),
            "nguid": hex(&self.identity.nguid),
            "path": self.path.as_ref().map(|path| path.to_string_lossy()),
            "size_bytes": self.media.size_bytes(),
            "block_bytes": self.media.block_bytes(),
            "engine": self.media.engine(),
            "direct": self.media.direct(),
            "volatile_cache": self.media.volatile_cache(),
            "read_only": self.media.read_only(),
            "degraded": self.degraded.load(Ordering::Relaxed),
            "ana_group": self.ana_group,
            "reads": get(&self.counters.reads),
            "read_bytes": get(&self.counters.read_bytes),
            "writes": get(&self.counters.writes),
            "written_bytes": get(&self.counters.written_bytes),
            "flushes": get(&self.counters.flushes),
            "media_errors": get(&self.counters.media_errors),
            "conflicts": get(&self.counters.conflicts),
            "reservations": self.reservations.status(),
        })
    }
}

impl NamespaceConfig {
    /// What is known of who may write.
    fn open_reservations(&self, uuid: [u8; 16]) -> Result<Reservations, String> {
        let store = match &self.media {
            MediaConfig::Memory { .. } => Store::default(),
            MediaConfig::File { .. } if self.read_only => Store::None("the namespace is read-only".into()),
            MediaConfig::File { path, .. } => Store::beside(path, self.reservations_path.as_deref(), uuid)?,
        };
        if self.no_reservations {
            if !store.load()?.registrants.is_empty() {
                return Err(format!(
                    "no_reservations, but hosts are registered in {}: whom they shut out could write",
                    store.describe()
                ));
            }
            return Ok(Reservations::off());
        }
        Reservations::open(store)
    }

    /// Open, or create, what holds the bytes.
    fn open_media(&self, engine: Engine) -> Result<Box<dyn Media>, String> {
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
                        "namespace {}: {} has {} bytes, and is to be served with {size}; leave the size out, or say what it has",
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

pub(crate) struct Subsystem {
    pub(crate) nqn: String,
    pub(crate) serial: String,
    pub(crate) model: String,
    pub(crate) limits: QueueLimits,
    pub(crate) discovery: bool,
    view: RwLock<Arc<View>>,
    /// That of the current view; to be compared without taking the lock.
    pub(crate) generation: AtomicU64,
    /// Removed, with commands still under way.
    retired: Mutex<Vec<Arc<Namespace>>>,
}

impl Subsystem {
    /// `portals`: the names of the target's listeners.
    pub(crate) fn open(
        config: &SubsystemConfig,
        limits: QueueLimits,
        engine: Engine,
        portals: &[String],
    ) -> Result<Self, String> {
        let mut namespaces = BTreeMap::new();
        for namespace in &config.namespaces {
            let opened = Namespace::open(namespace, &config.nqn, engine)
                .map_err(|e| format!("subsystem {}: {e}", config.nqn))?;
            namespaces.insert(namespace.nsid, Arc::new(opened));
        }
        let serial = if config.serial.is_empty() {
            format!("{:016X}", fnv128(&[config.nqn.as_bytes()]) as u64)
        } else {
            config.serial.clone()
        };
        let view = View {
            generation: 1,
            namespaces,
            groups: config.groups(portals),
            ana_changes: 0,
            hosts: config.hosts(),
        };
        Ok(Self::with_view(&config.nqn, &serial, &config.model, limits, view))
    }

    fn with_view(nqn: &str, serial: &str, model: &str, limits: QueueLimits, view: View) -> Self {
        Subsystem {
            nqn: nqn.into(),
            serial: serial.into(),
            model: model.into(),
            limits,
            discovery: nqn == DISCOVERY_NQN,
            generation: AtomicU64::new(view.generation),
            view: RwLock::new(Arc::new(view)),
            retired: Mutex::default(),
        }
    }

    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn with_media(nqn: &str, media: Box<dyn Media>) -> Self {
        let namespace = Arc::new(Namespace::new(1, nqn, media));
        let view = View {
            namespaces: BTreeMap::from([(1, namespace)]),
            ..View::clone(&Self::discovery(QueueLimits::default()).view())
        };
        Self::with_view(nqn, "", "", QueueLimits::default(), view)
    }

    /// The well-known one, which every target has.
    pub(crate) fn discovery(limits: QueueLimits) -> Self {
        let view = View {
            generation: 1,
            namespaces: BTreeMap::new(),
            groups: BTreeMap::new(),
            ana_changes: 0,
            hosts: Hosts {
                others: Some(HostAccess::ReadWrite),
                named: BTreeMap::new(),
            },
        };
        Self::with_view(
            DISCOVERY_NQN,
            "headrace-discovery",
            "headrace discovery",
            limits,
            view,
        )
    }

    /// What is there now.
    pub(crate) fn view(&self) -> Arc<View> {
        self.view.read().unwrap_or_else(|e| e.into_inner()).clone()
    }

    /// Make the next view. Everything is checked by `change` under the lock, so two changes never meet.
    pub(crate) fn change<T, E>(&self, change: impl FnOnce(&mut View) -> Result<T, E>) -> Result<T, E> {
        let mut current = self.view.write().unwrap_or_else(|e| e.into_inner());
        let mut next = View::clone(&current);
        let outcome = change(&mut next)?;
        next.generation += 1;
        let generation = next.generation;
        *current = Arc::new(next);
        // After the view: who sees the new number finds the new view.
        self.generation.store(generation, Ordering::Release);
        Ok(outcome)
    }

    /// Any namespace whose writes need a flush: what VWC says.
    pub(crate) fn volatile(&self) -> bool {
        self.view()
            .namespaces()
            .any(|namespace| namespace.media.volatile_cache())
    }

    pub(crate) fn degraded(&self) -> bool {
        self.view()
            .namespaces()
            .any(|namespace| namespace.degraded.load(Ordering::Relaxed))
    }

    /// The sum of one counter over the namespaces.
    pub(crate) fn total(&self, counter: impl Fn(&Counters) -> &AtomicU64) -> u64 {
        self.view()
            .namespaces()
            .map(|namespace| counter(&namespace.counters).load(Ordering::Relaxed))
            .sum()
    }

    pub(crate) fn retired(&self) -> MutexGuard<'_, Vec<Arc<Namespace>>> {
        self.retired.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// `portals`: the target's listeners; no namespace is behind those for discovery.
    pub(crate) fn status(&self, portals: &[Portal]) -> serde_json::Value {
        let view = self.view();
        let groups: Vec<_> = view
            .groups
            .iter()
            .map(|(id, group)| {
                let states: BTreeMap<_, _> = portals
                    .iter()
                    .zip(&group.states)
                    .filter(|(portal, _)| !portal.discovery)
                    .map(|(portal, state)| (&portal.name, state.name()))
                    .collect();
                json!({"id": id, "states": states, "changes": group.changes})
            })
            .collect();
        let hosts: BTreeMap<_, _> = view
            .hosts
            .named
            .iter()
            .map(|(nqn, access)| (nqn, access.name()))
            .collect();
        json!({
            "nqn": self.nqn,
            "serial": self.serial,
            "model": self.model,
            "hosts": hosts,
            "other_hosts": view.hosts.others.map(HostAccess::name),
            "ana_groups": groups,
            "namespaces": view.namespaces().map(|n| n.status()).collect::<Vec<_>>(),
            "closing": self.retired().iter().map(|n| n.nsid).collect::<Vec<_>>(),
        })
    }
}

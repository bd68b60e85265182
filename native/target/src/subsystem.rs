//! What is served: subsystems and their namespaces.

use crate::config::{parse_uuid, SubsystemConfig};
use headrace_media::{Engine, Mapping, Media};
use headrace_wire::DISCOVERY_NQN;
use serde_json::json;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;

/// NN and MNAN: the largest nsid.
pub(crate) const MAX_NAMESPACES: u32 = 1024;

#[derive(Default)]
pub(crate) struct Counters {
    pub(crate) reads: AtomicU64,
    pub(crate) read_bytes: AtomicU64,
    pub(crate) writes: AtomicU64,
    pub(crate) written_bytes: AtomicU64,
    pub(crate) flushes: AtomicU64,
    pub(crate) media_errors: AtomicU64,
}

pub(crate) fn count(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Ordering::Relaxed);
}

pub(crate) struct Namespace {
    pub(crate) nsid: u32,
    pub(crate) media: Box<dyn Media>,
    /// The media's bytes, where they can be sent from where they lie.
    pub(crate) mapping: Option<Arc<Mapping>>,
    pub(crate) uuid: [u8; 16],
    pub(crate) nguid: [u8; 16],
    pub(crate) counters: Counters,
    /// A sync failed: answered writes may be lost, and no flush succeeds any more.
    pub(crate) degraded: AtomicBool,
}

impl Namespace {
    pub(crate) fn new(nsid: u32, nqn: &str, uuid: Option<[u8; 16]>, media: Box<dyn Media>) -> Self {
        Namespace {
            nsid,
            mapping: media.mapping(),
            media,
            uuid: uuid.unwrap_or_else(|| derived_id(nqn, nsid, "uuid")),
            nguid: derived_id(nqn, nsid, "nguid"),
            counters: Counters::default(),
            degraded: AtomicBool::new(false),
        }
    }

    pub(crate) fn block_bytes(&self) -> u64 {
        u64::from(self.media.block_bytes())
    }

    pub(crate) fn blocks(&self) -> u64 {
        self.media.size_bytes() / self.block_bytes()
    }
}

pub(crate) struct Subsystem {
    pub(crate) nqn: String,
    pub(crate) serial: String,
    pub(crate) model: String,
    allow_hosts: Vec<String>,
    pub(crate) discovery: bool,
    namespaces: BTreeMap<u32, Arc<Namespace>>,
}

impl Subsystem {
    pub(crate) fn open(config: &SubsystemConfig, engine: Engine) -> Result<Self, String> {
        let mut namespaces = BTreeMap::new();
        for namespace in &config.namespaces {
            let media = namespace
                .open(engine)
                .map_err(|e| format!("subsystem {}: {e}", config.nqn))?;
            let uuid = namespace.uuid.as_deref().and_then(parse_uuid);
            let opened = Namespace::new(namespace.nsid, &config.nqn, uuid, media);
            namespaces.insert(namespace.nsid, Arc::new(opened));
        }
        let serial = if config.serial.is_empty() {
            format!("{:016X}", fnv128(&[config.nqn.as_bytes()]) as u64)
        } else {
            config.serial.clone()
        };
        Ok(Subsystem {
            nqn: config.nqn.clone(),
            serial,
            model: config.model.clone(),
            allow_hosts: config.allow_hosts.clone(),
            discovery: false,
            namespaces,
        })
    }

    #[cfg(test)]
    pub(crate) fn with_media(nqn: &str, media: Box<dyn Media>) -> Self {
        let namespace = Arc::new(Namespace::new(1, nqn, None, media));
        Subsystem {
            nqn: nqn.into(),
            namespaces: BTreeMap::from([(1, namespace)]),
            discovery: false,
            ..Self::discovery()
        }
    }

    /// The well-known one, which every target has.
    pub(crate) fn discovery() -> Self {
        Subsystem {
            nqn: DISCOVERY_NQN.into(),
            serial: "headrace-discovery".into(),
            model: "headrace discovery".into(),
            allow_hosts: Vec::new(),
            discovery: true,
            namespaces: BTreeMap::new(),
        }
    }

    pub(crate) fn allows(&self, hostnqn: &str) -> bool {
        self.allow_hosts.is_empty() || self.allow_hosts.iter().any(|host| host == hostnqn)
    }

    pub(crate) fn namespace(&self, nsid: u32) -> Option<&Arc<Namespace>> {
        self.namespaces.get(&nsid)
    }

    pub(crate) fn namespaces(&self) -> impl Iterator<Item = &Arc<Namespace>> {
        self.namespaces.values()
    }

    /// Any namespace whose writes need a flush: what VWC says.
    pub(crate) fn volatile(&self) -> bool {
        self.namespaces()
            .any(|namespace| namespace.media.volatile_cache())
    }

    pub(crate) fn degraded(&self) -> bool {
        self.namespaces()
            .any(|namespace| namespace.degraded.load(Ordering::Relaxed))
    }

    /// The sum of one counter over the namespaces.
    pub(crate) fn total(&self, counter: impl Fn(&Counters) -> &AtomicU64) -> u64 {
        self.namespaces()
            .map(|namespace| counter(&namespace.counters).load(Ordering::Relaxed))
            .sum()
    }

    pub(crate) fn status(&self) -> serde_json::Value {
        let namespaces: Vec<_> = self
            .namespaces()
            .map(|n| {
                let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
                json!({
                    "nsid": n.nsid,
                    "uuid": hex(&n.uuid),
                    "size_bytes": n.media.size_bytes(),
                    "block_bytes": n.media.block_bytes(),
                    "engine": n.media.engine(),
                    "volatile_cache": n.media.volatile_cache(),
                    "read_only": n.media.read_only(),
                    "degraded": n.degraded.load(Ordering::Relaxed),
                    "reads": get(&n.counters.reads),
                    "read_bytes": get(&n.counters.read_bytes),
                    "writes": get(&n.counters.writes),
                    "written_bytes": get(&n.counters.written_bytes),
                    "flushes": get(&n.counters.flushes),
                    "media_errors": get(&n.counters.media_errors),
                })
            })
            .collect();
        json!({
            "nqn": self.nqn,
            "serial": self.serial,
            "model": self.model,
            "allow_hosts": self.allow_hosts,
            "namespaces": namespaces,
        })
    }
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// FNV-1a over 128 bits: names to identifiers that stay the same over restarts. Not a secret, not a defence.
fn fnv128(parts: &[&[u8]]) -> u128 {
    let mut hash = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58du128;
    for byte in parts.iter().flat_map(|part| part.iter().chain(&[0])) {
        hash = (hash ^ u128::from(*byte)).wrapping_mul(0x0100_0000_0000_0000_0000_013b);
    }
    hash
}

/// A UUID of version 8 (RFC 9562: by an algorithm of one's own).
fn derived_id(nqn: &str, nsid: u32, purpose: &str) -> [u8; 16] {
    let mut id = fnv128(&[purpose.as_bytes(), nqn.as_bytes(), &nsid.to_le_bytes()]).to_be_bytes();
    id[6] = id[6] & 0x0F | 0x80;
    id[8] = id[8] & 0x3F | 0x80;
    id
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identifiers_differ_and_stay() {
        let a = derived_id("nqn.a", 1, "uuid");
        assert_eq!(a, derived_id("nqn.a", 1, "uuid"));
        for other in [
            derived_id("nqn.a", 2, "uuid"),
            derived_id("nqn.b", 1, "uuid"),
            derived_id("nqn.a", 1, "nguid"),
        ] {
            assert_ne!(a, other);
        }
        assert_eq!(a[6] >> 4, 8);
    }
}

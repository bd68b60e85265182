//! What must hold of a configuration: each mistake is one sentence that names its place.

use super::{default_group, MediaConfig, NamespaceConfig, QueueLimits, SubsystemConfig, TargetConfig};
use crate::identity::{parse_uuid, Identity};
use crate::memory::footprint;
use crate::subsystem::{MAX_ANA_GROUPS, MAX_NAMESPACES, MAX_NSID};
use crate::view::ana_state;
use headrace_media::check_geometry;
use headrace_wire::{DISCOVERY_NQN, NQN_MAX};
use std::collections::HashSet;

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
        let longest = longest.fold(self.mdts_bytes, u32::max) as usize;
        // Half of it is for data that are pulled: the longest command, or a fused pair.
        let least = 2 * footprint(longest).max(128 << 10);
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
        let mut namespaces: Vec<(String, Identity)> = Vec::new();
        for subsystem in &self.subsystems {
            if !nqns.insert(subsystem.nqn.as_str()) {
                return Err(format!("subsystem {:?} is given twice", subsystem.nqn));
            }
            subsystem.validate(&portals)?;
            subsystem
                .limits(self)
                .validate(&format!("subsystem {}: ", subsystem.nqn))?;
            for namespace in &subsystem.namespaces {
                let place = format!("namespace {} of {}", namespace.nsid, subsystem.nqn);
                let own = Identity::of(namespace, &subsystem.nqn);
                let mut others = namespaces.iter();
                if let Some((by, what)) = others.find_map(|(by, other)| Some((by, own.clash(other)?))) {
                    return Err(format!("{place}: {what} by {by}"));
                }
                namespaces.push((place, own));
            }
        }
        Ok(())
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

impl SubsystemConfig {
    fn validate(&self, portals: &[String]) -> Result<(), String> {
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
        }
        Ok(())
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
        if self.no_reservations && self.reservations_path.is_some() {
            return Err(format!("{place}: reservations_path with no_reservations"));
        }
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
            // Half a megabyte is taken as a whole one.
            (
                "\"subsystems\"",
                "\"mdts_bytes\": 524288, \"connection_memory_bytes\": 1048576, \"subsystems\"",
                "connection_memory_bytes must be from 2097152",
            ),
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
}

//! What an administrator changes while the target runs. Each change is one step: checked as a whole, made in the view of the
//! subsystem, told to its queues (which then hold on to nothing that is gone), and raised as the event that the hosts asked
//! to hear of.

use crate::config::{is_nqn, NamespaceConfig};
use crate::controller::{Controller, Event};
use crate::identity::Identity;
use crate::mailbox::Message;
use crate::subsystem::{Namespace, Subsystem, MAX_NAMESPACES};
use crate::target::Target;
use crate::view::{ana_state, HostAccess, View};
use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often a wait looks again.
const SOON: Duration = Duration::from_millis(2);

#[derive(Debug)]
pub enum ControlError {
    /// What was asked for cannot be meant: nothing has changed.
    Asked(String),
    /// It did not work.
    Failed(String),
}

impl fmt::Display for ControlError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ControlError::Asked(what) | ControlError::Failed(what) => f.write_str(what),
        }
    }
}

type Result<T> = std::result::Result<T, ControlError>;

fn asked<T>(what: impl Into<String>) -> Result<T> {
    Err(ControlError::Asked(what.into()))
}

fn no_namespace<T>(nqn: &str, nsid: u32, view: &View) -> Result<T> {
    let known = listed(view.namespaces.keys());
    asked(format!("subsystem {nqn} has no namespace {nsid}, only {known}"))
}

fn no_group<T>(nqn: &str, group: u32, known: &str) -> Result<T> {
    asked(format!("subsystem {nqn} has no ANA group {group}, only {known}"))
}

/// At most so many as a message holds.
fn listed<'a>(known: impl Iterator<Item = &'a u32>) -> String {
    let mut known: Vec<String> = known.take(17).map(u32::to_string).collect();
    if known.len() > 16 {
        known[16] = "others".into();
    }
    if known.is_empty() {
        "none".into()
    } else {
        known.join(", ")
    }
}

fn check_host(hostnqn: Option<&str>) -> Result<()> {
    match hostnqn {
        Some(nqn) if !is_nqn(nqn) => asked(format!("a host's NQN begins with \"nqn.\", found {nqn:?}")),
        _ => Ok(()),
    }
}

impl Target {
    fn subsystem(&self, nqn: &str) -> Result<&Arc<Subsystem>> {
        let found = self.shared.subsystems.iter().find(|s| s.nqn == nqn);
        found.map_or_else(
            || {
                let names: Vec<&str> = self.shared.subsystems.iter().map(|s| s.nqn.as_str()).collect();
                asked(format!("there is no subsystem {nqn}, only {}", names.join(", ")))
            },
            Ok,
        )
    }

    /// The controllers of a subsystem; their queues are told to look at it again.
    fn renew(&self, subsystem: &Arc<Subsystem>) -> Vec<Arc<Controller>> {
        let mut controllers = self.shared.registry.all();
        controllers.retain(|controller| Arc::ptr_eq(&controller.subsystem, subsystem));
        controllers.iter().for_each(|controller| controller.renew());
        controllers
    }

    /// Open its media and offer it to all hosts of the subsystem.
    pub fn add_namespace(&self, nqn: &str, config: &NamespaceConfig) -> Result<()> {
        let subsystem = self.subsystem(nqn)?;
        config.validate().map_err(ControlError::Asked)?;
        self.close_retired();
        let check = |view: &View| {
            if view.namespace(config.nsid).is_some() {
                return asked(format!("subsystem {nqn} has a namespace {} already", config.nsid));
            }
            if view.namespaces.len() >= MAX_NAMESPACES {
                return asked(format!(
                    "subsystem {nqn} has {MAX_NAMESPACES} namespaces, the most"
                ));
            }
            if !view.groups.contains_key(&config.ana_group) {
                return no_group(nqn, config.ana_group, &listed(view.groups.keys()));
            }
            Ok(())
        };
        // Twice: before a file is made, and when it is there.
        check(&subsystem.view())?;
        let own = Identity::of(config, nqn);
        for other in &self.shared.subsystems {
            let view = other.view();
            let mut others = view.namespaces();
            if let Some((by, what)) = others.find_map(|n| Some((n.nsid, own.clash(&n.identity)?))) {
                return asked(format!("{what} by namespace {by} of {}", other.nqn));
            }
        }
        let opened = Namespace::open(config, nqn, self.shared.engine).map_err(ControlError::Failed)?;
        subsystem.change(|view| {
            check(view)?;
            view.namespaces.insert(config.nsid, Arc::new(opened));
            Ok(())
        })?;
        self.shared
            .note(format!("namespace {} of {nqn} was added", config.nsid));
        for controller in self.renew(subsystem) {
            controller.namespaces_changed([config.nsid]);
        }
        Ok(())
    }

    /// From now on its commands are answered with Invalid Namespace. Those under way end; then its media is flushed and
    /// closed, which this waits for. `false`: commands were still under way after `timeout`; the next change, or the
    /// end of the target, closes it.
    pub fn remove_namespace(&self, nqn: &str, nsid: u32, timeout: Duration) -> Result<bool> {
        let subsystem = self.subsystem(nqn)?;
        let removed = subsystem.change(|view| {
            let found = view.namespaces.remove(&nsid);
            found.map_or_else(|| no_namespace(nqn, nsid, view), Ok)
        })?;
        let closed = removed.closed.clone();
        subsystem.retired().push(removed);
        self.shared.note(format!("namespace {nsid} of {nqn} was removed"));
        for controller in self.renew(subsystem) {
            controller.namespaces_changed([nsid]);
        }
        let deadline = Instant::now() + timeout;
        loop {
            self.close_retired();
            if let Some(outcome) = closed.get() {
                return outcome.as_ref().map(|()| true).map_err(|error| {
                    let what = format!("namespace {nsid} was removed, but its last flush failed: {error}");
                    ControlError::Failed(what)
                });
            }
            if Instant::now() >= deadline {
                return Ok(false);
            }
            std::thread::sleep(SOON);
        }
    }

    /// Flush and close the media of removed namespaces whose commands are through, and tell who waits for that.
    fn close_retired(&self) {
        for subsystem in &self.shared.subsystems {
            // Nobody finds a retired namespace any more, so one that only this list holds stays so.
            let done: Vec<Arc<Namespace>> = {
                let mut retired = subsystem.retired();
                let (done, busy) = retired.drain(..).partition(|n| Arc::strong_count(n) == 1);
                *retired = busy;
                done
            };
            for namespace in done {
                let flushed = namespace.media.flush();
                if let Err(error) = &flushed {
                    self.shared.note(format!(
                        "namespace {} of {}: flush at its removal: {error}",
                        namespace.nsid, subsystem.nqn
                    ));
                }
                let closed = namespace.closed.clone();
                drop(namespace);
                // Nobody else closes it.
                let _ = closed.set(flushed);
            }
        }
    }

    /// `force`: what lies beyond a smaller size is lost.
    pub fn resize_namespace(&self, nqn: &str, nsid: u32, size_bytes: u64, force: bool) -> Result<()> {
        let subsystem = self.subsystem(nqn)?;
        let view = subsystem.view();
        let Some(namespace) = view.namespace(nsid).cloned() else {
            return no_namespace(nqn, nsid, &view);
        };
        drop(view);
        let block = namespace.block_bytes();
        if size_bytes == 0 || size_bytes % block != 0 {
            return asked(format!(
                "the size of a namespace is a positive multiple of its block, {block} bytes, found {size_bytes}"
            ));
        }
        // Over both steps: another's growth between them would be cut off without force.
        let _alone = namespace.resizing.lock().unwrap_or_else(|e| e.into_inner());
        let before = namespace.media.size_bytes();
        if size_bytes < before && !force {
            return asked(format!(
                "namespace {nsid} has {before} bytes: with {size_bytes} what lies beyond is lost, so it must be forced (--force)"
            ));
        }
        if size_bytes == before {
            return Ok(());
        }
        let result = namespace.media.resize(size_bytes);
        result.map_err(|e| ControlError::Failed(format!("namespace {nsid} of {nqn}: {e}")))?;
        self.shared.note(format!(
            "namespace {nsid} of {nqn} has {size_bytes} bytes, before {before}"
        ));
        for controller in self.renew(subsystem) {
            controller.namespaces_changed([nsid]);
        }
        Ok(())
    }

    /// The state of an ANA group through one portal, by its name, or through all.
    pub fn set_ana_state(&self, nqn: &str, group: u32, portal: Option<&str>, state: &str) -> Result<()> {
        let subsystem = self.subsystem(nqn)?;
        let portals = self.shared.portal_names();
        let Some(state) = ana_state(state) else {
            return asked(format!(
                "an ANA state is optimized, non-optimized, inaccessible, persistent-loss or change, found {state:?}"
            ));
        };
        if let Some(name) = portal.filter(|name| !portals.iter().any(|known| known == name)) {
            return asked(format!(
                "there is no portal {name:?}, only {}",
                portals.join(", ")
            ));
        }
        let changed = subsystem.change(|view| {
            let known = listed(view.groups.keys());
            let Some(group) = view.groups.get_mut(&group) else {
                return no_group(nqn, group, &known);
            };
            let mut changed = Vec::new();
            for (index, old) in group.states.iter_mut().enumerate() {
                let chosen = portal.is_none_or(|name| portals.get(index).is_some_and(|known| known == name));
                if chosen && *old != state {
                    *old = state;
                    changed.push(index);
                }
            }
            if !changed.is_empty() {
                group.changes += 1;
                view.ana_changes += 1;
            }
            Ok(changed)
        })?;
        if changed.is_empty() {
            return Ok(());
        }
        self.shared.note(format!(
            "ANA group {group} of {nqn} is {} through {}",
            state.name(),
            portal.unwrap_or("every portal")
        ));
        for controller in self.renew(subsystem) {
            if changed.contains(&controller.portal) {
                controller.raise(Event::ANA);
            }
        }
        Ok(())
    }

    /// End all associations of a host; it may connect again. Returns how many there were.
    pub fn disconnect_host(&self, hostnqn: &str) -> Result<usize> {
        check_host(Some(hostnqn))?;
        Ok(
            self.end_controllers("disconnected by the administrator", |controller| {
                controller.host.hostnqn == hostnqn
            }),
        )
    }

    fn end_controllers(&self, why: &'static str, which: impl Fn(&Controller) -> bool) -> usize {
        let mut controllers = self.shared.registry.all();
        controllers.retain(|controller| which(controller));
        for controller in &controllers {
            self.shared.note(format!(
                "controller {} of {}: {why}",
                controller.cntlid, controller.host.hostnqn
            ));
            self.shared.registry.end(controller, why);
        }
        controllers.len()
    }

    /// `None`: every host that is not named.
    pub fn allow_host(&self, nqn: &str, hostnqn: Option<&str>, access: HostAccess) -> Result<()> {
        check_host(hostnqn)?;
        self.change_hosts(nqn, hostnqn, Some(access)).map(drop)
    }

    /// And end its associations with this subsystem; returns how many there were. `None`: every host that is not named.
    pub fn deny_host(&self, nqn: &str, hostnqn: Option<&str>) -> Result<usize> {
        check_host(hostnqn)?;
        let subsystem = self.subsystem(nqn)?;
        let hosts = subsystem.view().hosts.clone();
        if let Some(host) = hostnqn.filter(|host| !hosts.named.contains_key(*host)) {
            return asked(if hosts.others.is_some() {
                format!("{host} is not among the hosts of {nqn} by name: every host is allowed, so deny that first")
            } else {
                format!("{host} is not among the hosts of {nqn}")
            });
        }
        self.change_hosts(nqn, hostnqn, None)
    }

    fn change_hosts(&self, nqn: &str, hostnqn: Option<&str>, access: Option<HostAccess>) -> Result<usize> {
        let subsystem = self.subsystem(nqn)?;
        let (before, after) = subsystem.change(|view| {
            let before = view.hosts.clone();
            match (hostnqn, access) {
                (None, access) => view.hosts.others = access,
                (Some(host), Some(access)) => drop(view.hosts.named.insert(host.into(), access)),
                (Some(host), None) => drop(view.hosts.named.remove(host)),
            }
            Ok((before, view.hosts.clone()))
        })?;
        let ended = self.end_controllers("the host may not connect any more", |controller| {
            Arc::ptr_eq(&controller.subsystem, subsystem) && after.access(&controller.host.hostnqn).is_none()
        });
        for controller in self.renew(subsystem) {
            let host = &controller.host.hostnqn;
            if before.access(host) != after.access(host) {
                // Write protection is an attribute of each namespace.
                controller.namespaces_changed(subsystem.view().namespaces.keys().copied());
            }
        }
        // What discovery tells a host depends on what it may use.
        self.shared.discovery_generation.fetch_add(1, Ordering::AcqRel);
        for controller in self.shared.registry.all() {
            let host = &controller.host.hostnqn;
            if controller.subsystem.discovery && before.access(host).is_some() != after.access(host).is_some()
            {
                controller.raise(Event::DISCOVERY);
            }
        }
        let who = hostnqn.unwrap_or("every other host");
        let what = access.map_or("may not connect", HostAccess::name);
        self.shared.note(format!("{who} at {nqn}: {what}"));
        Ok(ended)
    }

    /// Accept no more connections and no more commands; those under way end, and then their connections. `false`: some
    /// were still there after `timeout`. [`Target::stop`] then ends the rest.
    pub fn drain(&self, timeout: Duration) -> bool {
        if !self.shared.draining.swap(true, Ordering::SeqCst) {
            self.shared.note("draining".into());
            self.shared
                .mailboxes
                .iter()
                .for_each(|mailbox| mailbox.post(Message::Drain));
        }
        let deadline = Instant::now() + timeout;
        while self.shared.connections.load(Ordering::Acquire) > 0 {
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(SOON);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common::NQN;
    use crate::TargetConfig;
    use headrace_media::{Media, MemoryMedia};
    use std::io;
    use std::sync::atomic::AtomicUsize;

    /// Where two change the size at once, the one that wants more is first.
    struct MoreFirst(MemoryMedia, AtomicUsize);

    impl Media for MoreFirst {
        fn size_bytes(&self) -> u64 {
            self.0.size_bytes()
        }
        fn block_bytes(&self) -> u32 {
            self.0.block_bytes()
        }
        fn read_only(&self) -> bool {
            false
        }
        fn volatile_cache(&self) -> bool {
            false
        }
        fn engine(&self) -> &'static str {
            "memory"
        }
        fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
            self.0.read(offset, into)
        }
        fn write(&self, offset: u64, from: &[u8], fua: bool) -> io::Result<()> {
            self.0.write(offset, from, fua)
        }
        fn flush(&self) -> io::Result<()> {
            self.0.flush()
        }
        fn deallocate(&self, offset: u64, length: u64) -> io::Result<()> {
            self.0.deallocate(offset, length)
        }
        fn resize(&self, size_bytes: u64) -> io::Result<()> {
            self.1.fetch_add(1, Ordering::SeqCst);
            let until = Instant::now() + Duration::from_millis(300);
            let other = || {
                self.1.load(Ordering::SeqCst) == 2 && (size_bytes == 3 << 20 || self.size_bytes() == 3 << 20)
            };
            while !other() && Instant::now() < until {
                std::thread::sleep(SOON);
            }
            self.0.resize(size_bytes)
        }
    }

    /// Two administrators, both without force: neither cuts off what the other has added.
    #[test]
    fn growing_at_the_same_time_never_shrinks() {
        let media = MoreFirst(MemoryMedia::new(1 << 20, 4096).unwrap(), AtomicUsize::new(0));
        let subsystem = Arc::new(Subsystem::with_media(NQN, Box::new(media)));
        let config = TargetConfig::from_json("{}").unwrap();
        let target = Target::serve(&config, vec![subsystem.clone()]).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| target.resize_namespace(NQN, 1, 2 << 20, false).is_ok());
            target.resize_namespace(NQN, 1, 3 << 20, false).unwrap();
        });
        let size = subsystem.view().namespace(1).map(|n| n.media.size_bytes());
        assert_eq!(size, Some(3 << 20), "it was cut off");
    }
}

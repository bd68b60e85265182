//! What a subsystem holds at one moment: namespaces, ANA groups, hosts. Never changed in place: a change makes the next
//! [`View`], and everybody who looks later sees that one.
//!
//! # Why the data path pays nothing
//!
//! A queue keeps the view of its last command, and for each command compares one number ([`Reach::renew`]): a load of a
//! cache line that nobody writes. Only after a change does it take the new view.
//!
//! A view that somebody keeps also keeps its namespaces, so a removed namespace's media could not be closed while idle
//! queues still hold the old view. Therefore whoever changes a subsystem also tells all of its queues to look again
//! ([`crate::mailbox::Message::Renew`]); what then still holds a removed namespace are its commands that are under way.

use crate::controller::Controller;
use crate::subsystem::Namespace;
use headrace_wire::ana::{AnaGroup, AnaLog, AnaState};
use headrace_wire::Status;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::Arc;

/// Index of a listener in the target's configuration.
pub(crate) type PortalId = usize;

/// What a host may do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HostAccess {
    #[default]
    ReadWrite,
    ReadOnly,
}

impl HostAccess {
    pub fn name(self) -> &'static str {
        match self {
            HostAccess::ReadWrite => "read-write",
            HostAccess::ReadOnly => "read-only",
        }
    }
}

/// Who may connect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hosts {
    /// What every host may do that is not named; `None`: it may not connect.
    pub(crate) others: Option<HostAccess>,
    pub(crate) named: BTreeMap<String, HostAccess>,
}

impl Hosts {
    pub(crate) fn access(&self, hostnqn: &str) -> Option<HostAccess> {
        self.named.get(hostnqn).copied().or(self.others)
    }
}

/// An ANA group: its state through each portal, and how often that changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Group {
    pub(crate) states: Vec<AnaState>,
    pub(crate) changes: u64,
}

#[derive(Clone)]
pub(crate) struct View {
    pub(crate) generation: u64,
    pub(crate) namespaces: BTreeMap<u32, Arc<Namespace>>,
    pub(crate) groups: BTreeMap<u32, Group>,
    pub(crate) ana_changes: u64,
    pub(crate) hosts: Hosts,
}

impl View {
    pub(crate) fn namespace(&self, nsid: u32) -> Option<&Arc<Namespace>> {
        self.namespaces.get(&nsid)
    }

    pub(crate) fn namespaces(&self) -> impl Iterator<Item = &Arc<Namespace>> {
        self.namespaces.values()
    }

    /// How `portal` reaches a namespace. Without groups, and through portals that no group speaks of: at its best.
    pub(crate) fn state(&self, namespace: &Namespace, portal: PortalId) -> AnaState {
        self.groups
            .get(&namespace.ana_group)
            .and_then(|group| group.states.get(portal))
            .copied()
            .unwrap_or(AnaState::Optimized)
    }

    /// The ANA log page as `portal` sees it.
    pub(crate) fn ana_log(&self, portal: PortalId, groups_only: bool) -> AnaLog {
        let nsids = |id: u32| {
            let members = self
                .namespaces()
                .filter(move |n| n.ana_group == id && !groups_only);
            members.map(|n| n.nsid).collect()
        };
        AnaLog {
            chgcnt: self.ana_changes,
            groups: self
                .groups
                .iter()
                .map(|(&id, group)| AnaGroup {
                    id,
                    chgcnt: group.changes,
                    state: group.states.get(portal).copied().unwrap_or(AnaState::Optimized),
                    nsids: nsids(id),
                })
                .collect(),
        }
    }
}

/// An ANA state by its name.
pub(crate) fn ana_state(name: &str) -> Option<AnaState> {
    (1..=15)
        .filter_map(AnaState::from_bits)
        .find(|state| state.name() == name)
}

/// What the commands of one queue reach: the view, through this portal, with this host's rights.
pub(crate) struct Reach {
    view: Arc<View>,
    portal: PortalId,
    read_only: bool,
}

impl Reach {
    pub(crate) fn new(controller: &Controller, portal: PortalId) -> Self {
        let view = controller.subsystem.view();
        // A host that was struck off meanwhile is about to be disconnected.
        let read_only = view.hosts.access(&controller.host.hostnqn) != Some(HostAccess::ReadWrite);
        Reach {
            view,
            portal,
            read_only,
        }
    }

    /// Look again, if something changed.
    pub(crate) fn renew(&mut self, controller: &Controller) {
        if self.view.generation != controller.subsystem.generation.load(Ordering::Acquire) {
            *self = Reach::new(controller, self.portal);
        }
    }

    pub(crate) fn view(&self) -> &Arc<View> {
        &self.view
    }

    /// The namespace that a command is for, if this path leads there now.
    pub(crate) fn namespace(&self, nsid: u32) -> Result<&Arc<Namespace>, Status> {
        let Some(namespace) = self.view.namespace(nsid) else {
            return Err(Status::INVALID_NAMESPACE.do_not_retry());
        };
        match self.view.state(namespace, self.portal) {
            AnaState::Optimized | AnaState::NonOptimized => Ok(namespace),
            // Never with Do Not Retry: another path may do.
            AnaState::Inaccessible => Err(Status::ANA_INACCESSIBLE),
            AnaState::PersistentLoss => Err(Status::ANA_PERSISTENT_LOSS),
            AnaState::Change => Err(Status::ANA_TRANSITION),
        }
    }

    pub(crate) fn may_write(&self, namespace: &Namespace) -> bool {
        !self.read_only && !namespace.media.read_only()
    }
}

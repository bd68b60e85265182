//! All controllers of a target, and the connections of lost ones that are still at the media.

use crate::controller::{Controller, HostKey};
use crate::gate::Gate;
use crate::mailbox::Message;
use crate::subsystem::Subsystem;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

/// CNTLIDs from 0xFFF0 are reserved.
const CNTLID_LAST: u16 = 0xFFEF;

#[derive(Default)]
pub(crate) struct Registry(Mutex<Inner>);

#[derive(Default)]
struct Inner {
    controllers: BTreeMap<u16, Arc<Controller>>,
    last: u16,
    /// Closed gates with commands inside.
    draining: Vec<Draining>,
    created: u64,
    expired: u64,
}

/// Commands that one host's lost or reset connection left at the media of one subsystem.
struct Draining {
    subsystem: Arc<Subsystem>,
    host: HostKey,
    gate: Arc<Gate>,
}

impl Inner {
    fn drain(&mut self, controller: &Controller, gate: &Arc<Gate>) {
        if !gate.idle() {
            self.draining.push(Draining {
                subsystem: controller.subsystem.clone(),
                host: controller.host.clone(),
                gate: gate.clone(),
            });
        }
    }
}

impl Registry {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// A new controller with a free CNTLID; ids rotate, so a stale one rarely names somebody else. `None`: all taken.
    pub(crate) fn create(&self, make: impl FnOnce(u16) -> Controller) -> Option<Arc<Controller>> {
        let mut inner = self.lock();
        let start = inner.last;
        let next = |id: u16| if id >= CNTLID_LAST { 1 } else { id + 1 };
        let mut id = next(start);
        while inner.controllers.contains_key(&id) {
            id = next(id);
            if id == next(start) {
                return None;
            }
        }
        inner.last = id;
        inner.created += 1;
        let controller = Arc::new(make(id));
        inner.controllers.insert(id, controller.clone());
        Some(controller)
    }

    pub(crate) fn get(&self, cntlid: u16) -> Option<Arc<Controller>> {
        self.lock().controllers.get(&cntlid).cloned()
    }

    pub(crate) fn all(&self) -> Vec<Arc<Controller>> {
        self.lock().controllers.values().cloned().collect()
    }

    pub(crate) fn created(&self) -> u64 {
        self.lock().created
    }

    pub(crate) fn expired(&self) -> u64 {
        self.lock().expired
    }

    /// Declare an association dead: when this returns, none of its commands begins to touch media any more.
    pub(crate) fn end(&self, controller: &Controller, why: &'static str) {
        let links = {
            // Over all steps, so that a gate is found with its controller or among those that drain.
            let mut inner = self.lock();
            let Some(links) = controller.end() else { return };
            for link in &links {
                link.gate.close();
                inner.drain(controller, &link.gate);
            }
            inner.controllers.remove(&controller.cntlid);
            links
        };
        for link in links {
            link.mailbox.post(Message::Close {
                token: link.token,
                why,
            });
        }
    }

    /// Controller reset (CC.EN to 0): the I/O queues end, and when this returns none of their commands begins to touch media
    /// any more; those that do now count until they are through. The lock is held over both steps, so that a Connect that
    /// finds a queue free also finds what has to drain before it.
    pub(crate) fn reset(&self, controller: &Controller) {
        let links = {
            let mut inner = self.lock();
            let links = controller.reset();
            for link in &links {
                inner.drain(controller, &link.gate);
            }
            links
        };
        for link in links {
            link.mailbox.post(Message::Close {
                token: link.token,
                why: "the controller was reset",
            });
        }
    }

    /// One queue's connection was lost: its gate is closed, and counts until it is idle.
    pub(crate) fn drain(&self, controller: &Controller, gate: &Arc<Gate>) {
        self.lock().drain(controller, gate);
    }

    /// Whether commands of lost connections of this host are still at the media of this subsystem. A host is its identifier
    /// here, under whatever name: that is what a reservation is held by.
    pub(crate) fn is_draining(&self, hostid: &[u8; 16], subsystem: &Arc<Subsystem>) -> bool {
        let mut inner = self.lock();
        inner.draining.retain(|old| !old.gate.idle());
        inner
            .draining
            .iter()
            .any(|old| old.host.hostid == *hostid && Arc::ptr_eq(&old.subsystem, subsystem))
    }

    /// The gates of all connections of these hosts, of lost ones too while commands of theirs are at the media.
    pub(crate) fn gates(&self, host: impl Fn(&HostKey) -> bool) -> Vec<Arc<Gate>> {
        let inner = self.lock();
        let draining = inner.draining.iter().filter(|old| host(&old.host));
        let mut gates: Vec<Arc<Gate>> = draining.map(|old| old.gate.clone()).collect();
        for controller in inner.controllers.values().filter(|c| host(&c.host)) {
            gates.extend(controller.state().queues.values().map(|link| link.gate.clone()));
        }
        gates
    }

    /// End the controllers whose keep-alive time has passed; returns them.
    pub(crate) fn expire(&self, now_ms: u64) -> Vec<Arc<Controller>> {
        let late: Vec<_> = self
            .all()
            .into_iter()
            .filter(|controller| controller.expired(now_ms))
            .collect();
        for controller in &late {
            self.end(controller, "keep-alive timer expired");
        }
        self.lock().expired += late.len() as u64;
        late
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controller::QueueLink;
    use crate::mailbox::Mailbox;
    use headrace_wire::event::ChangedNamespaces;
    use headrace_wire::fabrics::{Cc, CC_ENABLE};

    #[test]
    fn more_changed_namespaces_than_their_list_holds() {
        let host = HostKey {
            hostnqn: "host".into(),
            hostid: [1; 16],
        };
        let subsystem = Arc::new(Subsystem::discovery(crate::config::QueueLimits::default()));
        let controller = Controller::new(1, subsystem, host, 0, 0);
        controller.namespaces_changed(1..=1024);
        let ChangedNamespaces::List(nsids) = controller.changed_namespaces(false) else {
            panic!("they fit")
        };
        assert_eq!(nsids.len(), 1024);
        controller.namespaces_changed([7, 2000, 3000]);
        assert_eq!(
            controller.changed_namespaces(false),
            ChangedNamespaces::TooMany,
            "not read yet"
        );
        assert_eq!(controller.changed_namespaces(true), ChangedNamespaces::TooMany);
        assert_eq!(
            controller.changed_namespaces(true),
            ChangedNamespaces::List(vec![])
        );
        controller.namespaces_changed([9]);
        assert_eq!(
            controller.changed_namespaces(true),
            ChangedNamespaces::List(vec![9])
        );
    }

    /// The reactors of the queues' connections have not looked into their mailboxes yet, and the host's next Connect waits
    /// all the same.
    #[test]
    fn a_reset_counts_what_is_at_the_media_at_once() {
        let registry = Registry::default();
        let host = HostKey {
            hostnqn: "host".into(),
            hostid: [1; 16],
        };
        let subsystem = Arc::new(Subsystem::discovery(crate::config::QueueLimits::default()));
        let create = |cntlid| Controller::new(cntlid, subsystem.clone(), host.clone(), 0, 0);
        let controller = registry.create(create).unwrap();
        let mailbox = Arc::new(Mailbox::new().unwrap());
        let link = |gate: &Arc<Gate>| QueueLink {
            mailbox: mailbox.clone(),
            token: 5,
            gate: gate.clone(),
        };
        let (admin, busy, idle) = (Arc::default(), Arc::default(), Arc::default());
        assert!(controller.attach(0, link(&admin)));
        assert!(
            !controller.attach(1, link(&busy)),
            "an I/O queue of a disabled controller"
        );
        controller.set_cc(Cc(CC_ENABLE));
        assert!(controller.attach(1, link(&busy)) && controller.attach(2, link(&idle)));
        let inside = busy.enter().unwrap();

        controller.set_cc(Cc(0));
        registry.reset(&controller);
        assert!(busy.enter().is_none() && idle.enter().is_none() && admin.enter().is_some());
        assert!(
            registry.is_draining(&[1; 16], &subsystem),
            "a new queue would be admitted beside the old write"
        );
        assert_eq!(
            controller.csts(),
            1,
            "the reset is complete with a write at the media"
        );
        controller.set_cc(Cc(0).with_shutdown());
        controller.shutdown_done();
        assert_eq!(
            controller.csts(),
            1 | 1 << 2,
            "the shutdown is complete with a write at the media"
        );
        assert!(!registry.is_draining(&[2; 16], &subsystem), "another host");
        let other = Arc::new(Subsystem::discovery(crate::config::QueueLimits::default()));
        assert!(!registry.is_draining(&[1; 16], &other), "another subsystem");
        drop(inside);
        assert!(!registry.is_draining(&[1; 16], &subsystem));
        assert_eq!(controller.csts(), 2 << 2);
        let mut messages = Vec::new();
        mailbox.take(&mut messages);
        assert_eq!(messages.len(), 2, "both connections are told");
    }
}

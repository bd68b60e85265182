//! Controllers: one host's association with one subsystem. Dynamic model: made by an admin Connect, ended with its admin
//! connection, by keep-alive expiry or by the target's end.

use crate::gate::Gate;
use crate::mailbox::{Mailbox, Message};
use crate::reservation::notice::Notices;
use crate::subsystem::Subsystem;
use crate::view::PortalId;
use headrace_wire::event::{config, kind, notice, ChangedNamespaces};
use headrace_wire::fabrics::{Cc, Csts};
use headrace_wire::log::lid;
use headrace_wire::Status;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// Async Event Requests that a controller holds (AERL + 1).
pub(crate) const AER_LIMIT: usize = 4;
/// Entries of the error log (ELPE + 1).
pub(crate) const ERROR_LOG_ENTRIES: usize = 64;
pub(crate) const HOST_BEHAVIOUR_BYTES: usize = 512;
/// Entries of the Changed Namespace List.
const CHANGED_MAX: usize = ChangedNamespaces::BYTES / 4;
/// KAS: keep-alive granularity in units of 100 ms.
pub(crate) const KAS: u16 = 1;

/// Who a host is: its name and its identifier.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct HostKey {
    pub(crate) hostnqn: String,
    pub(crate) hostid: [u8; 16],
}

/// How to reach the connection of one queue.
pub(crate) struct QueueLink {
    pub(crate) mailbox: Arc<Mailbox>,
    pub(crate) token: u64,
    pub(crate) gate: Arc<Gate>,
}

/// An asynchronous event; DW0 of the AER completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Event {
    pub(crate) kind: u8,
    pub(crate) info: u8,
    pub(crate) lid: u8,
}

impl Event {
    /// A namespace lost answered writes: "NVM subsystem reliability" of the SMART log.
    pub(crate) const RELIABILITY: Event = Event {
        kind: kind::SMART,
        info: 0,
        lid: lid::SMART,
    };
    /// A namespace came, went or is another size; which ones is in the list.
    pub(crate) const NAMESPACES: Event = Event {
        kind: kind::NOTICE,
        info: notice::NAMESPACE_ATTRIBUTE,
        lid: lid::CHANGED_NAMESPACES,
    };
    pub(crate) const ANA: Event = Event {
        kind: kind::NOTICE,
        info: notice::ANA,
        lid: lid::ANA,
    };
    /// To discovery controllers: their log page is another.
    pub(crate) const DISCOVERY: Event = Event {
        kind: kind::NOTICE,
        info: notice::DISCOVERY,
        lid: lid::DISCOVERY,
    };

    pub(crate) fn dw0(self) -> u32 {
        u32::from(self.kind) | u32::from(self.info) << 8 | u32::from(self.lid) << 16
    }

    /// The bit of the Asynchronous Event Configuration feature that lets it out.
    fn config_bit(self) -> u32 {
        match (self.kind, self.info) {
            // SMART: the critical warning bit, here reliability.
            (kind::SMART, _) => 1 << 2,
            (kind::NOTICE, notice::NAMESPACE_ATTRIBUTE) => config::NAMESPACE_ATTRIBUTE,
            (kind::NOTICE, notice::ANA) => config::ANA,
            (kind::NOTICE, notice::DISCOVERY) => config::DISCOVERY,
            _ => 0,
        }
    }
}

#[derive(Clone, Copy)]
pub(crate) struct ErrorEntry {
    pub(crate) count: u64,
    pub(crate) sqid: u16,
    pub(crate) cid: u16,
    pub(crate) status: Status,
    pub(crate) lba: u64,
    pub(crate) nsid: u32,
}

pub(crate) struct State {
    pub(crate) queues: BTreeMap<u16, QueueLink>,
    pub(crate) async_config: u32,
    events: VecDeque<Event>,
    /// Log pages whose event was sent and whose page was not read since.
    masked: Vec<u8>,
    /// Namespaces that changed since their list was read; one more than it can hold means that they are too many.
    changed: BTreeSet<u32>,
    pub(crate) errors: VecDeque<ErrorEntry>,
    pub(crate) error_count: u64,
    pub(crate) queues_granted: u16,
    pub(crate) host_behaviour: Box<[u8; HOST_BEHAVIOUR_BYTES]>,
    /// Closed gates of the queues that the last resets took.
    resetting: Vec<Arc<Gate>>,
    ended: bool,
}

pub(crate) struct Controller {
    pub(crate) cntlid: u16,
    pub(crate) subsystem: Arc<Subsystem>,
    pub(crate) host: HostKey,
    /// Where its admin connection comes in, and from.
    pub(crate) portal: PortalId,
    pub(crate) peer: Option<SocketAddr>,
    pub(crate) kato_ms: AtomicU32,
    /// Time of the last command on any queue, in ms since the target began.
    seen_ms: AtomicU64,
    cc: AtomicU32,
    shutdown_done: AtomicBool,
    /// A shutdown was asked for: no I/O any more before a reset.
    shut: AtomicBool,
    /// Off: every write behaves as with FUA.
    pub(crate) write_cache: AtomicBool,
    /// Whether this host was told of a write cache (VWC). A namespace with one that is added later must not surprise it:
    /// its writes go to the medium at once, since nobody will flush them.
    cached: AtomicBool,
    state: Mutex<State>,
    notices: Mutex<Notices>,
}

impl Controller {
    pub(crate) fn new(
        cntlid: u16,
        subsystem: Arc<Subsystem>,
        host: HostKey,
        kato_ms: u32,
        now_ms: u64,
    ) -> Self {
        Controller {
            cntlid,
            cached: AtomicBool::new(subsystem.volatile()),
            subsystem,
            host,
            portal: 0,
            peer: None,
            kato_ms: AtomicU32::new(round_kato(kato_ms)),
            seen_ms: AtomicU64::new(now_ms),
            cc: AtomicU32::new(0),
            shutdown_done: AtomicBool::new(false),
            shut: AtomicBool::new(false),
            write_cache: AtomicBool::new(true),
            state: Mutex::new(State {
                queues: BTreeMap::new(),
                async_config: 0,
                events: VecDeque::new(),
                masked: Vec::new(),
                changed: BTreeSet::new(),
                errors: VecDeque::new(),
                error_count: 0,
                queues_granted: 0,
                host_behaviour: Box::new([0; HOST_BEHAVIOUR_BYTES]),
                resetting: Vec::new(),
                ended: false,
            }),
            notices: Mutex::default(),
        }
    }

    /// Whose admin connection comes in through `portal`, from `peer`.
    pub(crate) fn at(mut self, portal: PortalId, peer: SocketAddr) -> Self {
        self.portal = portal;
        self.peer = Some(peer);
        self
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        // Every critical section leaves the state consistent at each step, so a panic elsewhere does not spoil it.
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    pub(crate) fn notices(&self) -> MutexGuard<'_, Notices> {
        self.notices.lock().unwrap_or_else(|e| e.into_inner())
    }

    pub(crate) fn seen(&self, now_ms: u64) {
        self.seen_ms.store(now_ms, Ordering::Relaxed);
    }

    pub(crate) fn expired(&self, now_ms: u64) -> bool {
        let kato = u64::from(self.kato_ms.load(Ordering::Relaxed));
        kato > 0 && now_ms.saturating_sub(self.seen_ms.load(Ordering::Relaxed)) > kato
    }

    pub(crate) fn cc(&self) -> Cc {
        Cc(self.cc.load(Ordering::Acquire))
    }

    pub(crate) fn enabled(&self) -> bool {
        self.cc().enabled()
    }

    /// Enabled, and not shut down since the last reset.
    pub(crate) fn takes_io(&self) -> bool {
        self.enabled() && !self.shut.load(Ordering::Acquire)
    }

    /// A reset is complete (RDY 0) only when no command of the queues that it took is at the media any more; a shutdown when
    /// no command of any I/O queue is.
    pub(crate) fn csts(&self) -> u32 {
        let cc = self.cc();
        let (resetting, busy) = {
            let mut state = self.state();
            state.resetting.retain(|gate| !gate.idle());
            let busy = state.queues.range(1..).any(|(_, link)| !link.gate.idle());
            (!state.resetting.is_empty(), busy)
        };
        let mut csts = 0;
        if cc.enabled() || resetting {
            csts |= Csts::READY;
        }
        if cc.shn() != 0 {
            csts |= if self.shutdown_done.load(Ordering::Acquire) && !resetting && !busy {
                Csts::SHUTDOWN_DONE
            } else {
                1 << 2
            };
        }
        csts
    }

    /// Returns the old value. Disabling is a controller reset, which the caller carries out.
    pub(crate) fn set_cc(&self, value: Cc) -> Cc {
        if value.shn() == 0 {
            self.shutdown_done.store(false, Ordering::Release);
        }
        if value.shn() != 0 || !value.enabled() {
            // Only a reset takes it back.
            self.shut.store(value.shn() != 0, Ordering::Release);
        }
        Cc(self.cc.swap(value.0, Ordering::AcqRel))
    }

    pub(crate) fn shutdown_done(&self) {
        self.shutdown_done.store(true, Ordering::Release);
    }

    /// All I/O queues and settings go: their gates are closed, and the caller waits for them and closes the connections
    /// ([`crate::registry::Registry::reset`]).
    pub(crate) fn reset(&self) -> Vec<QueueLink> {
        let gone: Vec<QueueLink> = {
            let mut state = self.state();
            state.async_config = 0;
            state.queues_granted = 0;
            state.events.clear();
            state.masked.clear();
            state.changed.clear();
            state.host_behaviour.fill(0);
            let io: Vec<u16> = state.queues.range(1..).map(|(&qid, _)| qid).collect();
            let gone: Vec<QueueLink> = io.iter().filter_map(|qid| state.queues.remove(qid)).collect();
            for link in &gone {
                link.gate.close();
            }
            state.resetting.retain(|gate| !gate.idle());
            state.resetting.extend(gone.iter().map(|link| link.gate.clone()));
            gone
        };
        *self.notices() = Notices::default();
        self.write_cache.store(true, Ordering::Relaxed);
        self.cached.store(self.subsystem.volatile(), Ordering::Relaxed);
        gone
    }

    /// `false` where the controller has ended, or is disabled or shut down and has no I/O queues, or the queue exists.
    pub(crate) fn attach(&self, qid: u16, link: QueueLink) -> bool {
        let mut state = self.state();
        // Looked at under the lock: a reset either finds this queue, or is seen here.
        if state.ended || (qid > 0 && !self.takes_io()) || state.queues.contains_key(&qid) {
            return false;
        }
        state.queues.insert(qid, link);
        true
    }

    /// Only if it is still the connection of `token` that holds the queue.
    pub(crate) fn detach(&self, qid: u16, token: u64) {
        let mut state = self.state();
        if state.queues.get(&qid).is_some_and(|link| link.token == token) {
            state.queues.remove(&qid);
        }
    }

    /// Take all queues; the caller closes them. `None` the second time.
    pub(crate) fn end(&self) -> Option<Vec<QueueLink>> {
        let mut state = self.state();
        if std::mem::replace(&mut state.ended, true) {
            return None;
        }
        Some(std::mem::take(&mut state.queues).into_values().collect())
    }

    pub(crate) fn note_error(&self, sqid: u16, cid: u16, status: Status, lba: u64, nsid: u32) {
        let mut state = self.state();
        state.error_count += 1;
        let count = state.error_count;
        if state.errors.len() == ERROR_LOG_ENTRIES {
            state.errors.pop_back();
        }
        state.errors.push_front(ErrorEntry {
            count,
            sqid,
            cid,
            status,
            lba,
            nsid,
        });
    }

    /// Queue an event, if the host asked for its kind and has not one of the kind unread, and wake the admin queue.
    pub(crate) fn raise(&self, event: Event) {
        let mut state = self.state();
        // Those of reservations have their own mask (feature 82h).
        let wanted = event == Event::RESERVATION || state.async_config & event.config_bit() != 0;
        if !wanted || state.masked.contains(&event.lid) || state.events.contains(&event) {
            return;
        }
        state.events.push_back(event);
        if let Some(link) = state.queues.get(&0) {
            link.mailbox.post(Message::Events { token: link.token });
        }
    }

    /// The next event for a held AER; its page is masked until read.
    pub(crate) fn take_event(&self) -> Option<Event> {
        let mut state = self.state();
        let event = state.events.pop_front()?;
        state.masked.push(event.lid);
        Some(event)
    }

    /// What VWC says to this host, until its next reset.
    pub(crate) fn cached(&self) -> bool {
        self.cached.load(Ordering::Relaxed)
    }

    /// Writes must be durable when they are answered.
    pub(crate) fn writes_through(&self) -> bool {
        !self.cached() || !self.write_cache.load(Ordering::Relaxed)
    }

    /// These namespaces are not what they were.
    pub(crate) fn namespaces_changed(&self, nsids: impl IntoIterator<Item = u32>) {
        let mut state = self.state();
        for nsid in nsids {
            if state.changed.len() <= CHANGED_MAX {
                state.changed.insert(nsid);
            }
        }
        drop(state);
        self.raise(Event::NAMESPACES);
    }

    /// The Changed Namespace List; with `clear` it begins anew, and so may its event.
    pub(crate) fn changed_namespaces(&self, clear: bool) -> ChangedNamespaces {
        let mut state = self.state();
        let list = if state.changed.len() > CHANGED_MAX {
            ChangedNamespaces::TooMany
        } else {
            ChangedNamespaces::List(state.changed.iter().copied().collect())
        };
        if clear {
            state.changed.clear();
            state.masked.retain(|&masked| masked != lid::CHANGED_NAMESPACES);
        }
        list
    }

    /// Its queues must look at the subsystem again.
    pub(crate) fn renew(&self) {
        for link in self.state().queues.values() {
            link.mailbox.post(Message::Renew { token: link.token });
        }
    }

    /// The log page was read with RAE = 0.
    pub(crate) fn page_read(&self, lid: u8) {
        let mut state = self.state();
        state.masked.retain(|&masked| masked != lid);
    }
}

/// Up to the next multiple of the granularity.
pub(crate) fn round_kato(kato_ms: u32) -> u32 {
    let unit = u32::from(KAS) * 100;
    kato_ms.div_ceil(unit).saturating_mul(unit)
}

//! Fabrics commands: Connect, Property Get and Property Set (Base Specification 6).

use crate::commands::{Command, State, Task};
use crate::config::is_nqn;
use crate::connection::{Connection, Queue};
use crate::controller::{Controller, HostKey, QueueLink};
use crate::identify::VERSION;
use crate::memory::Buffer;
use crate::view::Reach;
use crate::work::Work;
use crate::worker::Job;
use headrace_wire::fabrics::{
    fctype, property, Cap, Cc, Connect, ConnectData, ConnectResponse, PropertyAccess, CATTR_NO_SQ_FLOW,
    CNTLID_DYNAMIC, CONNECT_DATA_BYTES, IPO_DATA_CNTLID, IPO_DATA_HOSTNQN, IPO_DATA_SUBNQN, IPO_SQE_QID,
    IPO_SQE_SQSIZE,
};
use headrace_wire::{Sgl, Sqe, Status};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a Connect waits for commands of the host's lost or reset queues that are still at the media.
const DRAIN_LIMIT: Duration = Duration::from_secs(5);
/// CAP.TO: enabling takes no time here; shutdown flushes. In half seconds.
const READY_TIMEOUT: u8 = 30;

/// A Connect that waits until nothing of the host's former associations and queues can touch media any more.
pub(crate) struct Deferred {
    slot: u16,
    data: ConnectData,
    since: Instant,
}

/// Status and DW0 of a refusal.
type Refusal = (Status, u32);

fn invalid(ipo: u16, in_data: bool) -> Refusal {
    (
        Status::CONNECT_INVALID_PARAMETERS.do_not_retry(),
        ConnectResponse::invalid(ipo, in_data).0,
    )
}

impl Connection {
    pub(crate) fn fabrics(&mut self, sqe: Sqe, data: Option<Buffer>) -> Result<(), Status> {
        let refuse = |status: Status| Err(status.do_not_retry());
        if sqe.psdt() != 1 {
            return refuse(Status::INVALID_FIELD);
        }
        match (sqe.fctype(), self.queue.as_ref().map(|queue| queue.qid)) {
            // One at a time, and only once.
            (fctype::CONNECT, None) if self.deferred.is_none() => self.connect(sqe, data),
            (fctype::CONNECT, _) | (_, None) => refuse(Status::SEQUENCE_ERROR),
            (fctype::PROPERTY_GET, Some(0)) => self.property_get(&sqe),
            (fctype::PROPERTY_SET, Some(0)) => self.property_set(&sqe),
            (fctype::PROPERTY_GET | fctype::PROPERTY_SET, Some(_)) => refuse(Status::INVALID_FIELD),
            _ => refuse(Status::INVALID_OPCODE),
        }
    }

    fn connect(&mut self, sqe: Sqe, data: Option<Buffer>) -> Result<(), Status> {
        let in_capsule = Sgl::InCapsule {
            offset: 0,
            length: CONNECT_DATA_BYTES as u32,
        };
        let mut bytes = [0; CONNECT_DATA_BYTES];
        match data {
            Some(data) if sqe.sgl() == in_capsule && data.len() == bytes.len() => {
                bytes.copy_from_slice(&data)
            }
            _ => return Err(Status::SGL_DATA_LENGTH.do_not_retry()),
        }
        let data = ConnectData::decode(&bytes);
        if self.is_draining(&data) {
            let slot = self
                .commands
                .insert(Command::new(sqe, Task::Connect, State::Held));
            self.deferred = Some(Deferred {
                slot,
                data,
                since: self.now,
            });
            return Ok(());
        }
        self.answer_connect(&sqe, data);
        Ok(())
    }

    /// Whether commands of this host's former associations can still touch what it wants to connect to.
    fn is_draining(&self, data: &ConnectData) -> bool {
        let subsystem = self.shared.subsystem(&data.subnqn);
        subsystem.is_some_and(|subsystem| self.shared.registry.is_draining(&data.hostid, subsystem))
    }

    /// A deferred Connect, again. `true` while it must be asked again.
    pub(crate) fn retry_connect(&mut self) -> bool {
        let Some(Deferred { slot, data, since }) = self.deferred.take() else {
            return false;
        };
        let draining = self.is_draining(&data);
        if draining && self.now.saturating_duration_since(since) < DRAIN_LIMIT {
            self.deferred = Some(Deferred { slot, data, since });
            return true;
        }
        let Some(command) = self.commands.remove(slot) else {
            return false;
        };
        if draining {
            self.respond(&command.sqe, Status::CONNECT_CONTROLLER_BUSY, 0);
        } else {
            self.answer_connect(&command.sqe, data);
        }
        false
    }

    fn answer_connect(&mut self, sqe: &Sqe, data: ConnectData) {
        let connect = Connect::decode(sqe);
        let named = format!("{} as queue {} of {}", data.hostnqn, connect.qid, data.subnqn);
        match self.admit(&connect, data) {
            Ok(cntlid) => {
                self.shared
                    .note(format!("{}: connected {named}, controller {cntlid}", self.peer));
                self.respond(sqe, Status::SUCCESS, u32::from(cntlid));
            }
            Err((status, dw0)) => {
                self.shared
                    .note(format!("{}: refused {named}: {status}", self.peer));
                self.respond(sqe, status, dw0);
            }
        }
    }

    /// Make this connection a queue; returns its controller's id.
    fn admit(&mut self, connect: &Connect, data: ConnectData) -> Result<u16, Refusal> {
        if connect.recfmt != 0 {
            return Err((Status::CONNECT_INCOMPATIBLE_FORMAT.do_not_retry(), 0));
        }
        if !is_nqn(&data.hostnqn) {
            return Err(invalid(IPO_DATA_HOSTNQN, true));
        }
        let Some(subsystem) = self.shared.subsystem(&data.subnqn).cloned() else {
            return Err(invalid(IPO_DATA_SUBNQN, true));
        };
        let portal = self.shared.portal_of(self.local);
        if self.shared.portals.get(portal).is_some_and(|p| p.discovery) && !subsystem.discovery {
            return Err(invalid(IPO_DATA_SUBNQN, true));
        }
        if subsystem.view().hosts.access(&data.hostnqn).is_none() {
            return Err((Status::CONNECT_INVALID_HOST.do_not_retry(), 0));
        }
        if connect.sqsize == 0 || connect.sqsize >= subsystem.limits.max_queue_entries {
            return Err(invalid(IPO_SQE_SQSIZE, false));
        }
        let host = HostKey {
            hostnqn: data.hostnqn,
            hostid: data.hostid,
        };
        let share = self.shared.hosts.share(&host);
        let Some(membership) = share.join(self.shared.limits.max_host_connections) else {
            return Err((Status::CONNECT_CONTROLLER_BUSY, 0));
        };
        let controller = if connect.qid == 0 {
            if data.cntlid != CNTLID_DYNAMIC {
                return Err(invalid(IPO_DATA_CNTLID, true));
            }
            let now_ms = self.shared.ms(self.now);
            let peer = self.peer;
            let create =
                |cntlid| Controller::new(cntlid, subsystem, host, connect.kato_ms, now_ms).at(portal, peer);
            self.shared
                .registry
                .create(create)
                .ok_or((Status::CONNECT_CONTROLLER_BUSY, 0))?
        } else {
            let found = self
                .shared
                .registry
                .get(data.cntlid)
                .filter(|c| Arc::ptr_eq(&c.subsystem, &subsystem));
            let controller = found.ok_or(invalid(IPO_DATA_CNTLID, true))?;
            if controller.host != host {
                return Err(invalid(IPO_DATA_HOSTNQN, true));
            }
            let granted = controller.state().queues_granted;
            let granted = if granted == 0 {
                subsystem.limits.max_io_queues
            } else {
                granted
            };
            if subsystem.discovery || connect.qid > granted {
                return Err(invalid(IPO_SQE_QID, false));
            }
            if !controller.takes_io() {
                return Err((Status::SEQUENCE_ERROR.do_not_retry(), 0));
            }
            controller
        };
        let link = QueueLink {
            mailbox: self.mailbox.clone(),
            token: self.token,
            gate: self.gate.clone(),
        };
        if !controller.attach(connect.qid, link) {
            // The queue exists, or the controller ended or was disabled a moment ago.
            return Err(invalid(IPO_SQE_QID, false));
        }
        if connect.qid > 0
            && self
                .shared
                .registry
                .is_draining(&controller.host.hostid, &controller.subsystem)
        {
            // A queue of this host ended between the first look and the attachment.
            controller.detach(connect.qid, self.token);
            return Err((Status::CONNECT_CONTROLLER_BUSY, 0));
        }
        // After it was attached: a change from here on finds this queue, one before is in the view.
        let reach = Reach::new(&controller, portal);
        if reach.view().hosts.access(&controller.host.hostnqn).is_none() {
            controller.detach(connect.qid, self.token);
            if connect.qid == 0 {
                self.shared
                    .registry
                    .end(&controller, "the host may not connect any more");
            }
            return Err((Status::CONNECT_INVALID_HOST.do_not_retry(), 0));
        }
        self.queue = Some(Queue {
            reach,
            controller: controller.clone(),
            qid: connect.qid,
            entries: connect.sqsize + 1,
            flow_control: connect.cattr & CATTR_NO_SQ_FLOW == 0,
            // Connect itself was the first entry.
            sqhd: 1 % (connect.sqsize + 1),
            _membership: membership,
        });
        self.allowance.belongs_to(&share);
        self.arrival = None;
        Ok(controller.cntlid)
    }

    fn property_get(&mut self, sqe: &Sqe) -> Result<(), Status> {
        let Some(queue) = &self.queue else {
            return Err(Status::SEQUENCE_ERROR.do_not_retry());
        };
        let access = PropertyAccess::decode(sqe);
        let value = match (access.offset, access.eight_bytes) {
            (property::CAP, true) => {
                Cap::new(
                    queue.controller.subsystem.limits.max_queue_entries - 1,
                    READY_TIMEOUT,
                )
                .0
            }
            (property::VS, false) => u64::from(VERSION),
            (property::CC, false) => u64::from(queue.controller.cc().0),
            (property::CSTS, false) => u64::from(queue.controller.csts()),
            // Subsystem reset is not supported (CAP.NSSRS 0); its register reads as zero.
            (property::NSSR, false) => 0,
            _ => return Err(Status::INVALID_FIELD.do_not_retry()),
        };
        self.respond_wide(sqe, Status::SUCCESS, value);
        Ok(())
    }

    fn property_set(&mut self, sqe: &Sqe) -> Result<(), Status> {
        let Some(queue) = &self.queue else {
            return Err(Status::SEQUENCE_ERROR.do_not_retry());
        };
        let controller = queue.controller.clone();
        let access = PropertyAccess::decode(sqe);
        if access.offset != property::CC || access.eight_bytes {
            return Err(Status::INVALID_FIELD.do_not_retry());
        }
        let cc = Cc(access.value as u32);
        // CSS: NVM, or all that is supported; MPS within CAP (4 KiB); round robin.
        let (css, mps, ams) = (cc.0 >> 4 & 7, cc.0 >> 7 & 15, cc.0 >> 11 & 7);
        // Entry sizes may be zero until I/O queues exist, and for discovery for ever.
        let sizes = matches!((cc.iosqes(), cc.iocqes()), (6, 4) | (0, 0));
        if cc.enabled() && (!matches!(css, 0 | 6) || mps != 0 || ams != 0 || !sizes) {
            return Err(Status::INVALID_FIELD.do_not_retry());
        }
        let before = controller.set_cc(cc);
        if before.enabled() && !cc.enabled() {
            self.shared.registry.reset(&controller);
            // It aborts what waits on this queue, event requests above all; a host sends them again, under the same CIDs.
            self.commands
                .forget(|state| matches!(state, State::Held | State::Working));
        }
        if before.shn() == 0 && cc.shn() != 0 {
            self.shut_down(&controller, cc.shn() == 1);
        }
        self.respond(sqe, Status::SUCCESS, 0);
        Ok(())
    }

    /// A normal shutdown makes everything durable; an abrupt one only ends.
    fn shut_down(&self, controller: &Arc<Controller>, normal: bool) {
        if !normal || !controller.subsystem.volatile() {
            controller.shutdown_done();
            return;
        }
        let work = Work::Shutdown {
            controller: controller.clone(),
        };
        self.shared.workers.submit(Job {
            work,
            gate: self.gate.clone(),
            reply: None,
        });
    }
}

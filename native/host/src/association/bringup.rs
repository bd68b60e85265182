//! The steps of the bring-up and of the shutdown: what each answer leads to.

use super::events::wanted;
use super::lanes::share_out;
use super::{is_transient, Association, Failure, Step, Tag, ADMIN_DEPTH, POLL_INTERVAL};
use crate::errors::{bad_answer, refused, step_failed};
use crate::lane::LANES;
use crate::queue::{Completion, Data, End};
use crate::reactor::Turn;
use crate::refusal::{connect_refused, Asked};
use headrace_transfer::{Buffer, ErrorKind, IoError};
use headrace_wire::ana::AnaLog;
use headrace_wire::command::feature;
use headrace_wire::event::config;
use headrace_wire::fabrics::{
    property, property_get, property_set, Cap, Connect, ConnectData, ConnectResponse, Csts, CATTR_NO_SQ_FLOW,
    CC_ENABLE, CNTLID_DYNAMIC,
};
use headrace_wire::identify::{cns, IDENTIFY_BYTES};
use headrace_wire::{admin, Cqe, Sqe, Status};
use std::time::Instant;

/// Of all lanes together; a connection's place in its token is bounded.
const QUEUES_ASKED_MAX: u32 = 384;

impl Association {
    pub(super) fn initialized(&mut self, at: usize, now: Instant) -> Result<(), Failure> {
        if at == 0 {
            self.step = Step::Connect;
            let connect = Connect {
                recfmt: 0,
                qid: 0,
                sqsize: ADMIN_DEPTH,
                cattr: CATTR_NO_SQ_FLOW,
                kato_ms: self.options.keep_alive.as_millis() as u32,
            };
            let data = self.connect_data(CNTLID_DYNAMIC);
            return self.command(0, connect.encode(0), data, Tag::Step, now);
        }
        if let Some(agreed) = self.connections[at].queue.agreed() {
            self.facts.maxh2cdata = agreed.maxh2cdata;
        }
        let qid = at as u16;
        // SQSIZE is zero-based, and a queue holds one entry less than its size.
        let connect = Connect {
            recfmt: 0,
            qid,
            sqsize: self.facts.depth,
            cattr: CATTR_NO_SQ_FLOW,
            kato_ms: 0,
        };
        let data = self.connect_data(self.facts.cntlid);
        self.command(at, connect.encode(0), data, Tag::Connect(qid), now)
    }

    fn connect_data(&self, cntlid: u16) -> Data {
        let options = &self.options;
        let data = ConnectData {
            hostid: options.hostid,
            cntlid,
            subnqn: options.subsysnqn.clone(),
            hostnqn: options.hostnqn.clone(),
        };
        Data::Write(Buffer::from_vec(data.encode().to_vec()))
    }

    pub(super) fn command(
        &mut self,
        at: usize,
        sqe: Sqe,
        data: Data,
        tag: Tag,
        now: Instant,
    ) -> Result<(), Failure> {
        let deadline = now + self.patience;
        self.submit(at, sqe, data, tag, Some(deadline))
            .map_err(|_| bad_answer(&self.options, "the admin queue is full").into())
    }

    pub(super) fn submit(
        &mut self,
        at: usize,
        sqe: Sqe,
        data: Data,
        tag: Tag,
        deadline: Option<Instant>,
    ) -> Result<(), (Tag, Data)> {
        self.connections[at].queue.submit(sqe, data, tag, deadline)?;
        self.check_at = self.check_at.into_iter().chain(deadline).min();
        Ok(())
    }

    pub(super) fn step(&mut self, step: Step, sqe: Sqe, now: Instant) -> Result<(), Failure> {
        self.step = step;
        self.command(0, sqe, Data::None, Tag::Step, now)
    }

    pub(super) fn identify(&mut self, step: Step, cns: u8, nsid: u32, now: Instant) -> Result<(), Failure> {
        self.step = step;
        let sqe = Sqe::new(admin::IDENTIFY, 0, nsid).with_cdw(10, cns.into());
        self.command(0, sqe, Data::Read(Buffer::zeroed(IDENTIFY_BYTES)), Tag::Step, now)
    }

    /// The answer to a step: refused, broken, or its bytes.
    pub(super) fn answer(&self, completion: Completion<Tag>) -> Result<(Cqe, Vec<u8>), Failure> {
        let step = self.step.name();
        match completion.end {
            End::Answer(cqe) => {
                let mut bytes = Vec::new();
                if let Data::Read(buffer) = &completion.data {
                    bytes.resize(buffer.len(), 0);
                    buffer.copy_to(0, &mut bytes);
                }
                Ok((cqe, bytes))
            }
            End::Short { came, wanted } => {
                Err(bad_answer(&self.options, format!("{step} was answered short"))
                    .expected(format!("{wanted} bytes"))
                    .found(came.to_string())
                    .into())
            }
            End::DataDigest => {
                Err(bad_answer(&self.options, format!("{step}: the data digest is wrong")).into())
            }
        }
    }

    fn connect_failure(&self, qid: u16, cqe: &Cqe) -> Failure {
        let place = self.options.address();
        let asked = Asked {
            place: &place,
            subsysnqn: &self.options.subsysnqn,
            hostnqn: &self.options.hostnqn,
            hostid: &self.options.hostid,
            qid,
            sqsize: if qid == 0 { ADMIN_DEPTH } else { self.facts.depth },
            keep_alive: self.options.keep_alive,
        };
        let transient = !cqe.status.dnr && is_transient(cqe.status);
        let plain = Status::new(cqe.status.sct, cqe.status.sc);
        let response = ConnectResponse(cqe.dw0);
        let no_such_subsystem =
            plain == Status::CONNECT_INVALID_PARAMETERS && response.in_data() && response.ipo() == 256;
        Failure {
            transient,
            permanent: cqe.status.dnr || plain == Status::CONNECT_INVALID_HOST || no_such_subsystem,
            ..Failure::from(connect_refused(asked, cqe))
        }
    }

    pub(super) fn stepped(&mut self, cqe: &Cqe, bytes: Vec<u8>, turn: &mut Turn<'_>) -> Result<(), Failure> {
        let now = turn.now;
        if !cqe.status.is_success() {
            return match self.step {
                Step::Connect => Err(self.connect_failure(0, cqe)),
                // Optional in old controllers.
                Step::Identifiers => self.identified(now),
                Step::Candidate => self.no_candidate(now),
                // A controller may refuse the SMART bits; without any, events of errors still come.
                Step::Events
                    if self.facts.events & !config::SMART != 0 && self.facts.events & config::SMART != 0 =>
                {
                    self.ask_for_events(self.facts.events & !config::SMART, now)
                }
                Step::Events => {
                    self.facts.events = 0;
                    self.connect_queues(turn)
                }
                step => {
                    let error = step_failed(&self.options.address(), step.name(), cqe.status);
                    Err(Failure {
                        transient: is_transient(cqe.status) && !cqe.status.dnr,
                        permanent: cqe.status.dnr,
                        ..error.into()
                    })
                }
            };
        }
        match self.step {
            Step::Connect => {
                let response = ConnectResponse(cqe.dw0);
                if response.authentication_required() {
                    let found = "authentication required";
                    return Err(refused(&self.options, "the target demands DH-HMAC-CHAP")
                        .expected("a subsystem that this host may use without authentication")
                        .found(found)
                        .next("on the target, allow this host without a key")
                        .into());
                }
                self.facts.cntlid = response.cntlid();
                if !self.options.keep_alive.is_zero() {
                    self.keep_alive_at = Some(now + self.keep_alive_interval());
                }
                self.step(Step::Capabilities, property_get(0, property::CAP, true), now)
            }
            Step::Capabilities => {
                self.facts
                    .capabilities(Cap(u64::from(cqe.dw0) | u64::from(cqe.dw1) << 32));
                self.step(Step::Version, property_get(0, property::VS, false), now)
            }
            Step::Version => {
                self.facts.version = cqe.dw0;
                self.step(
                    Step::Enable,
                    property_set(0, property::CC, CC_ENABLE.into(), false),
                    now,
                )
            }
            Step::Enable => self.step(Step::Ready, property_get(0, property::CSTS, false), now),
            Step::Ready => {
                let status = Csts(cqe.dw0);
                if status.fatal() {
                    return Err(
                        IoError::new(ErrorKind::Failed, "the controller reports a fatal status")
                            .at(self.options.address())
                            .expected("CSTS.RDY")
                            .found(format!("CSTS 0x{:x}", cqe.dw0))
                            .next("see the target's log")
                            .into(),
                    );
                }
                if !status.ready() {
                    self.poll_at = Some(now + POLL_INTERVAL);
                    return Ok(());
                }
                self.identify(Step::IdentifyController, cns::CONTROLLER, 0, now)
            }
            Step::IdentifyController => {
                self.facts.controller(&bytes, &self.options)?;
                let wanted = (u32::from(self.options.queues) * LANES as u32).min(QUEUES_ASKED_MAX) - 1;
                let sqe = Sqe::new(admin::SET_FEATURES, 0, 0)
                    .with_cdw(10, feature::NUMBER_OF_QUEUES.into())
                    .with_cdw(11, wanted | wanted << 16);
                self.step(Step::Queues, sqe, now)
            }
            Step::Queues => {
                let granted = (cqe.dw0 & 0xFFFF).min(cqe.dw0 >> 16) + 1;
                let granted = granted.min(QUEUES_ASKED_MAX) as u16;
                self.facts.lanes = share_out(granted, self.options.queues);
                self.facts.queues = self.facts.lanes[0];
                let mut depth = self.options.depth.min(self.facts.mqes.max(1));
                if self.facts.maxcmd > 0 {
                    depth = depth.min(self.facts.maxcmd);
                }
                self.facts.depth = depth;
                self.ask_for_events(wanted(self.facts.oaes), now)
            }
            Step::Events => self.connect_queues(turn),
            Step::ActiveNamespaces => self.active(&bytes, now),
            Step::Candidate => self.candidate(&bytes, now),
            Step::IdentifyNamespace => {
                self.facts.namespace(&bytes, &self.options)?;
                let nsid = self.facts.nsid;
                self.identify(Step::Identifiers, cns::NAMESPACE_DESCRIPTORS, nsid, now)
            }
            Step::Identifiers => {
                self.facts.descriptors(&bytes);
                self.identified(now)
            }
            Step::Ana => {
                let log = AnaLog::decode(&bytes).ok_or_else(|| {
                    bad_answer(&self.options, "the ANA log does not hold what its header says")
                })?;
                self.heed_ana(&log);
                // That is how it begins, not a change.
                self.take_events();
                self.run(now)
            }
            Step::Shutdown => self.step(Step::ShutdownStatus, property_get(0, property::CSTS, false), now),
            Step::ShutdownStatus => {
                if Csts(cqe.dw0).shst() == 2 {
                    self.step = Step::Done;
                } else {
                    self.poll_at = Some(now + POLL_INTERVAL);
                }
                Ok(())
            }
            Step::Tcp | Step::IoQueues | Step::Running | Step::Done => {
                Err(bad_answer(&self.options, "an answer to no step").into())
            }
        }
    }

    pub(super) fn io_connected(
        &mut self,
        qid: u16,
        completion: &Completion<Tag>,
        now: Instant,
    ) -> Result<(), Failure> {
        match completion.end {
            End::Answer(cqe) if cqe.status.is_success() => {}
            End::Answer(cqe) => return Err(self.connect_failure(qid, &cqe)),
            End::Short { .. } | End::DataDigest => {
                return Err(bad_answer(&self.options, "Connect of an I/O queue was answered wrongly").into())
            }
        }
        self.connections[usize::from(qid)]
            .queue
            .set_in_capsule(self.facts.in_capsule);
        if self.lane_connected(qid) && self.step == Step::IoQueues {
            self.find(now)?;
        }
        Ok(())
    }

    fn ask_for_events(&mut self, events: u32, now: Instant) -> Result<(), Failure> {
        self.facts.events = events;
        let sqe = Sqe::new(admin::SET_FEATURES, 0, 0)
            .with_cdw(10, feature::ASYNC_EVENT_CONFIG.into())
            .with_cdw(11, events);
        self.step(Step::Events, sqe, now)
    }

    fn connect_queues(&mut self, turn: &Turn<'_>) -> Result<(), Failure> {
        self.step = Step::IoQueues;
        self.open_lane(0, turn);
        if self.connections.len() > usize::from(self.facts.queues) {
            return Ok(());
        }
        Err(
            IoError::new(ErrorKind::Failed, "cannot open a socket for each I/O queue")
                .at(self.options.address())
                .expected(format!("{} sockets", self.facts.queues))
                .found(format!("{}", self.connections.len() - 1))
                .next("check the limit of open files")
                .into(),
        )
    }

    /// The namespace is known; where access is asymmetric, so is its state before anything is sent to it.
    fn identified(&mut self, now: Instant) -> Result<(), Failure> {
        if self.facts.ana.is_none() {
            return self.run(now);
        }
        let (sqe, length) = self.ana_log();
        self.step = Step::Ana;
        self.command(0, sqe, Data::Read(Buffer::zeroed(length)), Tag::Step, now)
    }
}

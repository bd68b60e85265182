//! One association with a controller: the admin connection, the I/O connections, and the way from a TCP address to ready.
//!
//! # Bring-up
//!
//! ```text
//! admin:  TCP -> ICReq/ICResp -> Connect -> CAP -> VS -> CC.EN=1 -> CSTS.RDY? -> Identify controller
//!         -> Set Features queues -> Set Features asynchronous events
//! I/O n:  TCP -> ICReq/ICResp -> Connect QID n            (the feed's, all at once; others when first used: [`lanes`])
//! admin:  [search by UUID or NGUID ->] Identify namespace -> identifiers -> [ANA log ->] ready, with event requests
//! ```
//!
//! Each arrow is an event; nothing here ever waits. Whoever owns the association has the deadline of the whole.
//!
//! # Keep Alive
//!
//! From the admin Connect on, a Keep Alive goes out every KATO/2 (KATO/4 where the controller counts traffic), whether or
//! not other commands run, and must be answered within KATO. The controller may round KATO up to its granularity (KAS);
//! what we asked for is the shorter time, and the one that we keep. It is sent by the I/O thread, which never takes the GIL
//! and never waits for another controller.

mod bringup;
mod events;
mod find;
mod lanes;

pub(crate) use events::{Event, Look};

use crate::connection::{Broken, Connection};
use crate::errors::{refused, unreachable};
use crate::facts::Facts;
use crate::lane::LANES;
use crate::options::HostOptions;
use crate::passthrough::Call;
use crate::queue::{Arrivals, Asked, Completion, Data, End, ADMIN_IN_CAPSULE};
use crate::reactor::Turn;
use crate::work::Part;
use events::Watch;
use find::Search;
use headrace_transfer::{ErrorKind, IoError};
use headrace_wire::ana::AnaState;
use headrace_wire::fabrics::{property, property_get, property_set, Cc, CC_ENABLE};
use headrace_wire::pdu::Digests;
use headrace_wire::{admin, Sqe, Status};
use lanes::Lane;
use mio::Token;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Commands under way on the admin queue: passed-through ones, and ours.
const ADMIN_DEPTH: u16 = 31;
/// What those of others leave to ours: a step, a look, Keep Alives, the event requests.
const ADMIN_SPARE: usize = 12;
/// Between two looks at CSTS.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// What a completion belongs to.
pub(crate) enum Tag {
    /// The one step of the bring-up (or shutdown) that is under way.
    Step,
    /// Connect of an I/O queue.
    Connect(u16),
    KeepAlive,
    /// Asynchronous Event Request.
    Event,
    Look(Look),
    Part(Part),
    /// A read that another path was sent since; when it was sent here.
    Recalled(Instant),
    /// Passed through.
    Call(Box<Call>),
    /// The question of the guard of this number.
    Guard(u64),
}

impl Arrivals for Tag {
    fn watches(&self) -> bool {
        matches!(self, Tag::Part(part) if part.watch.is_some())
    }

    fn arrived(&self, at: usize, count: usize) {
        if let Tag::Part(part) = self {
            part.arrived(at, count);
        }
    }

    fn departed(&self, at: usize, count: usize) {
        if let Tag::Part(part) = self {
            part.departed(at, count);
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Step {
    Tcp,
    Connect,
    Capabilities,
    Version,
    Enable,
    Ready,
    IdentifyController,
    Queues,
    Events,
    IoQueues,
    ActiveNamespaces,
    Candidate,
    IdentifyNamespace,
    Identifiers,
    Ana,
    Running,
    Shutdown,
    ShutdownStatus,
    Done,
}

impl Step {
    pub fn name(self) -> &'static str {
        match self {
            Step::Tcp => "TCP connect and ICReq",
            Step::Connect => "Connect",
            Step::Capabilities => "Property Get CAP",
            Step::Version => "Property Get VS",
            Step::Enable => "Property Set CC.EN",
            Step::Ready => "the wait for CSTS.RDY",
            Step::IdentifyController => "Identify Controller",
            Step::Queues => "Set Features Number of Queues",
            Step::Events => "Set Features Asynchronous Event Configuration",
            Step::ActiveNamespaces => "Identify Active Namespaces",
            Step::Candidate => "Identify Namespace Identification Descriptors of each namespace",
            Step::Ana => "Get Log Page (ANA)",
            Step::IoQueues => "Connect of the I/O queues",
            Step::IdentifyNamespace => "Identify Namespace",
            Step::Identifiers => "Identify Namespace Identification Descriptors",
            Step::Running => "running",
            Step::Shutdown => "Property Set CC.SHN",
            Step::ShutdownStatus => "waiting for CSTS.SHST",
            Step::Done => "shut down",
        }
    }
}

/// Why an association did not come about, or ended.
#[derive(Debug)]
pub(crate) struct Failure {
    pub error: IoError,
    /// Trying again at once may help (busy, not ready yet).
    pub transient: bool,
    /// TCP itself failed: another address may do.
    pub transport: bool,
    /// The peer broke the protocol, which each command under way may have caused.
    pub violation: bool,
    /// The controller will say the same however often it is asked.
    pub permanent: bool,
}

impl From<IoError> for Failure {
    fn from(error: IoError) -> Self {
        let violation = error.kind == ErrorKind::Protocol;
        Failure {
            error,
            transient: false,
            transport: false,
            violation,
            permanent: false,
        }
    }
}

pub(crate) struct Association {
    pub options: Arc<HostOptions>,
    /// Which of the portals.
    portal: usize,
    address: SocketAddr,
    /// 0 is admin, n is I/O queue n.
    pub connections: Vec<Connection<Tag>>,
    pub facts: Facts,
    pub step: Step,
    /// Next look at CSTS.
    poll_at: Option<Instant>,
    keep_alive_at: Option<Instant>,
    /// No command is overdue before this; exact when looked at.
    check_at: Option<Instant>,
    first_token: usize,
    lanes: [Lane; LANES],
    /// For commands of the bring-up.
    patience: Duration,
    search: Search,
    watch: Watch,
}

impl Association {
    pub fn begin(
        options: Arc<HostOptions>,
        portal: usize,
        address: SocketAddr,
        first_token: usize,
        turn: &Turn<'_>,
    ) -> Result<Self, Failure> {
        let mut association = Association {
            patience: options.connect_timeout,
            options,
            portal,
            address,
            connections: Vec::new(),
            facts: Facts::default(),
            step: Step::Tcp,
            poll_at: None,
            keep_alive_at: None,
            check_at: None,
            first_token,
            lanes: Default::default(),
            search: Search::default(),
            watch: Watch::default(),
        };
        association.connect_tcp(ADMIN_DEPTH, ADMIN_IN_CAPSULE, turn)?;
        Ok(association)
    }

    fn digests(&self) -> Digests {
        Digests {
            header: self.options.header_digest,
            data: self.options.data_digest,
        }
    }

    fn connect_tcp(&mut self, depth: u16, in_capsule: usize, turn: &Turn<'_>) -> Result<(), Failure> {
        let token = Token(self.first_token + self.connections.len());
        let asked = Asked {
            digests: self.digests(),
            hpda: self.options.hpda,
            maxr2t: self.options.maxr2t,
        };
        let way = (&self.options.route, self.address);
        let connection = Connection::open(way, turn.registry, token, depth, asked, in_capsule)
            .map_err(|broken| self.broken(broken))?;
        self.connections.push(connection);
        Ok(())
    }

    pub fn event(&mut self, event: &mio::event::Event) {
        // An event of a connection that is closed by now finds nobody: each attempt has its own range of tokens.
        let at = event.token().0.wrapping_sub(self.first_token);
        if let Some(connection) = self.connections.get_mut(at) {
            connection.event(event);
        }
    }

    /// Move bytes on every connection and hand what completed to `completed`; `true` when there is more to do at once.
    /// What completed before a failure is handed over all the same.
    pub fn turn(
        &mut self,
        turn: &mut Turn<'_>,
        completed: &mut dyn FnMut(Completion<Tag>),
    ) -> Result<bool, Failure> {
        let mut more = false;
        let mut at = 0;
        // By index: the bring-up adds connections on the way.
        while at < self.connections.len() {
            let before = self.connections[at].queue.agreed().is_some();
            let result = self.connections[at].turn(turn.scratch);
            while let Some(completion) = self.connections[at].queue.completion() {
                match completion.tag {
                    Tag::Part(_) | Tag::Recalled(_) | Tag::Call(_) | Tag::Guard(_) => completed(completion),
                    Tag::KeepAlive => self.kept_alive(&completion)?,
                    Tag::Event => self.heard(&completion, turn.now),
                    Tag::Look(look) => self.looked(look, completion, turn.now),
                    Tag::Connect(qid) => self.io_connected(qid, &completion, turn.now)?,
                    Tag::Step => {
                        let (cqe, data) = self.answer(completion)?;
                        self.stepped(&cqe, data, turn)?;
                    }
                }
            }
            match result {
                Ok(again) => more |= again,
                Err(broken) => return Err(self.broken(broken)),
            }
            if !before && self.connections[at].queue.agreed().is_some() {
                self.initialized(at, turn.now)?;
            }
            at += 1;
        }
        self.look(turn.now);
        // Not for the admin queue: event requests wait there for hours.
        if self.connections[1..]
            .iter()
            .any(|connection| connection.queue.is_busy())
        {
            turn.poll = turn.poll.max(self.options.poll);
        }
        self.send().map(|again| more | again)
    }

    /// Send what was queued since.
    pub fn send(&mut self) -> Result<bool, Failure> {
        let mut more = false;
        for at in 0..self.connections.len() {
            match self.connections[at].send() {
                Ok(again) => more |= again,
                Err(broken) => return Err(self.broken(broken)),
            }
        }
        Ok(more)
    }

    fn broken(&self, broken: Broken) -> Failure {
        let options = &self.options;
        let portal = &options.portals[self.portal];
        match broken {
            Broken::Io(error) if self.step == Step::Tcp => Failure {
                transport: true,
                ..Failure::from(unreachable(&portal.host, portal.port, &error))
            },
            // Another address of the same name may be one that we can reach from here.
            Broken::Ours(error) => Failure {
                transport: true,
                ..Failure::from(error)
            },
            Broken::Fault(fault) => Failure::from(
                IoError::new(ErrorKind::Protocol, fault.to_string())
                    .at(options.address())
                    .next(if self.step == Step::Tcp {
                        "check host and port: what answers there may be something else than an NVMe/TCP target"
                    } else {
                        "report this with the target's name and version"
                    }),
            ),
            other if self.step < Step::Running => {
                let error = refused(
                    options,
                    format!("the connection broke during {}", self.step.name()),
                )
                .expected("an NVMe/TCP target")
                .found(other.to_string())
                .next(match options.hpda {
                    0 => "check that the port is the target's NVMe/TCP port, and the target's log",
                    _ => "leave hpda out: some targets, Linux's among them, take 0 only",
                });
                Failure {
                    transport: true,
                    ..Failure::from(error)
                }
            }
            other => Failure::from(
                IoError::new(ErrorKind::Gone, "the connection to the controller broke")
                    .at(options.address())
                    .found(other.to_string()),
            ),
        }
    }

    // Running.

    /// KATO/2; KATO/4 where traffic counts (TBKAS): such a controller looks once a KATO whether anything came since it
    /// last looked, so that what arrives right after a look must not be all until the one after the next.
    fn keep_alive_interval(&self) -> Duration {
        let parts = if self.facts.traffic_keep_alive { 4 } else { 2 };
        self.options.keep_alive / parts
    }

    fn kept_alive(&mut self, completion: &Completion<Tag>) -> Result<(), Failure> {
        match completion.end {
            End::Answer(cqe) if cqe.status.is_success() => Ok(()),
            End::Answer(cqe) => Err(IoError::new(ErrorKind::Gone, "the controller refused Keep Alive")
                .at(self.options.address())
                .expected("Successful Completion")
                .found(cqe.status.to_string())
                .into()),
            End::Short { .. } | End::DataDigest => Ok(()),
        }
    }

    /// Begin the orderly end.
    pub fn shut_down(&mut self, now: Instant, patience: Duration) -> Result<(), Failure> {
        self.patience = patience;
        let cc = Cc(CC_ENABLE).with_shutdown();
        self.step(
            Step::Shutdown,
            property_set(0, property::CC, cc.0.into(), false),
            now,
        )
    }

    // Time.

    pub fn wake_at(&self) -> Option<Instant> {
        // In a shutdown nobody watches: what is due then would be due for ever.
        let watch = self.watch.wake_at().filter(|_| self.step == Step::Running);
        [
            self.poll_at,
            self.keep_alive_at,
            self.check_at,
            watch,
            self.lanes_wake_at(),
        ]
        .into_iter()
        .flatten()
        .min()
    }

    /// Do what is due. An overdue command is a failure.
    pub fn tick(&mut self, now: Instant) -> Result<(), Failure> {
        if self.poll_at.is_some_and(|at| at <= now) {
            self.poll_at = None;
            self.command(
                0,
                property_get(0, property::CSTS, false),
                Data::None,
                Tag::Step,
                now,
            )?;
        }
        if self.keep_alive_at.is_some_and(|at| at <= now) {
            let kato = self.options.keep_alive;
            self.keep_alive_at = Some(now + self.keep_alive_interval());
            let sqe = Sqe::new(admin::KEEP_ALIVE, 0, 0);
            // No room means that none was answered for long; those have deadlines of their own.
            let _ = self.submit(0, sqe, Data::None, Tag::KeepAlive, Some(now + kato));
        }
        self.tick_watch(now);
        self.tick_lanes(now)?;
        if self.check_at.is_some_and(|at| at <= now) {
            self.check_at = self
                .connections
                .iter()
                .filter_map(|c| c.queue.next_deadline())
                .min();
            if self.check_at.is_some_and(|at| at <= now) {
                let what = match self.step {
                    Step::Running => "a command or Keep Alive was not answered in time",
                    step => step.name(),
                };
                return Err(
                    IoError::new(ErrorKind::Timeout, format!("the controller is silent: {what}"))
                        .at(self.options.address())
                        .expected(format!(
                            "an answer within {:?} (Keep Alive: {:?})",
                            self.options.io_timeout, self.options.keep_alive
                        ))
                        .next("check the target and the network")
                        .into(),
                );
            }
        }
        Ok(())
    }

    /// Close every connection and hand out the parts that were under way, with whether they were overdue.
    pub fn end(mut self, turn: &Turn<'_>) -> Vec<(Part, Data, bool)> {
        let mut parts = Vec::new();
        for connection in &mut self.connections {
            connection.close(turn.registry);
        }
        for connection in &mut self.connections {
            for (tag, data, overdue) in connection.queue.abandon(turn.now) {
                if let Tag::Part(part) = tag {
                    parts.push((part, data, overdue));
                }
            }
        }
        parts
    }
}

/// Statuses that speak of the way to the namespace and not of the command (SCT 3).
pub(crate) fn is_path_related(status: Status) -> bool {
    status.sct == 3
}

/// What a status tells of the ANA state of the namespace on its path, if it does.
pub(crate) fn ana_state(status: Status) -> Option<AnaState> {
    match Status::new(status.sct, status.sc) {
        Status::ANA_PERSISTENT_LOSS => Some(AnaState::PersistentLoss),
        Status::ANA_INACCESSIBLE => Some(AnaState::Inaccessible),
        Status::ANA_TRANSITION => Some(AnaState::Change),
        _ => None,
    }
}

/// Statuses after which the same command may succeed by itself.
pub(crate) fn is_transient(status: Status) -> bool {
    let plain = Status::new(status.sct, status.sc);
    status.crd > 0
        || [
            Status::NAMESPACE_NOT_READY,
            Status::INTERRUPTED,
            Status::TRANSIENT_TRANSPORT,
            Status::DATA_TRANSFER_ERROR,
            Status::ABORT_REQUESTED,
            Status::SQ_DELETED,
            Status::CONNECT_CONTROLLER_BUSY,
        ]
        .contains(&plain)
}

//! One connection: one queue of one controller, without any I/O of its own.
//!
//! # Theory of operation
//!
//! Bytes go in through `Connection::feed` in whatever pieces the socket gives (or, for the data of a PDU that has begun,
//! straight into the command's buffer through `data_space`); what is to be sent collects in
//! [`Connection::output`]; results of workers come back through [`Connection::done`]. Nothing here waits, and nothing
//! here touches a socket, so every path can be driven by a test or a fuzzer byte by byte.
//!
//! ```text
//!            ICReq                Connect                         fatal error, or the peer's TermReq
//!  Fresh ------------> Initialised --------> (queue is Some) ---------------------------------> Ending
//! ```
//!
//! A PDU is received in stages: prefix (header, header digest, pad), data, data digest (module `receive`). The prefix is
//! checked as soon as its first eight bytes are there, so a lie about a length is refused before anything is allocated.
//!
//! A command is planned when its capsule is complete: range, rights and lengths are checked *before* data move. If it
//! needs the host's data it gets a buffer and one R2T over all of it; if there is no memory it waits in line for some. Data pulled by R2T may
//! use only part of the memory limits ([`crate::memory`]): these buffers become free only when more of the stream is
//! read, so they must never be what keeps the stream from being read.
//!
//! Memory media need no buffers: a read's data are sent from where they lie (so they are the bytes of the time of sending; a
//! write that is under way at the same time may be seen in part, even of a block), and a write's are received where they
//! belong (module `direct`). With a data digest both go through a buffer, since checked bytes must not change: a write's whole
//! data, a read's a piece at a time when it is sent (module `output`).
//!
//! Errors: what breaks the framing or the protocol ends the connection with a TermReq that names the field
//! ([`Connection::fatal`]); what is wrong with a command is its completion's status; a wrong data digest is the status
//! "Transient Transport Error" of its command, since framing is intact.

use crate::admin::{self, Outcome};
use crate::commands::{check_transfer, Command, Commands, State, Task};
use crate::controller::{Controller, AER_LIMIT};
use crate::fused::First;
use crate::gate::Gate;
use crate::hosts::{Arrival, Membership};
use crate::mailbox::Mailbox;
use crate::memory::{Allowance, Buffer};
use crate::nvm::{self, prepare, Plan, Prepared};
use crate::output::Output;
use crate::receive::Receiver;
use crate::reservation::desk::{persistence_feature, Request};
use crate::shared::Shared;
use crate::subsystem::count;
use crate::view::Reach;
use crate::work::Work;
use crate::worker::Job;
use headrace_wire::pdu::{fes_name, Digests, IcReq, IcResp, Pdu, PduError, R2t, TermReq};
use headrace_wire::reservation::Change;
use headrace_wire::{crc32c, Sgl, Sqe, Status};
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Reads of media memory that are copied only when they are sent, if they have to be copied.
const SUMMED_BYTES: u32 = 32 << 10;
/// How long the peer gets to read a TermReq and close.
const LINGER: Duration = Duration::from_secs(1);
/// Commands before Connect: Connect itself, and those that will be refused.
const FRESH_ENTRIES: usize = 32;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Phase {
    Fresh,
    Initialised,
    Ending { until: Instant },
}

/// The queue that this connection became by Connect.
pub(crate) struct Queue {
    pub(crate) controller: Arc<Controller>,
    pub(crate) qid: u16,
    /// Entries, one-based.
    pub(crate) entries: u16,
    /// SQ flow control: SQHD moves; without it SUCCESS may stand for a completion.
    pub(crate) flow_control: bool,
    pub(crate) sqhd: u16,
    pub(crate) reach: Reach,
    pub(crate) _membership: Membership,
}

pub(crate) struct Connection {
    pub(crate) shared: Arc<Shared>,
    pub(crate) mailbox: Arc<Mailbox>,
    pub(crate) token: u64,
    pub(crate) local: SocketAddr,
    pub(crate) peer: SocketAddr,
    /// The time of the reactor's turn.
    pub(crate) now: Instant,
    pub(crate) gate: Arc<Gate>,
    pub(crate) allowance: Arc<Allowance>,
    /// Until Connect.
    pub(crate) arrival: Option<Arrival>,
    pub(crate) queue: Option<Queue>,
    pub(crate) output: Output,
    pub(crate) commands: Commands,
    pub(crate) deferred: Option<crate::fabrics::Deferred>,
    pub(crate) phase: Phase,
    pub(crate) digests: Digests,
    pub(crate) hpda: u8,
    created: Instant,
    pub(crate) receiver: Receiver,
    /// Commands that wait for a buffer, first come first served.
    pub(crate) waiting: VecDeque<u16>,
    /// Of a fused pair, the last command that came.
    pub(crate) first: Option<First>,
}

impl Connection {
    pub(crate) fn new(
        shared: Arc<Shared>,
        mailbox: Arc<Mailbox>,
        token: u64,
        (local, peer): (SocketAddr, SocketAddr),
        arrival: Arrival,
        now: Instant,
    ) -> Self {
        let allowance = shared.memory.allowance(shared.limits.connection_memory_bytes);
        Connection {
            shared,
            mailbox,
            token,
            local,
            peer,
            now,
            gate: Arc::default(),
            allowance,
            arrival: Some(arrival),
            queue: None,
            output: Output::default(),
            commands: Commands::default(),
            deferred: None,
            phase: Phase::Fresh,
            digests: Digests::default(),
            hpda: 0,
            created: now,
            receiver: Receiver::default(),
            waiting: VecDeque::new(),
            first: None,
        }
    }

    pub(crate) fn is_ending(&self) -> bool {
        matches!(self.phase, Phase::Ending { .. })
    }

    /// Whether more of the stream may be read now. A host that does not take its answers is not read from.
    pub(crate) fn wants_input(&self) -> bool {
        !self.receiver.is_stalled() && !self.refrains() && self.output.chunk_count() < 4 * self.entries() + 64
    }

    /// The target drains, and this queue takes no new commands: it reads on only for data that commands wait for. The admin
    /// queue lives until the other queues of its controller are gone.
    fn refrains(&self) -> bool {
        self.shared.draining.load(Ordering::Relaxed)
            && !self.receiver.is_inside_pdu()
            && self.commands.count(State::Receiving) == 0
            && self.queue.as_ref().is_none_or(|queue| queue.qid > 0)
    }

    /// The target drains: end when nothing is under way any more and all answers are sent.
    pub(crate) fn leave(&mut self) {
        if self.refrains() {
            // Its second is not read any more.
            self.give_up_first();
        }
        if self.is_ending()
            || !self.output.is_empty()
            || self.commands.len() > self.commands.count(State::Held)
        {
            return;
        }
        let last = |queue: &Queue| queue.qid > 0 || queue.controller.state().queues.len() <= 1;
        if self.queue.as_ref().is_none_or(last) && !self.receiver.is_inside_pdu() {
            self.end();
        }
    }

    /// Something here goes on when memory is given back, or when an old association has drained.
    pub(crate) fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
            || self.receiver.is_stalled()
            || self.deferred.is_some()
            || self.output.is_starved()
    }

    /// There is something that the host may take now.
    pub(crate) fn offers_output(&self) -> bool {
        !self.output.is_empty() && !self.output.is_starved()
    }

    pub(crate) fn entries(&self) -> usize {
        self.queue
            .as_ref()
            .map_or(FRESH_ENTRIES, |queue| usize::from(queue.entries))
    }

    /// The host has begun something that it must go on with.
    pub(crate) fn expects_input(&self) -> bool {
        self.wants_input() && (self.receiver.is_inside_pdu() || self.commands.count(State::Receiving) > 0)
    }

    /// Why this connection should be dropped now, if it should. `owing`, `refusing`: for how long the host has made no
    /// progress with what it must send, or take.
    pub(crate) fn overdue(&self, owing: Duration, refusing: Duration) -> Option<&'static str> {
        let limits = &self.shared.limits;
        if let Phase::Ending { until } = self.phase {
            return (self.now >= until).then_some("ended");
        }
        if self.queue.is_none() && self.now.saturating_duration_since(self.created) > limits.connect_timeout {
            return Some("not connected to a controller in time");
        }
        if refusing > limits.progress_timeout {
            return Some("takes no answers");
        }
        (owing > limits.progress_timeout).then_some("owes data")
    }

    /// Nothing has come for a while: give back what only a busy queue needs.
    pub(crate) fn rest(&mut self) {
        self.commands.rest();
        self.output.rest();
        self.waiting.shrink_to_fit();
    }

    pub(crate) fn initialise(&mut self, request: &IcReq) {
        let maxh2cdata = self.shared.limits.max_h2c_data_bytes;
        let answer = Pdu::IcResp(IcResp {
            pfv: 0,
            cpda: 0,
            digests: request.digests,
            maxh2cdata,
        });
        self.output
            .small(|out| answer.encode(0, Digests::default(), 0, out));
        self.digests = request.digests;
        self.hpda = request.hpda;
        self.phase = Phase::Initialised;
    }

    /// The peer broke the protocol: tell it how, and end.
    pub(crate) fn fatal(&mut self, error: &PduError) {
        count(&self.shared.totals.protocol_errors, 1);
        self.shared.note(format!("{}: {error}", self.peer));
        let header = self.receiver.header().to_vec();
        let term = Pdu::C2hTermReq(TermReq {
            fes: error.fes as u16,
            fei: error.fei,
        });
        self.output.small(|out| {
            term.encode(header.len(), Digests::default(), 0, out);
            out.extend_from_slice(&header);
        });
        self.end();
    }

    pub(crate) fn peer_ends(&mut self, term: &TermReq) {
        self.shared.note(format!(
            "{}: the host ends the connection: {}",
            self.peer,
            fes_name(term.fes)
        ));
        self.end();
    }

    /// The queue is dead at once; the socket lives on until what was said is heard.
    fn end(&mut self) {
        self.phase = Phase::Ending {
            until: self.now + LINGER,
        };
        self.closed();
    }

    /// What this connection stood for ends: the queue, and with the admin queue its association.
    pub(crate) fn closed(&mut self) {
        self.gate.close();
        self.waiting.clear();
        self.first = None;
        self.commands.clear();
        self.deferred = None;
        let Some(queue) = self.queue.take() else { return };
        // In this order: who finds the queue free finds what has to drain before it.
        self.shared.registry.drain(&queue.controller, &self.gate);
        queue.controller.detach(queue.qid, self.token);
        if queue.qid == 0 {
            self.shared
                .registry
                .end(&queue.controller, "the admin connection ended");
        }
    }

    /// A command capsule, with the data that came in it.
    pub(crate) fn capsule(
        &mut self,
        sqe: Sqe,
        data: Option<Buffer>,
        digest_right: bool,
    ) -> Result<(), PduError> {
        let entries = self.entries();
        if self.commands.len() >= entries {
            return Err(PduError::sequence(format!(
                "more commands than the queue has entries ({entries})"
            )));
        }
        count(&self.shared.totals.commands, 1);
        if sqe.fuse() != 2 {
            self.give_up_first();
        }
        let mut qid = None;
        if let Some(queue) = &mut self.queue {
            queue.sqhd = (queue.sqhd + 1) % queue.entries;
            queue.controller.seen(self.shared.ms(self.now));
            qid = Some(queue.qid);
        }
        let result = if self.commands.contains(sqe.cid()) {
            Err(Status::CID_CONFLICT.do_not_retry())
        } else if !digest_right {
            Err(Status::TRANSIENT_TRANSPORT)
        } else if sqe.opcode() == headrace_wire::admin::FABRICS {
            self.fabrics(sqe, data)
        } else {
            match qid {
                None => Err(Status::SEQUENCE_ERROR.do_not_retry()),
                Some(0) => self.admin(sqe, data),
                Some(_) => self.io(sqe, data),
            }
        };
        if let Err(status) = result {
            self.refused_half(&sqe);
            self.respond(&sqe, status, 0);
        }
        Ok(())
    }

    fn io(&mut self, sqe: Sqe, data: Option<Buffer>) -> Result<(), Status> {
        let Some(queue) = &mut self.queue else {
            return Err(Status::SEQUENCE_ERROR.do_not_retry());
        };
        if !queue.controller.takes_io() {
            return Err(Status::SEQUENCE_ERROR.do_not_retry());
        }
        if sqe.fuse() != 0 {
            return self.fused(sqe, data);
        }
        queue.reach.renew(&queue.controller);
        let plan = nvm::plan(&sqe, &queue.controller, &queue.reach)?;
        let pull = check_transfer(
            &sqe,
            plan.bytes_from_host(),
            plan.bytes_to_host(),
            data.as_deref(),
        )?;
        if let Plan::Read {
            namespace,
            offset,
            length,
        } = &plan
        {
            // Short reads that have to be copied stay in the cache until they are sent anyway.
            if !self.digests.data || *length >= SUMMED_BYTES {
                if let Some(mapping) = nvm::map(namespace, *length) {
                    let (offset, length) = (*offset as usize, *length as usize);
                    let summed = self.digests.data;
                    let data = |output: &mut Output| match summed {
                        false => output.mapped(mapping, offset, length),
                        true => output.summed(mapping, offset, length),
                    };
                    self.send_data(&sqe, length, data, None);
                    return Ok(());
                }
            }
            self.wait_for_buffer(sqe, Task::Io(plan), 0);
            return Ok(());
        }
        if let Plan::Report { .. } = &plan {
            self.wait_for_buffer(sqe, Task::Io(plan), 0);
            return Ok(());
        }
        if pull {
            let from_host = plan.bytes_from_host();
            self.wait_for_buffer(sqe, Task::Io(plan), from_host);
            return Ok(());
        }
        let slot = self
            .commands
            .insert(Command::new(sqe, Task::Io(plan), State::Working));
        self.run(slot, data);
        Ok(())
    }

    fn admin(&mut self, sqe: Sqe, data: Option<Buffer>) -> Result<(), Status> {
        let Some(queue) = &self.queue else {
            return Err(Status::SEQUENCE_ERROR.do_not_retry());
        };
        if !queue.controller.enabled() {
            return Err(Status::SEQUENCE_ERROR.do_not_retry());
        }
        if sqe.fuse() != 0 {
            return Err(Status::INVALID_FIELD.do_not_retry());
        }
        if let Some((claim, request)) = persistence_feature(&sqe, &queue.controller)? {
            check_transfer(&sqe, 0, 0, data.as_deref())?;
            let slot = self
                .commands
                .insert(Command::new(sqe, Task::Admin, State::Working));
            if let Err(status) = self.submit_to_desk(slot, claim, request) {
                self.complete(slot, status, None);
            }
            return Ok(());
        }
        let from_host = admin::from_host(&sqe);
        if check_transfer(&sqe, from_host, 0, data.as_deref())? {
            self.wait_for_buffer(sqe, Task::Admin, from_host);
            return Ok(());
        }
        self.admin_now(sqe, data.as_deref().unwrap_or(&[]))
    }

    fn admin_now(&mut self, sqe: Sqe, data: &[u8]) -> Result<(), Status> {
        let Some(queue) = &self.queue else {
            return Err(Status::SEQUENCE_ERROR.do_not_retry());
        };
        if sqe.opcode() == headrace_wire::admin::ABORT && !queue.controller.subsystem.discovery {
            return self.abort(sqe);
        }
        match admin::execute(&sqe, data, &queue.controller, &self.shared, self.local)? {
            Outcome::Value(dw0) => self.respond(&sqe, Status::SUCCESS, dw0),
            Outcome::Bytes(bytes) => {
                if !matches!(sqe.sgl(), Sgl::Transport { length } if length as usize >= bytes.len()) {
                    return Err(Status::SGL_DATA_LENGTH.do_not_retry());
                }
                let digest = crc32c(&bytes);
                self.send_data(
                    &sqe,
                    bytes.len(),
                    |output| output.small(|out| out.extend_from_slice(&bytes)),
                    Some(digest),
                );
            }
            Outcome::Held => {
                if self.commands.count(State::Held) >= AER_LIMIT {
                    return Err(Status::AER_LIMIT_EXCEEDED.do_not_retry());
                }
                self.commands.insert(Command::new(sqe, Task::Admin, State::Held));
                self.events();
            }
        }
        Ok(())
    }

    /// Answer held event requests with the events that wait.
    pub(crate) fn events(&mut self) {
        loop {
            let held = self
                .commands
                .iter()
                .find(|(_, c)| c.state == State::Held)
                .map(|(slot, _)| slot);
            let (Some(slot), Some(queue)) = (held, &self.queue) else {
                return;
            };
            let Some(event) = queue.controller.take_event() else {
                return;
            };
            if let Some(command) = self.commands.remove(slot) {
                self.respond(&command.sqe, Status::SUCCESS, event.dw0());
            }
        }
    }

    /// The subsystem changed: hold on to nothing of what it was.
    pub(crate) fn renew(&mut self) {
        if let Some(queue) = &mut self.queue {
            queue.reach.renew(&queue.controller);
        }
    }

    /// `from_host` 0: a read.
    fn wait_for_buffer(&mut self, sqe: Sqe, task: Task, from_host: u32) {
        let slot = self.commands.insert(Command {
            from_host,
            ..Command::new(sqe, task, State::Waiting)
        });
        self.wait_in_line(slot);
    }

    pub(crate) fn wait_in_line(&mut self, slot: u16) {
        self.waiting.push_back(slot);
        self.serve_waiting();
    }

    /// Give buffers to commands that wait for one, in order, as far as memory goes.
    pub(crate) fn serve_waiting(&mut self) {
        while let Some(&slot) = self.waiting.front() {
            let Some(command) = self.commands.get_mut(slot) else {
                self.waiting.pop_front();
                continue;
            };
            if let Some(pair) = command.pair {
                if !self.serve_pair(pair) {
                    return;
                }
                self.waiting.pop_front();
                continue;
            }
            let pulled = command.from_host;
            if let (Task::Io(plan), false) = (&command.task, self.digests.data) {
                if let Some(bytes) = plan.direct_bytes() {
                    let Some(tail) = self.allowance.take_pulled(bytes) else {
                        return;
                    };
                    command.direct = plan.direct(tail);
                    self.waiting.pop_front();
                    self.pull(slot);
                    continue;
                }
            }
            let buffer = match &command.task {
                _ if pulled > 0 => self.allowance.take_pulled(pulled as usize),
                Task::Io(plan) => self.allowance.take_read(plan.bytes_to_host() as usize),
                _ => None,
            };
            let Some(buffer) = buffer else { return };
            self.waiting.pop_front();
            if pulled == 0 {
                self.run(slot, Some(buffer));
                continue;
            }
            command.buffer = Some(buffer);
            self.pull(slot);
        }
    }

    /// Ask for all of a command's data.
    pub(crate) fn pull(&mut self, slot: u16) {
        let Some(command) = self.commands.get_mut(slot) else {
            return;
        };
        command.state = State::Receiving;
        let (cccid, r2tl) = (command.sqe.cid(), command.from_host);
        let r2t = Pdu::R2t(R2t {
            cccid,
            ttag: slot,
            r2to: 0,
            r2tl,
        });
        let digests = self.digests;
        self.output.small(|out| r2t.encode(0, digests, 0, out));
    }

    /// All data that an R2T asked for are here.
    pub(crate) fn pulled(&mut self, slot: u16) {
        let Some(command) = self.commands.get_mut(slot) else {
            return;
        };
        if let Some(pair) = command.pair {
            command.state = State::Fused;
            return self.join_pair(pair);
        }
        let buffer = command.buffer.take();
        command.state = State::Working;
        if let Some(status) = command.failed {
            drop(buffer);
            self.complete(slot, status, None);
        } else if command.direct.is_some() {
            // An open gate now was open for each piece; through a closed one some were not placed, and nobody may be told
            // that they were.
            let Some(passage) = self.gate.enter() else { return };
            if let Task::Io(plan) = &command.task {
                plan.account_direct();
            }
            drop(passage);
            self.complete(slot, Status::SUCCESS, None);
        } else if matches!(command.task, Task::Admin) {
            if let Some(command) = self.commands.remove(slot) {
                if let Err(status) = self.admin_now(command.sqe, buffer.as_deref().unwrap_or(&[])) {
                    self.respond(&command.sqe, status, 0);
                }
            }
        } else {
            self.run(slot, buffer);
        }
    }

    /// The command has what it needs: carry it out here, if that is sure not to wait, or give it to a worker.
    fn run(&mut self, slot: u16, buffer: Option<Buffer>) {
        let Some(command) = self.commands.get_mut(slot) else {
            return;
        };
        let Task::Io(plan) = std::mem::replace(&mut command.task, Task::Admin) else {
            return;
        };
        command.state = State::Working;
        let sqe = command.sqe;
        match prepare(plan, buffer) {
            Ok(Prepared::Read(buffer)) => self.complete(slot, Status::SUCCESS, Some(buffer)),
            Ok(Prepared::Work(work)) => self.launch(slot, work),
            Ok(Prepared::Reserve(claim, data)) => {
                let request = Change::decode(&sqe, &data).map(Request::Change);
                if let Err(status) = request.and_then(|request| self.submit_to_desk(slot, claim, request)) {
                    self.complete(slot, status, None);
                }
            }
            Err(status) => self.complete(slot, status, None),
        }
    }

    pub(crate) fn launch(&mut self, slot: u16, mut work: Work) {
        if work.is_inline() {
            let Some(passage) = self.gate.enter() else { return };
            let status = work.run();
            drop(passage);
            return self.complete(slot, status, work.into_data());
        }
        let reply = self.reply(slot);
        self.shared.workers.submit(Job {
            work,
            gate: self.gate.clone(),
            reply: Some(reply),
        });
    }
}

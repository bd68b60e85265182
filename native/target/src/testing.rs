//! A target without threads, sockets or a clock of its own, for fuzzers and simulations: bytes go in and come out when the
//! caller says, time passes when it says, and work at the media begins and ends when and in the order that it says.
//!
//! It does what the reactor does, with the same [`Connection`]; what a socket or the kernel adds is not here.

use crate::abort::NOT_ABORTED;
use crate::config::QueueLimits;
use crate::connection::Connection;
use crate::hosts::Hosts;
use crate::mailbox::{Mailbox, Message};
use crate::memory::Memory;
use crate::progress::Progress;
use crate::registry::Registry;
use crate::shared::{Limits, Shared, Totals};
use crate::subsystem::Subsystem;
use crate::worker::{Job, Running, Workers};
use headrace_media::{Engine, Media};
use headrace_wire::Status;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The data in a capsule, the data of one H2CData, and the memory of all connections.
pub const IN_CAPSULE_BYTES: u32 = 16 << 10;
pub const MAX_H2C_DATA_BYTES: u32 = 128 << 10;
pub const MEMORY_BYTES: usize = 4 << 20;

const TICK: Duration = Duration::from_millis(100);

/// One subsystem with one namespace, 1.
pub(crate) fn shared(nqn: &str, media: Box<dyn Media>, memory_bytes: usize) -> Arc<Shared> {
    Arc::new(Shared {
        limits: Limits {
            max_h2c_data_bytes: MAX_H2C_DATA_BYTES,
            max_connections: 10,
            max_host_connections: 10,
            connection_memory_bytes: memory_bytes,
            connect_timeout: Duration::from_secs(10),
            progress_timeout: Duration::from_secs(10),
        },
        subsystems: vec![Arc::new(Subsystem::with_media(nqn, media))],
        discovery: Arc::new(Subsystem::discovery(QueueLimits::default())),
        registry: Registry::default(),
        hosts: Hosts::default(),
        memory: Memory::new(memory_bytes),
        workers: Workers::idle(),
        mailboxes: Vec::new(),
        portals: Vec::new(),
        discovery_generation: AtomicU64::new(1),
        draining: AtomicBool::new(false),
        engine: Engine::Auto,
        started: Instant::now(),
        connections: AtomicUsize::new(0),
        totals: Totals::default(),
        notes: Mutex::default(),
    })
}

struct Peer {
    connection: Connection,
    /// Bytes that came while the connection was stalled for memory.
    backlog: Vec<u8>,
    input: Progress,
    output: Progress,
}

impl Peer {
    fn work_off(&mut self) {
        if self.connection.deferred.is_some() {
            self.connection.retry_connect();
        }
        self.connection.serve_waiting();
        if self.connection.receiver.is_stalled() {
            self.connection.resume();
        }
        while !self.backlog.is_empty() && !self.connection.receiver.is_stalled() {
            let taken = self.connection.feed(&self.backlog);
            self.backlog.drain(..taken);
        }
    }
}

pub struct Bench {
    shared: Arc<Shared>,
    mailbox: Arc<Mailbox>,
    now: Instant,
    peers: BTreeMap<u64, Peer>,
    next_token: u64,
    waiting: Vec<Job>,
    running: Vec<Running>,
}

impl Bench {
    /// Serves `media` as namespace 1 of `nqn`, with [`MEMORY_BYTES`] for all connections together.
    pub fn new(nqn: &str, media: Box<dyn Media>) -> Self {
        let shared = shared(nqn, media, MEMORY_BYTES);
        for subsystem in &shared.subsystems {
            let view = subsystem.view();
            view.namespaces
                .values()
                .for_each(|namespace| namespace.reservations.desk.hold());
        }
        Bench {
            now: shared.started,
            shared,
            // An eventfd: there are no descriptors left, or there is one.
            mailbox: Arc::new(Mailbox::new().expect("a descriptor")),
            peers: BTreeMap::new(),
            next_token: 1,
            waiting: Vec::new(),
            running: Vec::new(),
        }
    }

    /// A new connection; its number is what the other calls take.
    pub fn accept(&mut self) -> u64 {
        let token = self.next_token;
        self.next_token += 1;
        let address = SocketAddr::from(([127, 0, 0, 1], 4420));
        let connection = Connection::new(
            self.shared.clone(),
            self.mailbox.clone(),
            token,
            (address, address),
            self.shared
                .hosts
                .arrive(address.ip(), usize::MAX)
                .expect("no limit"),
            self.now,
        );
        self.peers.insert(
            token,
            Peer {
                connection,
                backlog: Vec::new(),
                input: Progress::new(self.now),
                output: Progress::new(self.now),
            },
        );
        token
    }

    /// The connection is there, and will still answer.
    pub fn is_open(&self, peer: u64) -> bool {
        self.peers
            .get(&peer)
            .is_some_and(|peer| !peer.connection.is_ending())
    }

    /// Whether a socket would be read from now.
    pub fn wants_input(&self, peer: u64) -> bool {
        self.peers
            .get(&peer)
            .is_some_and(|peer| peer.connection.wants_input() && peer.backlog.is_empty())
    }

    /// Received bytes.
    pub fn feed(&mut self, peer: u64, bytes: &[u8]) {
        let now = self.now;
        if let Some(peer) = self.peers.get_mut(&peer) {
            peer.connection.now = now;
            peer.input.bytes += bytes.len() as u64;
            peer.backlog.extend_from_slice(bytes);
            peer.work_off();
        }
        self.collect();
    }

    /// Up to `limit` of the bytes that wait to be sent.
    pub fn output(&mut self, peer: u64, limit: usize) -> Vec<u8> {
        let now = self.now;
        let mut bytes = Vec::new();
        if let Some(peer) = self.peers.get_mut(&peer) {
            peer.connection.now = now;
            let connection = &mut peer.connection;
            connection
                .output
                .copy_for_tests(&connection.allowance, &mut bytes);
            bytes.truncate(limit);
            peer.connection.output.sent(bytes.len());
            peer.output.bytes += bytes.len() as u64;
            peer.work_off();
        }
        self.collect();
        bytes
    }

    pub fn has_output(&self, peer: u64) -> bool {
        self.peers
            .get(&peer)
            .is_some_and(|peer| !peer.connection.output.is_empty())
    }

    /// The connection is lost.
    pub fn hang_up(&mut self, peer: u64) {
        if let Some(mut peer) = self.peers.remove(&peer) {
            peer.connection.closed();
        }
        self.collect();
    }

    /// Commands that are not answered yet.
    pub fn commands(&self, peer: u64) -> usize {
        self.peers
            .get(&peer)
            .map_or(0, |peer| peer.connection.commands.len())
    }

    /// Time passes: silent peers are dropped, keep-alive timers expire.
    pub fn advance(&mut self, by: Duration) {
        let end = self.now + by;
        while self.now < end {
            self.now = end.min(self.now + TICK);
            let now = self.now;
            let overdue: Vec<u64> = self
                .peers
                .iter_mut()
                .filter_map(|(&token, peer)| {
                    peer.connection.now = now;
                    peer.connection.give_up_old_first();
                    let owing = peer.input.stuck(peer.connection.expects_input(), now);
                    let refusing = peer.output.stuck(!peer.connection.output.is_empty(), now);
                    peer.connection.overdue(owing, refusing)?;
                    Some(token)
                })
                .collect();
            overdue.into_iter().for_each(|token| self.hang_up(token));
            self.shared.registry.expire(self.shared.ms(now));
            self.collect();
        }
    }

    /// Work that no media thread has taken yet, and work that is at the media.
    pub fn work(&self) -> (usize, usize) {
        (self.waiting.len(), self.running.len())
    }

    /// A media thread takes the `nth` waiting piece of work.
    pub fn begin_work(&mut self, nth: usize) {
        let job = self.waiting.swap_remove(nth);
        self.running.extend(job.begin());
        self.collect();
    }

    /// The `nth` piece of work at the media is done.
    pub fn finish_work(&mut self, nth: usize) {
        self.running.swap_remove(nth).finish();
        self.collect();
    }

    /// All work, in the order in which it came.
    pub fn work_all(&mut self) {
        while !self.waiting.is_empty() || !self.running.is_empty() {
            for job in std::mem::take(&mut self.waiting) {
                self.running.extend(job.begin());
            }
            std::mem::take(&mut self.running)
                .into_iter()
                .for_each(Running::finish);
            self.collect();
        }
    }

    /// Buffers in use, in bytes.
    pub fn memory_bytes(&self) -> usize {
        self.shared.memory.used_bytes()
    }

    /// What a status report would tell last.
    pub fn notes(&self) -> Vec<String> {
        let notes = self.shared.notes.lock().unwrap_or_else(|e| e.into_inner());
        notes.iter().cloned().collect()
    }

    /// What the reactor does between two sleeps: messages, and those that wait for something.
    fn collect(&mut self) {
        let mut messages = Vec::new();
        loop {
            self.waiting.extend(self.shared.workers.take_all());
            if self.running.is_empty() {
                // A preemption waits, in real time, for what is at the media.
                for subsystem in &self.shared.subsystems {
                    let view = subsystem.view();
                    view.namespaces
                        .values()
                        .for_each(|namespace| namespace.reservations.desk.serve());
                }
            }
            self.mailbox.take(&mut messages);
            if messages.is_empty() {
                break;
            }
            for message in messages.drain(..) {
                let (token, done) = match message {
                    Message::Close { token, .. } => {
                        if let Some(mut peer) = self.peers.remove(&token) {
                            peer.connection.closed();
                        }
                        continue;
                    }
                    Message::Done(done) => (done.token, Some(done)),
                    Message::Events { token } => (token, None),
                    Message::Renew { token } => {
                        if let Some(peer) = self.peers.get_mut(&token) {
                            peer.connection.renew();
                        }
                        continue;
                    }
                    Message::Abort { token, cid, reply } => {
                        let peer = self.peers.get_mut(&token);
                        let aborted = peer.is_some_and(|peer| peer.connection.abort_command(cid));
                        reply.send(Status::SUCCESS, None, if aborted { 0 } else { NOT_ABORTED });
                        continue;
                    }
                    Message::Accepted(..) | Message::Drain | Message::Stop => continue,
                };
                let now = self.now;
                if let Some(peer) = self.peers.get_mut(&token) {
                    peer.connection.now = now;
                    match done {
                        Some(done) => peer.connection.done(done),
                        None => peer.connection.events(),
                    }
                }
            }
            self.peers.values_mut().for_each(Peer::work_off);
        }
        self.peers.values_mut().for_each(Peer::work_off);
        self.waiting.extend(self.shared.workers.take_all());
    }
}

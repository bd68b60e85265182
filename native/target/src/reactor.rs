//! A reactor: one thread that moves bytes between its sockets and their connections.
//!
//! It never waits for media (workers do) and never computes for long, so one connection's trouble is its own: reading and
//! sending are bounded each turn, a panic in one connection ends that connection, and peers that owe data or take no
//! answers are dropped by the clock. Without connections it sleeps until somebody comes.

use crate::abort::NOT_ABORTED;
use crate::connection::Connection;
use crate::hosts::Arrival;
use crate::mailbox::{Mailbox, Message};
use crate::progress::Progress;
use crate::shared::Shared;
use crate::subsystem::count;
use crate::system::{self, PartMut, Poller, BROKEN, READABLE, WRITABLE};
use headrace_wire::Status;
use std::io::ErrorKind;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::{Duration, Instant};

const WAKER: u64 = u64::MAX;
const LISTENER: u64 = u64::MAX - (1 << 16);
/// Bytes of headers and short data taken in one call.
const SCRATCH_BYTES: usize = 128 << 10;
/// Bytes that one connection may receive, and send, before others have their turn.
const TURN_BYTES: usize = 4 << 20;
/// Pieces in one `sendmsg`; the kernel takes 1024.
const TURN_PARTS: usize = 256;
/// How soon to look again while a connection waits for memory or for an old association.
const SOON: Duration = Duration::from_millis(2);
const TICK: Duration = Duration::from_millis(250);

/// What may wait in the kernel for a host on the same machine: little enough to stay in the cache until it is copied out again
/// (docs/decisions/0021). Across a network the kernel chooses, since a fixed size would bound the window.
const SAME_MACHINE_SEND_BYTES: usize = 256 << 10;
/// Silence after which a connection gives back what only a busy one needs.
const REST: Duration = Duration::from_secs(1);

struct Peer {
    stream: TcpStream,
    connection: Connection,
    /// Received bytes that wait for memory.
    backlog: Vec<u8>,
    interest: u32,
    input: Progress,
    output: Progress,
    last_turn: Instant,
    rested: bool,
    /// Our direction is shut down: what was to be said is said.
    shut: bool,
    /// It stands in the reactor's list of waiting connections.
    listed: bool,
}

pub(crate) struct Reactor {
    shared: Arc<Shared>,
    index: usize,
    mailbox: Arc<Mailbox>,
    poller: Poller,
    listeners: Vec<TcpListener>,
    /// Accepting failed for want of descriptors; try again at the next tick.
    paused: bool,
    peers: Vec<Option<Peer>>,
    generations: Vec<u32>,
    free: Vec<usize>,
    /// Connections that wait for memory, or for an old association to drain.
    waiting: Vec<u64>,
    scratch: Vec<u8>,
    next_reactor: usize,
    tick: Duration,
    next_tick: Instant,
    now: Instant,
}

/// Why a connection ends here and now.
enum End {
    /// The peer closed, or ended in order.
    Quiet,
    Error(String),
}

impl Reactor {
    pub(crate) fn new(
        shared: Arc<Shared>,
        index: usize,
        listeners: Vec<TcpListener>,
    ) -> std::io::Result<Self> {
        let poller = Poller::new()?;
        let mailbox = shared.mailboxes[index].clone();
        poller.add(&mailbox.waker, READABLE, WAKER)?;
        for (number, listener) in listeners.iter().enumerate() {
            poller.add(listener, READABLE, LISTENER + number as u64)?;
        }
        let shortest = shared.limits.connect_timeout.min(shared.limits.progress_timeout) / 4;
        let now = Instant::now();
        let tick = shortest.clamp(Duration::from_millis(5), TICK);
        Ok(Reactor {
            shared,
            index,
            mailbox,
            poller,
            listeners,
            paused: false,
            peers: Vec::new(),
            generations: Vec::new(),
            free: Vec::new(),
            waiting: Vec::new(),
            scratch: vec![0; SCRATCH_BYTES],
            next_reactor: 0,
            tick,
            next_tick: now + tick,
            now,
        })
    }

    pub(crate) fn run(mut self) {
        let mut ready = Vec::new();
        let mut messages = Vec::new();
        loop {
            let timeout = self.timeout();
            if let Err(error) = self.poller.wait(timeout, &mut ready) {
                self.shared.note(format!("the reactor ends: epoll_wait: {error}"));
                break;
            }
            self.now = Instant::now();
            for &(token, readiness) in &ready {
                match token {
                    WAKER => self.mailbox.waker.clear(),
                    token if token >= LISTENER => self.accept((token - LISTENER) as usize),
                    token => self.serve(token, readiness),
                }
            }
            self.mailbox.take(&mut messages);
            let mut touched = Vec::new();
            for message in messages.drain(..) {
                match message {
                    Message::Stop => return self.stop(),
                    Message::Accepted(stream, arrival) => self.add(stream, arrival),
                    Message::Abort { token, cid, reply } => {
                        let peer = self.peer(token);
                        let aborted = peer.is_some_and(|peer| peer.connection.abort_command(cid));
                        reply.send(Status::SUCCESS, None, if aborted { 0 } else { NOT_ABORTED });
                        touched.push(token);
                    }
                    Message::Close { token, why } => self.drop_peer(token, Some(why)),
                    Message::Done(done) => {
                        let token = done.token;
                        if let Some(peer) = self.peer(token) {
                            peer.connection.done(done);
                            touched.push(token);
                        }
                    }
                    Message::Renew { token } => {
                        if let Some(peer) = self.peer(token) {
                            peer.connection.renew();
                        }
                    }
                    Message::Drain => self.drain(),
                    Message::Events { token } => {
                        if let Some(peer) = self.peer(token) {
                            peer.connection.events();
                            touched.push(token);
                        }
                    }
                }
            }
            touched.dedup();
            touched.into_iter().for_each(|token| self.serve(token, 0));
            self.serve_waiting();
            if self.now >= self.next_tick {
                self.on_tick();
            }
        }
        self.stop();
    }

    fn timeout(&self) -> Option<Duration> {
        let occupied = self.peers.len() > self.free.len();
        if !self.waiting.is_empty() {
            return Some(SOON);
        }
        (occupied || self.paused).then(|| self.next_tick.saturating_duration_since(Instant::now()))
    }

    fn token(&self, index: usize) -> u64 {
        u64::from(self.generations[index] & 0x7FFF_FFFF) << 32 | index as u64
    }

    fn peer(&mut self, token: u64) -> Option<&mut Peer> {
        let peer = self.peers.get_mut((token & 0xFFFF_FFFF) as usize)?.as_mut()?;
        (peer.connection.token == token).then_some(peer)
    }

    fn accept(&mut self, number: usize) {
        loop {
            let Some(listener) = self.listeners.get(number) else {
                return;
            };
            match listener.accept() {
                Ok((stream, from)) => {
                    count(&self.shared.totals.accepted, 1);
                    let limits = &self.shared.limits;
                    let arrival = self.shared.hosts.arrive(from.ip(), limits.max_host_connections);
                    let full =
                        self.shared.connections.fetch_add(1, Ordering::AcqRel) >= limits.max_connections;
                    let (Some(arrival), false) = (arrival, full) else {
                        self.shared.connections.fetch_sub(1, Ordering::AcqRel);
                        count(&self.shared.totals.refused, 1);
                        continue;
                    };
                    let chosen = self.next_reactor % self.shared.mailboxes.len();
                    self.next_reactor = self.next_reactor.wrapping_add(1);
                    if chosen == self.index {
                        self.add(stream, arrival);
                    } else {
                        self.shared.mailboxes[chosen].post(Message::Accepted(stream, arrival));
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error)
                    if matches!(
                        error.kind(),
                        ErrorKind::Interrupted | ErrorKind::ConnectionAborted
                    ) => {}
                Err(error) => {
                    // No descriptors or no memory: the listener stays readable, so look away for a tick.
                    self.shared.note(format!("accept: {error}"));
                    self.paused = self.poller.change(listener, 0, LISTENER + number as u64).is_ok();
                    return;
                }
            }
        }
    }

    fn add(&mut self, stream: TcpStream, arrival: Arrival) {
        let addresses = stream
            .local_addr()
            .and_then(|local| Ok((local, stream.peer_addr()?)));
        let index = self.free.pop().unwrap_or_else(|| {
            self.peers.push(None);
            self.generations.push(0);
            self.peers.len() - 1
        });
        self.generations[index] = self.generations[index].wrapping_add(1);
        let token = self.token(index);
        let (Ok(addresses), Ok(())) = (addresses, self.poller.add(&stream, READABLE, token)) else {
            self.free.push(index);
            self.shared.connections.fetch_sub(1, Ordering::AcqRel);
            return;
        };
        // Without it small answers wait for acknowledgements; where it fails it is only slow.
        let _ = stream.set_nodelay(true);
        let (local, peer) = (addresses.0.ip().to_canonical(), addresses.1.ip().to_canonical());
        if peer.is_loopback() || local == peer {
            // As above.
            let _ = system::bound_send_buffer(&stream, SAME_MACHINE_SEND_BYTES);
        }
        let connection = Connection::new(
            self.shared.clone(),
            self.mailbox.clone(),
            token,
            addresses,
            arrival,
            self.now,
        );
        self.peers[index] = Some(Peer {
            stream,
            connection,
            backlog: Vec::new(),
            interest: READABLE,
            input: Progress::new(self.now),
            output: Progress::new(self.now),
            last_turn: self.now,
            rested: false,
            shut: false,
            listed: false,
        });
    }

    /// One turn of one connection: receive, work, send.
    fn serve(&mut self, token: u64, readiness: u32) {
        let now = self.now;
        let mut scratch = std::mem::take(&mut self.scratch);
        let Some(peer) = self.peer(token) else {
            self.scratch = scratch;
            return;
        };
        peer.connection.now = now;
        peer.last_turn = now;
        peer.rested = false;
        let result = catch_unwind(AssertUnwindSafe(|| peer.turn(readiness, &mut scratch)));
        self.scratch = scratch;
        match result {
            Ok(Ok(())) => self.update_interest(token),
            Ok(Err(End::Quiet)) => self.drop_peer(token, None),
            Ok(Err(End::Error(why))) => {
                self.drop_peer(token, Some(&why));
            }
            Err(_) => {
                count(&self.shared.totals.panics, 1);
                self.drop_peer(token, Some("internal error: the connection's code panicked"));
            }
        }
    }

    fn update_interest(&mut self, token: u64) {
        let poller = &self.poller;
        let Some(peer) = self
            .peers
            .get_mut((token & 0xFFFF_FFFF) as usize)
            .and_then(Option::as_mut)
        else {
            return;
        };
        if peer.connection.is_waiting() && !peer.listed {
            peer.listed = true;
            self.waiting.push(token);
        }
        let mut interest = 0;
        if peer.connection.is_ending() || peer.connection.wants_input() {
            interest |= READABLE;
        }
        if peer.connection.offers_output() {
            interest |= WRITABLE;
        }
        if interest != peer.interest && poller.change(&peer.stream, interest, token).is_ok() {
            peer.interest = interest;
        }
    }

    fn serve_waiting(&mut self) {
        for token in std::mem::take(&mut self.waiting) {
            if let Some(peer) = self.peer(token) {
                peer.listed = false;
                self.serve(token, 0);
            }
        }
    }

    fn on_tick(&mut self) {
        self.next_tick = self.now + self.tick;
        if std::mem::take(&mut self.paused) {
            for (number, listener) in self.listeners.iter().enumerate() {
                // Where it fails the next accept error comes here again.
                let _ = self.poller.change(listener, READABLE, LISTENER + number as u64);
            }
        }
        let now = self.now;
        let mut said = Vec::new();
        let overdue: Vec<(u64, &'static str)> = self
            .peers
            .iter_mut()
            .flatten()
            .filter_map(|peer| {
                peer.connection.now = now;
                let owing = peer.input.stuck(peer.connection.expects_input(), now);
                let refusing = peer.output.stuck(peer.connection.offers_output(), now);
                if !peer.rested && now.saturating_duration_since(peer.last_turn) > REST {
                    peer.rested = true;
                    peer.connection.rest();
                    peer.backlog.shrink_to_fit();
                }
                if peer.connection.give_up_old_first() {
                    said.push(peer.connection.token);
                }
                let why = peer.connection.overdue(owing, refusing)?;
                Some((peer.connection.token, why))
            })
            .collect();
        for (token, why) in overdue {
            if why != "ended" {
                count(&self.shared.totals.dropped_silent, 1);
            }
            self.drop_peer(token, Some(why));
        }
        said.into_iter().for_each(|token| self.serve(token, 0));
        if self.shared.draining.load(Ordering::Relaxed) {
            self.drain();
        }
        // One clock for all controllers.
        if self.index == 0 {
            self.shared.memory.trim();
            let now_ms = self.shared.ms(self.now);
            for controller in self.shared.registry.expire(now_ms) {
                let name = &controller.host.hostnqn;
                self.shared.note(format!(
                    "controller {} of {name}: keep-alive timer expired",
                    controller.cntlid
                ));
            }
        }
    }

    /// Closed listeners refuse; each connection ends in the turn in which nothing of it is under way.
    fn drain(&mut self) {
        self.listeners.clear();
        let tokens = self.peers.iter().flatten().map(|peer| peer.connection.token);
        tokens
            .collect::<Vec<_>>()
            .into_iter()
            .for_each(|token| self.serve(token, 0));
    }

    fn drop_peer(&mut self, token: u64, why: Option<&str>) {
        let index = (token & 0xFFFF_FFFF) as usize;
        if self.peer(token).is_none() {
            return;
        }
        let Some(mut peer) = self.peers.get_mut(index).and_then(Option::take) else {
            return;
        };
        self.poller.remove(&peer.stream);
        if let Some(why) = why {
            self.shared
                .note(format!("{}: closed: {why}", peer.connection.peer));
        }
        if catch_unwind(AssertUnwindSafe(|| peer.connection.closed())).is_err() {
            count(&self.shared.totals.panics, 1);
        }
        self.free.push(index);
        self.shared.connections.fetch_sub(1, Ordering::AcqRel);
    }

    fn stop(mut self) {
        let tokens: Vec<u64> = self
            .peers
            .iter()
            .flatten()
            .map(|peer| peer.connection.token)
            .collect();
        tokens.into_iter().for_each(|token| self.drop_peer(token, None));
    }
}

impl Peer {
    fn turn(&mut self, readiness: u32, scratch: &mut [u8]) -> Result<(), End> {
        if self.connection.deferred.is_some() {
            self.connection.retry_connect();
        }
        self.work_off();
        if readiness & READABLE != 0 {
            self.receive(scratch)?;
        }
        if readiness & BROKEN != 0 {
            // Reset, or both directions closed: nothing more can be said or heard.
            return Err(End::Quiet);
        }
        // Sending frees memory, which lets waiting commands go on, which makes more to send.
        let mut sent = 0;
        loop {
            let before = sent;
            sent += self.send(TURN_BYTES.saturating_sub(sent))?;
            self.work_off();
            if sent == before || self.connection.output.is_empty() || sent >= TURN_BYTES {
                break;
            }
        }
        if self.connection.shared.draining.load(Ordering::Relaxed) {
            self.connection.leave();
        }
        if self.connection.is_ending() && self.connection.output.is_empty() && !self.shut {
            self.shut = true;
            // What it says is on its way; the peer's close, or the clock, ends the rest.
            let _ = self.stream.shutdown(Shutdown::Write);
        }
        Ok(())
    }

    /// Give memory to what waits for it.
    fn work_off(&mut self) {
        self.connection.serve_waiting();
        if self.connection.receiver.is_stalled() {
            self.connection.resume();
        }
        while !self.backlog.is_empty() && !self.connection.receiver.is_stalled() {
            let taken = self.connection.feed(&self.backlog);
            self.backlog.drain(..taken);
        }
    }

    fn receive(&mut self, scratch: &mut [u8]) -> Result<(), End> {
        let mut total = 0;
        while total < TURN_BYTES {
            let ending = self.connection.is_ending();
            if !ending && (!self.connection.wants_input() || !self.backlog.is_empty()) {
                return Ok(());
            }
            let mut passage = None;
            let mut available = 0;
            if self.connection.is_direct() {
                passage = Some(self.connection.gate.enter().ok_or(End::Quiet)?);
                available =
                    system::available(&self.stream).map_err(|e| End::Error(format!("receive: {e}")))?;
            }
            let namespace = self.connection.direct_namespace();
            let shared = namespace.as_ref().map(|namespace| namespace.beside_others());
            let tail = self.connection.receiver.tail_bytes();
            let (mut parts, room) = self.connection.data_space(available);
            let tail = tail.min(scratch.len());
            parts.push(PartMut::slice(&mut scratch[..tail]));
            let result = system::receive(&self.stream, &mut parts);
            drop(parts);
            let count = match result {
                Ok(0) => return Err(End::Quiet),
                Ok(count) => count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return Err(End::Quiet),
                Err(error) => return Err(End::Error(format!("receive: {error}"))),
            };
            total += count;
            self.input.bytes += count as u64;
            let placed = count.min(room);
            if placed > 0 {
                self.connection.received(available, placed);
            }
            drop(shared);
            drop(passage);
            let rest = &scratch[..count - placed];
            let taken = self.connection.feed(rest);
            self.backlog.extend_from_slice(&rest[taken..]);
            if count < room + tail {
                // The socket is empty, or nearly: level-triggered readiness tells if not.
                return Ok(());
            }
        }
        Ok(())
    }

    /// Send up to about `limit` bytes; returns how many.
    fn send(&mut self, limit: usize) -> Result<usize, End> {
        let mut total = 0;
        while total < limit && !self.connection.output.is_empty() {
            self.connection.output.stage(&self.connection.allowance);
            let parts = self.connection.output.parts(TURN_PARTS);
            if parts.is_empty() {
                break;
            }
            let offered: usize = parts.iter().map(system::Part::len).sum();
            match system::send(&self.stream, &parts) {
                Ok(count) => {
                    total += count;
                    self.connection.output.sent(count);
                    self.output.bytes += count as u64;
                    if count < offered {
                        break;
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) => {
                    return Err(End::Quiet);
                }
                Err(error) => return Err(End::Error(format!("send: {error}"))),
            }
        }
        Ok(total)
    }
}

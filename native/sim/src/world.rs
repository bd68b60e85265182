//! One host, one target, a network between them that a seed makes, and what must hold all the same.
//!
//! # What is real
//!
//! The target's connections, controllers, gates and registry ([`Bench`]); the host's queue pairs ([`Queue`]). Around the
//! queue pairs stands a small host that keeps the rules of the real one: connections are closed before a loss is counted,
//! commands under way are sent again with the same bytes, nothing is sent before a new association is ready. (The real
//! one's life runs over real sockets in `native/interop-tests`.)
//!
//! # What happens
//!
//! A writer fills regions: it notes the loss counter, writes, flushes, and looks at the counter again; equal means durable,
//! else it writes the same bytes again. A reader reads what is durable. Meanwhile bytes are delayed, split and stalled,
//! connections are cut, half-open or closed with bytes still under way (which arrive at the target late: ghosts), media
//! threads take as long as they like, and the target loses its power, and with it whatever was not flushed.
//!
//! # What must hold
//!
//! * What is durable reads as what was written, whole, at every time, and after a loss of power.
//! * Nothing lands twice or late: no region goes back to older bytes.
//! * Everything ends: with the network healed, all work is done within a bounded virtual time.
//!
//! A region of which a command of unknown fate may live is written with other bytes only when that command is dead. With
//! [`Rules`] a rule is switched off, and then a seed must be found that breaks the promise: this shows that the simulation
//! can see it.

use crate::media::{Disk, Handle};
use crate::network::Pipe;
use crate::pair::later;
use crate::random::Random;
use crate::{HOST, NQN};
use headrace_host::testing::{Ended, Payload, Queue};
use headrace_media::{Media, MemoryMedia};
use headrace_target::testing::Bench;
use headrace_transfer::Buffer;
use headrace_wire::command::CDW12_FUA;
use headrace_wire::fabrics::{
    property_set, Connect, ConnectData, CATTR_NO_SQ_FLOW, CC_ENABLE, CNTLID_DYNAMIC,
};
use headrace_wire::pdu::Digests;
use headrace_wire::{admin, io, Sqe};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

const BLOCK: usize = 512;
const REGION_BLOCKS: usize = 8;
const REGION: usize = BLOCK * REGION_BLOCKS;
const REGIONS: usize = 24;
const IO_QUEUES: usize = 2;
/// Of virtual time, in ms.
const COMMAND_TIMEOUT: u64 = 3000;
const KEEP_ALIVE: u64 = 4000;
const FAULTY_UNTIL: u64 = 20_000;
const HEALED_FOR: u64 = 120_000;

/// Rules of the host that can be switched off, to see them missed, and what the network may do.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// Equal loss counters before the writes and after the flush, or the writes are done again.
    pub loss_counter: bool,
    /// No other bytes to a place where an older command may live.
    pub quarantine: bool,
    /// Bytes and ends of connections may come to the target after the host has gone on. Where they do not, the target's own
    /// promise is enough without the quarantine: what a lost association has at the media ends before a new one begins.
    pub late: bool,
}

impl Rules {
    pub const ALL: Rules = Rules {
        loss_counter: true,
        quarantine: true,
        late: true,
    };
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Request {
    Write { region: usize, version: u32, fua: bool },
    Read { region: usize, version: u32 },
    Flush,
}

struct UnderWay {
    request: Request,
    memory: Option<Buffer>,
    deadline: u64,
}

/// A connection; the host's end is gone when `queue` is.
struct Link {
    queue: Option<Queue>,
    peer: u64,
    to_target: Pipe,
    to_host: Pipe,
    /// The target is told of the end when its pipe is empty.
    fin: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// Since when the connections wait for their ICResp.
    Initialise,
    Connect,
    Enable,
    InitialiseIo,
    ConnectIo,
    Ready,
}

struct Association {
    step: Step,
    cntlid: u16,
    awaited: usize,
    digests: Digests,
    in_capsule: usize,
    /// Of the step, or of the whole bring-up.
    deadline: u64,
    keep_alive_at: u64,
    /// When the Keep Alive that is under way must be answered.
    kept_alive_by: Option<u64>,
    under_way: BTreeMap<u64, UnderWay>,
}

#[derive(Clone, Debug, Default)]
struct Region {
    /// 0: never written, zeros.
    durable: u32,
    /// Being written.
    next: Option<u32>,
    /// The target's life in which a command of unknown fate was sent to it.
    haunted: Option<u64>,
}

/// The writer's batch.
struct Batch {
    regions: Vec<usize>,
    left: usize,
    losses: u64,
    flushing: bool,
    fua: bool,
}

#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    pub losses: u64,
    pub power_losses: u64,
    pub writes: u64,
    pub reads: u64,
    pub durable: u64,
    pub repeated: u64,
    pub ghosts: u64,
}

enum Medium {
    Cached(Arc<Disk>),
    Mapped(Arc<MemoryMedia>),
}

impl Medium {
    fn serve(&self) -> Bench {
        let media: Box<dyn Media> = match self {
            Medium::Cached(disk) => Box::new(Handle(disk.clone())),
            Medium::Mapped(memory) => Box::new(Handle(memory.clone())),
        };
        Bench::new(NQN, media)
    }
}

pub struct World {
    random: Random,
    rules: Rules,
    now: u64,
    medium: Medium,
    bench: Bench,
    /// Until when each piece of work is at the medium, in the bench's order.
    at_media: Vec<u64>,
    /// How often the target has begun.
    life: u64,
    /// The links of the association: 0 is admin.
    links: Vec<Link>,
    /// Links that the host has closed and the target may not know of.
    zombies: Vec<Link>,
    association: Option<Association>,
    begin_at: u64,
    waiting: Vec<(u64, Request)>,
    next_tag: u64,
    regions: Vec<Region>,
    version: u32,
    batch: Option<Batch>,
    reads: usize,
    faulty: bool,
    delay: usize,
    pub counts: Counts,
}

/// What goes wrong: the sentence of the broken promise.
pub type Broken = String;

fn content(region: usize, version: u32) -> Vec<u8> {
    if version == 0 {
        return vec![0; REGION];
    }
    let word = (version << 8 | region as u32).to_le_bytes();
    word.repeat(REGION / 4)
}

/// Carry out one seed; the error names the broken promise.
pub fn run(seed: u64, rules: Rules) -> Result<Counts, Broken> {
    let mut world = World::new(seed, rules);
    world.faulty = true;
    while world.now < FAULTY_UNTIL {
        world.turn()?;
    }
    // The power fails once more, then the network is good, and all that is under way must end.
    world.power_fails();
    world.faulty = false;
    world.delay = 1;
    let end = world.now + HEALED_FOR;
    while world.is_busy() {
        if world.now > end {
            return Err(format!("hangs: {}", world.state()));
        }
        world.turn()?;
    }
    world.check_all()?;
    Ok(world.counts)
}

impl World {
    fn new(seed: u64, rules: Rules) -> Self {
        let mut random = Random::new(seed);
        let size = (REGIONS * REGION) as u64;
        let medium = if random.one_in(4) {
            Medium::Mapped(Arc::new(MemoryMedia::new(size, BLOCK as u32).expect("memory")))
        } else {
            Medium::Cached(Arc::new(Disk::new(size, BLOCK as u32)))
        };
        World {
            bench: medium.serve(),
            medium,
            at_media: Vec::new(),
            delay: random.pick(&[1, 10, 100]),
            random,
            rules,
            now: 0,
            life: 0,
            links: Vec::new(),
            zombies: Vec::new(),
            association: None,
            begin_at: 0,
            waiting: Vec::new(),
            next_tag: 1,
            regions: vec![Region::default(); REGIONS],
            version: 0,
            batch: None,
            reads: 0,
            faulty: false,
            counts: Counts::default(),
        }
    }

    fn state(&self) -> String {
        format!(
            "at {} ms: step {:?}, {} waiting, {} under way, batch {:?}, work {:?}, notes {:?}",
            self.now,
            self.association.as_ref().map(|a| a.step),
            self.waiting.len(),
            self.association.as_ref().map_or(0, |a| a.under_way.len()),
            self.batch.as_ref().map(|b| (b.left, b.flushing)),
            self.bench.work(),
            self.bench.notes()
        )
    }

    fn is_busy(&self) -> bool {
        self.batch.is_some() || self.reads > 0 || !self.waiting.is_empty()
    }

    /// A little of everything, then a little time.
    fn turn(&mut self) -> Result<(), Broken> {
        self.work();
        self.move_bytes()?;
        self.drive();
        if self.faulty {
            self.want();
            self.disturb();
        }
        if self.random.one_in(3) {
            let by = 1 + self.random.below(20) as u64;
            self.now += by;
            self.bench.advance(Duration::from_millis(by));
        }
        Ok(())
    }

    // The target and the network.

    fn work(&mut self) {
        // Media threads that are late to take work, and work that hangs.
        let slow = self.faulty && self.now / 700 % 3 == 1;
        let (waiting, running) = self.bench.work();
        if waiting > 0 && self.random.one_in(if slow { 30 } else { 2 }) {
            let nth = self.random.below(waiting);
            self.bench.begin_work(nth);
            if self.bench.work().1 > running {
                let hangs = self.faulty && self.random.one_in(20);
                let for_ms = self.random.below(if hangs { 2500 } else { 5 });
                self.at_media.push(self.now + for_ms as u64);
            }
        }
        let done = self
            .at_media
            .iter()
            .position(|&until| until <= self.now || !self.faulty);
        if let Some(nth) = done {
            self.at_media.swap_remove(nth);
            self.bench.finish_work(nth);
        }
    }

    fn move_bytes(&mut self) -> Result<(), Broken> {
        let mut lost = false;
        let World {
            links,
            bench,
            random,
            now,
            delay,
            ..
        } = self;
        for link in links.iter_mut() {
            let Some(queue) = &mut link.queue else { continue };
            let limit = if random.one_in(4) { 50 } else { 10_000 };
            if queue.has_output() {
                link.to_target.send(queue.output(limit), *now, *delay, random);
            }
            if bench.wants_input(link.peer) {
                let bytes = link.to_target.receive(*now, random);
                bench.feed(link.peer, &bytes);
            }
            link.to_host
                .send(bench.output(link.peer, limit), *now, *delay, random);
            let bytes = link.to_host.receive(*now, random);
            if !bytes.is_empty() {
                queue
                    .deliver(&bytes)
                    .map_err(|broken| format!("the host calls it a fault: {broken:?}"))?;
            }
            // The target has closed, and its last words are heard.
            lost |= !bench.is_open(link.peer) && !bench.has_output(link.peer) && link.to_host.is_empty();
        }
        for link in &mut self.zombies {
            if self.bench.wants_input(link.peer) || !self.bench.is_open(link.peer) {
                let bytes = link.to_target.receive(self.now, &mut self.random);
                self.counts.ghosts += u64::from(!bytes.is_empty());
                self.bench.feed(link.peer, &bytes);
            }
            self.bench.output(link.peer, usize::MAX);
            if link.to_target.is_over(self.now) && link.fin {
                self.bench.hang_up(link.peer);
                link.peer = 0;
            }
        }
        let bench = &self.bench;
        self.zombies
            .retain(|link| link.peer != 0 && (bench.is_open(link.peer) || bench.has_output(link.peer)));
        if lost {
            self.lose();
        }
        self.complete()
    }

    fn disturb(&mut self) {
        if !self.random.one_in(60) || self.links.is_empty() {
            return;
        }
        let at = self.random.below(self.links.len());
        match self.random.below(if self.rules.late { 12 } else { 8 }) {
            0..=3 => {
                let until = self.now + self.random.below(800) as u64;
                let link = &mut self.links[at];
                if self.random.one_in(2) {
                    link.to_target.stall(until);
                } else {
                    link.to_host.stall(until);
                }
            }
            4..=6 => {
                // Cut: both see it, now.
                let peer = self.links[at].peer;
                self.links[at].to_target.cut(&mut self.random);
                let bytes = self.links[at].to_target.receive(u64::MAX, &mut self.random);
                self.bench.feed(peer, &bytes);
                self.bench.hang_up(peer);
                self.lose();
            }
            7 => self.power_fails(),
            8 | 9 => {
                // The host sees it; the target gets what is under way, late, and the end of it later.
                for link in &mut self.links {
                    let until = self.now + self.random.below(3000) as u64;
                    link.to_target.stall(until);
                }
                self.lose();
            }
            10 => {
                // Half-open: nobody sees it.
                let link = &mut self.links[at];
                link.to_target.swallow();
                if self.random.one_in(2) {
                    link.to_host.swallow();
                }
            }
            _ => self.delay = self.random.pick(&[1, 10, 100, 500]),
        }
    }

    /// The target ends without a word, and begins again with what its medium has kept.
    fn power_fails(&mut self) {
        while self.bench.work().1 > 0 && self.random.one_in(2) {
            self.bench.finish_work(0);
        }
        if let Medium::Cached(disk) = &self.medium {
            disk.power_fails(&mut self.random);
        }
        self.bench = self.medium.serve();
        self.at_media.clear();
        self.life += 1;
        self.counts.power_losses += 1;
        self.zombies.clear();
        self.lose();
        // Its connections went with it: nothing that was sent on them can arrive any more.
        self.zombies.clear();
    }

    // The host.

    /// Close the connections, count, and let what was under way wait.
    fn lose(&mut self) {
        let Some(association) = self.association.take() else {
            return;
        };
        for mut link in self.links.drain(..) {
            if !self.rules.late {
                self.bench.hang_up(link.peer);
                continue;
            }
            link.queue = None;
            link.fin = true;
            self.zombies.push(link);
        }
        if association.step == Step::Ready {
            self.counts.losses += 1;
        }
        for (tag, one) in association.under_way {
            if let Request::Write { region, .. } = one.request {
                self.regions[region].haunted = Some(self.life);
            }
            self.waiting.push((tag, one.request));
        }
        self.begin_at = self.now + self.random.below(300) as u64;
    }

    fn open_link(&mut self, depth: u16, digests: Digests, in_capsule: usize) {
        let hpda = self.random.pick(&[0, 0, 1]);
        self.links.push(Link {
            queue: Some(Queue::new(depth, digests, (hpda, 0), in_capsule)),
            peer: self.bench.accept(),
            to_target: Pipe::default(),
            to_host: Pipe::default(),
            fin: false,
        });
    }

    /// What is due on the way up, and commands that wait.
    fn drive(&mut self) {
        let now = self.now;
        let Some(association) = &mut self.association else {
            if now >= self.begin_at {
                let digests = Digests {
                    header: self.random.one_in(2),
                    data: self.random.one_in(2),
                };
                self.association = Some(Association {
                    step: Step::Initialise,
                    cntlid: CNTLID_DYNAMIC,
                    awaited: 0,
                    digests,
                    in_capsule: self.random.pick(&[0, 4096, 16384]),
                    deadline: now + 2 * COMMAND_TIMEOUT,
                    keep_alive_at: u64::MAX,
                    kept_alive_by: None,
                    under_way: BTreeMap::new(),
                });
                self.open_link(31, digests, 8192);
            }
            return;
        };
        let overdue = association.step != Step::Ready && now > association.deadline
            || association.kept_alive_by.is_some_and(|by| now > by)
            || association.under_way.values().any(|one| now > one.deadline);
        if overdue {
            return self.lose();
        }
        let agreed = self
            .links
            .iter()
            .all(|link| link.queue.as_ref().is_some_and(Queue::is_agreed));
        match association.step {
            Step::Initialise if agreed => {
                association.step = Step::Connect;
                self.connect(0);
            }
            Step::InitialiseIo if agreed => {
                association.step = Step::ConnectIo;
                association.awaited = IO_QUEUES;
                (1..=IO_QUEUES).for_each(|qid| self.connect(qid));
            }
            Step::Ready => {
                if now >= association.keep_alive_at {
                    association.keep_alive_at = now + KEEP_ALIVE / 2;
                    association.kept_alive_by.get_or_insert(now + KEEP_ALIVE);
                    let sqe = Sqe::new(admin::KEEP_ALIVE, 0, 0);
                    if let Some(queue) = &mut self.links[0].queue {
                        queue.submit(sqe, Payload::None, 0, later());
                    }
                }
                self.send_waiting();
            }
            _ => {}
        }
    }

    fn connect(&mut self, qid: usize) {
        let Some(association) = &self.association else {
            return;
        };
        let connect = Connect {
            recfmt: 0,
            qid: qid as u16,
            sqsize: 31,
            cattr: CATTR_NO_SQ_FLOW,
            kato_ms: if qid == 0 { KEEP_ALIVE as u32 } else { 0 },
        };
        let data = ConnectData {
            hostid: [7; 16],
            cntlid: association.cntlid,
            subnqn: NQN.into(),
            hostnqn: HOST.into(),
        };
        let payload = Payload::Write(Buffer::from_vec(data.encode().to_vec()));
        if let Some(queue) = &mut self.links[qid].queue {
            queue.submit(connect.encode(0), payload, 0, later());
        }
    }

    fn send_waiting(&mut self) {
        let Some(association) = &mut self.association else {
            return;
        };
        while !self.waiting.is_empty() {
            let at = 1 + self.random.below(IO_QUEUES);
            let Some(queue) = &mut self.links[at].queue else {
                return;
            };
            if queue.room() < 8 {
                return;
            }
            // In any order: nothing that waits together depends on each other.
            let nth = self.random.below(self.waiting.len());
            let (tag, request) = self.waiting.swap_remove(nth);
            let rw = |opcode, region: usize| {
                Sqe::rw(
                    opcode,
                    0,
                    1,
                    (region * REGION_BLOCKS) as u64,
                    REGION_BLOCKS as u32,
                )
            };
            let (sqe, payload, memory) = match request {
                Request::Write { region, version, fua } => {
                    let sqe = rw(io::WRITE, region);
                    let sqe = sqe.with_cdw(12, sqe.cdw(12) | if fua { CDW12_FUA } else { 0 });
                    let buffer = Buffer::from_vec(content(region, version));
                    (sqe, Payload::Write(buffer), None)
                }
                Request::Read { region, .. } => {
                    let buffer = Buffer::zeroed(REGION);
                    (rw(io::READ, region), Payload::Read(buffer.clone()), Some(buffer))
                }
                Request::Flush => (Sqe::new(io::FLUSH, 0, 1), Payload::None, None),
            };
            queue.submit(sqe, payload, tag, later());
            association.under_way.insert(
                tag,
                UnderWay {
                    request,
                    memory,
                    deadline: self.now + COMMAND_TIMEOUT,
                },
            );
        }
    }

    fn complete(&mut self) -> Result<(), Broken> {
        for at in 0..self.links.len() {
            while let Some(queue) = self.links.get_mut(at).and_then(|link| link.queue.as_mut()) {
                let Some((tag, ended)) = queue.completion() else {
                    break;
                };
                let Ended::Answer(cqe) = ended else {
                    return Err(format!("a command ended with {ended:?}"));
                };
                if tag == 0 {
                    if cqe.status.is_success() {
                        self.came_up(at, cqe.dw0);
                    } else {
                        // Busy, or an association that the target has ended: again, later.
                        self.lose();
                    }
                    continue;
                }
                if !cqe.status.is_success() {
                    return Err(format!("a command ended with {}", cqe.status));
                }
                let under_way = self.association.as_mut().and_then(|a| a.under_way.remove(&tag));
                let Some(one) = under_way else {
                    return Err(format!("request {tag} ends twice"));
                };
                self.ended(&one)?;
            }
        }
        Ok(())
    }

    fn came_up(&mut self, at: usize, dw0: u32) {
        let Some(association) = &mut self.association else {
            return;
        };
        match association.step {
            Step::Connect => {
                association.cntlid = dw0 as u16;
                association.step = Step::Enable;
                let enable = property_set(0, 0x14, u64::from(CC_ENABLE), false);
                if let Some(queue) = &mut self.links[0].queue {
                    queue.submit(enable, Payload::None, 0, later());
                }
            }
            Step::Enable => {
                association.step = Step::InitialiseIo;
                let (digests, in_capsule) = (association.digests, association.in_capsule);
                for _ in 0..IO_QUEUES {
                    self.open_link(31, digests, in_capsule.max(1024));
                }
            }
            Step::ConnectIo => {
                association.awaited -= 1;
                if let Some(queue) = &mut self.links[at].queue {
                    queue.set_in_capsule(association.in_capsule);
                }
                if association.awaited == 0 {
                    association.step = Step::Ready;
                    association.keep_alive_at = self.now + KEEP_ALIVE / 2;
                }
            }
            Step::Ready => association.kept_alive_by = None,
            Step::Initialise | Step::InitialiseIo => {}
        }
    }

    // Its callers.

    fn ask(&mut self, request: Request) {
        let tag = self.next_tag;
        self.next_tag += 1;
        self.waiting.push((tag, request));
    }

    /// Begin what there is to do.
    fn want(&mut self) {
        let idle: Vec<usize> = (0..REGIONS)
            .filter(|&region| self.regions[region].next.is_none())
            .collect();
        if self.reads < 6 && !idle.is_empty() && self.random.one_in(8) {
            let region = self.random.pick(&idle);
            self.reads += 1;
            let version = self.regions[region].durable;
            self.ask(Request::Read { region, version });
        }
        if self.batch.is_some() || !self.random.one_in(4) {
            return;
        }
        for region in &mut self.regions {
            // The target that a command was sent to is no more, and the command with it.
            region.haunted = region.haunted.filter(|&life| life == self.life);
        }
        let quarantine = self.rules.quarantine;
        let mut free: Vec<usize> = idle
            .into_iter()
            .filter(|&region| !quarantine || self.regions[region].haunted.is_none())
            .collect();
        let wanted = self.random.range(1..=6);
        let mut regions = Vec::new();
        while regions.len() < wanted && !free.is_empty() {
            let haunted = free
                .iter()
                .position(|&region| self.regions[region].haunted.is_some());
            // Without the rule, straight into the trap.
            let nth = haunted.unwrap_or_else(|| self.random.below(free.len()));
            regions.push(free.swap_remove(nth));
        }
        if regions.is_empty() {
            // Everything is in quarantine. The target's end is one way to know that nothing old lives.
            if self.random.one_in(200) {
                self.power_fails();
            }
            return;
        }
        self.version += 1;
        for &region in &regions {
            self.regions[region].next = Some(self.version);
            self.regions[region].haunted = None;
        }
        let fua = self.random.one_in(5);
        self.batch = Some(Batch {
            left: 0,
            regions,
            losses: 0,
            flushing: false,
            fua,
        });
        self.write_batch();
    }

    fn write_batch(&mut self) {
        let Some(batch) = &mut self.batch else { return };
        batch.losses = self.counts.losses;
        batch.flushing = false;
        batch.left = batch.regions.len();
        let fua = batch.fua;
        for region in batch.regions.clone() {
            let version = self.regions[region].next.unwrap_or_default();
            self.ask(Request::Write { region, version, fua });
        }
    }

    fn ended(&mut self, one: &UnderWay) -> Result<(), Broken> {
        match one.request {
            Request::Write { .. } => {
                self.counts.writes += 1;
                let Some(batch) = &mut self.batch else {
                    return Err("a write that nobody waits for".into());
                };
                batch.left -= 1;
                if batch.left == 0 {
                    if batch.fua {
                        // Durable when answered, whatever happened meanwhile.
                        self.batch_is_durable();
                    } else {
                        batch.flushing = true;
                        self.ask(Request::Flush);
                    }
                }
            }
            Request::Flush => {
                let same = self
                    .batch
                    .as_ref()
                    .is_some_and(|batch| batch.losses == self.counts.losses);
                if same || !self.rules.loss_counter {
                    self.batch_is_durable();
                } else {
                    self.counts.repeated += 1;
                    self.write_batch();
                }
            }
            Request::Read { region, version } => {
                self.reads -= 1;
                self.counts.reads += 1;
                let state = &self.regions[region];
                // Written meanwhile: it may be either.
                if state.durable == version && state.next.is_none() {
                    let mut bytes = vec![0; REGION];
                    if let Some(memory) = &one.memory {
                        memory.copy_to(0, &mut bytes);
                    }
                    self.check(region, &bytes)?;
                }
            }
        }
        Ok(())
    }

    fn batch_is_durable(&mut self) {
        let Some(batch) = self.batch.take() else { return };
        for region in batch.regions {
            if let Some(version) = self.regions[region].next.take() {
                self.regions[region].durable = version;
                self.counts.durable += 1;
            }
        }
    }

    fn check(&self, region: usize, bytes: &[u8]) -> Result<(), Broken> {
        let expected = content(region, self.regions[region].durable);
        for (n, (found, right)) in bytes.chunks(BLOCK).zip(expected.chunks(BLOCK)).enumerate() {
            if found != right {
                let word = |block: &[u8]| u32::from_le_bytes([block[0], block[1], block[2], block[3]]);
                return Err(format!(
                    "at {} ms block {n} of region {region} holds version {}, durable is {} (losses {}, losses of power {})",
                    self.now,
                    word(found) >> 8,
                    word(right) >> 8,
                    self.counts.losses,
                    self.counts.power_losses
                ));
            }
        }
        Ok(())
    }

    /// What rests on the medium.
    fn check_all(&mut self) -> Result<(), Broken> {
        if let Medium::Cached(disk) = &self.medium {
            disk.power_fails(&mut self.random);
        }
        for region in 0..REGIONS {
            let mut bytes = vec![0; REGION];
            let offset = (region * REGION) as u64;
            match &self.medium {
                Medium::Cached(disk) => disk.read(offset, &mut bytes),
                Medium::Mapped(memory) => memory.read(offset, &mut bytes),
            }
            .map_err(|error| error.to_string())?;
            self.check(region, &bytes)?;
        }
        Ok(())
    }
}

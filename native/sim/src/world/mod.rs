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

mod callers;
mod host;

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
}

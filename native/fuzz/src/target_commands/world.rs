//! The hosts' side, and what it knows about the medium.

use headrace_media::{Media, MemoryMedia, VolatileCache};
use headrace_sim::client::{drain, Received};
use headrace_sim::media::Handle;
use headrace_sim::{Client, HOST, NQN};
use headrace_target::testing::{Bench, IN_CAPSULE_BYTES, MAX_H2C_DATA_BYTES, MEMORY_BYTES};
use headrace_wire::fabrics::{property_set, CC_ENABLE, CNTLID_DYNAMIC};
use headrace_wire::pdu::{DataHeader, Digests, Pdu};
use headrace_wire::{admin, io, Sqe, Status};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

pub const BLOCK: usize = 512;
pub const BLOCKS: usize = 256;
/// The admin queue and two I/O queues.
pub const QUEUES: usize = 3;

/// What the command is meant to be; `Any` may be refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Intent {
    Read,
    Write,
    Zero,
    Deallocate,
    Simple,
    Connect,
    Enable,
    Event,
    Any,
}

#[derive(Debug)]
struct Issued {
    intent: Intent,
    sqe: Sqe,
    data: Vec<u8>,
    /// Blocks that this command changes if it is carried out, with what they may hold if it was not.
    changes: Vec<(usize, BTreeSet<u32>)>,
    tag: u32,
    first: u64,
    /// No other command that changes the medium was under way with it.
    alone: bool,
}

struct R2t {
    cid: u16,
    ttag: u16,
    at: u32,
    end: u32,
}

#[derive(Default)]
struct Queue {
    peer: u64,
    client: Option<Client>,
    issued: BTreeMap<u16, Issued>,
    r2ts: Vec<R2t>,
    ready: bool,
    /// Something was sent that the target may end the connection for.
    provoked: bool,
}

pub struct World {
    bench: Bench,
    media: Arc<dyn Media>,
    queues: [Queue; QUEUES],
    digests: Digests,
    hpda: u8,
    cntlid: u16,
    cid: u16,
    tag: u32,
    /// What each block may hold: 0 is zeros.
    allowed: Vec<BTreeSet<u32>>,
    /// A lost command may still be at the medium.
    unsettled: bool,
    /// Byte of the next command, and its value.
    pub mutation: Option<(u8, u8)>,
}

fn filled(tag: u32, blocks: usize) -> Vec<u8> {
    tag.to_le_bytes().repeat(blocks * BLOCK / 4)
}

impl World {
    pub fn new(mode: u8) -> Self {
        let size = (BLOCKS * BLOCK) as u64;
        let memory = || MemoryMedia::new(size, BLOCK as u32).expect("memory");
        // Mapped memory is served in place; a cache above it is served by media threads.
        let (media, served): (Arc<dyn Media>, Box<dyn Media>) = if mode & 1 == 0 {
            let media = Arc::new(memory());
            (media.clone(), Box::new(Handle(media)))
        } else {
            let media = Arc::new(VolatileCache::new(Box::new(memory()), 16 << 10));
            (media.clone(), Box::new(Handle(media)))
        };
        World {
            bench: Bench::new(NQN, served),
            media,
            queues: Default::default(),
            digests: Digests {
                header: mode & 2 != 0,
                data: mode & 4 != 0,
            },
            hpda: if mode & 8 != 0 { mode >> 4 } else { 0 },
            cntlid: 0,
            cid: 0,
            tag: 0,
            allowed: vec![BTreeSet::from([0]); BLOCKS],
            unsettled: false,
            mutation: None,
        }
    }

    /// Data that no other write has.
    pub fn fresh(&mut self, blocks: u32) -> Vec<u8> {
        self.tag += 1;
        filled(self.tag, blocks as usize)
    }

    /// What a range holds, where that is known.
    pub fn expected(&self, slba: u64, blocks: u32) -> Vec<u8> {
        (slba as usize..slba as usize + blocks as usize)
            .flat_map(|block| filled(*self.allowed[block].first().expect("something"), 1))
            .collect()
    }

    fn next_cid(&mut self) -> u16 {
        self.cid = self.cid.wrapping_add(1);
        self.cid
    }

    /// Whether queue `at` can take a command; begins to connect it where it is not connected.
    fn is_ready(&mut self, at: usize) -> bool {
        if self.queues[at].client.is_some() {
            let queue = &self.queues[at];
            return queue.ready && queue.issued.len() < 31;
        }
        if at > 0 && !self.is_ready(0) {
            return false;
        }
        let peer = self.bench.accept();
        let client = Client::new(self.digests, self.hpda);
        let cntlid = if at == 0 { CNTLID_DYNAMIC } else { self.cntlid };
        self.bench.feed(peer, &client.hello());
        self.bench
            .feed(peer, &client.connect(NQN, HOST, at as u16, cntlid, 31, 0));
        let mut queue = Queue {
            peer,
            client: Some(client),
            ..Queue::default()
        };
        queue.issued.insert(0, Issued::of(Intent::Connect));
        self.queues[at] = queue;
        self.observe();
        self.queues[at].ready
    }

    /// Send a command; its CID, and the mutation that waits, are put in here.
    pub fn issue(&mut self, at: usize, sqe: Sqe, data: Vec<u8>, mut intent: Intent) {
        if !self.is_ready(at) {
            return;
        }
        let cid = loop {
            let cid = self.next_cid();
            if cid != 0 && !self.queues[at].issued.contains_key(&cid) {
                break cid;
            }
        };
        let mut sqe = sqe.with_cid(cid);
        if let Some((byte, value)) = self.mutation.take() {
            let byte = usize::from(byte) % 64;
            // The CID is how the answer is found.
            if !(2..4).contains(&byte) && sqe.0[byte] != value {
                sqe.0[byte] = value;
                intent = Intent::Any;
            }
        }
        if sqe.opcode() == admin::ASYNC_EVENT_REQUEST && at == 0 {
            intent = Intent::Event;
        }
        let mut issued = Issued {
            sqe,
            data,
            tag: self.tag,
            first: sqe.slba(),
            ..Issued::of(intent)
        };
        let (changed, tag) = self.effect(at, &sqe, &issued.data);
        let writers = self.unsettled || self.others().any(|other| !other.changes.is_empty());
        issued.alone = !writers;
        if !changed.is_empty() {
            self.queues
                .iter_mut()
                .flat_map(|queue| queue.issued.values_mut())
                .for_each(|other| other.alone = false);
        }
        issued.tag = tag;
        for block in changed {
            issued.changes.push((block, self.allowed[block].clone()));
            self.allowed[block].insert(tag);
        }
        let queue = &mut self.queues[at];
        let Some(client) = &queue.client else { return };
        let in_capsule = matches!(sqe.sgl(), headrace_wire::Sgl::InCapsule { .. })
            || intent == Intent::Any && !issued.data.is_empty() && sqe.0[39] != 0x5A;
        let bytes = client.command(sqe, if in_capsule { &issued.data } else { &[] });
        // Beyond what a capsule may carry.
        queue.provoked |=
            in_capsule && issued.data.len() > if at == 0 { 8192 } else { IN_CAPSULE_BYTES as usize };
        queue.issued.insert(cid, issued);
        let peer = queue.peer;
        self.bench.feed(peer, &bytes);
    }

    fn others(&self) -> impl Iterator<Item = &Issued> {
        self.queues.iter().flat_map(|queue| queue.issued.values())
    }

    /// Our own reading of what a command may change, and what it puts there.
    fn effect(&self, at: usize, sqe: &Sqe, data: &[u8]) -> (Vec<usize>, u32) {
        // A fused write may be one.
        let valid = at > 0 && sqe.nsid() == 1 && sqe.psdt() == 1;
        let inside = |slba: u64, blocks: u64| {
            let end = slba.checked_add(blocks).filter(|&end| end <= BLOCKS as u64);
            end.map_or(0..0, |end| slba as usize..end as usize)
        };
        match sqe.opcode() {
            io::WRITE if valid => {
                let tag = data
                    .first_chunk()
                    .map_or(0x0101_0101, |bytes| u32::from_le_bytes(*bytes));
                (inside(sqe.slba(), sqe.nlb().into()).collect(), tag)
            }
            io::WRITE_ZEROES if valid => (inside(sqe.slba(), sqe.nlb().into()).collect(), 0),
            io::DATASET_MANAGEMENT if valid => {
                let ranges = data.chunks_exact(16).flat_map(|bytes| {
                    let bytes: &[u8; 16] = bytes.try_into().expect("16 bytes");
                    let range = headrace_wire::command::DsmRange::decode(bytes);
                    inside(range.slba, range.blocks.into())
                });
                (ranges.collect::<BTreeSet<_>>().into_iter().collect(), 0)
            }
            _ => (Vec::new(), 0),
        }
    }

    /// Answer the oldest R2T of a queue with up to `most` bytes, as it should be.
    pub fn serve_r2t(&mut self, at: usize, most: usize) {
        let queue = &mut self.queues[at];
        let (Some(client), Some(r2t)) = (&queue.client, queue.r2ts.first_mut()) else {
            return;
        };
        let length = ((r2t.end - r2t.at) as usize)
            .min(most.max(1))
            .min(MAX_H2C_DATA_BYTES as usize);
        let from = r2t.at as usize;
        let data = match queue.issued.get(&r2t.cid) {
            Some(issued) if issued.data.len() >= from + length => issued.data[from..from + length].to_vec(),
            // An arbitrary command that takes more than we have.
            Some(issued) => filled(issued.tag, 1)
                .into_iter()
                .cycle()
                .skip(from % 4)
                .take(length)
                .collect(),
            None => vec![1; length],
        };
        r2t.at += length as u32;
        let header = Pdu::H2cData(DataHeader {
            cccid: r2t.cid,
            ttag: r2t.ttag,
            datao: from as u32,
            datal: length as u32,
            last: r2t.at == r2t.end,
            success: false,
        });
        if r2t.at == r2t.end {
            queue.r2ts.remove(0);
        }
        let bytes = client.encode(&header, &data);
        let peer = queue.peer;
        self.bench.feed(peer, &bytes);
    }

    /// Answer an R2T with one thing wrong; the target must end the connection, with a TermReq.
    pub fn serve_wrongly(&mut self, at: usize, (what, by): (u32, u16)) {
        let queue = &mut self.queues[at];
        let (Some(client), Some(r2t)) = (&queue.client, queue.r2ts.first()) else {
            return;
        };
        if !self.bench.wants_input(queue.peer) {
            // It stands still for want of memory, and would see this later.
            return;
        }
        let left = r2t.end - r2t.at;
        let length = left.min(512);
        let mut header = DataHeader {
            cccid: r2t.cid,
            ttag: r2t.ttag,
            datao: r2t.at,
            datal: length,
            last: length == left,
            success: false,
        };
        let mut carried = length as usize;
        let by = u32::from(by).max(1);
        match what {
            0 => header.cccid = header.cccid.wrapping_add(by as u16),
            1 => header.ttag = header.ttag.wrapping_add(0x100 + (by as u16 & 0xFF)),
            2 => header.datao = header.datao.wrapping_add(by),
            3 => header.datal = header.datal.wrapping_add(by),
            4 => {
                carried = left as usize + by as usize;
                header.datal = carried as u32;
            }
            5 if length < left => header.last = true,
            _ => header.datao = header.datao.wrapping_sub(by),
        }
        let bytes = client.encode(&Pdu::H2cData(header), &vec![0xEE; carried]);
        queue.provoked = true;
        let peer = queue.peer;
        self.bench.feed(peer, &bytes);
        assert!(
            !self.bench.is_open(peer),
            "a wrong H2CData was taken: {what} {header:?}"
        );
    }

    pub fn raw(&mut self, at: usize, bytes: &[u8]) {
        let queue = &mut self.queues[at];
        // With an R2T open they could be data.
        if queue.client.is_none() || !queue.r2ts.is_empty() {
            return;
        }
        queue.provoked = true;
        let peer = queue.peer;
        self.bench.feed(peer, bytes);
        self.observe();
        // What comes next would complete these bytes to some command.
        self.hang_up(at);
    }

    pub fn hang_up(&mut self, at: usize) {
        let peer = self.queues[at].peer;
        self.bench.hang_up(peer);
        self.lose(at);
        self.observe();
    }

    /// Its commands have no answer any more, but maybe an effect.
    fn lose(&mut self, at: usize) {
        let queue = std::mem::take(&mut self.queues[at]);
        self.unsettled |= queue.issued.values().any(|issued| !issued.changes.is_empty());
    }

    pub fn reset(&mut self) {
        let off = property_set(0, 0x14, 0, false);
        self.issue(0, off, Vec::new(), Intent::Any);
        let on = property_set(0, 0x14, u64::from(CC_ENABLE), false);
        self.issue(0, on, Vec::new(), Intent::Any);
    }

    pub fn advance(&mut self, millis: u64) {
        self.bench.advance(Duration::from_millis(millis));
    }

    /// Begin or end a piece of work at the medium.
    pub fn work(&mut self, which: u8) {
        let (waiting, running) = self.bench.work();
        let which = usize::from(which);
        if which % 2 == 0 && waiting > 0 {
            self.bench.begin_work(which / 2 % waiting);
        } else if running > 0 {
            self.bench.finish_work(which / 2 % running);
        }
    }

    /// Take what the target says.
    pub fn observe(&mut self) {
        assert!(self.bench.memory_bytes() <= MEMORY_BYTES);
        for at in 0..QUEUES {
            let queue = &mut self.queues[at];
            let Some(client) = &mut queue.client else { continue };
            let received = drain(&mut self.bench, queue.peer, client);
            for one in received {
                self.take(at, one);
            }
            let queue = &self.queues[at];
            if queue.client.is_some() && !self.bench.is_open(queue.peer) {
                self.lose(at);
            }
        }
        if self.unsettled && self.bench.work() == (0, 0) {
            self.unsettled = false;
        }
    }

    fn take(&mut self, at: usize, received: Received) {
        let queue = &mut self.queues[at];
        match received.pdu {
            Pdu::IcResp(_) => {}
            Pdu::C2hTermReq(term) => assert!(queue.provoked, "a TermReq for nothing: {term:?}"),
            Pdu::R2t(r2t) => {
                assert!(
                    queue.issued.contains_key(&r2t.cccid),
                    "R2T for no command: {r2t:?}"
                );
                queue.r2ts.push(R2t {
                    cid: r2t.cccid,
                    ttag: r2t.ttag,
                    at: r2t.r2to,
                    end: r2t.r2to + r2t.r2tl,
                });
            }
            Pdu::C2hData(header) => {
                let issued = queue.issued.get(&header.cccid);
                let issued = issued.unwrap_or_else(|| panic!("data for no command: {header:?}"));
                assert_eq!(header.datao, 0);
                if issued.intent == Intent::Read && issued.alone {
                    let first = issued.first as usize;
                    for (n, block) in received.data.chunks(BLOCK).enumerate() {
                        self.check(first + n, block);
                    }
                }
                if header.success {
                    self.ended(at, header.cccid, Status::SUCCESS, 0);
                }
            }
            Pdu::CapsuleResp(cqe) => self.ended(at, cqe.cid, cqe.status, cqe.dw0),
            other => panic!("a controller sent {other:?}"),
        }
    }

    fn check(&self, number: usize, block: &[u8]) {
        let tag = u32::from_le_bytes([block[0], block[1], block[2], block[3]]);
        assert_eq!(block, filled(tag, 1), "block {number} is torn");
        let allowed = &self.allowed[number];
        assert!(
            allowed.contains(&tag),
            "block {number} holds {tag}, not one of {allowed:?}"
        );
    }

    fn ended(&mut self, at: usize, cid: u16, status: Status, dw0: u32) {
        let queue = &mut self.queues[at];
        let issued = queue.issued.remove(&cid);
        let issued = issued.unwrap_or_else(|| panic!("an answer to no command: CID {cid}, {status}"));
        queue.r2ts.retain(|r2t| r2t.cid != cid);
        match issued.intent {
            Intent::Connect if status.is_success() => {
                if at == 0 {
                    self.cntlid = dw0 as u16;
                    let enable = property_set(cid, 0x14, u64::from(CC_ENABLE), false);
                    let bytes = queue.client.as_ref().map(|client| client.command(enable, &[]));
                    queue.issued.insert(0, Issued::of(Intent::Enable));
                    let peer = queue.peer;
                    self.bench.feed(peer, &bytes.unwrap_or_default());
                } else {
                    queue.ready = true;
                }
            }
            Intent::Connect => {
                let peer = queue.peer;
                self.bench.hang_up(peer);
                self.queues[at] = Queue::default();
            }
            Intent::Enable => {
                assert!(status.is_success(), "CC.EN: {status}");
                queue.ready = true;
            }
            Intent::Any | Intent::Event => {}
            _ => assert!(status.is_success(), "{:?} was refused: {status}", issued.intent),
        }
        if !issued.alone {
            return;
        }
        for (block, before) in issued.changes {
            if !status.is_success() {
                self.allowed[block] = before;
            } else if issued.intent != Intent::Any && issued.intent != Intent::Deallocate {
                self.allowed[block] = BTreeSet::from([issued.tag]);
            }
        }
    }

    /// Everything that can end does, and the medium holds what it may.
    pub fn settle(&mut self) {
        self.observe();
        self.mutation = None;
        for at in 1..QUEUES {
            // The first half of a fused pair waits for what comes next.
            if self.queues[at].ready {
                self.issue(at, Sqe::new(io::FLUSH, 0, 1), Vec::new(), Intent::Any);
            }
        }
        self.observe();
        for _ in 0..10_000 {
            self.bench.work_all();
            self.observe();
            let open: Vec<usize> = (0..QUEUES)
                .filter(|&at| !self.queues[at].r2ts.is_empty())
                .collect();
            if open.is_empty() {
                break;
            }
            open.into_iter().for_each(|at| self.serve_r2t(at, usize::MAX));
        }
        self.observe();
        for queue in &self.queues {
            for (cid, issued) in &queue.issued {
                assert_eq!(
                    issued.intent,
                    Intent::Event,
                    "CID {cid} never ends: {:?} {:x?}",
                    issued.sqe,
                    issued.sqe.0
                );
            }
        }
        let mut bytes = vec![0; BLOCKS * BLOCK];
        self.media.read(0, &mut bytes).expect("memory");
        for (number, block) in bytes.chunks(BLOCK).enumerate() {
            self.check(number, block);
        }
        (0..QUEUES).for_each(|at| self.hang_up(at));
        self.bench.work_all();
        assert_eq!(self.bench.memory_bytes(), 0, "memory stays taken");
    }
}

impl Issued {
    fn of(intent: Intent) -> Self {
        Issued {
            intent,
            sqe: Sqe([0; 64]),
            data: Vec::new(),
            changes: Vec::new(),
            tag: 0,
            first: 0,
            alone: false,
        }
    }
}

//! Requests, and the commands ("parts") that they are cut into.
//!
//! A request is cut when there is room for its next part, never ahead, so a request of gigabytes costs what one of a block
//! does. A part keeps its data from the moment it is cut to its final answer; a resend is the same bytes for the same
//! blocks, whatever happened in between. Order: parts to send again before fresh ones, each in the order of their first
//! sending. A part is cut for the path that takes it; a flush is spread over several (see [`crate::life`]), each part of
//! it meant for one path.

mod look;

use crate::facts::{Deallocation, Facts};
use crate::queue::{Data, WATCHED};
use headrace_transfer::{Buffer, ErrorKind, IoError, Op, Request, Sink};
use headrace_wire::command::{DsmRange, CDW11_DEALLOCATE, CDW12_DEAC, CDW12_FUA};
use headrace_wire::{io, Sqe};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verb {
    Read,
    Write {
        fua: bool,
    },
    Flush,
    /// Dataset Management with one range.
    Deallocate,
    /// Write Zeroes with DEAC.
    Zero,
}

impl Verb {
    pub fn opcode(self) -> u8 {
        match self {
            Verb::Read => io::READ,
            Verb::Write { .. } => io::WRITE,
            Verb::Flush => io::FLUSH,
            Verb::Deallocate => io::DATASET_MANAGEMENT,
            Verb::Zero => io::WRITE_ZEROES,
        }
    }

    /// How long it takes says something about the path. What the others take is the medium's.
    pub fn moves_data(self) -> bool {
        matches!(self, Verb::Read | Verb::Write { .. })
    }
}

/// How often a part was sent in vain, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tries {
    pub statuses: u8,
    pub timeouts: u8,
    pub losses: u8,
    pub violations: u8,
    /// Taken back from a path that was slow.
    pub recalls: u8,
    /// Statuses that speak of the path and not of the command.
    pub paths: u8,
    /// When the first of `losses` or `paths` was.
    pub failed_at: Option<Instant>,
    /// One bit for each path that failed it since all were tried.
    pub avoid: u16,
}

impl Tries {
    /// Sendings before this one.
    pub fn total(&self) -> u32 {
        [
            self.statuses,
            self.timeouts,
            self.losses,
            self.paths,
            self.recalls,
        ]
        .into_iter()
        .map(u32::from)
        .sum()
    }
}

/// One association of one path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    pub path: u8,
    pub generation: u32,
}

/// How a part travels, this time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Trip {
    pub path: u8,
    pub sent_at: Instant,
    /// Flush: the writes of the path that were answered before it was sent.
    pub covers: u64,
}

/// One command.
pub(crate) struct Part {
    request: u32,
    /// Which of the core's works it belongs to.
    pub lane: u8,
    pub verb: Verb,
    pub slba: u64,
    pub blocks: u64,
    order: u64,
    pub tries: Tries,
    /// Flush: where it must run to be worth anything.
    pub target: Option<Target>,
    pub trip: Option<Trip>,
    /// Who is told of data as they come or go, if somebody wants to know. It stays with the blocks, however often they are sent
    /// and whatever they are cut into: who is told of them once must be told whenever they come again.
    pub watch: Option<Watcher>,
}

/// Of a part of a read or write: its request, as its sink knows it.
#[derive(Clone)]
pub(crate) struct Watcher {
    sink: Arc<dyn Sink>,
    token: u64,
    /// Of the part's first byte, in the request.
    at: usize,
}

impl Part {
    /// `count` bytes from `at` of its data are in place.
    pub fn arrived(&self, at: usize, count: usize) {
        if let Some(watch) = &self.watch {
            watch.sink.arrived(watch.token, watch.at + at, count);
        }
    }

    /// `count` bytes from `at` of its data were sent.
    pub fn departed(&self, at: usize, count: usize) {
        if let Some(watch) = &self.watch {
            watch.sink.departed(watch.token, watch.at + at, count);
        }
    }

    /// Its submission queue entry; CID and SGL are the queue pair's to fill.
    pub fn sqe(&self, nsid: u32) -> Sqe {
        let opcode = self.verb.opcode();
        match self.verb {
            Verb::Read => Sqe::rw(opcode, 0, nsid, self.slba, self.blocks as u32),
            Verb::Write { fua } => {
                let sqe = Sqe::rw(opcode, 0, nsid, self.slba, self.blocks as u32);
                let cdw12 = sqe.cdw(12) | if fua { CDW12_FUA } else { 0 };
                sqe.with_cdw(12, cdw12)
            }
            Verb::Zero => {
                let sqe = Sqe::rw(opcode, 0, nsid, self.slba, self.blocks as u32);
                let cdw12 = sqe.cdw(12) | CDW12_DEAC;
                sqe.with_cdw(12, cdw12)
            }
            Verb::Flush => Sqe::new(opcode, 0, nsid),
            Verb::Deallocate => Sqe::new(opcode, 0, nsid).with_cdw(11, CDW11_DEALLOCATE),
        }
    }
}

struct Progress {
    sink: Arc<dyn Sink>,
    token: u64,
    op: Op,
    /// Blocks not cut yet, from `slba`.
    slba: u64,
    blocks: u64,
    /// Bytes of the buffer that are cut already.
    cut: usize,
    flush_due: bool,
    /// To do something with the data as they come, or go: the sink does, and a read is long enough.
    watched: bool,
    since: Instant,
    under_way: u32,
    error: Option<IoError>,
}

/// A request that ended. Its buffer is dropped; what is left is to say so.
pub(crate) struct Ended {
    sink: Arc<dyn Sink>,
    token: u64,
    result: Result<(), IoError>,
}

impl Ended {
    /// A sink that panics is a defect of its owner (the panic hook has printed it); other devices live on this thread.
    pub fn report(self) {
        let Ended { sink, token, result } = self;
        let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || sink.complete(token, result)));
    }
}

/// Let the request's memory go, then report.
pub(crate) fn reject(request: Request, error: IoError) -> Ended {
    let Request { op, token, sink, .. } = request;
    drop(op);
    Ended {
        sink,
        token,
        result: Err(error),
    }
}

#[derive(Default)]
pub(crate) struct Work {
    /// Written into each part.
    pub lane: u8,
    requests: Vec<Option<Progress>>,
    free: Vec<u32>,
    fresh: VecDeque<u32>,
    again: VecDeque<(Part, Data)>,
    /// Flushes that one path must answer; they wait for it without holding up the others.
    targeted: Vec<Part>,
    delayed: Vec<(Instant, Part, Data)>,
    next_order: u64,
}

impl Work {
    pub fn new(lane: u8) -> Self {
        Work {
            lane,
            ..Default::default()
        }
    }

    /// No request is left.
    pub fn is_empty(&self) -> bool {
        self.free.len() == self.requests.len()
    }

    /// A part could be sent now, if there is room.
    pub fn waiting(&self) -> bool {
        !self.fresh.is_empty() || !self.again.is_empty()
    }

    /// The paths that the next part should not take, if there are others.
    pub fn avoid(&self) -> u16 {
        self.again.front().map_or(0, |(part, _)| part.tries.avoid)
    }

    /// The next part would be cut from a flush, which is for [`Work::spread_flush`].
    pub fn at_flush(&self) -> bool {
        self.again.is_empty() && self.front().is_some_and(|progress| progress.flush_due)
    }

    fn front(&self) -> Option<&Progress> {
        let number = *self.fresh.front()?;
        self.requests.get(number as usize)?.as_ref()
    }

    /// The next part is none of a read.
    pub fn next_changes(&self) -> bool {
        match self.again.front() {
            Some((part, _)) => part.verb != Verb::Read,
            None => self
                .front()
                .is_some_and(|progress| !matches!(progress.op, Op::Read { .. })),
        }
    }

    /// The first part of a read that waits, past whatever is before it.
    pub fn next_read(&mut self, facts: &Facts) -> Option<(Part, Data)> {
        let read = |(part, _): &(Part, Data)| part.verb == Verb::Read;
        if let Some(at) = self.again.iter().position(read) {
            let (part, data) = self.again.remove(at)?;
            return Some(self.fit(part, data, facts));
        }
        let at = self.fresh.iter().position(|&number| {
            let progress = self.requests.get(number as usize).and_then(Option::as_ref);
            progress.is_some_and(|progress| matches!(progress.op, Op::Read { .. }))
        })?;
        let number = self.fresh[at];
        let progress = self.requests.get_mut(number as usize)?.as_mut()?;
        let cut = progress.cut(number, self.next_order, self.lane, facts);
        self.next_order += 1;
        progress.under_way += 1;
        if !progress.more() {
            self.fresh.remove(at);
        }
        Some(cut)
    }

    /// Cut the flush that is next into one part for each target; one for any path where there is none.
    pub fn spread_flush(&mut self, targets: &[Target], facts: &Facts) {
        let lane = self.lane;
        let Some(number) = self.fresh.pop_front() else {
            return;
        };
        let Some(Some(progress)) = self.requests.get_mut(number as usize) else {
            return;
        };
        let order = self.next_order;
        self.next_order += 1;
        for at in 0..targets.len().max(1) {
            let (mut part, data) = progress.cut(number, order, lane, facts);
            progress.under_way += 1;
            part.target = targets.get(at).copied();
            if part.target.is_some() {
                self.targeted.push(part);
            } else {
                self.again.push_front((part, data));
            }
        }
    }

    pub fn has_targeted(&self) -> bool {
        !self.targeted.is_empty()
    }

    /// Flushes that wait for their path.
    pub fn take_targeted(&mut self) -> Vec<Part> {
        std::mem::take(&mut self.targeted)
    }

    /// Take a request, or end it at once.
    pub fn accept(&mut self, request: Request, facts: &Facts, place: &str, now: Instant) -> Option<Ended> {
        let length = match &request.op {
            Op::Read { into } => into.len() as u64,
            Op::Write { from, .. } => from.len() as u64,
            Op::Flush => 0,
            Op::Deallocate { length } => *length,
        };
        let flush = matches!(request.op, Op::Flush);
        if !flush {
            if let Err(error) = check(&request, length, facts, place) {
                return Some(reject(request, error));
            }
        }
        let nothing = length == 0 && !flush;
        let undoable =
            matches!(request.op, Op::Deallocate { .. }) && facts.deallocation == Deallocation::None;
        let Request {
            op,
            offset,
            token,
            sink,
        } = request;
        if nothing || undoable {
            // Deallocation is advice: a namespace that takes none is not an error, and `describe` says so.
            drop(op);
            return Some(Ended {
                sink,
                token,
                result: Ok(()),
            });
        }
        let block = u64::from(facts.block_bytes);
        let progress = Some(Progress {
            watched: sink.watches()
                && match op {
                    Op::Read { .. } => length > WATCHED as u64,
                    // What went is cold when it is answered, however short it is.
                    Op::Write { .. } => true,
                    Op::Flush | Op::Deallocate { .. } => false,
                },
            sink,
            token,
            op,
            slba: if flush { 0 } else { offset / block },
            blocks: length / block,
            cut: 0,
            flush_due: flush,
            since: now,
            under_way: 0,
            error: None,
        });
        let number = match self.free.pop() {
            Some(number) => {
                self.requests[number as usize] = progress;
                number
            }
            None => {
                self.requests.push(progress);
                (self.requests.len() - 1) as u32
            }
        };
        self.fresh.push_back(number);
        None
    }

    /// The next command to send.
    pub fn next(&mut self, facts: &Facts) -> Option<(Part, Data)> {
        if let Some((part, data)) = self.again.pop_front() {
            return Some(self.fit(part, data, facts));
        }
        while let Some(&number) = self.fresh.front() {
            let Some(Some(progress)) = self.requests.get_mut(number as usize) else {
                self.fresh.pop_front();
                continue;
            };
            let (part, data) = progress.cut(number, self.next_order, self.lane, facts);
            self.next_order += 1;
            progress.under_way += 1;
            if !progress.more() {
                self.fresh.pop_front();
            }
            return Some((part, data));
        }
        None
    }

    /// After a reconnect the controller may take less at a time than before: cut what does not fit any more.
    fn fit(&mut self, mut part: Part, data: Data, facts: &Facts) -> (Part, Data) {
        let most = facts.fit(part.slba, part.blocks);
        let moves = matches!(part.verb, Verb::Read | Verb::Write { .. });
        if !moves || part.blocks <= most {
            return (part, data);
        }
        let bytes = most as usize * facts.block_bytes as usize;
        let divide = |buffer: &Buffer| {
            buffer
                .slice(0, bytes)
                .zip(buffer.slice(bytes, buffer.len() - bytes))
        };
        let halves = match &data {
            Data::Read(buffer) => divide(buffer).map(|(a, b)| (Data::Read(a), Data::Read(b))),
            Data::Write(buffer) => divide(buffer).map(|(a, b)| (Data::Write(a), Data::Write(b))),
            Data::None => None,
        };
        let Some((first, second)) = halves else {
            return (part, data);
        };
        let behind = |watch: &Watcher| Watcher {
            at: watch.at + bytes,
            ..watch.clone()
        };
        let rest = Part {
            slba: part.slba + most,
            blocks: part.blocks - most,
            watch: part.watch.as_ref().map(behind),
            ..part
        };
        if let Some(Some(progress)) = self.requests.get_mut(part.request as usize) {
            progress.under_way += 1;
        }
        self.again.push_front((rest, second));
        part.blocks = most;
        (part, first)
    }

    /// Send these again, first and in their old order; a flush that is meant for one path waits for that.
    pub fn again(&mut self, mut parts: Vec<(Part, Data)>) {
        parts.sort_by_key(|(part, _)| (part.order, part.slba));
        for (part, data) in parts.into_iter().rev() {
            self.back(part, data);
        }
    }

    /// It could not be sent now.
    pub fn back(&mut self, part: Part, data: Data) {
        match part.target {
            Some(_) => self.targeted.push(part),
            None => self.again.push_front((part, data)),
        }
    }

    /// Send again, not before `at`.
    pub fn later(&mut self, at: Instant, part: Part, data: Data) {
        self.delayed.push((at, part, data));
    }

    /// When the first delayed part is due.
    pub fn due(&self) -> Option<Instant> {
        self.delayed.iter().map(|(at, _, _)| *at).min()
    }

    pub fn ripen(&mut self, now: Instant) {
        let (ripe, green) = std::mem::take(&mut self.delayed)
            .into_iter()
            .partition(|(at, _, _)| *at <= now);
        self.delayed = green;
        let ripe: Vec<_> = ripe;
        self.again(ripe.into_iter().map(|(_, part, data)| (part, data)).collect());
    }

    /// A command ended; `Some` when its request did, too. The first error of a request stops its cutting.
    pub fn finish(&mut self, part: Part, data: Data, result: Result<(), IoError>) -> Option<Ended> {
        drop(data);
        let slot = self.requests.get_mut(part.request as usize)?;
        let progress = slot.as_mut()?;
        progress.under_way -= 1;
        if let Err(error) = result {
            progress.error.get_or_insert(error);
            if progress.more() {
                progress.blocks = 0;
                progress.flush_due = false;
                self.fresh.retain(|&number| number != part.request);
            }
        }
        if progress.under_way > 0 || progress.more() {
            return None;
        }
        self.end(part.request)
    }

    fn end(&mut self, number: u32) -> Option<Ended> {
        let Progress {
            sink,
            token,
            op,
            error,
            ..
        } = self.requests.get_mut(number as usize)?.take()?;
        drop(op);
        self.free.push(number);
        Some(Ended {
            sink,
            token,
            result: error.map_or(Ok(()), Err),
        })
    }

    /// Everything that waits here ends with `error`; commands that are on a queue end there, and then their requests do.
    /// With `but_reads` reads are left alone.
    pub fn fail_waiting(&mut self, error: &IoError, but_reads: bool) -> Vec<Ended> {
        let fails = |part: &Part| !but_reads || part.verb != Verb::Read;
        let (again, kept): (VecDeque<_>, VecDeque<_>) = std::mem::take(&mut self.again)
            .into_iter()
            .partition(|(part, _)| fails(part));
        self.again = kept;
        let (delayed, kept): (Vec<_>, Vec<_>) = std::mem::take(&mut self.delayed)
            .into_iter()
            .partition(|(_, part, _)| fails(part));
        self.delayed = kept;
        let targeted = std::mem::take(&mut self.targeted).into_iter();
        let parts: Vec<_> = again
            .into_iter()
            .chain(delayed.into_iter().map(|(_, part, data)| (part, data)))
            .chain(targeted.map(|part| (part, Data::None)))
            .collect();
        let mut ended: Vec<_> = parts
            .into_iter()
            .filter_map(|(part, data)| self.finish(part, data, Err(error.clone())))
            .collect();
        for number in std::mem::take(&mut self.fresh) {
            let Some(Some(progress)) = self.requests.get_mut(number as usize) else {
                continue;
            };
            if but_reads && matches!(progress.op, Op::Read { .. }) {
                self.fresh.push_back(number);
                continue;
            }
            progress.error.get_or_insert_with(|| error.clone());
            (progress.blocks, progress.flush_due) = (0, false);
            if progress.under_way == 0 {
                ended.extend(self.end(number));
            }
        }
        ended
    }

    /// Everything ends with `error`; commands still on a queue must have been taken from it before.
    pub fn fail_all(&mut self, error: &IoError) -> Vec<Ended> {
        self.fresh.clear();
        self.again.clear();
        self.delayed.clear();
        self.targeted.clear();
        self.free.clear();
        let mut ended = Vec::new();
        for progress in self.requests.drain(..).flatten() {
            let Progress {
                sink,
                token,
                op,
                error: earlier,
                ..
            } = progress;
            drop(op);
            ended.push(Ended {
                sink,
                token,
                result: Err(earlier.unwrap_or_else(|| error.clone())),
            });
        }
        ended
    }
}

impl Progress {
    fn more(&self) -> bool {
        self.blocks > 0 || self.flush_due
    }

    fn cut(&mut self, request: u32, order: u64, lane: u8, facts: &Facts) -> (Part, Data) {
        let (verb, most) = match &self.op {
            Op::Flush => (Verb::Flush, 0),
            Op::Read { .. } => (Verb::Read, facts.fit(self.slba, self.blocks)),
            Op::Write { fua, .. } => (Verb::Write { fua: *fua }, facts.fit(self.slba, self.blocks)),
            Op::Deallocate { .. } if facts.deallocation == Deallocation::DatasetManagement => {
                (Verb::Deallocate, self.blocks.min(u32::MAX.into()))
            }
            Op::Deallocate { .. } => (Verb::Zero, self.blocks.min(65536)),
        };
        let bytes = most as usize * facts.block_bytes as usize;
        let piece = |buffer: &Buffer| buffer.slice(self.cut, bytes).unwrap_or_else(|| Buffer::zeroed(0));
        let data = match &self.op {
            Op::Read { into } => Data::Read(piece(into)),
            Op::Write { from, .. } => Data::Write(piece(from)),
            Op::Deallocate { .. } if verb == Verb::Deallocate => {
                let range = DsmRange {
                    blocks: most as u32,
                    slba: self.slba,
                };
                Data::Write(Buffer::from_vec(range.encode().to_vec()))
            }
            Op::Flush | Op::Deallocate { .. } => Data::None,
        };
        let part = Part {
            request,
            lane,
            verb,
            slba: self.slba,
            blocks: most,
            order,
            tries: Tries::default(),
            target: None,
            trip: None,
            watch: self.watched.then(|| Watcher {
                sink: self.sink.clone(),
                token: self.token,
                at: self.cut,
            }),
        };
        self.slba += most;
        self.blocks -= most;
        self.cut += bytes;
        self.flush_due = false;
        (part, data)
    }
}

fn check(request: &Request, length: u64, facts: &Facts, place: &str) -> Result<(), IoError> {
    let offset = request.offset;
    let block = u64::from(facts.block_bytes);
    if offset % block != 0 || length % block != 0 {
        return Err(IoError::new(ErrorKind::Usage, "the request is not aligned")
            .at(place)
            .expected(format!("multiples of {block}"))
            .found(format!("offset {offset}, length {length}")));
    }
    if offset
        .checked_add(length)
        .is_none_or(|end| end > facts.size_bytes)
    {
        return Err(IoError::new(ErrorKind::Usage, "the request leaves the device")
            .at(place)
            .expected(format!("an end of at most {}", facts.size_bytes))
            .found(format!("{offset} + {length}")));
    }
    if facts.read_only && !matches!(request.op, Op::Read { .. }) {
        return Err(IoError::new(ErrorKind::Usage, "the namespace is write protected")
            .at(place)
            .next(crate::errors::READ_ONLY_HERE));
    }
    Ok(())
}

//! Batches over many devices: one call, one future, no heap per segment.
//!
//! # How a batch moves
//!
//! A batch is cut into [pieces](crate::piece) as it goes, never all at once. A window bounds what is under way (requests,
//! and memory for bounces); each completion makes room, and whichever thread finds enough room *pumps*: it cuts the next
//! pieces and submits them, one call a device. Only one thread pumps at a time, and it holds no lock while it submits;
//! another that would like to leaves a note (`again`) instead of waiting, so completions may come from inside `submit`
//! itself without recursion.
//!
//! A completion carries the number of a *slot*, which says what the request was. Reads are [verified](crate::verify) as
//! they come where the device tells of it and at their end where not, and bounces copied out, on the thread that completes
//! them, in parallel where devices have several. Checksums of writes are taken as they go where the device tells of that,
//! and where not by the caller's thread meanwhile.
//!
//! The first error ends the batch: nothing new is submitted, and once the last request under way has ended the waiter
//! gets that error. So when a wait has returned, no device holds the caller's buffers.

mod waiting;

pub use waiting::Waiting;

use crate::checksum::ChecksumSpec;
use crate::piece::{Cursor, Cutter, Piece};
use crate::segment::{check, Direction, Segment, Surroundings};
use crate::verify::{Sums, Verified, Verifier};
use crate::{BlockDevice, Buffer, ErrorKind, IoError, Op, Request, Sink};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Bounce memory under way in one transfer.
pub const BOUNCE_LIMIT_BYTES: u64 = 64 << 20;
/// Requests under way in one transfer: at least this many, and more where there are many devices.
const MIN_WINDOW: usize = 512;
const WINDOW_PER_DEVICE: usize = 128;

/// A batch, ready to go.
pub struct Plan {
    pub devices: Vec<Arc<dyn BlockDevice>>,
    pub segments: Vec<Segment>,
    pub buffers: Vec<Buffer>,
    pub checksum: ChecksumSpec,
}

struct Slot {
    piece: Piece,
    /// What the device moves, where something is done with it.
    memory: Option<Buffer>,
    verified: Verified,
}

#[derive(Default)]
struct State {
    cursor: Cursor,
    exhausted: bool,
    slots: Vec<Option<Slot>>,
    free: Vec<u32>,
    in_flight: usize,
    bounce_bytes: u64,
    pumping: bool,
    again: bool,
    /// And the segment in which it was, where it was in one of this batch.
    error: Option<(IoError, Option<usize>)>,
    finished: bool,
    /// Taken when the batch ends, so that the caller's memory is let go then and not when the transfer is dropped.
    buffers: Vec<Buffer>,
    /// Of a write whose checksums are wanted: where they go. Taken then, too.
    sums: Option<Buffer>,
    /// What begins when it has ended.
    next: Option<Next>,
}

/// Called once, by the thread that ended a batch, without its lock.
type Next = Box<dyn FnOnce(Result<(), IoError>) + Send>;

/// Gets each segment, by its index, when it was verified, on the thread that completed it: in any order, and from several
/// threads at once. The memory is the segment's own, and nobody else has it any more.
type Take = Box<dyn Fn(usize, Buffer) + Send + Sync>;

struct Shared {
    /// Itself, for pumping from a completion.
    this: Weak<Shared>,
    devices: Vec<Arc<dyn BlockDevice>>,
    block_bytes: Vec<u64>,
    segments: Vec<Segment>,
    checksum: ChecksumSpec,
    /// Blocks have checksums: of a read they are verified, of a write taken.
    verifies: bool,
    /// Of such a read: what the blocks should have; there before the first request is sent.
    expected: OnceLock<Vec<u32>>,
    /// Of such a read: each segment is one piece, in memory of its own, and goes here.
    take: Option<Take>,
    direction: Direction,
    window: usize,
    state: Mutex<State>,
    ended: Condvar,
}

/// A batch under way. Dropping it cancels nothing: what is under way ends by itself, with its buffers alive.
pub struct Transfer {
    shared: Arc<Shared>,
    /// What has to end before it begins.
    before: Weak<Shared>,
}

/// Read every segment of `plan`. With `checksums` (one a block, in segment order) every block is verified.
///
/// Fails at once, with nothing submitted, where [`check`] finds fault.
pub fn submit_read(plan: Plan, checksums: Option<Vec<u32>>) -> Result<Transfer, IoError> {
    let given = checksums.as_ref().map(Vec::len);
    let (shared, buffers) = Shared::new(plan, Direction::Read, given, None)?;
    if let Some(checksums) = checksums {
        shared.expect(checksums);
    }
    Ok(shared.start(buffers))
}

/// What is read, and verified, before the checksums of a batch are known.
pub struct Before {
    pub devices: Vec<Arc<dyn BlockDevice>>,
    /// Each is one checksum block. Of their place in a buffer nothing is looked at: each gets memory of its own, no more
    /// than [`BOUNCE_LIMIT_BYTES`] of it before it is read.
    pub segments: Vec<Segment>,
    pub checksum: ChecksumSpec,
    pub checksums: Vec<u32>,
    /// Where each segment goes; see [`Take`].
    pub take: Take,
}

/// Read all of `before`; when that has ended well, take the checksums of `plan` from `fill` and read that. The transfer is
/// that of `plan`; an error of `before` ends it, with no segment of its own.
///
/// Both are checked before anything is submitted.
pub fn submit_read_behind(
    before: Before,
    plan: Plan,
    fill: impl FnOnce() -> Vec<u32> + Send + 'static,
) -> Result<Transfer, IoError> {
    let count = |plan: &Plan| {
        let blocks = |segment: &Segment| plan.checksum.count(segment.length) as usize;
        plan.segments.iter().map(blocks).sum::<usize>()
    };
    let given = count(&plan);
    let (shared, buffers) = Shared::new(plan, Direction::Read, Some(given), None)?;
    let Before {
        devices,
        mut segments,
        checksum,
        checksums,
        take,
    } = before;
    for (index, segment) in segments.iter_mut().enumerate() {
        if segment.length > checksum.block_bytes {
            return Err(
                IoError::new(ErrorKind::Usage, "a segment of more than one checksum block")
                    .at(format!("segment {index}")),
            );
        }
        // Nothing of it goes to a buffer, so it is read whole into memory of its own.
        (segment.skip, segment.take) = (0, 0);
        (segment.buffer, segment.buffer_offset) = (0, 0);
    }
    let first = Plan {
        devices,
        segments,
        buffers: vec![Buffer::zeroed(0)],
        checksum,
    };
    let (first, none) = Shared::new(first, Direction::Read, Some(checksums.len()), Some(take))?;
    first.expect(checksums);
    let behind = shared.clone();
    first.lock().next = Some(Box::new(move |result| match result {
        Ok(()) => {
            behind.expect(fill());
            drop(behind.start(buffers));
        }
        Err(error) => {
            // Before the waiter is woken: when it looks, nothing holds the caller's memory any more. In `start` the batch
            // has them, and lets go of them before it says that it has ended (`finish_if_done`).
            drop(buffers);
            behind.give_up(error);
        }
    }));
    let before = Arc::downgrade(&first);
    first.start(none);
    Ok(Transfer { shared, before })
}

/// Write every segment of `plan`; the end of the last block is padded with zeros. `checksums` (4 bytes a block, native
/// byte order) is complete when the transfer has ended well: each block's is taken as it is sent, or where a device does not
/// tell of that, by the calling thread while the first requests are under way.
pub fn submit_write(mut plan: Plan, checksums: Option<&Buffer>) -> Result<Transfer, IoError> {
    for segment in &mut plan.segments {
        (segment.skip, segment.take) = (0, segment.length);
    }
    let given = checksums.map(|array| array.len() / 4);
    let (shared, buffers) = Shared::new(plan, Direction::Write, given, None)?;
    let mute = shared.devices.iter().any(|device| !device.tells_departures());
    let sources = checksums.filter(|_| mute).map(|array| (array, buffers.clone()));
    shared.lock().sums = checksums.cloned();
    let transfer = shared.start(buffers);
    if let Some((array, sources)) = sources {
        transfer.shared.compute(array, &sources);
    }
    Ok(transfer)
}

impl Shared {
    fn new(
        plan: Plan,
        direction: Direction,
        checksums: Option<usize>,
        take: Option<Take>,
    ) -> Result<(Arc<Self>, Vec<Buffer>), IoError> {
        let Plan {
            devices,
            mut segments,
            buffers,
            checksum,
        } = plan;
        let infos: Vec<_> = devices.iter().map(|device| device.info()).collect();
        let around = Surroundings {
            devices: &infos,
            buffers: &buffers,
            checksum,
            checksums,
            direction,
        };
        check(&mut segments, &around)?;
        let shared = Arc::new_cyclic(|this| Shared {
            this: this.clone(),
            window: MIN_WINDOW.max(WINDOW_PER_DEVICE * devices.len()),
            devices,
            block_bytes: infos.iter().map(|info| u64::from(info.block_bytes)).collect(),
            segments,
            checksum,
            verifies: checksums.is_some(),
            expected: OnceLock::new(),
            take,
            direction,
            state: Mutex::default(),
            ended: Condvar::new(),
        });
        Ok((shared, buffers))
    }

    /// What the blocks should have: as many as `check` counted.
    fn expect(&self, checksums: Vec<u32>) {
        // Once a batch: `start` comes behind it.
        let _ = self.expected.set(checksums);
    }

    /// End a batch that never began.
    fn give_up(&self, error: IoError) {
        let mut state = self.lock();
        state.error = Some((error, None));
        let next = self.finish_if_done(&mut state);
        self.go_on(state, next);
    }

    fn start(self: Arc<Self>, buffers: Vec<Buffer>) -> Transfer {
        self.lock().buffers = buffers;
        self.pump();
        Transfer {
            shared: self,
            before: Weak::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic under this lock is a defect that the test suite would show; the data behind it stay consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn cutter(&self) -> Cutter<'_> {
        Cutter {
            segments: &self.segments,
            block_bytes: &self.block_bytes,
            checksum_block_bytes: if self.verifies {
                self.checksum.block_bytes
            } else {
                0
            },
            direction: self.direction,
        }
    }

    /// `taken`: of a write, where the checksums go.
    fn verifier<'a>(&'a self, taken: Option<&'a Buffer>) -> Verifier<'a> {
        Verifier {
            segments: &self.segments,
            checksum: self.checksum,
            sums: match taken {
                Some(array) => Sums::Taken(array),
                // Where there are none, nothing matches.
                None => Sums::Expected(self.expected.get().map_or(&[][..], Vec::as_slice)),
            },
        }
    }

    /// The checksums of a write to this member are taken as it goes.
    fn takes(&self, segment: &Segment) -> bool {
        self.verifies && self.devices[segment.member as usize].tells_departures()
    }

    /// Submit as much as the window allows.
    fn pump(self: &Arc<Self>) {
        {
            let mut state = self.lock();
            if state.pumping {
                state.again = true;
                return;
            }
            state.pumping = true;
        }
        let mut requests: Vec<Vec<Request>> = self.devices.iter().map(|_| Vec::new()).collect();
        loop {
            {
                let mut state = self.lock();
                state.again = false;
                self.fill(&mut state, &mut requests);
            }
            for (device, requests) in self.devices.iter().zip(&mut requests) {
                if !requests.is_empty() {
                    device.submit(std::mem::take(requests));
                }
            }
            let mut state = self.lock();
            if !state.again {
                state.pumping = false;
                let next = self.finish_if_done(&mut state);
                self.go_on(state, next);
                return;
            }
        }
    }

    /// Cut pieces into requests until the window is full.
    fn fill(self: &Arc<Self>, state: &mut State, requests: &mut [Vec<Request>]) {
        let cutter = self.cutter();
        while !state.exhausted && state.error.is_none() && state.in_flight < self.window {
            let Some((piece, next)) = cutter.next(state.cursor) else {
                state.exhausted = true;
                break;
            };
            let bounce = if piece.bounced { piece.device_length } else { 0 };
            if bounce > 0 && state.bounce_bytes > 0 && state.bounce_bytes + bounce > BOUNCE_LIMIT_BYTES {
                break;
            }
            let segment = &self.segments[piece.segment];
            let memory = match self.memory(&piece, segment, &state.buffers) {
                Ok(memory) => memory,
                Err(error) => {
                    state.error = Some((error, Some(piece.segment)));
                    break;
                }
            };
            state.cursor = next;
            state.bounce_bytes += bounce;
            state.in_flight += 1;
            let kept = (self.direction == Direction::Read || self.takes(segment)).then(|| memory.clone());
            let slot = Some(Slot {
                piece,
                memory: kept,
                verified: Verified::default(),
            });
            let number = match state.free.pop() {
                Some(number) => {
                    state.slots[number as usize] = slot;
                    number
                }
                None => {
                    state.slots.push(slot);
                    (state.slots.len() - 1) as u32
                }
            };
            let op = match self.direction {
                Direction::Read => Op::Read { into: memory },
                Direction::Write => Op::Write {
                    from: memory,
                    fua: false,
                },
            };
            let offset = segment.offset + piece.start;
            let sink: Arc<dyn Sink> = self.clone();
            requests[segment.member as usize].push(Request {
                op,
                offset,
                token: u64::from(number),
                sink,
            });
        }
    }

    /// The memory that a piece moves to or from.
    fn memory(&self, piece: &Piece, segment: &Segment, buffers: &[Buffer]) -> Result<Buffer, IoError> {
        // `check` proved that the range is inside; an error here would be a defect of ours, and is not a crash.
        let inside = |start: usize, length: u64| {
            buffers[segment.buffer as usize]
                .slice(start, length as usize)
                .ok_or_else(|| {
                    IoError::new(ErrorKind::Failed, "a piece left its buffer")
                        .at(format!("segment {}", piece.segment))
                })
        };
        if !piece.bounced {
            return inside(segment.buffer_position(piece.start), piece.length);
        }
        let mut bounce = vec![0; piece.device_length as usize];
        if self.direction == Direction::Write {
            let source = inside(segment.buffer_position(piece.start), piece.length)?;
            source.copy_to(0, &mut bounce[..piece.length as usize]);
        }
        Ok(Buffer::from_vec(bounce))
    }

    /// Verify a piece that was read and hand its wanted part over; of one that was written, take its checksums.
    fn accept(
        &self,
        piece: &Piece,
        memory: &Buffer,
        verified: Verified,
        target: Option<&Buffer>,
        taken: Option<&Buffer>,
    ) -> Result<(), (IoError, usize)> {
        // SAFETY: the device gave the range up with the completion, and the waiter does not look before the end.
        let data = unsafe { memory.bytes() };
        if self.verifies {
            self.verifier(taken)
                .finish(piece, verified, &data[..piece.length as usize])?;
        }
        if let Some(take) = &self.take {
            let wanted = &data[..piece.length as usize];
            let own = if wanted.len() < data.len() {
                // Whoever keeps it must not keep the rest of a device's block, too.
                Some(Buffer::from_vec(wanted.to_vec()))
            } else {
                memory.slice(0, wanted.len())
            };
            if let Some(own) = own {
                take(piece.segment, own);
            }
        }
        if let Some(target) = target {
            let segment = &self.segments[piece.segment];
            let first = piece.start.max(segment.skip);
            let last = (piece.start + piece.length).min(segment.skip + segment.take);
            if first < last {
                let part = &data[(first - piece.start) as usize..(last - piece.start) as usize];
                target.copy_from(segment.buffer_position(first), part);
            }
        }
        Ok(())
    }

    /// Verify what has come of a piece, or take the checksums of what has gone, as far as that is without a gap. What does not
    /// match is left to `complete`, which verifies it again: it may come once more.
    fn moved(&self, token: u64, at: usize, count: usize) {
        let (piece, fresh, from, taken) = {
            let mut state = self.lock();
            let Some(Some(slot)) = state.slots.get_mut(token as usize) else {
                return;
            };
            let Some(memory) = &slot.memory else {
                return;
            };
            let (at, end) = (at as u64, at.saturating_add(count) as u64);
            let unit = self.checksum.block_bytes;
            let Some((from, bytes)) = slot.verified.come(at, end.min(slot.piece.length), unit) else {
                return;
            };
            let Some(fresh) = memory.slice(from.bytes() as usize, bytes as usize) else {
                return;
            };
            slot.verified = Verified::Now;
            (slot.piece, fresh, from, state.sums.clone())
        };
        // SAFETY: these bytes have come, and the thread that says so is the one that may let them come again. Those that went
        // nobody writes to.
        let result = self
            .verifier(taken.as_ref())
            .verify(&piece, from, unsafe { fresh.bytes() });
        drop((fresh, taken));
        let mut state = self.lock();
        if let Some(Some(slot)) = state.slots.get_mut(token as usize) {
            slot.verified.got(result.ok());
        }
    }

    /// Compute the checksums of a write into `array`, those that are not taken as it goes.
    fn compute(&self, array: &Buffer, sources: &[Buffer]) {
        for segment in self.segments.iter().filter(|segment| !self.takes(segment)) {
            let Some(source) = sources[segment.buffer as usize]
                .slice(segment.buffer_offset as usize, segment.length as usize)
            else {
                unreachable!("`check` bounded every segment by its buffer");
            };
            // SAFETY: the caller leaves the source alone until the transfer ends; devices only read it.
            let data = unsafe { source.bytes() };
            for (number, block) in data.chunks(self.checksum.block_bytes as usize).enumerate() {
                let number = number as u64;
                let sum = self
                    .checksum
                    .of(segment.birth, segment.first_block.wrapping_add(number), block);
                array.copy_from((segment.first_checksum + number) as usize * 4, &sum.to_ne_bytes());
            }
        }
    }

    /// The batch has ended where nothing is under way and nothing will be. Gives what begins then, for [`Self::go_on`].
    fn finish_if_done(&self, state: &mut State) -> Option<(Next, Result<(), IoError>)> {
        if !state.finished
            && state.in_flight == 0
            && !state.pumping
            && (state.exhausted || state.error.is_some())
        {
            state.finished = true;
            state.buffers = Vec::new();
            state.slots = Vec::new();
            state.sums = None;
            self.ended.notify_all();
            let result = state
                .error
                .as_ref()
                .map_or(Ok(()), |(error, _)| Err(error.clone()));
            return state.next.take().map(|next| (next, result));
        }
        None
    }

    fn go_on(&self, state: MutexGuard<'_, State>, next: Option<(Next, Result<(), IoError>)>) {
        drop(state);
        if let Some((next, result)) = next {
            next(result);
        }
    }
}

/// The sink of a batch is the batch itself: tokens are numbers of slots.
impl Sink for Shared {
    fn watches(&self) -> bool {
        self.verifies
    }

    fn arrived(&self, token: u64, at: usize, count: usize) {
        self.moved(token, at, count);
    }

    fn departed(&self, token: u64, at: usize, count: usize) {
        self.moved(token, at, count);
    }

    fn complete(&self, token: u64, result: Result<(), IoError>) {
        let (slot, target, taken) = {
            let mut state = self.lock();
            let slot = state.slots.get_mut(token as usize).and_then(Option::take);
            let Some(slot) = slot else {
                // A second completion of one request: a defect of the device, of which nothing may follow.
                return;
            };
            let copied = slot.piece.bounced && self.direction == Direction::Read;
            let target =
                copied.then(|| state.buffers[self.segments[slot.piece.segment].buffer as usize].clone());
            (slot, target, state.sums.clone())
        };
        let Slot {
            piece,
            memory,
            verified,
        } = slot;
        let result = match (result, &memory) {
            (Ok(()), Some(memory)) => self.accept(&piece, memory, verified, target.as_ref(), taken.as_ref()),
            (Ok(()), None) => Ok(()),
            (Err(error), _) => Err((error, piece.segment)),
        };
        drop((memory, target, taken));
        let mut state = self.lock();
        state.free.push(token as u32);
        state.in_flight -= 1;
        if piece.bounced {
            state.bounce_bytes -= piece.device_length;
        }
        if let Err(error) = result {
            let (error, segment) = error;
            state.error.get_or_insert((error, Some(segment)));
        }
        let more = !state.exhausted && state.error.is_none();
        // Wait until there is room for a handful, so that devices are woken for several requests at once.
        let room =
            state.in_flight <= self.window - self.window / 4 || state.bounce_bytes <= BOUNCE_LIMIT_BYTES / 2;
        if more && room && !state.pumping {
            drop(state);
            // Whoever completes a request holds its sink, so this cannot fail while requests are under way.
            if let Some(this) = self.this.upgrade() {
                this.pump();
            }
        } else {
            state.again |= more && state.pumping;
            let next = self.finish_if_done(&mut state);
            self.go_on(state, next);
        }
    }
}

impl Transfer {
    /// All segments ended, well or not.
    pub fn done(&self) -> bool {
        self.shared.lock().finished
    }

    /// Wait at most `timeout`; `None` when it passed, else the first error of the batch, if any.
    pub fn wait(&self, timeout: Duration) -> Option<Result<(), IoError>> {
        let deadline = Instant::now() + timeout;
        let mut state = self.shared.lock();
        while !state.finished {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            let ended = &self.shared.ended;
            state = ended
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        Some(
            state
                .error
                .as_ref()
                .map_or(Ok(()), |(error, _)| Err(error.clone())),
        )
    }

    /// One of its segments.
    pub fn segment(&self, index: usize) -> Option<Segment> {
        self.shared.segments.get(index).copied()
    }

    /// The segment of the first error; `None` where it was in none of this batch.
    pub fn failed_segment(&self) -> Option<usize> {
        self.shared
            .lock()
            .error
            .as_ref()
            .and_then(|(_, segment)| *segment)
    }
}

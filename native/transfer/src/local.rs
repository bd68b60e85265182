//! Local media as a block device: `file:`, `block:` and `mem:`.
//!
//! Media calls block, so a few threads of the device's own make them; `submit` only queues. There is no deadline here: the
//! kernel either answers or hangs the thread, and no code of ours can call such a thread back, nor the memory that it reads
//! into. How long the oldest call has been under way is in `describe`.

use crate::events::{monotonic_ns, status, NO_PATH};
use crate::{
    BlockDevice, Buffer, DeviceInfo, ErrorKind, Event, EventKind, IoError, Op, Recorded, Recorder, Request,
    Ring,
};
use headrace_media::{Fault, FaultKind, Media};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Requests may be of any length; this is only a hint for whoever cuts.
const MAX_TRANSFER_BYTES: u64 = 1 << 20;
/// Requests that wait, in one answer of `events`: the oldest.
const UNDER_WAY_MAX: usize = 4096;

#[derive(Default)]
struct Queue {
    /// With the moment at which each was handed over.
    waiting: VecDeque<(Instant, Request)>,
    /// Each call that is under way; the order is by worker and means nothing.
    running: Vec<Option<Event>>,
    closed: bool,
}

impl Queue {
    fn under_way(&self) -> bool {
        self.running.iter().any(Option::is_some)
    }
}

#[derive(Default)]
struct Counters {
    reads: AtomicU64,
    read_bytes: AtomicU64,
    writes: AtomicU64,
    written_bytes: AtomicU64,
    flushes: AtomicU64,
    errors: AtomicU64,
}

struct Inner {
    media: Box<dyn Media>,
    /// For messages and `describe`.
    transport: &'static str,
    address: String,
    queue: Mutex<Queue>,
    /// Signalled when something was queued, and when a worker went idle or the queue was closed.
    changed: Condvar,
    counters: Counters,
    recorder: Option<Mutex<Recorder>>,
    ring: Option<Arc<Ring>>,
}

/// What is asked for, as an event that began at `at`.
fn event(request: &Request, at: Instant) -> Event {
    let (kind, length) = match &request.op {
        Op::Read { into } => (EventKind::Read, into.len() as u64),
        Op::Write { from, .. } => (EventKind::Write, from.len() as u64),
        Op::Flush => (EventKind::Flush, 0),
        Op::Deallocate { length } => (EventKind::Other, *length),
    };
    Event {
        offset: request.offset,
        bytes: length.try_into().unwrap_or(u32::MAX),
        ..Event::new(kind, at, None)
    }
}

impl IoError {
    /// What media says of a failure, without the place.
    pub fn from_fault(fault: &Fault) -> IoError {
        let kind = match fault.kind {
            FaultKind::Usage => ErrorKind::Usage,
            FaultKind::Conflict => ErrorKind::Conflict,
            FaultKind::Gone => ErrorKind::Gone,
            FaultKind::Failed => ErrorKind::Failed,
        };
        IoError::new(kind, fault.what.as_str())
            .expected(fault.expected.as_str())
            .found(fault.found.as_str())
            .next(fault.next_step.as_str())
    }
}

/// A [`Media`] behind the [`BlockDevice`] interface.
pub struct MediaDevice {
    inner: Arc<Inner>,
    workers: Mutex<Vec<JoinHandle<()>>>,
}

impl MediaDevice {
    /// `transport`: "file", "block" or "memory"; `address`: what a person would call it. `workers`: how many media calls may be
    /// under way at a time. `events`: of its ring; 0: none.
    pub fn start(
        media: Box<dyn Media>,
        transport: &'static str,
        address: impl Into<String>,
        workers: usize,
        events: usize,
    ) -> Result<Arc<Self>, IoError> {
        let workers = workers.max(1);
        let queue = Queue {
            running: vec![None; workers],
            ..Queue::default()
        };
        let recorder = Recorder::new(events);
        let inner = Arc::new(Inner {
            media,
            transport,
            address: address.into(),
            queue: Mutex::new(queue),
            changed: Condvar::new(),
            counters: Counters::default(),
            ring: recorder.as_ref().map(Recorder::ring),
            recorder: recorder.map(Mutex::new),
        });
        let device = MediaDevice {
            inner: inner.clone(),
            workers: Mutex::default(),
        };
        for number in 0..workers {
            let inner = inner.clone();
            let worker = std::thread::Builder::new()
                .name(format!("headrace-{transport}-{number}"))
                .spawn(move || inner.work(number))
                .map_err(|error| {
                    IoError::new(ErrorKind::Failed, "cannot start a thread")
                        .at(&device.inner.address)
                        .found(error.to_string())
                })?;
            device.workers().push(worker);
        }
        Ok(Arc::new(device))
    }

    fn workers(&self) -> MutexGuard<'_, Vec<JoinHandle<()>>> {
        self.workers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self, number: usize) {
        let mut queue = self.queue();
        loop {
            let Some((_, request)) = queue.waiting.pop_front() else {
                if queue.closed {
                    return;
                }
                queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let begun = event(&request, Instant::now());
            queue.running[number] = Some(begun);
            drop(queue);
            let Request {
                op,
                offset,
                token,
                sink,
            } = request;
            let result = self.perform(op, offset);
            if result.is_err() {
                self.counters.errors.fetch_add(1, Ordering::Relaxed);
            }
            self.record(begun, result.is_ok());
            sink.complete(token, result);
            drop(sink);
            queue = self.queue();
            queue.running[number] = None;
            if queue.closed {
                self.changed.notify_all();
            }
        }
    }

    fn record(&self, begun: Event, success: bool) {
        let Some(recorder) = &self.recorder else { return };
        let event = Event {
            ended_ns: monotonic_ns(Instant::now()),
            status: if success { 0 } else { status::FAILED },
            ..begun
        };
        recorder
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .record(&event);
    }

    /// Do it, and let go of the buffer.
    fn perform(&self, op: Op, offset: u64) -> Result<(), IoError> {
        let counters = &self.counters;
        let (verb, result) = match op {
            Op::Read { into } => {
                self.check(offset, &into)?;
                counters.reads.fetch_add(1, Ordering::Relaxed);
                counters
                    .read_bytes
                    .fetch_add(into.len() as u64, Ordering::Relaxed);
                // SAFETY: the range is this request's alone until it completes (see `buffer`).
                ("read", self.media.read(offset, unsafe { into.bytes_mut() }))
            }
            Op::Write { from, fua } => {
                self.check(offset, &from)?;
                self.check_writable()?;
                counters.writes.fetch_add(1, Ordering::Relaxed);
                counters
                    .written_bytes
                    .fetch_add(from.len() as u64, Ordering::Relaxed);
                // SAFETY: the caller leaves the range alone until the request completes.
                ("write", self.media.write(offset, unsafe { from.bytes() }, fua))
            }
            Op::Flush => {
                counters.flushes.fetch_add(1, Ordering::Relaxed);
                (
                    "flush",
                    if self.media.read_only() {
                        Ok(())
                    } else {
                        self.media.flush()
                    },
                )
            }
            Op::Deallocate { length } => {
                self.check_range(offset, length)?;
                self.check_writable()?;
                ("deallocate", self.media.deallocate(offset, length))
            }
        };
        result.map_err(|error| {
            let place = format!("{}, offset {offset}", self.address);
            match Fault::of(&error) {
                Some(fault) => IoError::from_fault(fault).at(place),
                None => IoError::new(ErrorKind::Failed, format!("{verb} failed"))
                    .at(place)
                    .found(error.to_string()),
            }
        })
    }

    fn check(&self, offset: u64, buffer: &Buffer) -> Result<(), IoError> {
        self.check_range(offset, buffer.len() as u64)
    }

    fn check_range(&self, offset: u64, length: u64) -> Result<(), IoError> {
        let (size, block) = (self.media.size_bytes(), u64::from(self.media.block_bytes()));
        if offset % block != 0 || length % block != 0 {
            return Err(IoError::new(ErrorKind::Usage, "the request is not aligned")
                .at(&self.address)
                .expected(format!("multiples of {block}"))
                .found(format!("offset {offset}, length {length}")));
        }
        if offset.checked_add(length).is_none_or(|end| end > size) {
            return Err(IoError::new(ErrorKind::Usage, "the request leaves the device")
                .at(&self.address)
                .expected(format!("an end of at most {size}"))
                .found(format!("{offset} + {length}")));
        }
        Ok(())
    }

    fn check_writable(&self) -> Result<(), IoError> {
        if self.media.read_only() {
            return Err(
                IoError::new(ErrorKind::Usage, "the device is open for reading only").at(&self.address),
            );
        }
        Ok(())
    }

    fn closed(&self) -> IoError {
        IoError::new(ErrorKind::Closed, "the device is closed").at(&self.address)
    }
}

impl BlockDevice for MediaDevice {
    fn info(&self) -> DeviceInfo {
        let media = &self.inner.media;
        DeviceInfo {
            size_bytes: media.size_bytes(),
            block_bytes: media.block_bytes(),
            max_transfer_bytes: MAX_TRANSFER_BYTES,
            volatile_cache: media.volatile_cache(),
            read_only: media.read_only(),
        }
    }

    fn loss_count(&self) -> u64 {
        0
    }

    fn submit(&self, requests: Vec<Request>) {
        {
            let mut queue = self.inner.queue();
            if !queue.closed {
                let count = requests.len().min(queue.running.len());
                let now = Instant::now();
                queue
                    .waiting
                    .extend(requests.into_iter().map(|request| (now, request)));
                drop(queue);
                // As many as there is work for. Who else waits on it is `close`, and then nothing is queued any more.
                for _ in 0..count {
                    self.inner.changed.notify_one();
                }
                return;
            }
        }
        for request in requests {
            let Request { op, token, sink, .. } = request;
            drop(op);
            sink.complete(token, Err(self.inner.closed()));
        }
    }

    fn events(&self) -> Option<Recorded> {
        let ring = self.inner.ring.as_ref()?;
        let (mut running, waiting) = {
            let queue = self.inner.queue();
            let waiting = queue.waiting.iter().take(UNDER_WAY_MAX);
            let waiting = waiting.map(|(since, request)| Event {
                kind: EventKind::waiting(matches!(request.op, Op::Read { .. })),
                path: NO_PATH,
                ..event(request, *since)
            });
            let running = queue.running.iter().flatten().copied();
            (running.collect::<Vec<_>>(), waiting.collect::<Vec<_>>())
        };
        let mut found = ring.read(u64::MAX);
        // A call is recorded a moment before it is forgotten.
        let same = |a: &Event, b: &Event| {
            (a.started_ns, a.offset, a.kind as u8) == (b.started_ns, b.offset, b.kind as u8)
        };
        running.retain(|begun| !found.events.iter().any(|each| same(each, begun)));
        running.sort_by_key(|each| each.started_ns);
        found.events.extend(running);
        found.events.extend(waiting);
        Some(found)
    }

    fn describe(&self) -> serde_json::Value {
        let inner = &self.inner;
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &inner.counters;
        let (closed, oldest) = {
            let queue = inner.queue();
            (
                queue.closed,
                queue.running.iter().flatten().map(|each| each.started_ns).min(),
            )
        };
        serde_json::json!({
            "transport": inner.transport,
            "engine": inner.media.engine(),
            "direct": inner.media.direct(),
            "writes_through": inner.media.writes_through(),
            "address": inner.address,
            "state": if closed { "closed" } else { "open" },
            "oldest_call_s": oldest.map(|begun| monotonic_ns(Instant::now()).saturating_sub(begun) as f64 / 1e9),
            "associations_lost": 0,
            "counters": {
                "reads": count(&counters.reads),
                "read_bytes": count(&counters.read_bytes),
                "writes": count(&counters.writes),
                "written_bytes": count(&counters.written_bytes),
                "flushes": count(&counters.flushes),
                "errors": count(&counters.errors),
            },
        })
    }

    fn close(&self, timeout: Duration) {
        let deadline = Instant::now() + timeout;
        let me = std::thread::current().id();
        let mut workers = self.workers();
        // The last reference may be let go by a completion, on a worker: that one cannot wait for itself.
        let on_worker = workers.iter().any(|worker| worker.thread().id() == me);
        let rest: Vec<(Instant, Request)> = {
            let mut queue = self.inner.queue();
            queue.closed = true;
            self.inner.changed.notify_all();
            while !on_worker && (queue.under_way() || !queue.waiting.is_empty()) {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    break;
                }
                queue = self
                    .inner
                    .changed
                    .wait_timeout(queue, left)
                    .unwrap_or_else(PoisonError::into_inner)
                    .0;
            }
            queue.waiting.drain(..).collect()
        };
        for (_, request) in rest {
            let Request { op, token, sink, .. } = request;
            drop(op);
            sink.complete(token, Err(self.inner.closed()));
        }
        if on_worker {
            return;
        }
        let hung = self.inner.queue().under_way();
        for worker in workers.drain(..) {
            // A thread that hangs in the kernel cannot be joined without hanging too; it keeps what it needs alive.
            if !hung {
                let _ = worker.join();
            }
        }
    }
}

impl Drop for MediaDevice {
    fn drop(&mut self) {
        self.close(Duration::from_secs(5));
    }
}

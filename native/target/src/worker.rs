//! Threads that wait for media, so that reactors never do.
//!
//! Syncs (flush, FUA) can take seconds. They have their own line, and at most half of the threads (one at least) stand in
//! it, so that reads and plain writes pass by a slow disk's sync. With one thread there is no passing. Where both lines
//! have work they take turns: hosts that always have reads waiting keep nobody's flush waiting for ever, nor the other way.

use crate::gate::{Gate, Passage};
use crate::mailbox::{Done, Mailbox, Message};
use crate::memory::Buffer;
use crate::work::Work;
use headrace_wire::Status;
use std::collections::VecDeque;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;

pub(crate) struct Job {
    pub(crate) work: Work,
    pub(crate) gate: Arc<Gate>,
    /// Who waits for it; `None`: nobody.
    pub(crate) reply: Option<Reply>,
}

pub(crate) struct Reply {
    pub(crate) mailbox: Arc<Mailbox>,
    pub(crate) token: u64,
    pub(crate) slot: u16,
    pub(crate) generation: u32,
}

impl Reply {
    fn is(&self, other: &Reply) -> bool {
        Arc::ptr_eq(&self.mailbox, &other.mailbox)
            && (self.token, self.slot, self.generation) == (other.token, other.slot, other.generation)
    }

    pub(crate) fn send(self, status: Status, buffer: Option<Buffer>, value: u32) {
        self.mailbox.post(Message::Done(Done {
            token: self.token,
            slot: self.slot,
            generation: self.generation,
            status,
            buffer,
            value,
        }));
    }
}

struct Lines<T> {
    jobs: VecDeque<T>,
    syncs: VecDeque<T>,
    syncing: usize,
    sync_limit: usize,
    /// Whose turn it is where both lines have work.
    sync_next: bool,
    stopping: bool,
}

impl<T> Lines<T> {
    fn new(sync_limit: usize) -> Self {
        Lines {
            jobs: VecDeque::new(),
            syncs: VecDeque::new(),
            syncing: 0,
            sync_limit,
            sync_next: false,
            stopping: false,
        }
    }

    /// What a free thread does next, and whether it is a sync, which counts until `syncing` is lowered again.
    fn take(&mut self) -> Option<(T, bool)> {
        let sync_ready = self.syncing < self.sync_limit && !self.syncs.is_empty();
        if sync_ready && (self.sync_next || self.jobs.is_empty()) {
            self.sync_next = false;
            self.syncing += 1;
            return self.syncs.pop_front().map(|sync| (sync, true));
        }
        self.sync_next = true;
        self.jobs.pop_front().map(|job| (job, false))
    }
}

pub(crate) struct Workers {
    lines: Mutex<Lines<Job>>,
    wake: Condvar,
}

impl Workers {
    pub(crate) fn start(threads: usize) -> Result<(Arc<Self>, Vec<JoinHandle<()>>), String> {
        let workers = Arc::new(Workers {
            lines: Mutex::new(Lines::new((threads / 2).max(1))),
            wake: Condvar::new(),
        });
        let mut handles = Vec::with_capacity(threads);
        for index in 0..threads {
            let own = workers.clone();
            let spawned = std::thread::Builder::new()
                .name(format!("target-media-{index}"))
                .spawn(move || own.serve());
            match spawned {
                Ok(handle) => handles.push(handle),
                Err(error) => {
                    workers.stop();
                    handles.into_iter().for_each(|handle| drop(handle.join()));
                    return Err(format!("cannot start a media thread: {error}"));
                }
            }
        }
        Ok((workers, handles))
    }

    fn lines(&self) -> MutexGuard<'_, Lines<Job>> {
        self.lines.lock().unwrap_or_else(|e| e.into_inner())
    }

    pub(crate) fn submit(&self, job: Job) {
        let mut lines = self.lines();
        let line = if job.work.syncs() {
            &mut lines.syncs
        } else {
            &mut lines.jobs
        };
        line.push_back(job);
        drop(lines);
        self.wake.notify_one();
    }

    /// Take a job out of its line. `false`: it is at the media, or done.
    pub(crate) fn revoke(&self, who: &Reply) -> bool {
        let mut lines = self.lines();
        let Lines { jobs, syncs, .. } = &mut *lines;
        for line in [jobs, syncs] {
            let found = line
                .iter()
                .position(|job| job.reply.as_ref().is_some_and(|reply| reply.is(who)));
            if let Some(index) = found {
                line.remove(index);
                return true;
            }
        }
        false
    }

    /// Jobs that wait or run no more are dropped; those at the media end.
    pub(crate) fn stop(&self) {
        let mut lines = self.lines();
        lines.stopping = true;
        lines.jobs.clear();
        lines.syncs.clear();
        drop(lines);
        self.wake.notify_all();
    }

    /// Without threads: jobs wait until a test takes them, in whatever order it likes.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn idle() -> Arc<Self> {
        Arc::new(Workers {
            lines: Mutex::new(Lines::new(1)),
            wake: Condvar::new(),
        })
    }

    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn take_all(&self) -> Vec<Job> {
        let mut lines = self.lines();
        let mut jobs: Vec<Job> = lines.jobs.drain(..).collect();
        jobs.extend(lines.syncs.drain(..));
        jobs
    }

    fn next(&self) -> Option<(Job, bool)> {
        let mut lines = self.lines();
        loop {
            if lines.stopping {
                return None;
            }
            if let Some(taken) = lines.take() {
                return Some(taken);
            }
            lines = self.wake.wait(lines).unwrap_or_else(|e| e.into_inner());
        }
    }

    fn serve(&self) {
        while let Some((job, sync)) = self.next() {
            // A panic in one command must not end the thread that others wait for; its command is answered with an error.
            run(job);
            if sync {
                self.lines().syncing -= 1;
                self.wake.notify_one();
            }
        }
    }
}

fn run(job: Job) {
    if let Some(running) = job.begin() {
        running.finish();
    }
}

/// A job that is at the media.
pub(crate) struct Running {
    work: Work,
    reply: Option<Reply>,
    passage: Passage,
}

impl Job {
    /// `None`: its connection is dead, and it never gets to the media.
    pub(crate) fn begin(self) -> Option<Running> {
        let passage = self.gate.enter()?;
        Some(Running {
            work: self.work,
            reply: self.reply,
            passage,
        })
    }
}

impl Running {
    pub(crate) fn finish(self) {
        let Running {
            mut work,
            reply,
            passage,
        } = self;
        let status = catch_unwind(AssertUnwindSafe(|| work.run())).unwrap_or(Status::INTERNAL_ERROR);
        drop(passage);
        if let Some(reply) = reply {
            reply.send(status, work.into_data(), 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads that never stop coming, and one flush: it is done all the same. And the other way.
    #[test]
    fn neither_line_waits_for_ever() {
        let mut lines = Lines::new(1);
        lines.syncs.push_back("flush");
        lines.jobs.extend(["read"; 4]);
        let mut done = Vec::new();
        for _ in 0..4 {
            let (what, sync) = lines.take().unwrap();
            done.push(what);
            lines.jobs.push_back("read");
            lines.syncing -= usize::from(sync);
        }
        assert!(done.contains(&"flush"), "{done:?}");

        let mut lines = Lines::new(1);
        lines.jobs.push_back("read");
        lines.syncs.extend(["flush"; 4]);
        assert_eq!(
            (0..2).map(|_| lines.take().unwrap().0).collect::<Vec<_>>(),
            ["read", "flush"]
        );
        // The one thread that may sync is at it; nothing else is there to do.
        assert!(lines.take().is_none());
        lines.jobs.push_back("read");
        assert_eq!(lines.take(), Some(("read", false)));
    }
}

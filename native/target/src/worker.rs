//! Threads that wait for media, so that reactors never do.
//!
//! Syncs (flush, FUA) can take seconds. They have their own line, and at most half of the threads (one at least) stand in
//! it, so that reads and plain writes pass by a slow disk's sync. With one thread there is no passing.

use crate::gate::Gate;
use crate::mailbox::{Done, Mailbox, Message};
use crate::nvm::Work;
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

#[derive(Default)]
struct Lines {
    jobs: VecDeque<Job>,
    syncs: VecDeque<Job>,
    syncing: usize,
    stopping: bool,
}

pub(crate) struct Workers {
    lines: Mutex<Lines>,
    wake: Condvar,
    sync_limit: usize,
}

impl Workers {
    pub(crate) fn start(threads: usize) -> Result<(Arc<Self>, Vec<JoinHandle<()>>), String> {
        let workers = Arc::new(Workers {
            lines: Mutex::default(),
            wake: Condvar::new(),
            sync_limit: (threads / 2).max(1),
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

    fn lines(&self) -> MutexGuard<'_, Lines> {
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

    /// Jobs that wait or run no more are dropped; those at the media end.
    pub(crate) fn stop(&self) {
        let mut lines = self.lines();
        lines.stopping = true;
        lines.jobs.clear();
        lines.syncs.clear();
        drop(lines);
        self.wake.notify_all();
    }

    fn next(&self) -> Option<(Job, bool)> {
        let mut lines = self.lines();
        loop {
            if lines.stopping {
                return None;
            }
            if let Some(job) = lines.jobs.pop_front() {
                return Some((job, false));
            }
            if lines.syncing < self.sync_limit {
                if let Some(job) = lines.syncs.pop_front() {
                    lines.syncing += 1;
                    return Some((job, true));
                }
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
    let Job {
        mut work,
        gate,
        reply,
    } = job;
    let Some(passage) = gate.enter() else { return };
    let status =
        catch_unwind(AssertUnwindSafe(|| work.run())).unwrap_or(headrace_wire::Status::INTERNAL_ERROR);
    drop(passage);
    if let Some(Reply {
        mailbox,
        token,
        slot,
        generation,
    }) = reply
    {
        let buffer = work.into_data();
        mailbox.post(Message::Done(Done {
            token,
            slot,
            generation,
            status,
            buffer,
        }));
    }
}

//! Where reservation commands of one namespace are carried out: one after another, on a thread that exists only while
//! there are some. They wait for a file to be synced and for commands of preempted hosts to leave the media.

use super::rules::Effects;
use super::Claim;
use crate::connection::Connection;
use crate::controller::Controller;
use crate::gate::Gate;
use crate::shared::Shared;
use crate::view::Reach;
use crate::worker::Reply;
use headrace_wire::command::feature;
use headrace_wire::reservation::{AcquireAction, Change};
use headrace_wire::{admin, Sqe, Status};
use std::collections::VecDeque;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a preempt and abort waits for what preempted hosts have at the media. Shorter than a host's usual patience.
pub(crate) const ABORT_LIMIT: Duration = Duration::from_secs(5);

pub(crate) enum Request {
    Change(Change),
    /// PTPL by Set Features.
    Persist(bool),
}

struct Job {
    request: Request,
    claim: Claim,
    gate: Arc<Gate>,
    reply: Reply,
    shared: Arc<Shared>,
}

#[derive(Default)]
pub(crate) struct Desk(Mutex<Line>);

#[derive(Default)]
struct Line {
    jobs: VecDeque<Job>,
    /// The thread that serves the line; another one only when this one has left it.
    thread: Option<JoinHandle<()>>,
    serving: bool,
    stopping: bool,
    /// No thread: a simulation serves the line by hand.
    held: bool,
}

impl Desk {
    fn line(&self) -> MutexGuard<'_, Line> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn submit(&self, job: Job) -> Result<(), Status> {
        let mut line = self.line();
        if line.stopping {
            return Ok(());
        }
        if !line.serving && !line.held {
            let namespace = job.claim.namespace.clone();
            let thread = std::thread::Builder::new()
                .name(format!("target-reservation-{}", namespace.nsid))
                .spawn(move || namespace.reservations.desk.serve())
                .map_err(|_| Status::INTERNAL_ERROR)?;
            // The last one has left the line, so this takes no time.
            if let Some(last) = line.thread.replace(thread) {
                let _ = last.join();
            }
            line.serving = true;
        }
        line.jobs.push_back(job);
        Ok(())
    }

    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn hold(&self) {
        self.line().held = true;
    }

    pub(crate) fn serve(&self) {
        loop {
            let job = {
                let mut line = self.line();
                let job = line.jobs.pop_front();
                line.serving = job.is_some();
                job
            };
            let Some(job) = job else { return };
            self.carry_out(job);
        }
    }

    fn carry_out(&self, job: Job) {
        // A lost association's commands change nothing any more.
        let Some(passage) = job.gate.enter() else { return };
        let reservations = &job.claim.reservations;
        let result = catch_unwind(AssertUnwindSafe(|| match &job.request {
            Request::Change(change) => reservations.change(job.claim.host(), change),
            Request::Persist(persist) => reservations.set_persist(*persist).map(|()| Effects::default()),
        }));
        // Before the wait: who waits for this host must not wait for its waiting.
        drop(passage);
        let status = match result {
            Ok(Ok(effects)) => self.follow(&job, &effects),
            Ok(Err(status)) => status,
            Err(_) => Status::INTERNAL_ERROR,
        };
        job.reply.send(status, None, 0);
    }

    /// The state is changed: tell whom it concerns, and wait for what must be through.
    fn follow(&self, job: &Job, effects: &Effects) -> Status {
        let subsystem = &job.claim.controller().subsystem;
        for controller in job.shared.registry.all() {
            if Arc::ptr_eq(&controller.subsystem, subsystem) {
                for (_, kind) in effects
                    .notices
                    .iter()
                    .filter(|(host, _)| *host == controller.host)
                {
                    controller.notice(job.claim.nsid, *kind);
                }
            }
        }
        if effects.abort.is_empty() {
            return Status::SUCCESS;
        }
        let until = Instant::now() + ABORT_LIMIT;
        let gates = job.shared.registry.gates(|host| effects.abort.contains(host));
        let stopping = || self.line().stopping;
        if gates.iter().all(|gate| gate.wait_out(until, stopping)) {
            return Status::SUCCESS;
        }
        job.shared.note(format!(
            "namespace {}: preempted hosts still have commands at the media after {ABORT_LIMIT:?}",
            job.claim.nsid
        ));
        // Shut out they are; "success" would say that nothing of theirs can land any more. Trying again proves nothing.
        Status::INTERRUPTED.do_not_retry()
    }

    /// Jobs that wait are dropped. `false`: the thread is still at one.
    pub(crate) fn stop(&self, until: Instant) -> bool {
        let thread = {
            let mut line = self.line();
            line.stopping = true;
            line.jobs.clear();
            line.thread.take()
        };
        let Some(thread) = thread else { return true };
        while !thread.is_finished() {
            if Instant::now() >= until {
                self.line().thread = Some(thread);
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        thread.join().is_ok()
    }
}

/// Set Features 83h is for the desk, since it syncs a file; `None`: another command.
pub(crate) fn persistence_feature(
    sqe: &Sqe,
    controller: &Arc<Controller>,
) -> Result<Option<(Claim, Request)>, Status> {
    const SAVE: u32 = 1 << 31;
    if controller.subsystem.discovery
        || sqe.opcode() != admin::SET_FEATURES
        || sqe.cdw(10) & (SAVE | 0xFF) != u32::from(feature::RESERVATION_PERSISTENCE)
    {
        return Ok(None);
    }
    let reach = Reach::new(controller, controller.portal);
    let namespace = reach.namespace(sqe.nsid())?;
    if !reach.may_write(namespace) {
        return Err(Status::WRITE_PROTECTED.do_not_retry());
    }
    let claim = Claim::new(namespace, controller, None)?;
    Ok(Some((claim, Request::Persist(sqe.cdw(11) & 1 != 0))))
}

impl Connection {
    /// The command in `slot` goes to the namespace's desk.
    pub(crate) fn submit_to_desk(&mut self, slot: u16, claim: Claim, request: Request) -> Result<(), Status> {
        if let Request::Change(
            change @ Change::Acquire {
                action: AcquireAction::Preempt | AcquireAction::PreemptAndAbort,
                ..
            },
        ) = &request
        {
            let host = &claim.host().hostnqn;
            self.shared
                .note(format!("{}: {host} preempts: {change:x?}", self.peer));
        }
        let namespace = claim.namespace.clone();
        namespace.reservations.desk.submit(Job {
            request,
            claim,
            gate: self.gate.clone(),
            reply: self.reply(slot),
            shared: self.shared.clone(),
        })
    }
}

//! What the controller tells by itself (Base Specification 5.1.2), and what we ask now and then in case it did not.
//!
//! ```text
//!  Asynchronous Event Requests ----> event ----> its log page, RAE 0 ----> the namespace, the ANA log ----> Event
//!      (as many as AERL allows,        |           (which lets the next                                       |
//!       at most AERS_MAX)              |            event of its kind out)                                    v
//!                                      +-- sent again at once                                     take_events, Core
//!  every `reconcile`: the same looks, without an event. Events get lost: a controller that was busy, or that masked a page
//!  nobody read again, says nothing for ever.
//! ```
//!
//! One look at a time is under way, each with the deadline of any command. A look that fails with a status changes
//! nothing: the next reconcile repeats it. A controller that floods us with events is heard [`EVENTS_MAX`] times a
//! [`WINDOW`]; then its requests stay away until the window is over.

use super::{Association, Failure, Step, Tag};
use crate::facts::{Ana, Facts};
use crate::queue::{Completion, Data, End};
use headrace_transfer::{Buffer, IoError};
use headrace_wire::ana::{AnaLog, GROUPS_ONLY};
use headrace_wire::command::NSID_ALL;
use headrace_wire::event::{async_event_request, config, kind, notice, AsyncEvent, ChangedNamespaces};
use headrace_wire::identify::{cns, IDENTIFY_BYTES};
use headrace_wire::log::{get_log_page, lid, with_lsp};
use headrace_wire::{admin, Sqe, Status};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Asynchronous Event Requests that we keep with the controller.
const AERS_MAX: u8 = 4;
const EVENTS_MAX: u32 = 32;
const WINDOW: Duration = Duration::from_secs(1);
/// Events that nobody has taken yet; the oldest go.
const UNHEARD_MAX: usize = 64;
/// Most of an ANA log that we read: 8190 groups.
const ANA_LOG_MAX: u64 = 256 * 1024;
/// What is read of a page only to let its next event out.
const PAGE_BYTES: u32 = 512;

/// For the owner of the association.
#[derive(Debug)]
pub(crate) enum Event {
    /// What the namespace is now; the association's facts say so, too.
    NamespaceChanged(Box<Facts>),
    /// It is no more, or nothing that we can use.
    NamespaceGone(IoError),
    /// The state of the namespace's ANA group on this controller, or its group, is another.
    AnaChanged(Ana),
    DiscoveryChanged,
    /// The critical warning of the SMART log, as bits.
    Health(u8),
    /// Heard, and nothing follows for us.
    Noted(AsyncEvent),
}

/// What an admin command in the background asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Look {
    /// The changed namespace list.
    Changed,
    Namespace,
    Descriptors,
    Ana,
    /// A page that only has to be read; SMART also tells its warning.
    Page(u8),
}

#[derive(Default)]
pub(crate) struct Watch {
    /// Requests that the controller may hold, and holds.
    limit: u8,
    held: u8,
    events: VecDeque<Event>,
    looks: VecDeque<Look>,
    looking: bool,
    reconcile_at: Option<Instant>,
    /// Events since the window began.
    window: Option<Instant>,
    count: u32,
    resume_at: Option<Instant>,
    /// The namespace while its descriptors are still to come.
    candidate: Option<Facts>,
}

impl Watch {
    pub fn wake_at(&self) -> Option<Instant> {
        self.reconcile_at.into_iter().chain(self.resume_at).min()
    }

    fn tell(&mut self, event: Event) {
        if self.events.len() == UNHEARD_MAX {
            self.events.pop_front();
        }
        self.events.push_back(event);
    }

    fn want(&mut self, look: Look) {
        if !self.looks.contains(&look) {
            self.looks.push_back(look);
        }
    }
}

/// Which events we ask for, of those that OAES offers; with the SMART warnings, which have no bit there.
pub(super) fn wanted(oaes: u32) -> u32 {
    config::SMART | oaes & (config::NAMESPACE_ATTRIBUTE | config::ANA | config::DISCOVERY)
}

impl Association {
    /// What happened since it was last asked.
    pub fn take_events(&mut self) -> VecDeque<Event> {
        std::mem::take(&mut self.watch.events)
    }

    /// A command was told of an ANA state: what does the log say?
    pub fn ask_ana(&mut self, now: Instant) {
        if self.facts.ana.is_some() {
            self.watch.want(Look::Ana);
            self.look(now);
        }
    }

    /// The bring-up is over.
    pub(super) fn run(&mut self, now: Instant) -> Result<(), Failure> {
        self.step = Step::Running;
        self.watch.limit = self.facts.aerl.saturating_add(1).min(AERS_MAX);
        self.watch.reconcile_at = Some(now + self.options.reconcile);
        self.listen(now);
        Ok(())
    }

    /// Leave requests with the controller, without a deadline: it answers when something happens.
    fn listen(&mut self, now: Instant) {
        while self.watch.held < self.watch.limit && self.watch.resume_at.is_none() {
            let sqe = async_event_request(0);
            if self.submit(0, sqe, Data::None, Tag::Event, None).is_err() {
                // The admin queue is full of commands that have deadlines; the reconcile comes back here.
                self.watch.resume_at = Some(now + WINDOW);
                return;
            }
            self.watch.held += 1;
        }
    }

    /// A request came back.
    pub(super) fn heard(&mut self, completion: &Completion<Tag>, now: Instant) {
        self.watch.held = self.watch.held.saturating_sub(1);
        let End::Answer(cqe) = completion.end else {
            return;
        };
        if !cqe.status.is_success() {
            // More than it takes, or it takes none; in a shutdown it gives them back.
            self.watch.limit = self.watch.held;
            return;
        }
        if self.step != Step::Running {
            return;
        }
        if self.watch.window.is_none_or(|began| now - began >= WINDOW) {
            self.watch.window = Some(now);
            self.watch.count = 0;
        }
        self.watch.count += 1;
        if self.watch.count >= EVENTS_MAX {
            self.watch.resume_at = Some(now + WINDOW);
        }
        let event = AsyncEvent::from_dw0(cqe.dw0);
        match (event.kind, event.info, event.lid) {
            (kind::NOTICE, notice::NAMESPACE_ATTRIBUTE, _) => self.watch.want(Look::Changed),
            (kind::NOTICE, notice::ANA, _) => self.watch.want(Look::Ana),
            (kind::NOTICE, notice::DISCOVERY, _) => {
                self.watch.tell(Event::DiscoveryChanged);
                self.watch.want(Look::Page(lid::DISCOVERY));
            }
            (kind::SMART, ..) => self.watch.want(Look::Page(lid::SMART)),
            _ => {
                self.watch.tell(Event::Noted(event));
                if event.lid != 0 {
                    self.watch.want(Look::Page(event.lid));
                }
            }
        }
        self.listen(now);
    }

    /// Begin the next look, if none is under way.
    pub(super) fn look(&mut self, now: Instant) {
        if self.watch.looking || self.step != Step::Running {
            return;
        }
        let Some(look) = self.watch.looks.pop_front() else {
            return;
        };
        let nsid = self.facts.nsid;
        let identify = |cns: u8| Sqe::new(admin::IDENTIFY, 0, nsid).with_cdw(10, cns.into());
        let (sqe, length) = match look {
            Look::Changed => {
                let length = ChangedNamespaces::BYTES;
                let lid = lid::CHANGED_NAMESPACES;
                (get_log_page(0, NSID_ALL, lid, 0, length as u32), length)
            }
            Look::Namespace => (identify(cns::NAMESPACE), IDENTIFY_BYTES),
            Look::Descriptors => (identify(cns::NAMESPACE_DESCRIPTORS), IDENTIFY_BYTES),
            Look::Ana => self.ana_log(),
            Look::Page(lid) => (get_log_page(0, NSID_ALL, lid, 0, PAGE_BYTES), PAGE_BYTES as usize),
        };
        let data = Data::Read(Buffer::zeroed(length));
        let deadline = now + self.options.io_timeout;
        match self.submit(0, sqe, data, Tag::Look(look), Some(deadline)) {
            Ok(()) => self.watch.looking = true,
            // Full: what is under way there ends by its deadline, and the reconcile asks again.
            Err(_) => self.watch.looks.clear(),
        }
    }

    /// Groups without their namespaces: its length is known beforehand. A controller that lists them all the same is
    /// given room for as many as it has, within our bound.
    pub(super) fn ana_log(&self) -> (Sqe, usize) {
        let facts = &self.facts;
        let groups = u64::from(facts.nanagrpid.max(1)) * AnaLog::GROUP_BYTES as u64;
        let most = ANA_LOG_MAX.min(facts.mdts_bytes.unwrap_or(u64::MAX));
        let names = 4 * u64::from(facts.namespaces_max.min(1024));
        let length = (AnaLog::HEADER_BYTES as u64 + groups + names).min(most) & !3;
        let sqe = get_log_page(0, NSID_ALL, lid::ANA, 0, length as u32);
        (with_lsp(sqe, GROUPS_ONLY), length as usize)
    }

    pub(super) fn looked(&mut self, look: Look, completion: Completion<Tag>, now: Instant) {
        self.watch.looking = false;
        let status = match completion.end {
            End::Answer(cqe) => cqe.status,
            // Bytes that cannot be trusted say nothing.
            End::Short { .. } | End::DataDigest => Status::DATA_TRANSFER_ERROR,
        };
        let bytes = match &completion.data {
            Data::Read(buffer) if status.is_success() => {
                let mut bytes = vec![0; buffer.len()];
                buffer.copy_to(0, &mut bytes);
                Some(bytes)
            }
            _ => None,
        };
        match (look, bytes) {
            (Look::Changed, Some(bytes)) => {
                let changed = ChangedNamespaces::decode(&bytes);
                let ours = changed.contains(self.facts.nsid);
                self.watch.looks.extend(ours.then_some(Look::Namespace));
            }
            (Look::Namespace, Some(bytes)) => {
                let mut facts = self.facts.clone();
                match facts.namespace(&bytes, &self.options) {
                    Ok(()) => {
                        self.watch.candidate = Some(facts);
                        self.watch.looks.push_front(Look::Descriptors);
                    }
                    Err(error) => self.watch.tell(Event::NamespaceGone(error)),
                }
            }
            (Look::Namespace, None) if Status::new(status.sct, status.sc) == Status::INVALID_NAMESPACE => {
                let error = crate::errors::namespace_missing(&self.options, &status.to_string());
                self.watch.tell(Event::NamespaceGone(error));
            }
            (Look::Descriptors, bytes) => self.compare(bytes),
            (Look::Ana, Some(bytes)) => {
                if let Some(log) = AnaLog::decode(&bytes) {
                    self.heed_ana(&log);
                }
            }
            (Look::Page(lid::SMART), Some(bytes)) => self.watch.tell(Event::Health(bytes[0])),
            _ => {}
        }
        self.look(now);
    }

    /// What the namespace was, and what it is now.
    fn compare(&mut self, descriptors: Option<Vec<u8>>) {
        let Some(mut now) = self.watch.candidate.take() else {
            return;
        };
        match descriptors {
            Some(bytes) => now.descriptors(&bytes),
            // Optional in old controllers.
            None => now.ids.uuid = self.facts.ids.uuid,
        }
        if let (Some(was), Some(ana)) = (self.facts.ana, &mut now.ana) {
            if was.group == ana.group {
                *ana = was;
            } else {
                self.watch.want(Look::Ana);
            }
        }
        if now != self.facts {
            self.facts = now.clone();
            self.watch.tell(Event::NamespaceChanged(Box::new(now)));
        }
    }

    pub(super) fn heed_ana(&mut self, log: &AnaLog) {
        let Some(was) = self.facts.ana else {
            return;
        };
        // A group that the log leaves out has no state; then the controller's statuses decide.
        let now = Ana {
            group: was.group,
            state: log.group(was.group).map(|group| group.state),
            chgcnt: log.chgcnt,
        };
        self.facts.ana = Some(now);
        if (was.group, was.state) != (now.group, now.state) {
            self.watch.tell(Event::AnaChanged(now));
        }
    }

    /// What is due. Commands that are queued here are sent by the caller.
    pub(super) fn tick_watch(&mut self, now: Instant) {
        if self.step != Step::Running {
            return;
        }
        if self.watch.resume_at.is_some_and(|at| at <= now) {
            self.watch.resume_at = None;
            self.listen(now);
        }
        if self.watch.reconcile_at.is_some_and(|at| at <= now) {
            self.watch.reconcile_at = Some(now + self.options.reconcile);
            if self.facts.events & config::NAMESPACE_ATTRIBUTE != 0 {
                self.watch.want(Look::Changed);
            }
            self.watch.want(Look::Namespace);
            if self.facts.ana.is_some() {
                self.watch.want(Look::Ana);
            }
        }
        self.look(now);
    }
}

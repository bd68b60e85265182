//! A cap on the bytes of reads under way, so that many targets do not drown one link.
//!
//! # Why
//!
//! What is asked for arrives. Sixteen targets that each answer one read of 1 MiB send 16 MiB at once towards one port of a
//! switch that holds some hundred KiB; what does not fit is dropped, and some connections wait for a retransmission timer,
//! two hundred milliseconds, while the others go on ("incast"). TCP cannot prevent it: each connection sees only
//! itself. The reader can: it knows how much it has asked for, of whom, and how long it took.
//!
//! # What
//!
//! ```text
//!   a read is about to be sent --> admit? --- yes --> under way --> done(round trip) --> delay --> window
//!                                    | no                              |
//!                                    v                                 v
//!                                  turns  <----------------------- room again: next
//! ```
//!
//! * [`delay`]: what of the round trips is waiting that all devices share. * [`window`]: how much may be under way.
//! * [`turns`]: who may send when there is room. * [`table`], [`node`]: the other processes of this user on this node.
//!
//! One device alone is not held back: one connection is TCP's own business, and there is nobody to share with. (A device's
//! traffic classes have connections of their own, and count as devices here.) Writes are not counted: the target takes them
//! at its pace, and the socket holds them back. Reads of some KiB, of a device that has hardly anything under way, always
//! pass: metadata never wait behind data.
//!
//! Nobody is ever stuck: a process with nothing under way may always send one read, so whoever is held back has an answer
//! to come that lets it go on. No clock, no socket and no thread here; time comes with the calls.

mod delay;
mod node;
mod table;
mod turns;
mod window;

use delay::Base;
use node::Node;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use table::{Others, Slot};
use turns::Turns;
use window::Window;

/// A device with no more than this under way, the read included, is never held back.
const SMALL_BYTES: u64 = 64 << 10;
const EPOCH_MIN: Duration = Duration::from_millis(10);
const EPOCH_MAX: Duration = Duration::from_secs(1);
/// How long a window is good for after the last time that it was needed.
const FRESH: Duration = Duration::from_secs(5);

/// What a user wants of the cap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Inflight {
    /// Adapts to round trips.
    #[default]
    Auto,
    /// Adapts, and never more than this on the node.
    AtMost(u64),
    Off,
}

/// For `describe`.
#[derive(Clone, Debug, Default)]
pub(crate) struct Report {
    pub place: Option<Result<String, String>>,
    pub governed: bool,
    pub window: u64,
    pub in_flight: u64,
    pub delay: Duration,
    pub others: Others,
    pub devices: u32,
    pub held_back: u64,
}

impl Report {
    pub fn describe(&self, mode: Inflight) -> serde_json::Value {
        let (shared, alone) = match &self.place {
            Some(Ok(place)) => (Some(place.as_str()), None),
            Some(Err(reason)) => (None, Some(reason.as_str())),
            None => (None, Some("nothing was read yet")),
        };
        serde_json::json!({
            "mode": match mode {
                Inflight::Auto => "auto".into(),
                Inflight::AtMost(bytes) => bytes.to_string(),
                Inflight::Off => "off".to_string(),
            },
            "governed": self.governed && mode != Inflight::Off,
            "window_bytes": self.window,
            "in_flight_bytes": self.in_flight,
            "shared_delay_us": self.delay.as_micros() as u64,
            "held_back": self.held_back,
            "devices": self.devices,
            "other_processes": self.others.processes,
            "other_in_flight_bytes": self.others.in_flight,
            "shared_in": shared,
            "not_shared_because": alone,
        })
    }
}

struct Flow {
    owner: usize,
    mode: Inflight,
    in_flight: u64,
    base: Base,
    /// Least waiting of this epoch.
    least: Option<Duration>,
    waiting: bool,
}

/// The cap of one I/O thread.
pub(crate) struct Governor {
    flows: Vec<Option<Flow>>,
    window: Window,
    turns: Turns,
    node: Node,
    nonce: u64,
    others: Others,
    /// The smallest that a device was opened with.
    cap: Option<u64>,
    /// Under way of devices that are not `Off`.
    in_flight: u64,
    /// Devices with something under way or waiting.
    active: u32,
    /// The most of both in this epoch: at its end, which an answer brings, there may be nothing for a moment.
    peak: (u64, u32),
    governed: bool,
    governed_at: Option<Instant>,
    limited: bool,
    epoch_began: Option<Instant>,
    epoch_ends: Option<Instant>,
    epoch: Duration,
    shortest: Duration,
    delays: Vec<Duration>,
    held_back: u64,
    report: Arc<Mutex<Report>>,
}

impl Governor {
    pub fn new(nonce: u64) -> Self {
        Self::with(Node::new(nonce), nonce)
    }

    fn with(node: Node, nonce: u64) -> Self {
        Governor {
            flows: Vec::new(),
            window: Window::new(),
            turns: Turns::default(),
            node,
            nonce,
            others: Others::default(),
            cap: None,
            in_flight: 0,
            active: 0,
            peak: (0, 0),
            governed: false,
            governed_at: None,
            limited: false,
            epoch_began: None,
            epoch_ends: None,
            epoch: EPOCH_MIN,
            shortest: Duration::MAX,
            delays: Vec::new(),
            held_back: 0,
            report: Arc::default(),
        }
    }

    /// What `describe` shows; as of the last epoch.
    pub fn report(&self) -> Arc<Mutex<Report>> {
        self.report.clone()
    }

    /// A device comes; the number by which it is known here until [`Governor::leave`].
    pub fn join(&mut self, owner: usize, mode: Inflight) -> usize {
        let free = self.flows.iter().position(Option::is_none);
        let flow = free.unwrap_or(self.flows.len());
        if free.is_none() {
            self.flows.push(None);
        }
        self.flows[flow] = Some(Flow {
            owner,
            mode,
            in_flight: 0,
            base: Base::new(),
            least: None,
            waiting: false,
        });
        self.find_cap();
        flow
    }

    /// Nothing of `flow` is under way or waits any more.
    pub fn reset(&mut self, flow: usize) {
        self.turns.forget(flow);
        if let Some(Some(it)) = self.flows.get_mut(flow) {
            if it.mode != Inflight::Off && (it.in_flight > 0 || it.waiting) {
                self.active -= 1;
            }
            self.in_flight -= it.in_flight;
            it.in_flight = 0;
            it.waiting = false;
        }
    }

    pub fn leave(&mut self, flow: usize) {
        self.reset(flow);
        if let Some(it) = self.flows.get_mut(flow) {
            *it = None;
            self.find_cap();
        }
    }

    /// Whether a read of so many bytes may be sent now; it counts as sent then. Otherwise [`Governor::next`] names
    /// its owner when it may.
    pub fn admit(&mut self, flow: usize, bytes: u64, now: Instant) -> bool {
        if self.epoch_ends.is_none_or(|at| at <= now) {
            self.end_epoch(now);
        }
        let Some(Some(it)) = self.flows.get(flow) else {
            return true;
        };
        if it.mode == Inflight::Off {
            return true;
        }
        let (own, was_active) = (it.in_flight, it.in_flight > 0 || it.waiting);
        self.window.saw(bytes);
        if !was_active {
            self.active += 1;
            self.peak.1 = self.peak.1.max(self.active);
        }
        self.govern(now);
        let may =
            !self.governed || own + bytes <= SMALL_BYTES || self.fits(bytes) && self.turns.may(flow, bytes);
        let Some(Some(it)) = self.flows.get_mut(flow) else {
            return true;
        };
        if may {
            it.in_flight += bytes;
            it.waiting = false;
            self.in_flight += bytes;
            self.peak.0 = self.peak.0.max(self.in_flight);
        } else {
            self.held_back += u64::from(!it.waiting);
            it.waiting = true;
            self.turns.wait(flow, bytes);
            self.limited = true;
        }
        may
    }

    /// A read that was admitted has its answer.
    pub fn done(&mut self, flow: usize, bytes: u64, round_trip: Duration, now: Instant) {
        let Some(Some(it)) = self.flows.get_mut(flow) else {
            return;
        };
        if it.mode == Inflight::Off {
            return;
        }
        let waited = it.base.waited(bytes, round_trip);
        // What was sent before the window was set says nothing about the window.
        if self.epoch_began.is_some_and(|began| now >= began + round_trip) {
            it.least = Some(it.least.map_or(waited, |least| least.min(waited)));
        }
        self.shortest = self.shortest.min(round_trip);
        self.back(flow, bytes);
        if self.epoch_ends.is_none_or(|at| at <= now) {
            self.end_epoch(now);
        }
    }

    /// A read that was admitted was not sent, or ended without an answer that says anything about the way.
    pub fn back(&mut self, flow: usize, bytes: u64) {
        let Some(Some(it)) = self.flows.get_mut(flow) else {
            return;
        };
        let less = bytes.min(it.in_flight);
        it.in_flight -= less;
        self.in_flight -= less;
        if less > 0 && it.in_flight == 0 && !it.waiting {
            self.active -= 1;
        }
    }

    /// The owner of the device whose turn it is, if there is room for what it wants. To be called until there is none.
    pub fn next(&mut self) -> Option<usize> {
        if self.cap.is_none() && self.active + self.others.devices <= 1 {
            self.governed = false;
        }
        let (limit, in_flight, governed) = (self.limit(), self.in_flight, self.governed);
        let flow = self
            .turns
            .next(|wants| !governed || in_flight == 0 || in_flight + wants <= limit)?;
        let it = self.flows.get_mut(flow)?.as_mut()?;
        if std::mem::take(&mut it.waiting) && it.in_flight == 0 {
            // Counted again if it still wants something.
            self.active -= 1;
        }
        Some(it.owner)
    }

    fn fits(&self, bytes: u64) -> bool {
        self.in_flight == 0 || self.in_flight + bytes <= self.limit()
    }

    fn find_cap(&mut self) {
        let caps = self.flows.iter().flatten().filter_map(|flow| match flow.mode {
            Inflight::AtMost(bytes) => Some(bytes),
            _ => None,
        });
        self.cap = caps.min();
    }

    fn govern(&mut self, now: Instant) {
        self.governed = self.cap.is_some() || self.active + self.others.devices > 1;
        if self.governed && self.governed_at.is_none_or(|at| now > at + FRESH) {
            // What was right when there was company last may be far too much by now.
            self.window.restart(now);
        }
        if self.governed {
            self.governed_at = Some(now);
        }
    }

    /// For this process.
    fn limit(&self) -> u64 {
        let window = self.window.limit();
        let Some(cap) = self.cap else {
            return window;
        };
        let fair = cap / u64::from(self.others.processes + 1);
        // What the others leave is ours too, unless they wait for it.
        let left = if self.others.waiting {
            0
        } else {
            cap.saturating_sub(self.others.in_flight)
        };
        window.min(fair.max(left)).max(self.window.largest().min(cap))
    }

    fn end_epoch(&mut self, now: Instant) {
        // After a pause there is nothing to conclude from.
        let paused = self.epoch_ends.is_none_or(|at| now > at + EPOCH_MAX);
        self.delays.clear();
        for flow in self.flows.iter_mut().flatten() {
            self.delays.extend(flow.least.take());
        }
        let delay = delay::shared(&mut self.delays);
        if self.governed && !paused && self.window.adapt(delay, self.limited, now) {
            self.flows
                .iter_mut()
                .flatten()
                .for_each(|flow| flow.base.rotate());
        }
        let ours = Slot {
            process: std::process::id(),
            in_flight: self.peak.0,
            window: self.window.limit(),
            devices: self.peak.1,
            waiting: self.limited,
            ..Slot::default()
        };
        self.others = self.node.exchange(ours, self.nonce, now);
        self.peak = (self.in_flight, self.active);
        if self.shortest < Duration::MAX {
            // Long enough for reads that are sent in it to come back in it.
            let late = if delay.is_none() {
                self.epoch
            } else {
                Duration::ZERO
            };
            self.epoch = (self.shortest * 2).max(late * 2).clamp(EPOCH_MIN, EPOCH_MAX);
        }
        self.shortest = Duration::MAX;
        self.epoch_began = Some(now);
        self.epoch_ends = Some(now + self.epoch);
        *self.report.lock().unwrap_or_else(PoisonError::into_inner) = Report {
            place: Some(self.node.place()),
            governed: self.governed,
            window: self.limit(),
            in_flight: self.in_flight,
            delay: delay.unwrap_or_default(),
            others: self.others,
            devices: self.active,
            held_back: self.held_back,
        };
        self.limited = !self.turns.is_empty();
    }
}

#[cfg(test)]
mod tests;

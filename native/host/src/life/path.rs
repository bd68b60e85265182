//! One path of a device: a portal, and the life of its associations.
//!
//! ```text
//!              name, TCP, bring-up            first answer
//!   Waiting -----------------------> Connecting ---------> Ready
//!    ^   ^          fails               |                    |  \
//!    |   +------------------------------+                    |   \ close
//!    |                    refused for good |                 |    v
//!    |                                     v                 |   Stopping --> Over
//!    |                                  Refused              |
//!    +---- backoff, or held back where it flaps -------------+ lost
//! ```
//!
//! *Refused* is what a controller says with Do Not Retry set, or that means the same (it does not know this host, or has no
//! such subsystem), and what another namespace behind the portal means. Such a path is left alone until somebody asks.
//!
//! A path that comes up and breaks [`FLAPS`] times within [`FLAP_WINDOW`] is *held back*: each time twice as long, and only
//! while another path is usable. Commands that went its way would wait for its next break again and again.

use super::own::Asked;
use super::pace::Pace;
use crate::association::Association;
use crate::facts::Facts;
use crate::lane::LANES;
use crate::options::Portal;
use crate::paths::{PathShared, PathState};
use crate::resolve::Answer;
use crate::shared::{count, Shared};
use headrace_transfer::IoError;
use headrace_wire::ana::AnaState;
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(super) const BACKOFF_MIN: Duration = Duration::from_millis(100);
const BACKOFF_MAX: Duration = Duration::from_secs(2);
/// An association that lived this long was a good one: the next loss starts with a short wait again.
const GOOD_LIFE: Duration = Duration::from_secs(5);
/// Losses within the window that make a path one that flaps.
const FLAPS: usize = 3;
const FLAP_WINDOW: Duration = Duration::from_secs(30);
const HOLD_MIN: Duration = Duration::from_secs(5);
const HOLD_MAX: Duration = Duration::from_secs(60);
/// A state that a command's status told, where no ANA log page confirms or ends it.
const HEARSAY: Duration = Duration::from_secs(1);

pub(super) enum Phase {
    /// While a method has the association in its hands.
    Between,
    /// Until the name's addresses are known; whoever looks them up wakes us.
    Resolving,
    Connecting(Box<Association>),
    Ready(Box<Association>),
    Waiting(Instant),
    Refused,
    Stopping(Box<Association>),
    Over,
}

/// What commands have been told of a path's ANA state since its log page was read.
struct Hearsay {
    state: AnaState,
    until: Instant,
}

pub(super) struct Path {
    pub index: usize,
    pub phase: Phase,
    pub addresses: Vec<SocketAddr>,
    /// A name that is being looked up.
    pub asked: Option<Answer>,
    pub attempt: usize,
    pub attempt_until: Instant,
    /// When this attempt, or the last one, began.
    pub begun: Instant,
    /// While the device opens: addresses that were not tried yet, and why this path cannot be had.
    pub addresses_left: usize,
    pub hopeless: Option<IoError>,
    backoff: Duration,
    ready_since: Instant,
    /// A command succeeded on this association.
    pub progress: bool,
    /// Number of the association.
    pub generation: u32,
    /// Writes answered on this association, and how many of them a flush that was answered covers.
    pub written: u64,
    pub flushed: u64,
    pub under_way: usize,
    pub pace: Pace,
    losses: VecDeque<Instant>,
    hold: Duration,
    /// When the path was held back.
    pub held: bool,
    hearsay: Option<Hearsay>,
    /// What the guard of writes knows of this association.
    pub guard: Asked,
    /// Lanes whose queues the controller refused, since an association lived long without them.
    shared_lanes: [bool; LANES],
    /// What was told of its use last.
    told: (bool, Option<AnaState>),
    ana_since: Instant,
    shared: Arc<Shared>,
}

impl Path {
    pub fn new(index: usize, shared: Arc<Shared>, now: Instant, deadline: Instant) -> Self {
        Path {
            index,
            phase: Phase::Waiting(now),
            addresses: Vec::new(),
            asked: None,
            attempt: 0,
            attempt_until: deadline,
            begun: now,
            addresses_left: 0,
            hopeless: None,
            backoff: BACKOFF_MIN,
            ready_since: now,
            progress: false,
            generation: 0,
            written: 0,
            flushed: 0,
            under_way: 0,
            pace: Pace::new(now),
            losses: VecDeque::new(),
            hold: HOLD_MIN,
            held: false,
            hearsay: None,
            guard: Asked::Not,
            shared_lanes: [false; LANES],
            told: (false, None),
            ana_since: now,
            shared,
        }
    }

    pub fn portal(&self) -> &Portal {
        &self.shared.options.portals[self.index]
    }

    pub fn public(&self) -> &PathShared {
        &self.shared.paths[self.index]
    }

    pub fn association(&mut self) -> Option<&mut Association> {
        match &mut self.phase {
            Phase::Connecting(association) | Phase::Ready(association) | Phase::Stopping(association) => {
                Some(association)
            }
            _ => None,
        }
    }

    /// Writes were answered here that no flush covers.
    pub fn dirty(&self) -> bool {
        self.written > self.flushed
    }

    // Use.

    /// How good this path is for commands now: 0 is best; `None`: it takes none.
    pub fn tier(&self, now: Instant) -> Option<u8> {
        let Phase::Ready(_) = &self.phase else {
            return None;
        };
        match self.ana(now) {
            None | Some(AnaState::Optimized) => Some(0),
            Some(AnaState::NonOptimized) => Some(1),
            Some(AnaState::Inaccessible | AnaState::PersistentLoss | AnaState::Change) => None,
        }
    }

    /// `None`: the controller does not report it, and no command was told.
    pub fn ana(&self, now: Instant) -> Option<AnaState> {
        let heard = self.hearsay.as_ref().filter(|heard| heard.until > now);
        let said = self.facts().and_then(|facts| facts.ana?.state);
        heard.map(|heard| heard.state).or(said)
    }

    /// Until when a change of the ANA state may take (ANATT); beyond that it counts as inaccessible.
    pub fn change_until(&self, now: Instant) -> Option<Instant> {
        let anatt = self.facts()?.anatt;
        (self.ana(now) == Some(AnaState::Change)).then(|| self.ana_since + anatt)
    }

    /// When what was heard lapses.
    pub fn hearsay_ends(&self) -> Option<Instant> {
        self.hearsay.as_ref().map(|heard| heard.until)
    }

    /// A command's status said so. The log is asked; until it has told something else, the status counts for a while.
    pub fn heard(&mut self, state: AnaState, now: Instant) {
        let until = now + HEARSAY;
        self.hearsay = Some(Hearsay { state, until });
        if let Phase::Ready(association) = &mut self.phase {
            association.ask_ana(now);
        }
    }

    /// The log has spoken.
    pub fn forget_hearsay(&mut self) {
        self.hearsay = None;
    }

    /// `true` when something lapsed.
    pub fn lapse_hearsay(&mut self, now: Instant) -> bool {
        let lapsed = self.hearsay.as_ref().is_some_and(|heard| heard.until <= now);
        if lapsed {
            self.hearsay = None;
        }
        lapsed
    }

    /// What one more command would cost here: those before it, times how long each takes.
    pub fn cost(&self, usual: Duration, queues: usize, now: Instant) -> u128 {
        let latency = self.pace.recent(now).unwrap_or(usual);
        (self.under_way as u128 + 1) * latency.as_nanos().max(1) / queues.max(1) as u128
    }

    /// A command is not under way any more.
    pub fn one_less(&mut self) {
        self.under_way = self.under_way.saturating_sub(1);
        self.public().under_way.store(self.under_way, Ordering::Relaxed);
    }

    // Phases.

    /// Tell whoever looks.
    pub fn tell(&self, state: PathState, why: impl Into<String>) {
        self.tell_state(state);
        self.public().status().why = why.into();
    }

    /// The reason that was told last still holds.
    pub fn tell_state(&self, state: PathState) {
        let mut status = self.public().status();
        if status.state != state {
            status.since = Instant::now();
        }
        status.state = state;
    }

    /// Whether commands may go this way, and why not: where that changed.
    pub fn tell_use(&mut self, now: Instant) {
        let use_now = (self.tier(now).is_some(), self.ana(now));
        if self.told == use_now {
            return;
        }
        if use_now.1 != self.told.1 {
            self.ana_since = now;
        }
        self.told = use_now;
        let (usable, ana) = use_now;
        let mut status = self.public().status();
        (status.usable, status.ana) = use_now;
        if matches!(self.phase, Phase::Ready(_)) {
            status.why = match ana.filter(|_| !usable) {
                Some(state) => format!("the ANA state of the namespace is {}", state.name()),
                None => String::new(),
            };
        }
    }

    /// Whether it is slow, where that changed.
    pub fn tell_pace(&self) -> Option<bool> {
        let public = self.public();
        let slow = self.pace.is_slow();
        // Only this thread writes: no locked instruction for each command.
        let changed = public.slow.load(Ordering::Relaxed) != slow;
        if changed {
            public.slow.store(slow, Ordering::Relaxed);
            count(&public.slow_times, u64::from(slow));
        }
        changed.then_some(slow)
    }

    /// Do without the queues that the controller did not let the last association have.
    pub fn share_lanes(&self, association: &mut Association) {
        (1..LANES)
            .filter(|&lane| self.shared_lanes[lane])
            .for_each(|lane| association.share_lane(lane));
    }

    pub fn became_ready(&mut self, association: Box<Association>, now: Instant, first: bool) {
        self.generation += 1;
        self.guard = Asked::Not;
        (self.written, self.flushed, self.under_way) = (0, 0, 0);
        self.ready_since = now;
        self.progress = false;
        self.held = false;
        self.hopeless = None;
        self.hearsay = None;
        self.pace = Pace::new(now);
        self.tell_pace();
        self.tell(PathState::Ready, "");
        let mut status = self.public().status();
        status.reconnects += u64::from(!first);
        status.cntlid = association.facts.cntlid;
        drop(status);
        self.phase = Phase::Ready(association);
    }

    /// Until the next attempt: doubling, with up to a quarter more or less, so that many hosts do not come at once.
    pub fn wait(&mut self, now: Instant, random: u64, why: &str) {
        let share = 0.75 + (random % 1024) as f64 / 2048.0;
        self.phase = Phase::Waiting(now + self.backoff.mul_f64(share));
        // A short `loss_timeout` gets several attempts, too.
        let patience = self.shared.options.loss_timeout.unwrap_or(Duration::MAX);
        self.backoff = (self.backoff * 2).min(BACKOFF_MAX.min(patience / 4));
        self.held = false;
        self.tell(PathState::Waiting, why);
    }

    /// The association ended while it connected this lane: the next one does without.
    pub fn share_lane(&mut self, lane: usize) {
        self.shared_lanes[lane] = true;
    }

    /// An association that was ready is gone. Held back where that happens too often and `others` can do the work.
    pub fn lost(&mut self, now: Instant, random: u64, others: bool, why: &str) {
        (self.written, self.flushed, self.under_way) = (0, 0, 0);
        self.public().under_way.store(0, Ordering::Relaxed);
        self.pace = Pace::new(now);
        self.tell_pace();
        if now.duration_since(self.ready_since) >= GOOD_LIFE {
            self.backoff = BACKOFF_MIN;
            // It may have been the network, or a controller that was short of queues then.
            self.shared_lanes = [false; LANES];
        }
        self.losses
            .retain(|at| now.saturating_duration_since(*at) < FLAP_WINDOW);
        if self.losses.is_empty() {
            self.hold = HOLD_MIN;
        }
        self.losses.push_back(now);
        if self.losses.len() < FLAPS || !others {
            return self.wait(now, random, why);
        }
        let times = self.losses.len();
        self.losses.drain(..times - FLAPS);
        let why = format!(
            "it came up and broke {times} times within {FLAP_WINDOW:?}; next attempt in {:?}; last: {why}",
            self.hold
        );
        self.phase = Phase::Waiting(now + self.hold);
        self.held = true;
        self.tell(PathState::HeldBack, why);
        // Losses before the hold count for the next one, too, so the window must not end within it.
        self.losses
            .iter_mut()
            .for_each(|at| *at = (now + self.hold).max(*at));
        self.hold = (self.hold * 2).min(HOLD_MAX);
    }

    /// No other path is left: a held-back one is tried now.
    pub fn release(&mut self, now: Instant) {
        if self.held {
            self.held = false;
            self.phase = Phase::Waiting(now);
            self.tell(
                PathState::Waiting,
                "held back before, but no other path is usable",
            );
        }
    }

    pub fn refuse(&mut self, error: IoError) {
        self.phase = Phase::Refused;
        self.tell(PathState::Refused, error.to_string());
        self.hopeless = Some(error);
    }

    /// Somebody asked to try again.
    pub fn reconnect(&mut self, now: Instant) {
        if matches!(self.phase, Phase::Refused | Phase::Waiting(_)) {
            self.phase = Phase::Waiting(now);
            self.hopeless = None;
            self.held = false;
            self.backoff = BACKOFF_MIN;
            self.losses.clear();
            self.tell(PathState::Waiting, "asked to try again");
        }
    }

    pub fn facts(&self) -> Option<&Facts> {
        match &self.phase {
            Phase::Ready(association) => Some(&association.facts),
            _ => None,
        }
    }

    pub fn wake_at(&self) -> Option<Instant> {
        let phase = match &self.phase {
            Phase::Connecting(association) => [association.wake_at(), Some(self.attempt_until)]
                .into_iter()
                .flatten()
                .min(),
            Phase::Ready(association) | Phase::Stopping(association) => association.wake_at(),
            Phase::Waiting(at) => Some(*at),
            Phase::Resolving => Some(self.attempt_until),
            Phase::Between | Phase::Refused | Phase::Over => None,
        };
        [phase, self.hearsay_ends()].into_iter().flatten().min()
    }
}

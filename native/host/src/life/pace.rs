//! Which paths are slow, and so left alone while there is another one.
//!
//! A path is *slow* when its answers took [`FACTOR`] times as long as they do on the quickest other path, [`LATE`] times one
//! after another; or when one of its commands has waited so long that its answer will be late, whenever it comes. Where
//! nothing is known of another path, a wait is held against what is usual on the path itself.
//!
//! ```text
//!            late answers, or a wait
//!     usual -----------------------> slow: no command while another path takes them
//!       ^                             |  after the hold: one command, nothing else under way
//!       |      answered in time       v
//!       +--------------------------- tried ---- late again: the hold doubles ----> slow
//! ```
//!
//! Reads that wait for too long on a slow path are taken back, where another one is there that keeps up: that one is sent them,
//! and what the slow path still says of them falls on nobody's memory. They count as under way there until it has answered.
//! Writes stay where they are: nobody could tell when the first one lands.
//!
//! Two paths to one target that is busy are slow together, and neither is avoided. Nor is one that is only worse by its ANA
//! state: what was never used has no pace to be beside. Only reads and writes count: a flush, or a deallocation, takes as
//! long as the medium does.

use super::path::{Path, Phase};
use super::Core;
use crate::association::ana_state;
use crate::queue::End;
use crate::reactor::Turn;
use crate::shared::count;
use crate::work::{Ended, Verb};
use headrace_transfer::events::status;
use headrace_transfer::EventKind;
use std::time::{Duration, Instant};

/// A latency that is older than this says nothing about now.
const OLD: Duration = Duration::from_secs(1);
const FACTOR: u32 = 8;
/// Less than this is not late, whatever others take.
const LATE_MIN: Duration = Duration::from_millis(20);
/// Late answers, one after another: a single one may be anybody's.
const LATE: u8 = 4;
/// A wait that is no hiccup; and one that is none where nothing is known of another path.
const WAIT_MIN: Duration = Duration::from_millis(250);
const WAIT_ALONE: Duration = Duration::from_secs(1);
/// Between two looks at what waits.
const LOOK: Duration = Duration::from_millis(50);
const HOLD_MIN: Duration = Duration::from_secs(1);
const HOLD_MAX: Duration = Duration::from_secs(32);

/// How fast one association answers.
pub(super) struct Pace {
    /// Moving average of the latest answers.
    recent: Duration,
    recent_at: Instant,
    late: u8,
    look_at: Instant,
    /// Until when it is avoided, and how long the next time. `None`: it keeps up.
    slow: Option<Instant>,
    hold: Duration,
}

impl Pace {
    pub fn new(now: Instant) -> Self {
        Pace {
            recent: Duration::ZERO,
            recent_at: now,
            late: 0,
            look_at: now,
            slow: None,
            hold: HOLD_MIN,
        }
    }

    /// `None` where nothing is known of now.
    pub fn recent(&self, now: Instant) -> Option<Duration> {
        let fresh = now.saturating_duration_since(self.recent_at) < OLD;
        (fresh && !self.recent.is_zero()).then_some(self.recent)
    }

    pub fn is_slow(&self) -> bool {
        self.slow.is_some()
    }

    /// Commands should go elsewhere.
    pub fn avoided(&self, under_way: usize, now: Instant) -> bool {
        self.slow.is_some_and(|until| until > now || under_way > 0)
    }

    /// A command was answered; `others`: what the quickest other path takes.
    fn answered(&mut self, took: Duration, others: Option<Duration>, now: Instant) {
        self.recent = match self.recent(now) {
            None => took.max(Duration::from_nanos(1)),
            Some(before) => (before * 15 + took) / 16,
        };
        self.recent_at = now;
        if others.is_none_or(|others| took <= (others * FACTOR).max(LATE_MIN)) {
            if self.slow.take().is_some() {
                // What was measured before is not how it is now.
                self.recent = took.max(Duration::from_nanos(1));
            }
            (self.late, self.hold) = (0, HOLD_MIN);
            return;
        }
        self.late = self.late.saturating_add(1);
        match self.slow {
            // The answer to what was tried.
            Some(until) if until <= now => self.slow_down(now),
            None if self.late >= LATE => self.slow_down(now),
            _ => {}
        }
    }

    /// Whoever waits longer waits too long.
    fn patience(&self, others: Option<Duration>) -> Duration {
        match others {
            Some(others) => (others * FACTOR).max(WAIT_MIN),
            None => (self.recent * FACTOR).max(WAIT_ALONE),
        }
    }

    /// The command that waits longest has waited for `oldest`.
    fn looked(&mut self, oldest: Duration, others: Option<Duration>, now: Instant) {
        if oldest <= self.patience(others) {
            return;
        }
        match self.slow {
            Some(until) if until > now => {}
            // As long as it waits, nothing else is tried.
            Some(_) => self.slow = Some(now + HOLD_MIN),
            None => self.slow_down(now),
        }
    }

    fn slow_down(&mut self, now: Instant) {
        self.slow = Some(now + self.hold);
        self.hold = (self.hold * 2).min(HOLD_MAX);
    }
}

impl Core {
    /// A command was answered on a path.
    pub(super) fn answered(&mut self, at: usize, verb: Verb, took: Duration, now: Instant) {
        self.paths[at].public().latency.count(took);
        if !verb.moves_data() {
            return;
        }
        let others = self.quickest_other(at, now);
        let path = &mut self.paths[at];
        path.pace.answered(took, others, now);
        let told = path.tell_pace();
        self.record_pace(at, told, now);
    }

    /// Where a command has waited for too long.
    pub(super) fn look_at_pace(&mut self, now: Instant) {
        for at in 0..self.paths.len() {
            let path = &self.paths[at];
            if path.pace.look_at > now {
                continue;
            }
            let oldest = match &path.phase {
                Phase::Ready(association) => association.oldest(),
                _ => None,
            };
            let others = self.quickest_other(at, now);
            let path = &mut self.paths[at];
            path.pace.look_at = now + LOOK;
            if let Some(sent) = oldest {
                path.pace.looked(now.saturating_duration_since(sent), others, now);
                let told = path.tell_pace();
                self.record_pace(at, told, now);
            }
        }
    }

    /// When a look at what waits is due; `None` where nothing does, or there is one path only.
    pub(super) fn look_due(&self) -> Option<Instant> {
        let paths = self.paths.iter().filter(|_| self.paths.len() > 1);
        paths
            .filter(|path| path.under_way > 0)
            .map(|path| path.pace.look_at)
            .min()
    }

    /// Reads that wait for too long on a path that is slow, to be sent by one that is not.
    pub(super) fn recall(&mut self, turn: &Turn<'_>) {
        let now = turn.now;
        if self.look_due().is_none_or(|at| at > now) {
            return;
        }
        self.look_at_pace(now);
        let mut recalled = Vec::new();
        for at in 0..self.paths.len() {
            let keeps_up = |path: &&Path| path.tier(now).is_some() && !path.pace.avoided(path.under_way, now);
            let others = self.paths.iter().filter(|path| path.index != at);
            if !self.paths[at].pace.is_slow() || others.filter(keeps_up).count() == 0 {
                continue;
            }
            let patience = self.paths[at].pace.patience(self.quickest_other(at, now));
            let (Phase::Ready(association), Some(before)) =
                (&mut self.paths[at].phase, now.checked_sub(patience))
            else {
                continue;
            };
            let found = association.recall(before);
            count(&self.shared.paths[at].counters.resends, found.len() as u64);
            recalled.extend(found);
        }
        for (part, _) in &recalled {
            self.record(part, Some(EventKind::Recalled), status::TAKEN_BACK, now);
        }
        for (part, _) in &mut recalled {
            part.tries.recalls = part.tries.recalls.saturating_add(1);
            self.not_read(part, turn);
        }
        self.keep(recalled).into_iter().for_each(Ended::report);
    }

    /// An answer to a read that was taken back.
    pub(super) fn recalled_answered(&mut self, at: usize, sent_at: Instant, end: &End, now: Instant) {
        self.paths[at].one_less();
        if let End::Answer(cqe) = end {
            self.answered(at, Verb::Read, now.saturating_duration_since(sent_at), now);
            if let Some(state) = ana_state(cqe.status) {
                self.paths[at].heard(state, now);
            }
        }
    }

    fn quickest_other(&self, at: usize, now: Instant) -> Option<Duration> {
        let others = self.paths.iter().filter(|path: &&Path| path.index != at);
        others
            .filter(|path| path.tier(now).is_some())
            .filter_map(|path| path.pace.recent(now))
            .min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn late_answers_in_a_row_and_waits_make_a_path_slow_and_one_in_time_ends_it() {
        let begin = Instant::now();
        let mut pace = Pace::new(begin);
        let others = Some(MS);
        for _ in 0..3 {
            pace.answered(30 * MS, others, begin);
        }
        // One in time in between.
        pace.answered(20 * MS, others, begin);
        assert!(!pace.is_slow());
        for _ in 0..4 {
            assert!(!pace.is_slow());
            pace.answered(30 * MS, others, begin);
        }
        assert!(pace.avoided(0, begin));
        // Those that were under way are late, too, and say nothing new.
        pace.answered(90 * MS, others, begin + 500 * MS);
        assert!(!pace.avoided(0, begin + 1000 * MS) && pace.avoided(1, begin + 1000 * MS));
        // Tried, late again, for twice as long.
        pace.answered(90 * MS, others, begin + 1100 * MS);
        assert!(pace.avoided(0, begin + 3000 * MS) && !pace.avoided(0, begin + 3100 * MS));
        pace.answered(MS, others, begin + 3200 * MS);
        assert!(!pace.is_slow());
        assert_eq!(pace.recent(begin + 3200 * MS), Some(MS));
    }

    #[test]
    fn a_busy_target_is_slow_on_all_paths_and_none_is_avoided() {
        let begin = Instant::now();
        let mut pace = Pace::new(begin);
        for _ in 0..20 {
            pace.answered(500 * MS, Some(80 * MS), begin);
        }
        pace.looked(600 * MS, Some(80 * MS), begin);
        assert!(!pace.is_slow());
        // Nothing is known of others.
        for _ in 0..20 {
            pace.answered(500 * MS, None, begin);
        }
        pace.looked(3900 * MS, None, begin);
        assert!(!pace.is_slow());
    }

    #[test]
    fn a_command_that_waits_is_enough_and_keeps_others_away_while_it_does() {
        let begin = Instant::now();
        let mut pace = Pace::new(begin);
        pace.looked(250 * MS, Some(MS), begin);
        assert!(!pace.is_slow());
        pace.looked(251 * MS, Some(MS), begin);
        assert!(pace.is_slow());
        pace.looked(1300 * MS, Some(MS), begin + 1050 * MS);
        assert!(pace.avoided(0, begin + 2000 * MS));
        let mut alone = Pace::new(begin);
        alone.looked(1000 * MS, None, begin);
        assert!(!alone.is_slow());
        alone.looked(1001 * MS, None, begin);
        assert!(alone.is_slow());
    }
}

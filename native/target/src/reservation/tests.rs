//! The rules, as one table of commands against reservations and as stories of several hosts.

use super::rules::{Access, State, REGISTRANTS_MAX};
use crate::controller::HostKey;
use headrace_wire::reservation::{
    AcquireAction, Change, NotificationKind, RegisterAction, ReleaseAction, ReservationType as T,
};
use headrace_wire::{io, Status};

pub(super) fn host(n: u8) -> HostKey {
    HostKey {
        hostnqn: "nqn.2026-01.io.x:site".into(),
        hostid: [n; 16],
    }
}

pub(super) fn register(key: u64) -> Change {
    Change::Register {
        action: RegisterAction::Register,
        ignore_existing: false,
        persist: None,
        key: 0,
        new_key: key,
    }
}

fn changed(action: RegisterAction, ignore_existing: bool, key: u64, new_key: u64) -> Change {
    Change::Register {
        action,
        ignore_existing,
        persist: None,
        key,
        new_key,
    }
}

pub(super) fn acquire(action: AcquireAction, kind: T, key: u64, victim: u64) -> Change {
    Change::Acquire {
        action,
        kind,
        key,
        victim,
    }
}

fn release(action: ReleaseAction, kind: Option<T>, key: u64) -> Change {
    Change::Release { action, kind, key }
}

const CONFLICT: Status = Status::RESERVATION_CONFLICT.do_not_retry();
const INVALID: Status = Status::INVALID_FIELD.do_not_retry();

fn must(state: &mut State, n: u8, change: Change) -> Vec<(HostKey, NotificationKind)> {
    state.apply(&host(n), &change, true).unwrap().notices
}

fn refused(state: &mut State, n: u8, change: Change) -> Status {
    let before = state.clone();
    let status = state.apply(&host(n), &change, false).unwrap_err();
    assert_eq!(*state, before, "a refused command changed something");
    status
}

/// Hosts 1 and 2 are registered with keys 11 and 12, 3 is not; 1 holds.
fn held(kind: T) -> State {
    let mut state = State::default();
    must(&mut state, 1, register(11));
    must(&mut state, 2, register(12));
    must(&mut state, 1, acquire(AcquireAction::Acquire, kind, 11, 0));
    state
}

/// Base Specification, figure "Command Behavior in the Presence of a Reservation": who may do what.
#[test]
fn every_command_against_every_type() {
    // type, registrant reads, registrant writes, stranger reads, stranger writes
    let table = [
        (None, true, true, true, true),
        (Some(T::WriteExclusive), true, false, true, false),
        (Some(T::ExclusiveAccess), false, false, false, false),
        (Some(T::WriteExclusiveRegistrants), true, true, true, false),
        (Some(T::ExclusiveAccessRegistrants), true, true, false, false),
        (Some(T::WriteExclusiveAll), true, true, true, false),
        (Some(T::ExclusiveAccessAll), true, true, false, false),
    ];
    let commands = [
        (io::READ, Access::Read),
        (io::COMPARE, Access::Read),
        (io::VERIFY, Access::Read),
        (io::WRITE, Access::Write),
        (io::WRITE_ZEROES, Access::Write),
        (io::WRITE_UNCORRECTABLE, Access::Write),
        (io::DATASET_MANAGEMENT, Access::Write),
        (io::FLUSH, Access::Write),
        (io::COPY, Access::Write),
    ];
    for (kind, registrant_reads, registrant_writes, stranger_reads, stranger_writes) in table {
        let state = kind.map_or_else(State::default, held);
        for (opcode, access) in commands {
            assert_eq!(Access::of(opcode), Some(access), "{}", io::name(opcode));
            let (registrant, stranger) = match access {
                Access::Read => (registrant_reads, stranger_reads),
                Access::Write => (registrant_writes, stranger_writes),
            };
            let name = io::name(opcode);
            assert!(state.permits(&host(1), access), "{kind:?}: holder, {name}");
            assert_eq!(
                state.permits(&host(2), access),
                registrant,
                "{kind:?}: registrant, {name}"
            );
            assert_eq!(
                state.permits(&host(3), access),
                stranger,
                "{kind:?}: stranger, {name}"
            );
        }
        // Reservation commands have their own rules: a stranger may only register and report.
        for opcode in [
            io::RESERVATION_REGISTER,
            io::RESERVATION_REPORT,
            io::RESERVATION_ACQUIRE,
            io::RESERVATION_RELEASE,
        ] {
            assert_eq!(Access::of(opcode), None);
        }
        let mut state = state;
        for change in [
            acquire(AcquireAction::Acquire, T::WriteExclusive, 13, 0),
            acquire(AcquireAction::PreemptAndAbort, T::WriteExclusive, 11, 11),
            release(ReleaseAction::Release, kind, 11),
            release(ReleaseAction::Clear, None, 0),
            changed(RegisterAction::Unregister, true, 11, 0),
            changed(RegisterAction::Replace, true, 11, 5),
        ] {
            assert_eq!(refused(&mut state, 3, change), CONFLICT, "{kind:?} {change:?}");
        }
        must(&mut state, 3, register(13));
    }
}

#[test]
fn the_name_is_part_of_who_a_host_is() {
    let state = held(T::WriteExclusive);
    let mut other = host(1);
    other.hostnqn = "nqn.2026-01.io.x:elsewhere".into();
    assert!(!state.permits(&other, Access::Write));
}

#[test]
fn registering() {
    let mut state = State::default();
    assert_eq!(refused(&mut state, 1, register(0)), INVALID);
    must(&mut state, 1, register(11));
    assert_eq!(state.generation, 1);
    // Again with the same key; not with another.
    must(&mut state, 1, register(11));
    assert_eq!(refused(&mut state, 1, register(5)), CONFLICT);
    use RegisterAction::{Replace, Unregister};
    assert_eq!(refused(&mut state, 1, changed(Replace, false, 5, 6)), CONFLICT);
    assert_eq!(refused(&mut state, 1, changed(Replace, false, 11, 0)), INVALID);
    must(&mut state, 1, changed(Replace, false, 11, 6));
    must(&mut state, 1, changed(Replace, true, 99, 7));
    assert_eq!(state.registrants[0].key, 7);
    assert_eq!(refused(&mut state, 1, changed(Unregister, false, 6, 0)), CONFLICT);
    must(&mut state, 1, changed(Unregister, true, 6, 0));
    assert_eq!((state.registrants.len(), state.generation), (0, 5));
    // Two hosts may have one key.
    must(&mut state, 1, register(7));
    must(&mut state, 2, register(7));
    assert_eq!(state.report().registered, 2);
}

#[test]
fn persistence_only_where_there_is_some() {
    let mut state = State::default();
    let change = Change::Register {
        action: RegisterAction::Register,
        ignore_existing: false,
        persist: Some(true),
        key: 0,
        new_key: 1,
    };
    assert_eq!(refused(&mut state, 1, change), INVALID);
    must(&mut state, 1, change);
    assert!(state.persist && state.report().persistent);
}

#[test]
fn acquiring_and_releasing() {
    use ReleaseAction::Release;
    for kind in T::ALL {
        let mut state = held(kind);
        let generation = state.generation;
        let all = kind.held_by_all();
        must(&mut state, 1, acquire(AcquireAction::Acquire, kind, 11, 0));
        let other = T::from_u8(kind as u8 % 6 + 1).unwrap();
        let change = acquire(AcquireAction::Acquire, other, 11, 0);
        assert_eq!(refused(&mut state, 1, change), CONFLICT);
        assert_eq!(
            refused(&mut state, 1, acquire(AcquireAction::Acquire, kind, 5, 0)),
            CONFLICT
        );
        let second = acquire(AcquireAction::Acquire, kind, 12, 0);
        if all {
            must(&mut state, 2, second);
        } else {
            assert_eq!(refused(&mut state, 2, second), CONFLICT);
            // Not the holder: nothing happens, and that is fine.
            assert!(must(&mut state, 2, release(Release, Some(kind), 12)).is_empty());
            assert!(state.held.is_some());
        }
        assert_eq!(refused(&mut state, 1, release(Release, Some(other), 11)), INVALID);
        assert_eq!(refused(&mut state, 1, release(Release, None, 11)), INVALID);
        let notices = must(&mut state, 1, release(Release, Some(kind), 11));
        assert_eq!(notices.len(), usize::from(kind.admits_registrants()));
        assert!(notices
            .iter()
            .all(|notice| *notice == (host(2), NotificationKind::ReservationReleased)));
        assert_eq!((state.held.is_none(), state.registrants.len()), (true, 2));
        assert_eq!(state.generation, generation, "neither counts as a change");
    }
}

#[test]
fn a_holder_who_unregisters_releases() {
    for kind in T::ALL {
        let mut state = held(kind);
        let leave = |key| changed(RegisterAction::Unregister, false, key, 0);
        let notices = must(&mut state, 1, leave(11));
        if kind.held_by_all() {
            assert!(
                notices.is_empty() && state.holds(&host(2)),
                "the other one holds on"
            );
            must(&mut state, 2, leave(12));
        } else {
            assert_eq!(notices.len(), usize::from(kind.admits_registrants()));
        }
        assert!(state.held.is_none(), "{kind:?}");
    }
}

#[test]
fn clear_leaves_nothing() {
    let mut state = held(T::WriteExclusiveRegistrants);
    let notices = must(&mut state, 2, release(ReleaseAction::Clear, None, 12));
    assert_eq!(notices, [(host(1), NotificationKind::ReservationPreempted)]);
    assert!(state.registrants.is_empty() && state.held.is_none());
}

#[test]
fn preempting_the_holder() {
    use AcquireAction::{Preempt, PreemptAndAbort};
    for kind in [
        T::WriteExclusive,
        T::ExclusiveAccess,
        T::WriteExclusiveRegistrants,
    ] {
        for action in [Preempt, PreemptAndAbort] {
            let mut state = held(kind);
            // A bystander.
            must(&mut state, 3, register(13));
            let generation = state.generation;
            let effects = state
                .apply(
                    &host(2),
                    &acquire(action, T::WriteExclusiveRegistrants, 12, 11),
                    true,
                )
                .unwrap();
            let mut notices = vec![(host(1), NotificationKind::RegistrationPreempted)];
            if kind != T::WriteExclusiveRegistrants {
                notices.push((host(3), NotificationKind::ReservationReleased));
            }
            assert_eq!(effects.notices, notices);
            let aborted = if action == Preempt { vec![] } else { vec![host(1)] };
            assert_eq!(effects.abort, aborted);
            assert!(state.holds(&host(2)) && !state.permits(&host(1), Access::Write));
            assert_eq!((state.registrants.len(), state.generation), (2, generation + 1));
        }
    }
}

#[test]
fn preempting_others() {
    let preempt = |key, victim| acquire(AcquireAction::Preempt, T::WriteExclusive, key, victim);
    // A registrant that does not hold: the reservation stays as it is.
    let mut state = held(T::WriteExclusiveRegistrants);
    must(&mut state, 3, register(12));
    let notices = must(&mut state, 1, preempt(11, 12));
    assert_eq!(notices.len(), 2, "all with that key");
    assert!(state.holds(&host(1)) && state.report().rtype == 3);
    assert_eq!(refused(&mut state, 1, preempt(11, 12)), CONFLICT);
    assert_eq!(refused(&mut state, 1, preempt(11, 0)), INVALID);
    assert_eq!(refused(&mut state, 1, preempt(5, 11)), CONFLICT);
    // The holder's own key: the type changes, and nobody with it stays.
    must(&mut state, 2, register(11));
    let notices = must(&mut state, 1, preempt(11, 11));
    assert_eq!(notices, [(host(2), NotificationKind::RegistrationPreempted)]);
    assert!(state.holds(&host(1)) && state.report().rtype == 1);
    // Nobody holds: only registrations go.
    let mut state = State::default();
    must(&mut state, 1, register(11));
    must(&mut state, 2, register(12));
    must(&mut state, 1, preempt(11, 12));
    assert!(state.held.is_none() && state.registrants.len() == 1);
    assert_eq!(refused(&mut state, 1, preempt(11, 0)), INVALID);
}

#[test]
fn preempting_what_all_hold() {
    for kind in [T::WriteExclusiveAll, T::ExclusiveAccessAll] {
        let preempt = |key, victim| acquire(AcquireAction::Preempt, T::WriteExclusive, key, victim);
        let mut state = held(kind);
        must(&mut state, 3, register(13));
        // By key: only the registration.
        must(&mut state, 2, preempt(12, 11));
        assert_eq!(state.report().rtype, kind as u8);
        assert!(!state.holds(&host(1)) && state.holds(&host(3)));
        // By zero: everything.
        let notices = must(&mut state, 2, preempt(12, 0));
        assert_eq!(notices, [(host(3), NotificationKind::RegistrationPreempted)]);
        assert!(state.holds(&host(2)) && state.report().rtype == 1);
        assert_eq!(state.registrants.len(), 1);
    }
}

#[test]
fn registrants_are_bounded() {
    let mut state = State::default();
    for n in 0..REGISTRANTS_MAX {
        let mut who = host(0);
        who.hostid[..8].copy_from_slice(&(n as u64).to_le_bytes());
        state.apply(&who, &register(1), false).unwrap();
    }
    assert_eq!(
        refused(&mut state, 9, register(1)),
        Status::INTERNAL_ERROR.do_not_retry()
    );
}

//! What this host says when something fails: what, where, expected, found, and what to do next.

use crate::options::{authority, HostOptions};
use crate::work::Part;
use headrace_transfer::{ErrorKind, IoError};
use headrace_wire::{io, Status};

/// The controller's answer makes no sense.
pub(crate) fn bad_answer(options: &HostOptions, what: impl Into<String>) -> IoError {
    IoError::new(ErrorKind::Protocol, what).at(options.address())
}

pub(crate) fn refused(options: &HostOptions, what: impl Into<String>) -> IoError {
    IoError::new(ErrorKind::Refused, what).at(options.address())
}

pub(crate) fn namespace_missing(options: &HostOptions, found: &str) -> IoError {
    refused(options, format!("{} is not there", options.namespace.words()))
        .expected("an active namespace")
        .found(found)
        .next("check its number; on the target, check that the namespace is attached for this host")
}

/// TCP did not come about, or broke during the bring-up.
pub(crate) fn unreachable(host: &str, port: u16, error: &std::io::Error) -> IoError {
    let kind = match error.kind() {
        std::io::ErrorKind::TimedOut => ErrorKind::Timeout,
        _ => ErrorKind::Refused,
    };
    IoError::new(kind, "cannot connect")
        .at(authority(host, port))
        .expected("an NVMe/TCP target that listens")
        .found(error.to_string())
        .next("check host and port, and that the target runs")
}

/// Another command of the bring-up failed.
pub(crate) fn step_failed(place: &str, step: &str, status: Status) -> IoError {
    IoError::new(ErrorKind::Failed, format!("{step} failed"))
        .at(place)
        .expected("Successful Completion")
        .found(status.to_string())
        .next("see the target's log")
}

/// What to do about a write that the target does not take from this host.
pub(crate) const READ_ONLY_HERE: &str = "the namespace, or this host, may only be read: on the target, serve it for \
     writing and let the host name (`describe()` has it) write; for headrace: `headrace target allow-host HOSTNQN`";

/// Where a part was to move bytes.
pub(crate) fn place_of(part: &Part, options: &HostOptions) -> String {
    let mut place = format!("subsystem {}, {}", options.subsysnqn, options.namespace.words());
    if part.blocks > 0 {
        place += &format!(", LBA {} to {}", part.slba, part.slba + part.blocks - 1);
    }
    if let Some(portal) = part
        .trip
        .and_then(|trip| options.portals.get(usize::from(trip.path)))
    {
        place += &format!(", by {portal}");
    }
    place
}

pub(crate) fn command_failed(part: &Part, options: &HostOptions, status: Status) -> IoError {
    let plain = Status::new(status.sct, status.sc);
    let next = if plain == Status::RESERVATION_CONFLICT || plain == Status::PREEMPT_ABORT {
        "another host holds the reservation of this namespace"
    } else if plain == Status::WRITE_PROTECTED || plain == Status::ACCESS_DENIED {
        READ_ONLY_HERE
    } else if plain == Status::LBA_RANGE || plain == Status::INVALID_NAMESPACE {
        "the namespace changed since it was opened: open it again"
    } else {
        "see the target's log"
    };
    // What was aborted for a preempt is refused as well: its host is shut out.
    let conflict = plain == Status::RESERVATION_CONFLICT || plain == Status::PREEMPT_ABORT;
    let kind = if conflict {
        ErrorKind::Conflict
    } else {
        ErrorKind::Failed
    };
    IoError::new(kind, format!("{} failed", io::name(part.verb.opcode())))
        .at(place_of(part, options))
        .expected("Successful Completion")
        .found(match part.tries.total() {
            0 => status.to_string(),
            tries => format!("{status}, after {} attempts", tries + 1),
        })
        .next(next)
}

pub(crate) fn command_broken(
    part: &Part,
    options: &HostOptions,
    kind: ErrorKind,
    expected: &str,
    found: String,
) -> IoError {
    IoError::new(kind, format!("{} failed", io::name(part.verb.opcode())))
        .at(place_of(part, options))
        .expected(expected)
        .found(found)
        .next("see the target's log; the fault is on its side or on the way")
}

/// None of the portals leads to the namespace.
pub(crate) fn no_path(options: &HostOptions, causes: &[IoError]) -> IoError {
    let Some(first) = causes.first() else {
        return refused(options, "no path leads to the namespace");
    };
    if causes.len() == 1 {
        return first.clone();
    }
    let each: Vec<_> = options
        .portals
        .iter()
        .zip(causes)
        .map(|(portal, cause)| match cause.found.is_empty() {
            true => format!("{portal}: {}", cause.what),
            false => format!("{portal}: {}: {}", cause.what, cause.found),
        })
        .collect();
    IoError::new(first.kind, "no path leads to the namespace")
        .at(options.address())
        .expected("one portal at least that takes this host")
        .found(each.join("; "))
        .next(first.next_step.to_string())
}

pub(crate) fn closed(place: &str) -> IoError {
    IoError::new(ErrorKind::Closed, "the device is closed")
        .at(place)
        .next("open it again by its address")
}

pub(crate) fn forked(place: &str) -> IoError {
    IoError::new(ErrorKind::Closed, "the device belongs to the parent process")
        .at(place)
        .expected("use in the process that opened it")
        .found("a fork")
        .next("open it again by its address in this process")
}

//! What this host says when something fails: what, where, expected, found, and what to do next.

use crate::options::{authority, HostOptions};
use crate::work::Part;
use headrace_transfer::{ErrorKind, IoError};
use headrace_wire::fabrics::ConnectResponse;
use headrace_wire::{io, Cqe, Status};

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

/// A Connect that the controller refused: which field, whose side, what to do.
pub(crate) fn connect_refused(options: ConnectPlace<'_>, cqe: &Cqe) -> IoError {
    let status = Status {
        dnr: cqe.status.dnr,
        ..Status::new(cqe.status.sct, cqe.status.sc)
    };
    let plain = Status::new(cqe.status.sct, cqe.status.sc);
    let response = ConnectResponse(cqe.dw0);
    let error = IoError::new(ErrorKind::Refused, "the target refused Connect").at(options.place);
    if plain == Status::CONNECT_INVALID_PARAMETERS {
        let field = response.field_name();
        let value = match (response.in_data(), response.ipo()) {
            (true, 256) => options.subsysnqn.to_string(),
            (true, 512) => options.hostnqn.to_string(),
            _ => String::new(),
        };
        let remedy = match (response.in_data(), response.ipo()) {
            (true, 256) => {
                "no subsystem of this name at this port: check the name here, or `headrace discover`"
            }
            (true, 512) => "check the host name that this side sends, and the target's list of allowed hosts",
            (true, 0) => "this host identifier is in use with another host name: give this host its own",
            (false, 44) => "ask for a smaller queue depth",
            (false, 42) => "ask for fewer queues",
            _ => "compare this host's options with the target's configuration",
        };
        let found = if value.is_empty() {
            format!("{status}, at {field}")
        } else {
            format!("{status}, at {field}: {value}")
        };
        return error
            .expected(format!("a valid {field} from this side"))
            .found(found)
            .next(remedy);
    }
    let remedy = if plain == Status::CONNECT_INVALID_HOST {
        format!("on the target, allow the host name {}", options.hostnqn)
    } else if plain == Status::CONNECT_CONTROLLER_BUSY {
        "the target has no controller free: try later, or raise its limit".into()
    } else if plain == Status::CONNECT_RESTART_DISCOVERY {
        "the target asks to be discovered again: `headrace discover`".into()
    } else if plain == Status::AUTHENTICATION_REQUIRED {
        "the target demands authentication, which this version does not speak: allow this host without it"
            .into()
    } else {
        "see the target's log".into()
    };
    error
        .expected("Successful Completion")
        .found(status.to_string())
        .next(remedy)
}

/// Who asked for the Connect that was refused.
#[derive(Clone, Copy)]
pub(crate) struct ConnectPlace<'a> {
    pub place: &'a str,
    pub subsysnqn: &'a str,
    pub hostnqn: &'a str,
}

/// Another command of the bring-up failed.
pub(crate) fn step_failed(place: &str, step: &str, status: Status) -> IoError {
    IoError::new(ErrorKind::Failed, format!("{step} failed"))
        .at(place)
        .expected("Successful Completion")
        .found(status.to_string())
        .next("see the target's log")
}

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
        "the target does not let this host write here"
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

//! Why a controller refused Connect, for people: which field, what stood in it, whose side is to change, and how.
//!
//! A refusal is the one error that everybody meets on the first day, and "Input/output error" is what most hosts make of
//! it. The specification lets a controller say exactly which byte it did not like (Base 6.3: IPO and IATTR with Invalid
//! Parameters), and some statuses speak for themselves; this table says them all in words.

use headrace_transfer::{ErrorKind, IoError};
use headrace_wire::fabrics::ConnectResponse;
use headrace_wire::{Cqe, Status};
use std::time::Duration;

/// The Connect that was refused.
#[derive(Clone, Copy)]
pub(crate) struct Asked<'a> {
    pub place: &'a str,
    pub subsysnqn: &'a str,
    pub hostnqn: &'a str,
    pub hostid: &'a [u8; 16],
    pub qid: u16,
    /// Zero-based.
    pub sqsize: u16,
    pub keep_alive: Duration,
}

/// Fields of Connect, by where they lie (Base 6.3, figures of the command and of its data).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Field {
    RecordFormat,
    Queue,
    QueueSize,
    Attributes,
    KeepAlive,
    HostId,
    Controller,
    Subsystem,
    Host,
}

impl Field {
    fn at(response: ConnectResponse) -> Option<Field> {
        Some(match (response.in_data(), response.ipo()) {
            (false, 40..=41) => Field::RecordFormat,
            (false, 42..=43) => Field::Queue,
            (false, 44..=45) => Field::QueueSize,
            (false, 46) => Field::Attributes,
            (false, 48..=51) => Field::KeepAlive,
            (true, 0..=15) => Field::HostId,
            (true, 16..=17) => Field::Controller,
            (true, 256..=511) => Field::Subsystem,
            (true, 512..=767) => Field::Host,
            _ => return None,
        })
    }

    fn name(self) -> &'static str {
        match self {
            Field::RecordFormat => "RECFMT (record format)",
            Field::Queue => "QID (queue number)",
            Field::QueueSize => "SQSIZE (queue size)",
            Field::Attributes => "CATTR (connect attributes)",
            Field::KeepAlive => "KATO (keep-alive time-out)",
            Field::HostId => "HOSTID (host identifier)",
            Field::Controller => "CNTLID (controller identifier)",
            Field::Subsystem => "SUBNQN (subsystem name)",
            Field::Host => "HOSTNQN (host name)",
        }
    }

    /// What we sent.
    fn value(self, asked: &Asked<'_>) -> String {
        match self {
            Field::RecordFormat => "0".into(),
            Field::Queue => asked.qid.to_string(),
            Field::QueueSize => format!("{} entries", u32::from(asked.sqsize) + 1),
            Field::Attributes => "no SQ flow control".into(),
            Field::KeepAlive => format!("{} ms", asked.keep_alive.as_millis()),
            Field::HostId => uuid(asked.hostid),
            Field::Controller => "the one of the first queue, or any".into(),
            Field::Subsystem => asked.subsysnqn.into(),
            Field::Host => asked.hostnqn.into(),
        }
    }

    fn remedy(self, asked: &Asked<'_>) -> String {
        match self {
            Field::RecordFormat => {
                "on the target: it speaks another version of NVMe over Fabrics than this host; update it".into()
            }
            Field::Queue => "on this host: ask for fewer queues, or raise the target's limit".into(),
            Field::QueueSize => "on this host: ask for a smaller depth, or raise the target's limit".into(),
            Field::Attributes => {
                "on the target: it insists on SQ flow control, which this host does not use; update it".into()
            }
            Field::KeepAlive => "on this host: choose another keepalive".into(),
            Field::HostId => format!(
                "on this host: the identifier is in use with another host name than {}, or is one that the target does \
                 not take; give each host name an identifier of its own (HEADRACE_HOSTID, or /etc/nvme/hostid)",
                asked.hostnqn
            ),
            Field::Controller => {
                "on either side: the controller is gone, or belongs to another host; connect again".into()
            }
            Field::Subsystem => format!(
                "on either side: no subsystem of this name at this port; check the name, or ask with `headrace discover` \
                 ({} may see only what it is allowed to use)",
                asked.hostnqn
            ),
            Field::Host => {
                "on either side: check the host name (HEADRACE_HOSTNQN, or /etc/nvme/hostnqn), and the target's list of \
                 allowed hosts"
                    .into()
            }
        }
    }
}

/// A Connect that the controller refused: which field, whose side, what to do.
pub(crate) fn connect_refused(asked: Asked<'_>, cqe: &Cqe) -> IoError {
    let plain = Status::new(cqe.status.sct, cqe.status.sc);
    let status = Status {
        dnr: cqe.status.dnr,
        ..plain
    };
    let error = IoError::new(ErrorKind::Refused, "the target refused Connect").at(asked.place);
    let field = match plain {
        Status::CONNECT_INVALID_PARAMETERS => Field::at(ConnectResponse(cqe.dw0)),
        Status::CONNECT_INCOMPATIBLE_FORMAT => Some(Field::RecordFormat),
        Status::CONNECT_INVALID_HOST => Some(Field::Host),
        Status::INVALID_QUEUE_ID => Some(Field::Queue),
        Status::HOST_ID_INCONSISTENT => Some(Field::HostId),
        Status::KEEP_ALIVE_INVALID => Some(Field::KeepAlive),
        _ => None,
    };
    if let Some(field) = field {
        let remedy = match plain {
            Status::CONNECT_INVALID_HOST => format!(
                "on the target: allow the host name {}; where it is allowed, its identifier {} may be in use with \
                 another name: give each name its own",
                asked.hostnqn,
                uuid(asked.hostid)
            ),
            _ => field.remedy(&asked),
        };
        return error
            .expected(format!("a {} that the target takes", field.name()))
            .found(format!("{status}, at {}: {}", field.name(), field.value(&asked)))
            .next(remedy);
    }
    let response = ConnectResponse(cqe.dw0);
    let found = match plain {
        Status::CONNECT_INVALID_PARAMETERS if response.0 != 0 => {
            let part = if response.in_data() { "data" } else { "command" };
            format!("{status}, at byte {} of the Connect {part}", response.ipo())
        }
        _ => status.to_string(),
    };
    let remedy = match plain {
        Status::CONNECT_INVALID_PARAMETERS => {
            "on either side: the target does not name the field; compare subsystem, host name, queues and depth with its \
             configuration"
        }
        Status::CONNECT_CONTROLLER_BUSY => {
            "on the target: it has no controller free, or still ends an earlier association of this host; try later, or \
             raise its limit"
        }
        Status::CONNECT_RESTART_DISCOVERY => {
            "on this host: the subsystem is elsewhere now; ask with `headrace discover`"
        }
        Status::INVALID_QUEUE_TYPE => "on the target: it does not take I/O queues here; use another of its ports",
        Status::AUTHENTICATION_REQUIRED => {
            "on the target: it demands authentication, which this version does not speak; allow this host without it"
        }
        Status::INVALID_OPCODE => {
            "on either side: what answers does not know Connect; check that the port is an NVMe/TCP target's"
        }
        Status::INVALID_FIELD => {
            "on either side: the target does not name the field; compare this host's options with its configuration"
        }
        Status::SEQUENCE_ERROR => {
            "on the target: it found this Connect out of its turn; see its log, and report this with its name and version"
        }
        Status::INTERNAL_ERROR | Status::ABORT_REQUESTED | Status::SQ_DELETED | Status::INTERRUPTED => {
            "on the target: it failed by itself; see its log"
        }
        _ => "on the target: see its log",
    };
    error.expected("Successful Completion").found(found).next(remedy)
}

fn uuid(id: &[u8; 16]) -> String {
    crate::options::NamespaceKey::Uuid(*id)
        .to_string()
        .trim_start_matches("uuid=")
        .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOSTID: [u8; 16] = [0x11; 16];

    fn refused(status: Status, dw0: u32) -> String {
        let asked = Asked {
            place: "nvme+tcp://h:1/nqn.s?nsid=1",
            subsysnqn: "nqn.s",
            hostnqn: "nqn.h",
            hostid: &HOSTID,
            qid: 3,
            sqsize: 127,
            keep_alive: Duration::from_secs(5),
        };
        let cqe = Cqe {
            dw0,
            ..Cqe::new(0, status)
        };
        let error = connect_refused(asked, &cqe);
        assert_eq!(error.kind, ErrorKind::Refused);
        error.to_string()
    }

    /// Each status that a Connect may be answered with: its own name, a side, and words that belong to it.
    #[test]
    fn every_status_names_a_side_and_a_remedy() {
        let cases: &[(Status, &[&str])] = &[
            (Status::INVALID_OPCODE, &["on either side", "NVMe/TCP target"]),
            (
                Status::INVALID_FIELD,
                &["on either side", "does not name the field"],
            ),
            (Status::SEQUENCE_ERROR, &["on the target", "out of its turn"]),
            (Status::INTERNAL_ERROR, &["on the target", "log"]),
            (Status::ABORT_REQUESTED, &["on the target", "log"]),
            (
                Status::HOST_ID_INCONSISTENT,
                &["on this host", "HOSTID", "HEADRACE_HOSTID"],
            ),
            (
                Status::KEEP_ALIVE_INVALID,
                &["on this host", "KATO", "5000 ms", "keepalive"],
            ),
            (
                Status::CONNECT_INCOMPATIBLE_FORMAT,
                &["on the target", "RECFMT", "version"],
            ),
            (Status::CONNECT_CONTROLLER_BUSY, &["on the target", "try later"]),
            (
                Status::CONNECT_INVALID_PARAMETERS,
                &["on either side", "does not name the field"],
            ),
            (
                Status::CONNECT_RESTART_DISCOVERY,
                &["on this host", "headrace discover"],
            ),
            (
                Status::CONNECT_INVALID_HOST,
                &[
                    "on the target",
                    "HOSTNQN",
                    "allow the host name nqn.h",
                    "11111111-1111",
                ],
            ),
            (
                Status::INVALID_QUEUE_TYPE,
                &["on the target", "another of its ports"],
            ),
            (Status::INVALID_QUEUE_ID, &["on this host", "QID", "fewer queues"]),
            (
                Status::AUTHENTICATION_REQUIRED,
                &["on the target", "authentication"],
            ),
            (
                Status::new(7, 0x42),
                &["on the target", "log", "type 7, code 0x42"],
            ),
        ];
        for (status, words) in cases {
            for status in [*status, status.do_not_retry()] {
                let text = refused(status, 0);
                assert!(
                    text.contains("the target refused Connect at nvme+tcp://h:1/nqn.s"),
                    "{text}"
                );
                assert!(text.contains(&status.to_string()), "{text}");
                for word in *words {
                    assert!(text.contains(word), "{word:?} in {text}");
                }
            }
        }
    }

    /// IPO and IATTR: the field by name, what stood in it, and its remedy; at its first byte and at its last.
    #[test]
    fn every_field_is_named_with_its_value() {
        let cases: &[(bool, u16, u16, &[&str])] = &[
            (false, 40, 41, &["RECFMT", "on the target", "version"]),
            (false, 42, 43, &["QID", ": 3;", "on this host", "fewer queues"]),
            (
                false,
                44,
                45,
                &["SQSIZE", "128 entries", "on this host", "smaller depth"],
            ),
            (false, 46, 46, &["CATTR", "on the target", "flow control"]),
            (false, 48, 51, &["KATO", "5000 ms", "on this host", "keepalive"]),
            (
                true,
                0,
                15,
                &[
                    "HOSTID",
                    "11111111-1111",
                    "on this host",
                    "another host name than nqn.h",
                ],
            ),
            (true, 16, 17, &["CNTLID", "on either side", "connect again"]),
            (
                true,
                256,
                511,
                &["SUBNQN", "nqn.s", "on either side", "headrace discover"],
            ),
            (
                true,
                512,
                767,
                &["HOSTNQN", "nqn.h", "on either side", "allowed hosts"],
            ),
        ];
        for (in_data, first, last, words) in cases {
            for ipo in [first, last] {
                let dw0 = ConnectResponse::invalid(*ipo, *in_data).0;
                let text = refused(Status::CONNECT_INVALID_PARAMETERS.do_not_retry(), dw0);
                for word in *words {
                    assert!(text.contains(word), "{word:?} in {text}");
                }
            }
        }
        // Bytes between the fields are told by their number.
        let dw0 = ConnectResponse::invalid(20, true).0;
        let text = refused(Status::CONNECT_INVALID_PARAMETERS, dw0);
        assert!(
            text.contains("byte 20 of the Connect data") && text.contains("on either side"),
            "{text}"
        );
    }
}

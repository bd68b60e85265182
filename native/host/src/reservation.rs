//! Reservation verbs. A registration belongs to the host identifier, so each goes to any one path.
//!
//! A verb whose answer was lost is not simply sent again: Report says what has become of it. What is so already counts as
//! done; what is not is sent again, a bounded number of times. A preempt and abort is the exception: that the victim is
//! gone does not show that its commands are through, so there the outcome stays unknown.

use crate::association::{is_path_related, is_transient};
use crate::device::NvmeTcpDevice;
use crate::guard::REPORT_BYTES;
use crate::passthrough::{Command, CommandAnswer, CommandData};
use headrace_transfer::{BlockDevice, ErrorKind, IoError};
use headrace_wire::reservation::{
    AcquireAction, Change, RegisterAction, ReleaseAction, Report, CDW11_EXTENDED,
};
use headrace_wire::{io, Status};
use std::time::{Duration, Instant};

const TRIES: u32 = 5;
const DELAY: Duration = Duration::from_millis(50);

impl NvmeTcpDevice {
    /// Carry out a reservation command within `timeout`.
    ///
    /// `Conflict`: the target refused it. `Unknown`: nobody can say whether it was carried out.
    pub fn reserve(&self, change: &Change, timeout: Duration) -> Result<(), IoError> {
        let deadline = Instant::now() + timeout;
        let mut tries = 0;
        let mut doubt: Option<IoError> = None;
        loop {
            tries += 1;
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(doubt.unwrap_or_else(|| self.late(change)));
            }
            match self.command(self.reservation_command(change, left)) {
                Ok(answer) if answer.status.is_success() => return Ok(()),
                Ok(answer) if tries < TRIES && passes(answer.status) => {
                    std::thread::sleep((DELAY * tries).min(left));
                }
                // One that was lost before may have done it, which would be why this one finds nothing to do.
                Ok(answer) => {
                    return match doubt {
                        Some(doubt) if self.is_done(change, deadline)? => settled(change, doubt),
                        _ => Err(self.refused(change, &answer)),
                    };
                }
                Err(error) if error.kind == ErrorKind::Unknown => {
                    if self.is_done(change, deadline)? {
                        return settled(change, error);
                    }
                    if tries == TRIES {
                        return Err(error);
                    }
                    doubt = Some(error);
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Who is registered and who holds.
    pub fn reservation_report(&self, timeout: Duration) -> Result<Report, IoError> {
        let deadline = Instant::now() + timeout;
        let length = REPORT_BYTES.min(self.info().max_transfer_bytes) as usize;
        let mut tries = 0;
        loop {
            tries += 1;
            let command = Command {
                admin: false,
                opcode: io::RESERVATION_REPORT,
                nsid: None,
                cdw: [(length / 4 - 1) as u32, CDW11_EXTENDED, 0, 0, 0, 0],
                data: CommandData::In(length),
                timeout: deadline
                    .saturating_duration_since(Instant::now())
                    .max(Duration::from_millis(1)),
            };
            match self.command(command) {
                Ok(answer) if answer.status.is_success() => {
                    return Report::decode(&answer.data, true).ok_or_else(|| {
                        IoError::new(ErrorKind::Protocol, "Reservation Report is cut short").at(self.place())
                    });
                }
                Ok(answer) if tries < TRIES && passes(answer.status) => {
                    std::thread::sleep(DELAY * tries);
                }
                Ok(answer) => return Err(failed("Reservation Report", self.place(), answer.status)),
                // It changes nothing.
                Err(error)
                    if error.kind == ErrorKind::Unknown && tries < TRIES && Instant::now() < deadline => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn reservation_command(&self, change: &Change, timeout: Duration) -> Command {
        let (cdw10, data) = change.encode();
        Command {
            admin: false,
            opcode: change.opcode(),
            nsid: None,
            cdw: [cdw10, 0, 0, 0, 0, 0],
            data: CommandData::Out(data),
            timeout,
        }
    }

    /// Whether Report shows what the command would have brought about.
    fn is_done(&self, change: &Change, deadline: Instant) -> Result<bool, IoError> {
        let left = deadline.saturating_duration_since(Instant::now());
        let report = self.reservation_report(left.max(Duration::from_secs(1)))?;
        Ok(shows(&report, change, &self.hostid()))
    }

    fn late(&self, change: &Change) -> IoError {
        IoError::new(
            ErrorKind::Timeout,
            format!("{} did not end in time", io::name(change.opcode())),
        )
        .at(self.place())
        .next("check the target and the network")
    }

    fn refused(&self, change: &Change, answer: &CommandAnswer) -> IoError {
        let name = io::name(change.opcode());
        let interrupted = Status::new(answer.status.sct, answer.status.sc) == Status::INTERRUPTED;
        let preempts = matches!(
            change,
            Change::Acquire {
                action: AcquireAction::PreemptAndAbort,
                ..
            }
        );
        if interrupted && preempts {
            return IoError::new(
                ErrorKind::Failed,
                "the preempted hosts are shut out, but not drained",
            )
            .at(self.place())
            .expected("Successful Completion of preempt and abort")
            .found(answer.status.to_string())
            .next("what they had under way may still land: use none of the space that they may write to");
        }
        failed(name, self.place(), answer.status)
    }
}

/// Whether another try may go better: the controller was busy, or another path has the namespace by now.
fn passes(status: Status) -> bool {
    is_path_related(status) || (is_transient(status) && !status.dnr)
}

fn failed(name: &str, place: &str, status: Status) -> IoError {
    let conflict = Status::new(status.sct, status.sc) == Status::RESERVATION_CONFLICT;
    let kind = if conflict {
        ErrorKind::Conflict
    } else {
        ErrorKind::Failed
    };
    IoError::new(kind, format!("{name} was refused"))
        .at(place)
        .expected("Successful Completion")
        .found(status.to_string())
        .next(if conflict {
            "look at the reservation report: who is registered with which key, and who holds"
        } else if Status::new(status.sct, status.sc) == Status::WRITE_PROTECTED {
            crate::errors::READ_ONLY_HERE
        } else {
            "see the target's log"
        })
}

/// Report shows that a command whose answer was lost was carried out.
fn settled(change: &Change, doubt: IoError) -> Result<(), IoError> {
    match change {
        Change::Acquire {
            action: AcquireAction::PreemptAndAbort,
            ..
        } => Err(IoError {
            found:
                "the preempted hosts are shut out; whether what they had under way is through, nobody said"
                    .into(),
            ..doubt
        }),
        _ => Ok(()),
    }
}

fn shows(report: &Report, change: &Change, hostid: &[u8; 16]) -> bool {
    let own = report.registrants.iter().find(|r| r.hostid == *hostid);
    let own_key = own.map(|own| own.key);
    match change {
        Change::Register {
            action: RegisterAction::Unregister,
            ..
        } => own.is_none(),
        Change::Register { new_key, persist, .. } => {
            own_key == Some(*new_key) && persist.is_none_or(|persist| persist == report.persistent)
        }
        Change::Acquire {
            action: AcquireAction::Acquire,
            kind,
            ..
        } => report.kind() == Some(*kind) && own.is_some_and(|own| own.holds),
        // Victim 0: all others.
        Change::Acquire { victim: 0, .. } => own.is_some() && report.registrants.len() == 1,
        Change::Acquire { victim, .. } => {
            own.is_some()
                && !report
                    .registrants
                    .iter()
                    .any(|r| r.key == *victim && r.hostid != *hostid)
        }
        Change::Release {
            action: ReleaseAction::Release,
            ..
        } => own.is_some_and(|own| !own.holds),
        Change::Release {
            action: ReleaseAction::Clear,
            ..
        } => report.registered == 0,
    }
}

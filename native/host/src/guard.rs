//! The guard: nothing is written on a new association before the target has shown that this host still holds the
//! reservation that it writes under.
//!
//! A host that was shut out while it was cut off does not know it. Its queued writes go out on the next association, and
//! if the target has forgotten reservations meanwhile (Linux keeps them in memory only: a restart lets everybody write)
//! they land in what is another host's by then. So after every new association of every path the I/O thread itself asks
//! for a Reservation Report, and holds back writes, flushes and deallocations on that path until it shows
//!
//! * this host identifier registered, with the key that was given, and
//! * the reservation of the type that was given, held by this host; or, for the registrants-only types, by a registrant
//!   with that key.
//!
//! If it shows anything else the device is *fenced*: everything but reads fails at once, for good. Nobody registers again
//! on a reconnect, which is what a host that was shut out must not do. Where the question itself fails the association is
//! given up, and the next one is asked again. A path by which the namespace is not accessible (ANA) is asked once it is.
//! Where no usable path shows it for `loss_timeout`, whether or not associations come up meanwhile, writes fail until one
//! does; reads go on.

use crate::device::{NvmeTcpDevice, GRACE};
use crate::shared::Latch;
use headrace_transfer::{ErrorKind, IoError};
use headrace_wire::reservation::{Report, ReservationType};
use std::sync::Arc;
use std::time::Duration;

/// Longest report that is asked for: a thousand registrants.
pub(crate) const REPORT_BYTES: u64 = 128 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Guard {
    /// Counts the guards of a device, so that an old one's answer is not taken for this one's.
    pub number: u64,
    pub key: u64,
    pub kind: ReservationType,
}

/// For `describe`.
#[derive(Clone, Debug, Default)]
pub(crate) struct GuardStatus {
    /// `off`, `asking`, `passed`, `fenced`.
    pub state: &'static str,
    pub key: u64,
    pub kind: &'static str,
    /// Associations that were asked about and found right.
    pub passed: u64,
    pub fenced: String,
}

impl GuardStatus {
    pub fn describe(&self) -> serde_json::Value {
        if self.kind.is_empty() {
            return serde_json::json!({ "state": "off" });
        }
        serde_json::json!({
            "state": self.state,
            "key": format!("{:#018x}", self.key),
            "type": self.kind,
            "associations_passed": self.passed,
            "fenced": self.fenced,
        })
    }
}

impl Guard {
    /// `Err`: what the report shows instead.
    pub fn check(&self, report: &Report, hostid: &[u8; 16]) -> Result<(), String> {
        let own = report
            .registrants
            .iter()
            .find(|registrant| registrant.hostid == *hostid);
        let cut = if report.is_whole() {
            String::new()
        } else {
            format!(
                ", in a report of {} of {} registrants",
                report.registrants.len(),
                report.registered
            )
        };
        let held = match report.kind() {
            Some(kind) => {
                let holders: Vec<String> = report
                    .registrants
                    .iter()
                    .filter(|registrant| registrant.holds)
                    .take(3)
                    .map(|holder| format!("{:#x}", holder.key))
                    .collect();
                format!("{} held with key {}", kind.name(), holders.join(", "))
            }
            None => "no reservation".into(),
        };
        let Some(own) = own else {
            return Err(format!("this host is not registered{cut}; {held}"));
        };
        if own.key != self.key {
            return Err(format!("this host is registered with key {:#x}; {held}", own.key));
        }
        let right = report.kind() == Some(self.kind)
            && match self.kind {
                ReservationType::WriteExclusiveRegistrants | ReservationType::ExclusiveAccessRegistrants => {
                    let ours = |r: &headrace_wire::reservation::Registrant| r.holds && r.key == self.key;
                    report.registrants.iter().any(ours)
                }
                _ => own.holds,
            };
        if right {
            Ok(())
        } else {
            Err(format!("{held}{cut}"))
        }
    }

    pub fn fence(&self, found: String, place: &str) -> IoError {
        IoError::new(
            ErrorKind::Conflict,
            "the device is fenced: this host may not write any more",
        )
        .at(place)
        .expected(format!(
            "Reservation Report shows this host registered with key {:#x}, and {} held under it",
            self.key,
            self.kind.name()
        ))
        .found(found)
        .next("register and acquire first; where that was done, another host has taken over, or the target has forgotten \
             its reservations: open a new session")
    }
}

impl NvmeTcpDevice {
    /// From now on writes, flushes and deallocations go out only on associations whose target has shown this reservation.
    /// Waits until one has; `Conflict`: it showed another state, and the device is fenced. A guard replaces the one before,
    /// and a fence with it.
    pub fn guard_writes(&self, key: u64, kind: ReservationType, timeout: Duration) -> Result<(), IoError> {
        let reply = Arc::new(Latch::new());
        self.send_guard(Some((key, kind)), reply.clone());
        self.wait_for(&reply, timeout, Duration::ZERO)
    }

    /// Without a guard again; a fence ends.
    pub fn unguard(&self) -> Result<(), IoError> {
        let reply = Arc::new(Latch::new());
        self.send_guard(None, reply.clone());
        self.wait_for(&reply, GRACE, Duration::ZERO)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use headrace_wire::reservation::Registrant;

    const HOST: [u8; 16] = [1; 16];
    const KEY: u64 = 77;

    fn report(kind: u8, registrants: &[(u8, u64, bool)]) -> Report {
        Report {
            rtype: kind,
            registered: registrants.len() as u16,
            registrants: registrants
                .iter()
                .map(|&(host, key, holds)| Registrant {
                    cntlid: 0xFFFF,
                    holds,
                    hostid: [host; 16],
                    key,
                })
                .collect(),
            ..Report::default()
        }
    }

    /// What a report must show, and every way in which it can show something else.
    #[test]
    fn what_passes() {
        use ReservationType as T;
        let check = |kind: T, report: &Report| {
            let guard = Guard {
                number: 1,
                key: KEY,
                kind,
            };
            guard.check(report, &HOST)
        };
        for kind in T::ALL {
            let number = kind as u8;
            let registrants_only =
                [T::WriteExclusiveRegistrants, T::ExclusiveAccessRegistrants].contains(&kind);
            check(kind, &report(number, &[(2, 5, false), (1, KEY, true)])).unwrap();
            // Held by another identifier with our key.
            let other = report(number, &[(1, KEY, false), (2, KEY, true)]);
            assert_eq!(check(kind, &other).is_ok(), registrants_only, "{kind:?}");
            for (wrong, says) in [
                (report(0, &[]), "not registered; no reservation"),
                (report(number, &[(2, 5, true)]), "not registered"),
                (report(number, &[(2, KEY, true)]), "not registered"),
                (report(number, &[(1, 6, true)]), "registered with key 0x6"),
                (
                    report(number, &[(1, KEY, false), (2, 5, true)]),
                    "held with key 0x5",
                ),
                (report(0, &[(1, KEY, false)]), "no reservation"),
                (report(number % 6 + 1, &[(1, KEY, true)]), "held with key 0x4d"),
                (report(9, &[(1, KEY, true)]), "no reservation"),
            ] {
                let found = check(kind, &wrong).unwrap_err();
                assert!(found.contains(says), "{kind:?}: {found:?} does not say {says:?}");
            }
        }
        let mut cut = report(3, &[(2, 5, true)]);
        cut.registered = 40;
        let found = check(T::WriteExclusiveRegistrants, &cut).unwrap_err();
        assert!(found.contains("1 of 40"), "{found}");
    }
}

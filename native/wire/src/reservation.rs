//! Reservations (Base Specification 8.1.22 with commands 7.2 to 7.5; section numbers of revision 2.1).
//!
//! ```text
//! Register 0Dh   CDW10: RREGA 2:0 (0 register, 1 unregister, 2 replace), IEKEY 3, CPTPL 31:30     data: CRKEY (8) NRKEY (8)
//! Acquire  11h   CDW10: RACQA 2:0 (0 acquire, 1 preempt, 2 preempt and abort), IEKEY 3, RTYPE 15:8  data: CRKEY (8) PRKEY (8)
//! Release  15h   CDW10: RRELA 2:0 (0 release, 1 clear), IEKEY 3, RTYPE 15:8                       data: CRKEY (8)
//! Report   0Eh   CDW10: NUMD (zero-based dwords)   CDW11: EDS 0
//!
//! report header    0 GEN (4)   4 RTYPE   5 REGCTL (2)   9 PTPLS                 24 bytes, 64 with EDS
//! entry, 24 bytes  0 CNTLID (2)   2 RCSTS (bit 0 holder)   8 HOSTID (8)   16 RKEY (8)
//! entry, 64 bytes  0 CNTLID (2)   2 RCSTS (bit 0 holder)   8 RKEY (8)     16 HOSTID (16)
//!
//! notification log page 80h, 64 bytes   0 COUNT (8)   8 TYPE   9 further pages   12 NSID (4)
//! ```

use crate::command::{io, Sgl, Sqe};
use crate::field::{put, u16_at, u32_at, u64_at};
use crate::Status;

/// Data of Register and of Acquire.
pub const KEYS_BYTES: usize = 16;
/// Data of Release.
pub const KEY_BYTES: usize = 8;
/// EDS in CDW11 of Report: entries with 128-bit host identifiers, the only ones over fabrics.
pub const CDW11_EXTENDED: u32 = 1;

/// Bits of RESCAP in Identify Namespace.
pub mod rescap {
    pub const PERSIST: u8 = 1 << 0;
    /// All six types; the bit of type T is `1 << T`.
    pub const ALL_TYPES: u8 = 0x7E;
    /// IEKEY behaves as of NVMe 1.3.
    pub const IEKEY_1_3: u8 = 1 << 7;
}

/// RTYPE.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ReservationType {
    WriteExclusive = 1,
    ExclusiveAccess = 2,
    WriteExclusiveRegistrants = 3,
    ExclusiveAccessRegistrants = 4,
    WriteExclusiveAll = 5,
    ExclusiveAccessAll = 6,
}

impl ReservationType {
    pub const ALL: [ReservationType; 6] = [
        Self::WriteExclusive,
        Self::ExclusiveAccess,
        Self::WriteExclusiveRegistrants,
        Self::ExclusiveAccessRegistrants,
        Self::WriteExclusiveAll,
        Self::ExclusiveAccessAll,
    ];

    pub fn from_u8(value: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|&kind| kind as u8 == value)
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::WriteExclusive => "write exclusive",
            Self::ExclusiveAccess => "exclusive access",
            Self::WriteExclusiveRegistrants => "write exclusive, registrants only",
            Self::ExclusiveAccessRegistrants => "exclusive access, registrants only",
            Self::WriteExclusiveAll => "write exclusive, all registrants",
            Self::ExclusiveAccessAll => "exclusive access, all registrants",
        }
    }

    /// Reads of others are refused too.
    pub fn excludes_reads(self) -> bool {
        matches!(
            self,
            Self::ExclusiveAccess | Self::ExclusiveAccessRegistrants | Self::ExclusiveAccessAll
        )
    }

    /// Every registrant may do what the holder may.
    pub fn admits_registrants(self) -> bool {
        !matches!(self, Self::WriteExclusive | Self::ExclusiveAccess)
    }

    /// Every registrant is a holder.
    pub fn held_by_all(self) -> bool {
        matches!(self, Self::WriteExclusiveAll | Self::ExclusiveAccessAll)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegisterAction {
    Register,
    Unregister,
    Replace,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AcquireAction {
    Acquire,
    Preempt,
    PreemptAndAbort,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReleaseAction {
    Release,
    Clear,
}

/// A command that changes who is registered or who holds, whole: its entry and its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    Register {
        action: RegisterAction,
        ignore_existing: bool,
        /// CPTPL: `None` leaves persistence through power loss as it is.
        persist: Option<bool>,
        key: u64,
        new_key: u64,
    },
    Acquire {
        action: AcquireAction,
        kind: ReservationType,
        key: u64,
        /// PRKEY: whom to preempt.
        victim: u64,
    },
    Release {
        action: ReleaseAction,
        /// RTYPE; Clear does not look at it.
        kind: Option<ReservationType>,
        key: u64,
    },
}

impl Change {
    /// Bytes of data of a command with this opcode; `None`: it is none of these commands.
    pub fn data_bytes(opcode: u8) -> Option<usize> {
        match opcode {
            io::RESERVATION_REGISTER | io::RESERVATION_ACQUIRE => Some(KEYS_BYTES),
            io::RESERVATION_RELEASE => Some(KEY_BYTES),
            _ => None,
        }
    }

    pub fn opcode(&self) -> u8 {
        match self {
            Change::Register { .. } => io::RESERVATION_REGISTER,
            Change::Acquire { .. } => io::RESERVATION_ACQUIRE,
            Change::Release { .. } => io::RESERVATION_RELEASE,
        }
    }

    /// CDW10 and data.
    pub fn encode(&self) -> (u32, Vec<u8>) {
        let (cdw10, keys) = match *self {
            Change::Register {
                action,
                ignore_existing,
                persist,
                key,
                new_key,
            } => {
                let action = match action {
                    RegisterAction::Register => 0,
                    RegisterAction::Unregister => 1,
                    RegisterAction::Replace => 2,
                };
                let cptpl = match persist {
                    None => 0,
                    Some(false) => 2,
                    Some(true) => 3,
                };
                (
                    action | u32::from(ignore_existing) << 3 | cptpl << 30,
                    vec![key, new_key],
                )
            }
            Change::Acquire {
                action,
                kind,
                key,
                victim,
            } => {
                let action = match action {
                    AcquireAction::Acquire => 0,
                    AcquireAction::Preempt => 1,
                    AcquireAction::PreemptAndAbort => 2,
                };
                (action | (kind as u32) << 8, vec![key, victim])
            }
            Change::Release { action, kind, key } => {
                let action = match action {
                    ReleaseAction::Release => 0,
                    ReleaseAction::Clear => 1,
                };
                (action | kind.map_or(0, |kind| kind as u32) << 8, vec![key])
            }
        };
        (cdw10, keys.iter().flat_map(|key| key.to_le_bytes()).collect())
    }

    /// The entry, its data to be pulled, and the data.
    pub fn command(&self, cid: u16, nsid: u32) -> (Sqe, Vec<u8>) {
        let (cdw10, data) = self.encode();
        let length = data.len() as u32;
        let sqe = Sqe::new(self.opcode(), cid, nsid)
            .with_cdw(10, cdw10)
            .with_sgl(Sgl::Transport { length });
        (sqe, data)
    }

    /// `data` may be longer than the command needs: Linux sends 16 bytes with each. Reserved values are Invalid Field.
    pub fn decode(sqe: &Sqe, data: &[u8]) -> Result<Self, Status> {
        const REFUSED: Status = Status::INVALID_FIELD.do_not_retry();
        let needed = Self::data_bytes(sqe.opcode()).ok_or(Status::INVALID_OPCODE.do_not_retry())?;
        if data.len() < needed {
            return Err(Status::SGL_DATA_LENGTH.do_not_retry());
        }
        let cdw10 = sqe.cdw(10);
        let (action, ignore_existing) = (cdw10 & 7, cdw10 & 1 << 3 != 0);
        let kind = ReservationType::from_u8((cdw10 >> 8) as u8);
        let key = u64_at(data, 0);
        if sqe.opcode() == io::RESERVATION_REGISTER {
            return Ok(Change::Register {
                action: match action {
                    0 => RegisterAction::Register,
                    1 => RegisterAction::Unregister,
                    2 => RegisterAction::Replace,
                    _ => return Err(REFUSED),
                },
                ignore_existing,
                persist: match cdw10 >> 30 {
                    0 => None,
                    2 => Some(false),
                    3 => Some(true),
                    _ => return Err(REFUSED),
                },
                key,
                new_key: u64_at(data, 8),
            });
        }
        // "If set to 1, abort with Invalid Field": only Register may leave the existing key aside.
        if ignore_existing {
            return Err(REFUSED);
        }
        if sqe.opcode() == io::RESERVATION_ACQUIRE {
            return Ok(Change::Acquire {
                action: match action {
                    0 => AcquireAction::Acquire,
                    1 => AcquireAction::Preempt,
                    2 => AcquireAction::PreemptAndAbort,
                    _ => return Err(REFUSED),
                },
                kind: kind.ok_or(REFUSED)?,
                key,
                victim: u64_at(data, 8),
            });
        }
        Ok(Change::Release {
            action: match action {
                0 => ReleaseAction::Release,
                1 => ReleaseAction::Clear,
                _ => return Err(REFUSED),
            },
            kind,
            key,
        })
    }
}

/// A Reservation Report of `length` bytes (a multiple of 4, at least 4).
pub fn report_command(cid: u16, nsid: u32, extended: bool, length: u32) -> Sqe {
    debug_assert!(length >= 4 && length % 4 == 0);
    Sqe::new(io::RESERVATION_REPORT, cid, nsid)
        .with_cdw(10, length / 4 - 1)
        .with_cdw(11, u32::from(extended) * CDW11_EXTENDED)
        .with_sgl(Sgl::Transport { length })
}

/// Bytes that a Reservation Report asks for, up to 2^34, and whether in the extended form.
pub fn report_request(sqe: &Sqe) -> (u64, bool) {
    (
        (u64::from(sqe.cdw(10)) + 1) * 4,
        sqe.cdw(11) & CDW11_EXTENDED != 0,
    )
}

/// One registrant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registrant {
    /// FFFFh where controllers are dynamic.
    pub cntlid: u16,
    pub holds: bool,
    /// In the 24-byte form the first 8 bytes, the rest zero.
    pub hostid: [u8; 16],
    pub key: u64,
}

/// What Reservation Report says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    pub generation: u32,
    /// RTYPE as it came; 0: nobody holds.
    pub rtype: u8,
    /// PTPLS: registrations and reservation survive a loss of power.
    pub persistent: bool,
    /// REGCTL: how many there are; `registrants` has fewer where the buffer was too short.
    pub registered: u16,
    pub registrants: Vec<Registrant>,
}

impl Report {
    /// Header, and each entry.
    pub const fn entry_bytes(extended: bool) -> usize {
        if extended {
            64
        } else {
            24
        }
    }

    pub fn kind(&self) -> Option<ReservationType> {
        ReservationType::from_u8(self.rtype)
    }

    /// All registrants were in the buffer.
    pub fn is_whole(&self) -> bool {
        usize::from(self.registered) == self.registrants.len()
    }

    /// Fill `into`: what does not fit is cut, what remains is zero.
    pub fn encode_into(&self, extended: bool, into: &mut [u8]) {
        let unit = Self::entry_bytes(extended);
        into.fill(0);
        let mut place = |at: usize, bytes: &[u8]| {
            let end = into.len().min(at + bytes.len());
            if at < end {
                into[at..end].copy_from_slice(&bytes[..end - at]);
            }
        };
        let mut header = [0; 24];
        put(&mut header, 0, &self.generation.to_le_bytes());
        header[4] = self.rtype;
        put(&mut header, 5, &self.registered.to_le_bytes());
        header[9] = u8::from(self.persistent);
        place(0, &header);
        for (index, registrant) in self.registrants.iter().enumerate() {
            let mut entry = [0; 64];
            put(&mut entry, 0, &registrant.cntlid.to_le_bytes());
            entry[2] = u8::from(registrant.holds);
            if extended {
                put(&mut entry, 8, &registrant.key.to_le_bytes());
                put(&mut entry, 16, &registrant.hostid);
            } else {
                put(&mut entry, 8, &registrant.hostid[..8]);
                put(&mut entry, 16, &registrant.key.to_le_bytes());
            }
            place(unit * (index + 1), &entry[..unit]);
        }
    }

    /// `None` where `b` is shorter than a header. Entries that are not whole in `b` are left out, whatever REGCTL says.
    pub fn decode(b: &[u8], extended: bool) -> Option<Self> {
        let unit = Self::entry_bytes(extended);
        if b.len() < unit {
            return None;
        }
        let registered = u16_at(b, 5);
        let registrants = b[unit..]
            .chunks_exact(unit)
            .take(usize::from(registered))
            .map(|entry| {
                let mut hostid = [0; 16];
                let key = if extended {
                    hostid.copy_from_slice(&entry[16..32]);
                    u64_at(entry, 8)
                } else {
                    hostid[..8].copy_from_slice(&entry[8..16]);
                    u64_at(entry, 16)
                };
                Registrant {
                    cntlid: u16_at(entry, 0),
                    holds: entry[2] & 1 != 0,
                    hostid,
                    key,
                }
            })
            .collect();
        Some(Report {
            generation: u32_at(b, 0),
            rtype: b[4],
            persistent: b[9] & 1 != 0,
            registered,
            registrants,
        })
    }
}

/// What a notification tells. The bit of its kind in feature 82h (Reservation Notification Mask) is `1 << kind`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum NotificationKind {
    RegistrationPreempted = 1,
    ReservationReleased = 2,
    ReservationPreempted = 3,
}

/// One Reservation Notification log page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Notification {
    /// Grows by one with each page; 0: there was none yet.
    pub count: u64,
    /// 0: nothing to tell; else a [`NotificationKind`].
    pub kind: u8,
    /// Further pages that wait; 255 means as many or more.
    pub further: u8,
    pub nsid: u32,
}

impl Notification {
    pub const BYTES: usize = 64;

    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut b = [0; Self::BYTES];
        put(&mut b, 0, &self.count.to_le_bytes());
        b[8] = self.kind;
        b[9] = self.further;
        put(&mut b, 12, &self.nsid.to_le_bytes());
        b
    }

    /// `None` unless `b` has 64 bytes or more.
    pub fn decode(b: &[u8]) -> Option<Self> {
        (b.len() >= Self::BYTES).then(|| Notification {
            count: u64_at(b, 0),
            kind: b[8],
            further: b[9],
            nsid: u32_at(b, 12),
        })
    }
}

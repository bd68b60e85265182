//! The NVM command set: what a command means, checked before any data moves. Module `work` carries it out.

use crate::controller::Controller;
use crate::direct::Direct;
use crate::memory::Buffer;
use crate::reservation::rules::Access;
use crate::reservation::Claim;
use crate::subsystem::Namespace;
use crate::view::Reach;
use crate::work::{account_read, account_write, Work};
use headrace_media::Mapping;
use headrace_wire::command::{DsmRange, CDW11_DEALLOCATE, CDW12_DEAC, NSID_ALL};
use headrace_wire::reservation::{report_request, Change};
use headrace_wire::{io, Sgl, Sqe, Status};
use std::sync::Arc;

/// All 256 range descriptors of Dataset Management.
const DSM_BYTES_MAX: u32 = 256 * DsmRange::BYTES as u32;
/// Data of reservation commands: two keys, and what some hosts send behind them.
const RESERVE_BYTES_MAX: u32 = 4096;

/// What a command does, and with how many bytes in which direction.
pub(crate) enum Plan {
    Read {
        namespace: Claim,
        offset: u64,
        length: u32,
    },
    Write {
        namespace: Claim,
        offset: u64,
        length: u32,
        fua: bool,
    },
    Compare {
        namespace: Claim,
        offset: u64,
        length: u32,
    },
    Zero {
        namespace: Claim,
        offset: u64,
        length: u64,
        fua: bool,
        deallocate: bool,
    },
    /// Register, Acquire, Release: `bytes` come from the host.
    Reserve {
        namespace: Claim,
        bytes: u32,
    },
    Report {
        namespace: Claim,
        length: u32,
    },
    /// `ranges` range descriptors come from the host, in `bytes` that may be more: Linux always sends a whole page.
    Manage {
        namespace: Claim,
        ranges: usize,
        bytes: u32,
        deallocate: bool,
    },
    Flush(Vec<Claim>),
}

impl Plan {
    /// Bytes that the host sends.
    pub(crate) fn bytes_from_host(&self) -> u32 {
        match self {
            Plan::Write { length, .. } | Plan::Compare { length, .. } => *length,
            Plan::Manage { bytes, .. } | Plan::Reserve { bytes, .. } => *bytes,
            Plan::Read { .. } | Plan::Zero { .. } | Plan::Flush(_) | Plan::Report { .. } => 0,
        }
    }

    /// For a write whose data can be received right where they belong: the length of the buffer that it needs all the same.
    pub(crate) fn direct_bytes(&self) -> Option<usize> {
        let Plan::Write { namespace, .. } = self else {
            return None;
        };
        namespace.mapping.as_ref()?;
        Some(namespace.block_bytes() as usize)
    }

    /// Where a write goes.
    pub(crate) fn written(&self) -> Option<Arc<Namespace>> {
        match self {
            Plan::Write { namespace, .. } => Some(namespace.namespace().clone()),
            _ => None,
        }
    }

    /// With a buffer of that length.
    pub(crate) fn direct(&self, tail: Buffer) -> Option<Direct> {
        let Plan::Write {
            namespace, offset, ..
        } = self
        else {
            return None;
        };
        // It fits: the range was checked against the mapping's size.
        Some(Direct::new(namespace.mapping.clone()?, *offset as usize, tail))
    }

    /// Data go straight to the medium, now: may they still? With the connection's gate entered.
    pub(crate) fn check_direct(&self) -> Result<(), Status> {
        match self {
            Plan::Write { namespace, .. } => namespace.check(Access::Write),
            _ => Ok(()),
        }
    }

    /// Count a write whose data are in place.
    pub(crate) fn account_direct(&self) {
        if let Plan::Write {
            namespace, length, ..
        } = self
        {
            account_write(namespace, *length as usize);
        }
    }

    /// Bytes that the host gets.
    pub(crate) fn bytes_to_host(&self) -> u32 {
        match self {
            Plan::Read { length, .. } | Plan::Report { length, .. } => *length,
            _ => 0,
        }
    }
}

/// Decode and check a command of an I/O queue, which goes where `reach` says.
pub(crate) fn plan(sqe: &Sqe, controller: &Arc<Controller>, reach: &Reach) -> Result<Plan, Status> {
    let refuse = |status: Status| Err(status.do_not_retry());
    let opcode = sqe.opcode();
    if opcode == io::FLUSH && sqe.nsid() == NSID_ALL {
        let claim = |namespace| Claim::new(namespace, controller, Some(Access::Write));
        let claims = reach.view().namespaces().map(claim);
        return Ok(Plan::Flush(claims.collect::<Result<_, _>>()?));
    }
    let known = [
        io::FLUSH,
        io::READ,
        io::WRITE,
        io::COMPARE,
        io::WRITE_ZEROES,
        io::DATASET_MANAGEMENT,
        io::RESERVATION_REGISTER,
        io::RESERVATION_REPORT,
        io::RESERVATION_ACQUIRE,
        io::RESERVATION_RELEASE,
    ];
    if !known.contains(&opcode) {
        return refuse(Status::INVALID_OPCODE);
    }
    let namespace = Claim::new(reach.namespace(sqe.nsid())?, controller, Access::of(opcode))?;
    let writes = matches!(opcode, io::WRITE | io::WRITE_ZEROES | io::DATASET_MANAGEMENT);
    let reserves = opcode == io::RESERVATION_REPORT || Change::data_bytes(opcode).is_some();
    if reserves && namespace.reservations.are_off() {
        return refuse(Status::INVALID_OPCODE);
    }
    // Who may only read must not shut out who may write.
    if (writes || Change::data_bytes(opcode).is_some()) && !reach.may_write(&namespace) {
        return refuse(Status::WRITE_PROTECTED);
    }
    match opcode {
        io::FLUSH => return Ok(Plan::Flush(vec![namespace])),
        io::RESERVATION_REGISTER | io::RESERVATION_ACQUIRE | io::RESERVATION_RELEASE => {
            let needed = Change::data_bytes(opcode).map_or(0, |bytes| bytes as u32);
            return Ok(Plan::Reserve {
                namespace,
                bytes: at_least(sqe, needed, RESERVE_BYTES_MAX),
            });
        }
        io::RESERVATION_REPORT => {
            let (length, extended) = report_request(sqe);
            // Over fabrics host identifiers have 128 bits, which the short form does not hold.
            if !extended {
                return refuse(Status::HOST_ID_INCONSISTENT);
            }
            return match u32::try_from(length) {
                Ok(length) if length <= controller.subsystem.limits.mdts_bytes => {
                    Ok(Plan::Report { namespace, length })
                }
                _ => refuse(Status::INVALID_FIELD),
            };
        }
        io::DATASET_MANAGEMENT => {
            let deallocate = sqe.cdw(11) & CDW11_DEALLOCATE != 0;
            let ranges = (sqe.cdw(10) & 0xFF) + 1;
            let needed = ranges * DsmRange::BYTES as u32;
            let bytes = at_least(sqe, needed, DSM_BYTES_MAX);
            return Ok(Plan::Manage {
                namespace,
                ranges: ranges as usize,
                bytes,
                deallocate,
            });
        }
        _ => {}
    }
    let (offset, length) = range(&namespace, sqe.slba(), sqe.nlb())?;
    let fua = sqe.fua() || (writes && controller.writes_through());
    if opcode == io::WRITE_ZEROES {
        // DEAC is a wish, and granted where what is deallocated reads as zeros.
        let deallocate = sqe.cdw(12) & CDW12_DEAC != 0 && namespace.media.deallocated_reads_zeros();
        return Ok(Plan::Zero {
            deallocate,
            namespace,
            offset,
            length,
            fua,
        });
    }
    // A command's length in bytes is at most 65536 blocks of 4096, which u32 holds.
    let length = match u32::try_from(length) {
        Ok(length) if length <= controller.subsystem.limits.mdts_bytes => length,
        _ => return refuse(Status::INVALID_FIELD),
    };
    Ok(match opcode {
        io::READ => Plan::Read {
            namespace,
            offset,
            length,
        },
        io::WRITE => Plan::Write {
            namespace,
            offset,
            length,
            fua,
        },
        _ => Plan::Compare {
            namespace,
            offset,
            length,
        },
    })
}

/// The length of the host's data where it may send more than the command `needed`: Linux does.
fn at_least(sqe: &Sqe, needed: u32, most: u32) -> u32 {
    match sqe.sgl() {
        Sgl::InCapsule { length, .. } | Sgl::Transport { length } => length.clamp(needed, most),
        _ => needed,
    }
}

/// Blocks to bytes, within the namespace.
pub(crate) fn range(namespace: &Namespace, slba: u64, blocks: u32) -> Result<(u64, u64), Status> {
    let end = slba
        .checked_add(u64::from(blocks))
        .filter(|&end| end <= namespace.blocks());
    if end.is_none() {
        return Err(Status::LBA_RANGE.do_not_retry());
    }
    // No overflow: the namespace's size in bytes is a u64.
    Ok((
        slba * namespace.block_bytes(),
        u64::from(blocks) * namespace.block_bytes(),
    ))
}

/// A read that needs no work: its data are sent from where they lie.
pub(crate) fn map(namespace: &Namespace, length: u32) -> Option<Arc<Mapping>> {
    let mapping = namespace.mapping.clone()?;
    account_read(namespace, length as usize);
    Some(mapping)
}

/// Longer reads go to a worker, so that copying them overlaps with sending others.
const READ_NOW_BYTES: usize = 64 << 10;

/// A short read that needs no waiting; `true` if it was done.
fn read_now(namespace: &Namespace, offset: u64, buffer: &mut Buffer) -> bool {
    let done = buffer.len() <= READ_NOW_BYTES && matches!(namespace.media.try_read(offset, buffer), Ok(true));
    if done {
        account_read(namespace, buffer.len());
    }
    done
}

pub(crate) enum Prepared {
    /// A read that was done already.
    Read(Buffer),
    Work(Work),
    /// For the namespace's desk.
    Reserve(Claim, Buffer),
}

/// A plan and its data become work; a short read that the page cache can serve is done at once.
pub(crate) fn prepare(plan: Plan, buffer: Option<Buffer>) -> Result<Prepared, Status> {
    let need = |buffer: Option<Buffer>| buffer.ok_or(Status::INTERNAL_ERROR);
    Ok(Prepared::Work(match plan {
        Plan::Read {
            namespace, offset, ..
        } => {
            let mut buffer = need(buffer)?;
            namespace.check(Access::Read)?;
            if read_now(&namespace, offset, &mut buffer) {
                return Ok(Prepared::Read(buffer));
            }
            Work::Read {
                namespace,
                offset,
                buffer,
            }
        }
        Plan::Write {
            namespace,
            offset,
            fua,
            ..
        } => Work::Write {
            namespace,
            offset,
            buffer: need(buffer)?,
            fua,
        },
        Plan::Compare {
            namespace, offset, ..
        } => Work::Compare {
            namespace,
            offset,
            buffer: need(buffer)?,
        },
        Plan::Zero {
            namespace,
            offset,
            length,
            fua,
            deallocate,
        } => Work::Zero {
            namespace,
            offset,
            length,
            fua,
            deallocate,
        },
        Plan::Manage {
            namespace,
            ranges,
            deallocate,
            ..
        } => {
            let work = Work::manage(namespace, &need(buffer)?, ranges)?;
            if !deallocate {
                // The other attributes are hints about access patterns, which this target does not use.
                return Ok(Prepared::Work(Work::Flush(Vec::new())));
            }
            work
        }
        Plan::Report { namespace, .. } => {
            let mut buffer = need(buffer)?;
            namespace.reservations.report().encode_into(true, &mut buffer);
            return Ok(Prepared::Read(buffer));
        }
        Plan::Reserve { namespace, .. } => {
            return Ok(Prepared::Reserve(namespace, need(buffer)?));
        }
        Plan::Flush(namespaces) => Work::Flush(namespaces),
    }))
}

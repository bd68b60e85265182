//! The NVM command set: what a command means, checked before any data moves, and how it is carried out.

use crate::controller::{Controller, Event};
use crate::direct::Direct;
use crate::memory::Buffer;
use crate::reservation::rules::Access;
use crate::reservation::Claim;
use crate::subsystem::{count, Namespace};
use crate::view::Reach;
use headrace_media::Mapping;
use headrace_wire::command::{DsmRange, CDW11_DEALLOCATE, CDW12_DEAC, NSID_ALL};
use headrace_wire::reservation::{report_request, Change};
use headrace_wire::{io, Sgl, Sqe, Status};
use std::sync::atomic::Ordering;
use std::sync::Arc;

/// All 256 range descriptors of Dataset Management.
const DSM_BYTES_MAX: u32 = 256 * DsmRange::BYTES as u32;
/// Data of reservation commands: two keys, and what some hosts send behind them.
const RESERVE_BYTES_MAX: u32 = 4096;

/// Memory that is zeroed in one piece: some milliseconds.
const PIECE_BYTES: u64 = 16 << 20;

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
fn range(namespace: &Namespace, slba: u64, blocks: u32) -> Result<(u64, u64), Status> {
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

/// A planned command with its data, ready to touch media.
pub(crate) enum Work {
    Read {
        namespace: Claim,
        offset: u64,
        buffer: Buffer,
    },
    Write {
        namespace: Claim,
        offset: u64,
        buffer: Buffer,
        fua: bool,
    },
    Compare {
        namespace: Claim,
        offset: u64,
        buffer: Buffer,
    },
    /// A fused pair.
    CompareAndWrite {
        namespace: Claim,
        offset: u64,
        compare: Buffer,
        write: Buffer,
        fua: bool,
    },
    Zero {
        namespace: Claim,
        offset: u64,
        length: u64,
        fua: bool,
        deallocate: bool,
    },
    Deallocate {
        namespace: Claim,
        ranges: Vec<(u64, u64)>,
    },
    Flush(Vec<Claim>),
    /// The normal shutdown of a controller: flush, then say so in CSTS.
    Shutdown {
        controller: Arc<Controller>,
    },
}

impl Work {
    /// The first `count` ranges of Dataset Management, all checked before the first is carried out.
    pub(crate) fn manage(namespace: Claim, descriptors: &[u8], count: usize) -> Result<Work, Status> {
        let mut ranges = Vec::with_capacity(count);
        for descriptor in descriptors.chunks_exact(DsmRange::BYTES).take(count) {
            let mut bytes = [0; DsmRange::BYTES];
            bytes.copy_from_slice(descriptor);
            let found = DsmRange::decode(&bytes);
            ranges.push(range(&namespace, found.slba, found.blocks)?);
        }
        Ok(Work::Deallocate { namespace, ranges })
    }

    /// May wait for a device to sync; the workers run only some of these at a time.
    pub(crate) fn syncs(&self) -> bool {
        match self {
            Work::Flush(_) | Work::Shutdown { .. } => true,
            Work::Write { fua, .. } | Work::Zero { fua, .. } | Work::CompareAndWrite { fua, .. } => *fua,
            _ => false,
        }
    }

    /// Short enough, and sure not to wait, so that the reactor does it itself.
    pub(crate) fn is_inline(&self) -> bool {
        const INLINE_ZERO: u64 = 4 << 20;
        match self {
            Work::Read { namespace, .. }
            | Work::Write { namespace, .. }
            | Work::CompareAndWrite { namespace, .. }
            | Work::Compare { namespace, .. } => namespace.mapping.is_some(),
            Work::Zero {
                namespace, length, ..
            } => namespace.mapping.is_some() && *length <= INLINE_ZERO,
            Work::Deallocate { namespace, ranges } => {
                namespace.mapping.is_some() && ranges.iter().map(|r| r.1).sum::<u64>() <= INLINE_ZERO
            }
            Work::Flush(namespaces) => namespaces.iter().all(|n| n.mapping.is_some()),
            Work::Shutdown { .. } => false,
        }
    }

    /// May it still touch media? A reservation may have come since its capsule did.
    fn check(&self) -> Result<(), Status> {
        match self {
            Work::Read { namespace, .. } | Work::Compare { namespace, .. } => namespace.check(Access::Read),
            Work::Write { namespace, .. }
            | Work::CompareAndWrite { namespace, .. }
            | Work::Zero { namespace, .. }
            | Work::Deallocate { namespace, .. } => namespace.check(Access::Write),
            Work::Flush(namespaces) => namespaces.iter().try_for_each(|n| n.check(Access::Write)),
            Work::Shutdown { .. } => Ok(()),
        }
    }

    /// Carry it out; waits as long as the media does. With the connection's gate entered.
    pub(crate) fn run(&mut self) -> Status {
        if let Err(status) = self.check() {
            return status;
        }
        match self {
            Work::Read {
                namespace,
                offset,
                buffer,
            } => {
                let result = namespace.media.read(*offset, buffer);
                account_read(namespace, buffer.len());
                outcome(namespace, result, Status::UNRECOVERED_READ)
            }
            Work::Write {
                namespace,
                offset,
                buffer,
                fua,
            } => {
                let _shared = namespace.beside_others();
                write(namespace, *offset, buffer, *fua)
            }
            Work::CompareAndWrite {
                namespace,
                offset,
                compare: expected,
                write: data,
                fua,
            } => {
                let _alone = namespace.alone();
                match compare(namespace, *offset, expected) {
                    Status::SUCCESS => write(namespace, *offset, data, *fua),
                    status => status,
                }
            }
            Work::Compare {
                namespace,
                offset,
                buffer,
            } => compare(namespace, *offset, buffer),
            Work::Zero {
                namespace,
                offset,
                length,
                fua,
                deallocate,
            } => {
                let media = &namespace.media;
                let result = in_pieces(namespace, *offset, *length, |offset, length| match *deallocate {
                    false => media.write_zeroes(offset, length, *fua),
                    true => media.deallocate(offset, length),
                });
                let result = match *deallocate && *fua {
                    true => result.and_then(|()| media.flush()),
                    false => result,
                };
                durably(namespace, result, *fua)
            }
            Work::Deallocate { namespace, ranges } => {
                let mut ranges = ranges.iter();
                let result = ranges.try_for_each(|&(offset, length)| {
                    let deallocate = |offset, length| namespace.media.deallocate(offset, length);
                    in_pieces(namespace, offset, length, deallocate)
                });
                outcome(namespace, result, Status::WRITE_FAULT)
            }
            Work::Flush(namespaces) => {
                flush(namespaces.iter().map(|claim| (&**claim, &**claim.controller())))
            }
            Work::Shutdown { controller } => {
                let view = controller.subsystem.view();
                let status = flush(view.namespaces().map(|n| (&**n, &**controller)));
                controller.shutdown_done();
                status
            }
        }
    }

    /// The data of a finished read.
    pub(crate) fn into_data(self) -> Option<Buffer> {
        match self {
            Work::Read { buffer, .. } => Some(buffer),
            _ => None,
        }
    }
}

/// Do something to a long range beside other writers. Of memory a piece at a time: a fused pair waits for the others to
/// step aside, in a reactor, and giving back terabytes takes its time.
fn in_pieces(
    namespace: &Namespace,
    offset: u64,
    length: u64,
    mut work: impl FnMut(u64, u64) -> std::io::Result<()>,
) -> std::io::Result<()> {
    let piece = namespace.mapping.as_ref().map_or(u64::MAX, |_| PIECE_BYTES);
    let mut at = 0;
    while at < length {
        let next = piece.min(length - at);
        let _shared = namespace.beside_others();
        work(offset + at, next)?;
        at += next;
    }
    Ok(())
}

fn write(namespace: &Claim, offset: u64, data: &[u8], fua: bool) -> Status {
    let result = namespace.media.write(offset, data, fua);
    account_write(namespace, data.len());
    durably(namespace, result, fua)
}

/// What came of a write; one with FUA that failed was a sync that failed.
fn durably(namespace: &Claim, result: std::io::Result<()>, fua: bool) -> Status {
    let status = outcome(namespace, result, Status::WRITE_FAULT);
    if fua && status == Status::WRITE_FAULT {
        lost(namespace, namespace.controller());
    }
    status
}

/// Answered writes may be lost: said in the status, in SMART, and to the host that asked, now and as long as the media is open.
fn lost(namespace: &Namespace, controller: &Controller) {
    namespace.degraded.store(true, Ordering::Relaxed);
    controller.raise(Event::RELIABILITY);
}

fn compare(namespace: &Namespace, offset: u64, expected: &[u8]) -> Status {
    // Piece by piece: a second buffer of the command's length would be memory that nobody counts.
    let mut at = 0;
    let mut found = vec![0; expected.len().min(64 << 10)];
    while at < expected.len() {
        let length = found.len().min(expected.len() - at);
        let piece = &mut found[..length];
        if let Err(error) = namespace.media.read(offset + at as u64, piece) {
            return outcome(namespace, Err(error), Status::UNRECOVERED_READ);
        }
        if expected[at..at + length] != *piece {
            return Status::COMPARE_FAILURE;
        }
        at += length;
    }
    account_read(namespace, expected.len());
    Status::SUCCESS
}

/// Flush all, each for a controller, even if one fails; the first failure is the answer.
fn flush<'a>(namespaces: impl Iterator<Item = (&'a Namespace, &'a Controller)>) -> Status {
    let mut answer = Status::SUCCESS;
    for (namespace, controller) in namespaces {
        count(&namespace.counters.flushes, 1);
        let status = outcome(namespace, namespace.media.flush(), Status::WRITE_FAULT);
        if !status.is_success() {
            lost(namespace, controller);
            if answer.is_success() {
                answer = status;
            }
        }
    }
    answer
}

fn account_read(namespace: &Namespace, bytes: usize) {
    count(&namespace.counters.reads, 1);
    count(&namespace.counters.read_bytes, bytes as u64);
}

fn account_write(namespace: &Namespace, bytes: usize) {
    count(&namespace.counters.writes, 1);
    count(&namespace.counters.written_bytes, bytes as u64);
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

fn outcome(namespace: &Namespace, result: std::io::Result<()>, failure: Status) -> Status {
    let Err(error) = result else {
        return Status::SUCCESS;
    };
    // The media's own check, which the command had passed before: the namespace has become smaller since.
    if error.kind() == std::io::ErrorKind::InvalidInput && error.raw_os_error().is_none() {
        return Status::LBA_RANGE.do_not_retry();
    }
    count(&namespace.counters.media_errors, 1);
    match error.raw_os_error() {
        Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG) => Status::CAPACITY_EXCEEDED,
        _ => failure,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use headrace_media::MemoryMedia;

    /// Each piece lets others in between, and together they are the range.
    #[test]
    fn long_ranges_of_memory_are_cut() {
        let media = MemoryMedia::new(1 << 30, 4096).unwrap();
        let namespace = Namespace::new(1, "nqn.x", Box::new(media));
        let (mut at, end) = (8192, 3 * PIECE_BYTES + 4096);
        let result = in_pieces(&namespace, at, end - at, |offset, length| {
            assert!(offset == at && length > 0 && length <= PIECE_BYTES);
            at += length;
            Ok(())
        });
        result.unwrap();
        assert_eq!(at, end);
        drop(namespace.alone());
    }
}

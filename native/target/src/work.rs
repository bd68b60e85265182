//! Commands at the media: what each does there, and what its answer is.

use crate::controller::{Controller, Event};
use crate::memory::Buffer;
use crate::nvm::range;
use crate::reservation::rules::Access;
use crate::reservation::Claim;
use crate::subsystem::{count, Namespace};
use headrace_wire::command::DsmRange;
use headrace_wire::Status;
use std::sync::atomic::Ordering;
use std::sync::Arc;

/// Memory that is zeroed in one piece: some milliseconds.
const PIECE_BYTES: u64 = 16 << 20;

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

pub(crate) fn account_read(namespace: &Namespace, bytes: usize) {
    count(&namespace.counters.reads, 1);
    count(&namespace.counters.read_bytes, bytes as u64);
}

pub(crate) fn account_write(namespace: &Namespace, bytes: usize) {
    count(&namespace.counters.writes, 1);
    count(&namespace.counters.written_bytes, bytes as u64);
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

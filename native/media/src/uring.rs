//! Files through io_uring: one small ring a thread, submit and wait.
//!
//! A transfer is cut into pieces that are under way together, so that a drive sees several at once from one thread that
//! waits for one. Against `pread` from the page cache that gains nothing (measured: `examples/engines.rs`), so
//! [`crate::Engine::Auto`] means `pread`; this engine is for files that are mostly not cached, and must be asked for.
//!
//! # Why this is sound
//!
//! The kernel reads and writes the caller's slice while operations are under way. [`transfer`] borrows the slice for its
//! whole run and returns only when every operation that it submitted has completed; where the ring itself fails in a way
//! that makes this unknowable, the process ends rather than hand back memory that the kernel still uses. The ring is the
//! thread's own and the operations are all `transfer`'s, so nobody else's completions are in it.

use io_uring::{opcode, squeue, types, IoUring};
use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::OnceLock;

const ENTRIES: u32 = 8;
const PIECE_BYTES: usize = 256 << 10;

thread_local! {
    static RING: RefCell<Option<IoUring>> = const { RefCell::new(None) };
}

/// Whether this system lets us make a ring; asked once. Container profiles and `io_uring_disabled` often do not.
pub(crate) fn available() -> Result<(), String> {
    static ANSWER: OnceLock<Result<(), String>> = OnceLock::new();
    ANSWER
        .get_or_init(|| IoUring::new(ENTRIES).map(drop).map_err(|e| e.to_string()))
        .clone()
}

pub(crate) enum Direction {
    Read,
    /// With these `RWF_` flags.
    Write(i32),
}

pub(crate) fn read(file: &File, offset: u64, into: &mut [u8]) -> io::Result<()> {
    with_ring(|ring| {
        transfer(
            ring,
            file,
            offset,
            into.as_mut_ptr(),
            into.len(),
            &Direction::Read,
        )
    })
}

pub(crate) fn write(file: &File, offset: u64, from: &[u8], flags: i32) -> io::Result<()> {
    // The kernel only reads through the pointer of a write.
    with_ring(|ring| {
        transfer(
            ring,
            file,
            offset,
            from.as_ptr().cast_mut(),
            from.len(),
            &Direction::Write(flags),
        )
    })
}

pub(crate) fn sync(file: &File) -> io::Result<()> {
    let entry = opcode::Fsync::new(types::Fd(file.as_raw_fd()))
        .flags(types::FsyncFlags::DATASYNC)
        .build();
    with_ring(|ring| {
        // SAFETY: the operation refers to no memory, and the descriptor outlives it since we wait.
        unsafe { ring.submission().push(&entry) }.map_err(io::Error::other)?;
        let mut result = 0;
        wait(ring, 1, |_, answer| result = answer);
        if result < 0 {
            return Err(io::Error::from_raw_os_error(-result));
        }
        Ok(())
    })
}

fn with_ring<T>(work: impl FnOnce(&mut IoUring) -> io::Result<T>) -> io::Result<T> {
    RING.with_borrow_mut(|slot| {
        if slot.is_none() {
            *slot = Some(IoUring::new(ENTRIES)?);
        }
        match slot {
            Some(ring) => work(ring),
            None => Err(io::ErrorKind::Unsupported.into()),
        }
    })
}

/// Submit what is queued and wait for `count` completions.
fn wait(ring: &mut IoUring, count: usize, mut completed: impl FnMut(u64, i32)) {
    let mut left = count;
    while left > 0 {
        if let Err(error) = ring.submit_and_wait(left) {
            match error.raw_os_error() {
                Some(libc::EINTR | libc::EAGAIN | libc::EBUSY) => {}
                // Operations may be under way on memory that the caller is about to get back.
                _ => std::process::abort(),
            }
        }
        for entry in ring.completion() {
            completed(entry.user_data(), entry.result());
            left -= 1;
        }
    }
}

/// A part of the transfer: where it is, how long, and what of it is done.
#[derive(Clone, Copy)]
struct Piece {
    start: usize,
    length: usize,
}

/// `memory` is valid for `length` bytes, and for reads exclusively ours, until this returns: the two callers pass slices.
fn transfer(
    ring: &mut IoUring,
    file: &File,
    offset: u64,
    memory: *mut u8,
    length: usize,
    direction: &Direction,
) -> io::Result<()> {
    let mut pieces: Vec<Piece> = (0..length)
        .step_by(PIECE_BYTES)
        .map(|start| Piece {
            start,
            length: PIECE_BYTES.min(length - start),
        })
        .collect();
    let mut failure = None;
    while !pieces.is_empty() && failure.is_none() {
        let batch: Vec<Piece> = pieces.drain(..pieces.len().min(ENTRIES as usize)).collect();
        for (index, piece) in batch.iter().enumerate() {
            let entry = entry(file, offset, memory, piece, direction).user_data(index as u64);
            // SAFETY: the entry's memory is valid until this function returns, and it returns only after `wait` has seen
            // every entry's completion. There is room: a batch is at most the ring's size, and the ring is empty.
            if unsafe { ring.submission().push(&entry) }.is_err() {
                // Entries that were pushed before must not stay in the ring.
                std::process::abort();
            }
        }
        wait(ring, batch.len(), |index, result| {
            let Some(piece) = batch.get(index as usize) else {
                return;
            };
            match usize::try_from(result) {
                Err(_) if -result == libc::EINTR || -result == libc::EAGAIN => pieces.push(*piece),
                Err(_) => failure = Some(io::Error::from_raw_os_error(-result)),
                Ok(0) => failure = Some(io::ErrorKind::UnexpectedEof.into()),
                Ok(done) if done < piece.length => {
                    pieces.push(Piece {
                        start: piece.start + done,
                        length: piece.length - done,
                    });
                }
                Ok(_) => {}
            }
        });
    }
    failure.map_or(Ok(()), Err)
}

fn entry(file: &File, offset: u64, memory: *mut u8, piece: &Piece, direction: &Direction) -> squeue::Entry {
    let fd = types::Fd(file.as_raw_fd());
    let at = memory.wrapping_add(piece.start);
    let place = offset + piece.start as u64;
    // A piece is at most PIECE_BYTES long.
    let length = piece.length as u32;
    match direction {
        Direction::Read => opcode::Read::new(fd, at, length).offset(place).build(),
        Direction::Write(flags) => opcode::Write::new(fd, at, length)
            .offset(place)
            .rw_flags(*flags)
            .build(),
    }
}

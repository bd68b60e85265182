//! O_DIRECT: bytes between a device and the caller's memory, past the page cache.
//!
//! The kernel wants offset, length and memory aligned. Offsets and lengths are whole blocks, so they are right where the
//! block is a multiple of the alignment; where the caller's memory is not aligned, bytes go through a piece of this thread's
//! own that is.

use std::cell::RefCell;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

const PIECE_BYTES: usize = 1 << 20;
/// What drives and file systems ask for, the smallest first.
const ALIGNMENTS: [usize; 2] = [512, 4096];

thread_local! {
    static BOUNCE: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Open `path` for direct I/O in whole blocks; returns the alignment that its memory must have.
pub(crate) fn open(path: &Path, block_bytes: u32, read_only: bool) -> io::Result<(File, usize)> {
    let mut options = OpenOptions::new();
    options.read(true).write(!read_only).custom_flags(libc::O_DIRECT);
    let file = options.open(path)?;
    // Asked by doing: what statx says is not said by every kernel, nor by every file system.
    let mut memory = vec![0; 3 * ALIGNMENTS[1]];
    let start = memory.as_ptr().align_offset(ALIGNMENTS[1]);
    let mut failure = None;
    for alignment in ALIGNMENTS.into_iter().filter(|&a| a <= block_bytes as usize) {
        // Not aligned to more than is tried.
        let at = start + alignment;
        match file.read_exact_at(&mut memory[at..at + alignment], 0) {
            Ok(()) => return Ok((file, alignment)),
            Err(error) => failure = Some(error),
        }
    }
    Err(failure.unwrap_or_else(|| io::ErrorKind::Unsupported.into()))
}

pub(crate) fn is_aligned(memory: *const u8, alignment: usize) -> bool {
    memory as usize % alignment == 0
}

/// Let `work` have aligned memory, for one piece of `length` bytes after the other; it gets where the piece begins, too.
pub(crate) fn in_pieces(
    length: usize,
    alignment: usize,
    mut work: impl FnMut(usize, &mut [u8]) -> io::Result<()>,
) -> io::Result<()> {
    BOUNCE.with_borrow_mut(|memory| {
        if memory.is_empty() {
            memory.resize(PIECE_BYTES + ALIGNMENTS[1], 0);
        }
        let start = memory.as_ptr().align_offset(alignment);
        let piece = &mut memory[start..start + PIECE_BYTES];
        for at in (0..length).step_by(PIECE_BYTES) {
            work(at, &mut piece[..PIECE_BYTES.min(length - at)])?;
        }
        Ok(())
    })
}

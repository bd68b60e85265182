//! Where bytes rest: memory, files, block devices of the kernel, and a volatile write cache in front of any.
//!
//! A [`Media`] is a flat range of logical blocks with the manners of a drive:
//!
//! * Offsets and lengths are multiples of [`Media::block_bytes`]; anything else is refused, never rounded.
//! * Requests may come from many threads at once. Overlapping requests that run at the same time may be torn between
//!   each other, as on a drive; one that begins after another was answered sees all of it.
//! * An answered write is *visible*. It is *durable* after a [`Media::flush`] that began later, or at once with `fua`.
//!   [`Media::volatile_cache`] says whether that difference exists.
//! * A flush that failed means that writes may be lost, and no later flush can bring them back: the media keeps failing
//!   until it is opened again.
//!
//! Modules: [`memory`], [`file`] and [`block`] hold bytes, [`volatile`] is the cache; [`fault`] is an error that has more to say. The unsafe parts are small: [`mapping`]
//! (anonymous memory), `direct` (memory as O_DIRECT wants it), `system` (calls that the standard library lacks) and `uring`.

pub mod block;
mod direct;
pub mod fault;
pub mod file;
pub mod mapping;
pub mod memory;
mod system;
mod uring;
pub mod volatile;

pub use block::BlockMedia;
pub use fault::{Fault, FaultKind};
pub use file::{Cache, Engine, FileMedia};
pub use mapping::Mapping;
pub use memory::MemoryMedia;
pub use volatile::VolatileCache;

use std::io;
use std::sync::Arc;

pub trait Media: Send + Sync {
    fn size_bytes(&self) -> u64;

    /// Bytes of one logical block.
    fn block_bytes(&self) -> u32;

    fn read_only(&self) -> bool;

    /// Whether answered writes can still be lost with power or with this process, until flushed.
    fn volatile_cache(&self) -> bool;

    /// How bytes move: `memory`, `io_uring` or `pread`.
    fn engine(&self) -> &'static str;

    /// Fill `into` from `offset`.
    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()>;

    /// `fua`: durable when this returns.
    fn write(&self, offset: u64, from: &[u8], fua: bool) -> io::Result<()>;

    /// Make every write that was answered before this call durable.
    fn flush(&self) -> io::Result<()>;

    /// The range is not needed any more: it reads as zeros afterwards, or as before where the media cannot.
    fn deallocate(&self, offset: u64, length: u64) -> io::Result<()>;

    /// Make the range read as zeros.
    fn write_zeroes(&self, offset: u64, length: u64, fua: bool) -> io::Result<()> {
        const PIECE: u64 = 256 << 10;
        check(self, offset, length)?;
        let zeros = vec![0; PIECE.min(length) as usize];
        let mut at = 0;
        while at < length {
            let piece = PIECE.min(length - at);
            self.write(offset + at, &zeros[..piece as usize], fua)?;
            at += piece;
        }
        Ok(())
    }

    /// Another size from now on: what is new reads as zeros, what lies beyond is lost. A request that was checked against the
    /// old size is through when this returns.
    fn resize(&self, _size_bytes: u64) -> io::Result<()> {
        Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "this media cannot change its size",
        ))
    }

    /// Whether a range that was deallocated is certain to read as zeros.
    fn deallocated_reads_zeros(&self) -> bool {
        false
    }

    /// Whether bytes pass by the page cache.
    fn direct(&self) -> bool {
        false
    }

    /// Whether each write is durable when it is answered.
    fn writes_through(&self) -> bool {
        false
    }

    /// Fill `into` only if that needs no waiting for a device; `false`: it was not done, use [`Media::read`].
    fn try_read(&self, _offset: u64, _into: &mut [u8]) -> io::Result<bool> {
        Ok(false)
    }

    /// The bytes themselves, where they lie in memory of this process: for `writev` without a copy.
    fn mapping(&self) -> Option<Arc<Mapping>> {
        None
    }
}

/// What every media checks before it does anything: alignment and range.
pub fn check<M: Media + ?Sized>(media: &M, offset: u64, length: u64) -> io::Result<()> {
    let block = u64::from(media.block_bytes());
    let size = media.size_bytes();
    if offset % block != 0 || length % block != 0 {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("offset {offset} and length {length} must be multiples of the block, {block} bytes"),
        ));
    }
    if offset.checked_add(length).is_none_or(|end| end > size) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("offset {offset} and length {length} leave the media, which has {size} bytes"),
        ));
    }
    Ok(())
}

fn check_write<M: Media + ?Sized>(media: &M, offset: u64, length: u64) -> io::Result<()> {
    if media.read_only() {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            "the media is open for reading only",
        ));
    }
    check(media, offset, length)
}

/// A logical block is a power of two from 512 bytes to 64 KiB, and the media is a whole number of them, at least one.
pub fn check_geometry(size_bytes: u64, block_bytes: u32) -> io::Result<()> {
    if !block_bytes.is_power_of_two() || !(512..=65536).contains(&block_bytes) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("block_bytes must be a power of two from 512 to 65536, found {block_bytes}"),
        ));
    }
    if size_bytes == 0 || size_bytes % u64::from(block_bytes) != 0 || size_bytes > i64::MAX as u64 {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!(
                "size_bytes must be a positive multiple of the block ({block_bytes}), found {size_bytes}"
            ),
        ));
    }
    Ok(())
}

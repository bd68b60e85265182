//! Blocks in anonymous memory.

use crate::{check, check_geometry, check_write, Mapping, Media};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// How many times its first size it can become.
const GROWTH: usize = 16;

/// A sparse memory of any size: untouched blocks read as zeros and cost nothing.
///
/// It reports no volatile cache: there is nothing behind it that a flush could reach, so an answered write is already as
/// durable as it will ever be, which is as long as the process lives.
pub struct MemoryMedia {
    /// Longer than the media, so that it can grow where it lies. Addresses cost nothing.
    mapping: Arc<Mapping>,
    size_bytes: AtomicU64,
    /// One change of size at a time.
    shape: Mutex<()>,
    block_bytes: u32,
}

impl MemoryMedia {
    pub fn new(size_bytes: u64, block_bytes: u32) -> io::Result<Self> {
        check_geometry(size_bytes, block_bytes)?;
        let length =
            usize::try_from(size_bytes).map_err(|e| io::Error::new(io::ErrorKind::InvalidInput, e))?;
        let mapping = match Mapping::new(length.saturating_mul(GROWTH)) {
            Ok(mapping) => mapping,
            // Addresses are limited here: then it stays as it is.
            Err(_) => Mapping::new(length)?,
        };
        Ok(MemoryMedia {
            mapping: Arc::new(mapping),
            size_bytes: AtomicU64::new(size_bytes),
            shape: Mutex::default(),
            block_bytes,
        })
    }
}

impl Media for MemoryMedia {
    fn size_bytes(&self) -> u64 {
        self.size_bytes.load(Ordering::Acquire)
    }
    fn block_bytes(&self) -> u32 {
        self.block_bytes
    }
    fn read_only(&self) -> bool {
        false
    }
    fn volatile_cache(&self) -> bool {
        false
    }
    fn engine(&self) -> &'static str {
        "memory"
    }
    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        check(self, offset, into.len() as u64)?;
        self.mapping.copy_out(offset as usize, into);
        Ok(())
    }
    fn write(&self, offset: u64, from: &[u8], _fua: bool) -> io::Result<()> {
        check_write(self, offset, from.len() as u64)?;
        self.mapping.copy_in(offset as usize, from);
        Ok(())
    }
    fn flush(&self) -> io::Result<()> {
        Ok(())
    }
    fn deallocate(&self, offset: u64, length: u64) -> io::Result<()> {
        self.write_zeroes(offset, length, false)
    }
    fn write_zeroes(&self, offset: u64, length: u64, _fua: bool) -> io::Result<()> {
        check_write(self, offset, length)?;
        self.mapping.zero(offset as usize, length as usize);
        Ok(())
    }
    fn resize(&self, size_bytes: u64) -> io::Result<()> {
        check_geometry(size_bytes, self.block_bytes)?;
        let longest = self.mapping.len() as u64;
        if size_bytes > longest {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                format!("memory can grow to {longest} bytes where it lies, not to {size_bytes}"),
            ));
        }
        let _alone = self.shape.lock().unwrap_or_else(|e| e.into_inner());
        let before = self.size_bytes();
        // What comes is zeroed again, since a transfer that was under way when it went may have written; and before anybody
        // may write there. What goes is given back when nobody may write there any more.
        if size_bytes > before {
            self.mapping.zero(before as usize, (size_bytes - before) as usize);
        }
        self.size_bytes.store(size_bytes, Ordering::Release);
        if size_bytes < before {
            self.mapping
                .zero(size_bytes as usize, (before - size_bytes) as usize);
        }
        Ok(())
    }
    fn deallocated_reads_zeros(&self) -> bool {
        true
    }
    fn try_read(&self, offset: u64, into: &mut [u8]) -> io::Result<bool> {
        self.read(offset, into).map(|()| true)
    }
    fn mapping(&self) -> Option<Arc<Mapping>> {
        Some(self.mapping.clone())
    }
}

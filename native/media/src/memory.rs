//! Blocks in anonymous memory.

use crate::{check, check_geometry, check_write, Mapping, Media};
use std::io;
use std::sync::Arc;

/// A sparse memory of any size: untouched blocks read as zeros and cost nothing.
///
/// It reports no volatile cache: there is nothing behind it that a flush could reach, so an answered write is already as
/// durable as it will ever be, which is as long as the process lives.
pub struct MemoryMedia {
    mapping: Arc<Mapping>,
    block_bytes: u32,
}

impl MemoryMedia {
    pub fn new(size_bytes: u64, block_bytes: u32) -> io::Result<Self> {
        check_geometry(size_bytes, block_bytes)?;
        let length =
            usize::try_from(size_bytes).map_err(|e| io::Error::new(io::ErrorKind::InvalidInput, e))?;
        Ok(MemoryMedia {
            mapping: Arc::new(Mapping::new(length)?),
            block_bytes,
        })
    }
}

impl Media for MemoryMedia {
    fn size_bytes(&self) -> u64 {
        self.mapping.len() as u64
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
    fn try_read(&self, offset: u64, into: &mut [u8]) -> io::Result<bool> {
        self.read(offset, into).map(|()| true)
    }
    fn mapping(&self) -> Option<Arc<Mapping>> {
        Some(self.mapping.clone())
    }
}

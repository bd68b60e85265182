//! Media that tests can look into while a target serves them.

use headrace_media::{Mapping, Media};
use std::io;
use std::sync::Arc;

/// A medium that others hold too.
pub struct Handle<M: ?Sized>(pub Arc<M>);

impl<M: Media + ?Sized> Media for Handle<M> {
    fn size_bytes(&self) -> u64 {
        self.0.size_bytes()
    }
    fn block_bytes(&self) -> u32 {
        self.0.block_bytes()
    }
    fn read_only(&self) -> bool {
        self.0.read_only()
    }
    fn volatile_cache(&self) -> bool {
        self.0.volatile_cache()
    }
    fn engine(&self) -> &'static str {
        self.0.engine()
    }
    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.0.read(offset, into)
    }
    fn write(&self, offset: u64, from: &[u8], fua: bool) -> io::Result<()> {
        self.0.write(offset, from, fua)
    }
    fn flush(&self) -> io::Result<()> {
        self.0.flush()
    }
    fn deallocate(&self, offset: u64, length: u64) -> io::Result<()> {
        self.0.deallocate(offset, length)
    }
    fn write_zeroes(&self, offset: u64, length: u64, fua: bool) -> io::Result<()> {
        self.0.write_zeroes(offset, length, fua)
    }
    fn try_read(&self, offset: u64, into: &mut [u8]) -> io::Result<bool> {
        self.0.try_read(offset, into)
    }
    fn mapping(&self) -> Option<Arc<Mapping>> {
        self.0.mapping()
    }
}

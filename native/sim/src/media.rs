//! Media that tests can look into while a target serves them.

use crate::random::Random;
use headrace_media::{check, Mapping, Media};
use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

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

/// A drive with a volatile cache, as nasty as a drive may be: when its power fails, each block that was not flushed keeps
/// what was durable or any of the bytes that were written since, whatever its neighbours keep.
pub struct Disk {
    size_bytes: u64,
    block_bytes: u32,
    state: Mutex<State>,
}

struct State {
    durable: Vec<u8>,
    /// Since the last flush, oldest first.
    written: BTreeMap<usize, Vec<Vec<u8>>>,
}

impl Disk {
    pub fn new(size_bytes: u64, block_bytes: u32) -> Self {
        Disk {
            size_bytes,
            block_bytes,
            state: Mutex::new(State {
                durable: vec![0; size_bytes as usize],
                written: BTreeMap::new(),
            }),
        }
    }

    pub fn power_fails(&self, random: &mut Random) {
        let mut state = self.state();
        for (block, versions) in std::mem::take(&mut state.written) {
            let kept = random.below(versions.len() + 1);
            if let Some(bytes) = kept.checked_sub(1).map(|index| &versions[index]) {
                let at = block * self.block_bytes as usize;
                state.durable[at..at + bytes.len()].copy_from_slice(bytes);
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn blocks(&self, offset: u64) -> usize {
        (offset / u64::from(self.block_bytes)) as usize
    }
}

impl Media for Disk {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }
    fn block_bytes(&self) -> u32 {
        self.block_bytes
    }
    fn read_only(&self) -> bool {
        false
    }
    fn volatile_cache(&self) -> bool {
        true
    }
    fn engine(&self) -> &'static str {
        "memory"
    }
    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        check(self, offset, into.len() as u64)?;
        let state = self.state();
        let size = self.block_bytes as usize;
        for (block, piece) in (self.blocks(offset)..).zip(into.chunks_mut(size)) {
            let last = state.written.get(&block).and_then(|versions| versions.last());
            piece.copy_from_slice(
                last.map_or(&state.durable[block * size..(block + 1) * size], |bytes| bytes),
            );
        }
        Ok(())
    }
    fn write(&self, offset: u64, from: &[u8], fua: bool) -> io::Result<()> {
        check(self, offset, from.len() as u64)?;
        let mut state = self.state();
        let size = self.block_bytes as usize;
        for (block, piece) in (self.blocks(offset)..).zip(from.chunks(size)) {
            if fua {
                state.written.remove(&block);
                state.durable[block * size..(block + 1) * size].copy_from_slice(piece);
            } else {
                state.written.entry(block).or_default().push(piece.to_vec());
            }
        }
        Ok(())
    }
    fn flush(&self) -> io::Result<()> {
        let mut state = self.state();
        let size = self.block_bytes as usize;
        for (block, versions) in std::mem::take(&mut state.written) {
            if let Some(bytes) = versions.last() {
                state.durable[block * size..(block + 1) * size].copy_from_slice(bytes);
            }
        }
        Ok(())
    }
    fn deallocate(&self, offset: u64, length: u64) -> io::Result<()> {
        check(self, offset, length)
    }
}

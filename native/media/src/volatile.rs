//! A volatile write cache, as a drive has one.
//!
//! Answered writes rest in this process's memory until a flush, a `fua` write over them, or the limit. Kill the process
//! and they are gone, which is what the cache is for: to make tests of durability tell the truth.
//!
//! Cached blocks are kept one entry a block, by block number, with the time of their last write. The limit works as in
//! a drive: when it is passed, the blocks written longest ago go down (visible below, durable only when flushed there).
//!
//! One lock guards the map. It is held while blocks go down, so a block is always found either above or below; a read
//! takes the blocks below first and then the cached ones over them, under the lock.

use crate::{check, check_write, Media};
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard};

pub struct VolatileCache {
    below: Box<dyn Media>,
    limit_bytes: u64,
    cached: Mutex<Cached>,
}

#[derive(Default)]
struct Cached {
    /// Block number to its bytes and the time of its last write.
    blocks: BTreeMap<u64, (u64, Box<[u8]>)>,
    /// Time of last write to block number: who goes down first.
    order: BTreeMap<u64, u64>,
    clock: u64,
}

impl Cached {
    fn put(&mut self, block: u64, bytes: &[u8]) {
        self.clock += 1;
        let time = self.clock;
        match self.blocks.get_mut(&block) {
            Some((old, kept)) => {
                self.order.remove(old);
                *old = time;
                kept.copy_from_slice(bytes);
            }
            None => {
                self.blocks.insert(block, (time, bytes.into()));
            }
        }
        self.order.insert(time, block);
    }

    fn covers(&self, blocks: &Range<u64>) -> bool {
        self.blocks.range(blocks.clone()).count() as u64 == blocks.end - blocks.start
    }

    /// Copy the cached blocks of a range over what was read from below.
    fn lay_over(&self, blocks: &Range<u64>, into: &mut [u8]) {
        for (&block, (_, bytes)) in self.blocks.range(blocks.clone()) {
            let at = (block - blocks.start) as usize * bytes.len();
            into[at..at + bytes.len()].copy_from_slice(bytes);
        }
    }

    fn forget(&mut self, first: u64, last: u64) {
        let gone: Vec<u64> = self.blocks.range(first..last).map(|(&block, _)| block).collect();
        for block in gone {
            if let Some((time, _)) = self.blocks.remove(&block) {
                self.order.remove(&time);
            }
        }
    }
}

impl VolatileCache {
    pub fn new(below: Box<dyn Media>, limit_bytes: u64) -> Self {
        VolatileCache {
            below,
            limit_bytes,
            cached: Mutex::new(Cached::default()),
        }
    }

    /// Bytes that would be lost now.
    pub fn cached_bytes(&self) -> u64 {
        self.lock().blocks.len() as u64 * u64::from(self.block_bytes())
    }

    fn range(&self, offset: u64, length: usize) -> Range<u64> {
        let size = u64::from(self.block_bytes());
        let first = offset / size;
        first..first + length as u64 / size
    }

    fn lock(&self) -> MutexGuard<'_, Cached> {
        // The map is consistent between any two statements that can panic, so a poisoned lock is still usable.
        self.cached
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Write cached blocks of `range` down, neighbours together, and drop them from the cache. On an error they stay.
    fn write_down(&self, cached: &mut Cached, first: u64, last: u64) -> io::Result<()> {
        const TOGETHER: usize = 1 << 20;
        let size = u64::from(self.block_bytes());
        let mut run: Vec<u8> = Vec::new();
        let mut start = first;
        let mut next = first;
        for (&block, (_, bytes)) in cached.blocks.range(first..last) {
            if !run.is_empty() && (block != next || run.len() >= TOGETHER) {
                self.below.write(start * size, &run, false)?;
                run.clear();
            }
            if run.is_empty() {
                start = block;
            }
            run.extend_from_slice(bytes);
            next = block + 1;
        }
        if !run.is_empty() {
            self.below.write(start * size, &run, false)?;
        }
        cached.forget(first, last);
        Ok(())
    }

    fn keep_limit(&self, cached: &mut Cached) -> io::Result<()> {
        let size = u64::from(self.block_bytes());
        while cached.blocks.len() as u64 * size > self.limit_bytes {
            let Some((_, &oldest)) = cached.order.first_key_value() else {
                break;
            };
            // What follows it goes with it, so that a long write goes down as one.
            let mut last = oldest + 1;
            while last - oldest < 256 && cached.blocks.contains_key(&last) {
                last += 1;
            }
            self.write_down(cached, oldest, last)?;
        }
        Ok(())
    }
}

impl Media for VolatileCache {
    fn size_bytes(&self) -> u64 {
        self.below.size_bytes()
    }
    fn block_bytes(&self) -> u32 {
        self.below.block_bytes()
    }
    fn read_only(&self) -> bool {
        self.below.read_only()
    }
    fn volatile_cache(&self) -> bool {
        true
    }
    fn engine(&self) -> &'static str {
        self.below.engine()
    }
    fn deallocated_reads_zeros(&self) -> bool {
        self.below.deallocated_reads_zeros()
    }
    fn direct(&self) -> bool {
        self.below.direct()
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        check(self, offset, into.len() as u64)?;
        // Under the lock, so that a block that goes down meanwhile is not missed in both places.
        let cached = self.lock();
        let blocks = self.range(offset, into.len());
        if !cached.covers(&blocks) {
            self.below.read(offset, into)?;
        }
        cached.lay_over(&blocks, into);
        Ok(())
    }

    fn try_read(&self, offset: u64, into: &mut [u8]) -> io::Result<bool> {
        check(self, offset, into.len() as u64)?;
        // Whoever holds the lock may be waiting for a device.
        let Ok(cached) = self.cached.try_lock() else {
            return Ok(false);
        };
        let blocks = self.range(offset, into.len());
        if !cached.covers(&blocks) && !self.below.try_read(offset, into)? {
            return Ok(false);
        }
        cached.lay_over(&blocks, into);
        Ok(true)
    }

    fn write(&self, offset: u64, from: &[u8], fua: bool) -> io::Result<()> {
        let size = u64::from(self.block_bytes());
        let first = offset / size;
        // Under the lock, so that the size that it is checked against is that at which it lands.
        let mut cached = self.lock();
        check_write(self, offset, from.len() as u64)?;
        if fua {
            self.below.write(offset, from, true)?;
            cached.forget(first, first + from.len() as u64 / size);
            return Ok(());
        }
        for (block, bytes) in (first..).zip(from.chunks_exact(size as usize)) {
            cached.put(block, bytes);
        }
        self.keep_limit(&mut cached)
    }

    fn flush(&self) -> io::Result<()> {
        {
            let mut cached = self.lock();
            self.write_down(&mut cached, 0, u64::MAX)?;
        }
        // Without the lock: the blocks are below and visible, and new writes need not wait for the device.
        self.below.flush()
    }

    fn resize(&self, size_bytes: u64) -> io::Result<()> {
        let mut cached = self.lock();
        self.below.resize(size_bytes)?;
        cached.forget(size_bytes / u64::from(self.block_bytes()), u64::MAX);
        Ok(())
    }

    fn deallocate(&self, offset: u64, length: u64) -> io::Result<()> {
        let mut cached = self.lock();
        check_write(self, offset, length)?;
        let size = u64::from(self.block_bytes());
        let (first, last) = (offset / size, (offset + length) / size);
        // Down first: where deallocation below does nothing, the last written bytes must stay readable, not older ones.
        self.write_down(&mut cached, first, last)?;
        self.below.deallocate(offset, length)
    }

    fn write_zeroes(&self, offset: u64, length: u64, fua: bool) -> io::Result<()> {
        let mut cached = self.lock();
        check_write(self, offset, length)?;
        let size = u64::from(self.block_bytes());
        let (first, last) = (offset / size, (offset + length) / size);
        self.below.write_zeroes(offset, length, fua)?;
        cached.forget(first, last);
        Ok(())
    }
}

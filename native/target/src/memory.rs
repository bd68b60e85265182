//! Data buffers: bounded for each connection and for all, reused, and given back by `Drop` wherever they end.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// Buffers are made in these sizes, so that one that comes back fits the next of its kind.
const CLASSES: [usize; 7] = [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20];
/// Idle buffers that are kept for reuse.
const IDLE_BYTES: usize = 64 << 20;

/// All buffers of one target.
pub(crate) struct Memory {
    limit_bytes: usize,
    used_bytes: AtomicUsize,
    idle: Mutex<Idle>,
}

#[derive(Default)]
struct Idle {
    bytes: usize,
    buffers: [Vec<Box<[u8]>>; CLASSES.len()],
}

/// One connection's share.
pub(crate) struct Allowance {
    memory: Arc<Memory>,
    limit_bytes: usize,
    used_bytes: AtomicUsize,
}

/// A buffer of at least the length that was asked for; it derefs to exactly that length.
pub(crate) struct Buffer {
    bytes: Option<Box<[u8]>>,
    length: usize,
    class: usize,
    owner: Arc<Allowance>,
}

impl Memory {
    pub(crate) fn new(limit_bytes: usize) -> Arc<Self> {
        Arc::new(Memory {
            limit_bytes,
            used_bytes: AtomicUsize::new(0),
            idle: Mutex::default(),
        })
    }

    pub(crate) fn used_bytes(&self) -> usize {
        self.used_bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn allowance(self: &Arc<Self>, limit_bytes: usize) -> Arc<Allowance> {
        Arc::new(Allowance {
            memory: self.clone(),
            limit_bytes,
            used_bytes: AtomicUsize::new(0),
        })
    }
}

fn reserve(counter: &AtomicUsize, bytes: usize, limit: usize) -> bool {
    let take = |used: usize| used.checked_add(bytes).filter(|&sum| sum <= limit);
    counter
        .fetch_update(Ordering::AcqRel, Ordering::Acquire, take)
        .is_ok()
}

impl Allowance {
    /// `None`: this connection, or the target, is at its limit; ask again when something was given back.
    pub(crate) fn take(self: &Arc<Self>, length: usize) -> Option<Buffer> {
        self.take_within(length, self.limit_bytes, self.memory.limit_bytes)
    }

    /// For data that must still be pulled through the connection: only part of the limits, so that such buffers can never
    /// take what the stream needs to move on (commands with data in the capsule stand before the pulled data in it).
    pub(crate) fn take_pulled(self: &Arc<Self>, length: usize) -> Option<Buffer> {
        self.take_within(length, self.limit_bytes / 2, self.memory.limit_bytes / 4 * 3)
    }

    fn take_within(self: &Arc<Self>, length: usize, own_limit: usize, limit: usize) -> Option<Buffer> {
        let class = CLASSES.iter().position(|&size| length <= size)?;
        let size = CLASSES[class];
        if !reserve(&self.used_bytes, size, own_limit) {
            return None;
        }
        if !reserve(&self.memory.used_bytes, size, limit) {
            self.used_bytes.fetch_sub(size, Ordering::AcqRel);
            return None;
        }
        let reused = {
            let mut idle = self.memory.idle.lock().unwrap_or_else(|e| e.into_inner());
            let buffer = idle.buffers[class].pop();
            if buffer.is_some() {
                idle.bytes -= size;
            }
            buffer
        };
        let bytes = reused.unwrap_or_else(|| vec![0; size].into_boxed_slice());
        Some(Buffer {
            bytes: Some(bytes),
            length,
            class,
            owner: self.clone(),
        })
    }

    #[cfg(test)]
    pub(crate) fn used_bytes(&self) -> usize {
        self.used_bytes.load(Ordering::Relaxed)
    }
}

impl Deref for Buffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.bytes.as_ref().map_or(&[], |bytes| &bytes[..self.length])
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        let length = self.length;
        self.bytes.as_mut().map_or(&mut [], |bytes| &mut bytes[..length])
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let size = CLASSES[self.class];
        if let Some(bytes) = self.bytes.take() {
            let mut idle = self.owner.memory.idle.lock().unwrap_or_else(|e| e.into_inner());
            if idle.bytes + size <= IDLE_BYTES {
                idle.bytes += size;
                idle.buffers[self.class].push(bytes);
            }
        }
        self.owner.used_bytes.fetch_sub(size, Ordering::AcqRel);
        self.owner.memory.used_bytes.fetch_sub(size, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_hold_and_drop_gives_back() {
        let memory = Memory::new(3 << 20);
        let (a, b) = (memory.allowance(2 << 20), memory.allowance(2 << 20));
        let first = a.take(1 << 20).unwrap();
        let second = a.take((1 << 20) - 5).unwrap();
        assert_eq!(second.len(), (1 << 20) - 5);
        assert!(a.take(1).is_none(), "over the connection's share");
        let third = b.take(1 << 20).unwrap();
        assert!(b.take(1).is_none(), "over the target's limit");
        drop((first, second));
        assert!(b.take(1 << 20).is_some() && a.used_bytes() == 0);
        drop(third);
        assert_eq!(memory.used_bytes(), 0);
        assert!(a.take(17 << 20).is_none(), "longer than any command");
    }
}

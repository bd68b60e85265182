//! Data buffers: bounded for each connection, for each host and for all, reused, and given back by `Drop` wherever they end.
//!
//! # A host's share
//!
//! A host may hold no more than what is still free, so one greedy host has half of the memory at most, two a third each, and
//! whoever comes next always finds as much as each of them has. Nothing is set aside for hosts that do not ask. The rule is for
//! buffers that a host's manners can hold back: those of data that it has to send and of data that it has to take. A
//! capsule's own data are outside of it: they stand before everything else in the stream, so their buffer must never wait
//! for one that only more of the stream can free.

use crate::hosts::HostShare;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

/// Buffers are made in these sizes, so that one that comes back fits the next of its kind.
const CLASSES: [usize; 7] = [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20];
/// Idle buffers that are kept for reuse.
const IDLE_BYTES: usize = 64 << 20;
/// Buffers begin at a multiple of it, as O_DIRECT wants them.
const ALIGNMENT: usize = 4096;
/// How many ticks (of 250 ms) they are kept when nobody takes any.
const QUIET_TICKS: u32 = 40;

/// What a buffer of this length takes of the limits.
pub(crate) fn footprint(length: usize) -> usize {
    CLASSES.into_iter().find(|&size| length <= size).unwrap_or(length)
}

/// All buffers of one target.
pub(crate) struct Memory {
    limit_bytes: usize,
    used_bytes: AtomicUsize,
    idle: Mutex<Idle>,
}

#[derive(Default)]
struct Idle {
    bytes: usize,
    /// Calls of [`Memory::trim`] since a buffer was taken.
    quiet: u32,
    buffers: [Vec<Box<[u8]>>; CLASSES.len()],
}

/// One connection's share.
pub(crate) struct Allowance {
    memory: Arc<Memory>,
    limit_bytes: usize,
    used_bytes: AtomicUsize,
    /// From Connect on.
    host: OnceLock<Arc<HostShare>>,
}

/// A buffer of at least the length that was asked for; it derefs to exactly that length.
pub(crate) struct Buffer {
    bytes: Option<Box<[u8]>>,
    /// Where it begins in `bytes`.
    start: usize,
    length: usize,
    class: usize,
    owner: Arc<Allowance>,
    /// Whose share it counts in.
    host: Option<Arc<HostShare>>,
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
            host: OnceLock::new(),
        })
    }

    /// Called by the clock: after [`QUIET_TICKS`] calls without a buffer taken, the idle ones are given back to the system.
    pub(crate) fn trim(&self) {
        let mut idle = self.idle.lock().unwrap_or_else(|e| e.into_inner());
        idle.quiet = idle.quiet.saturating_add(1);
        if idle.quiet >= QUIET_TICKS && idle.bytes > 0 {
            *idle = Idle::default();
        }
    }
}

fn reserve(counter: &AtomicUsize, bytes: usize, limit: usize) -> bool {
    let take = |used: usize| used.checked_add(bytes).filter(|&sum| sum <= limit);
    counter
        .fetch_update(Ordering::AcqRel, Ordering::Acquire, take)
        .is_ok()
}

impl Allowance {
    /// The connection is this host's now.
    pub(crate) fn belongs_to(&self, host: &Arc<HostShare>) {
        // A connection becomes a queue once.
        let _ = self.host.set(host.clone());
    }

    /// For a capsule's data. `None`: this connection, or the target, is at its limit; ask again when something was given back.
    pub(crate) fn take(self: &Arc<Self>, length: usize) -> Option<Buffer> {
        self.take_within(length, self.limit_bytes, self.memory.limit_bytes, None)
    }

    /// For data that the host will have to take.
    pub(crate) fn take_read(self: &Arc<Self>, length: usize) -> Option<Buffer> {
        self.take_within(length, self.limit_bytes, self.memory.limit_bytes, self.host.get())
    }

    /// For data that must still be pulled through the connection: only part of the limits, so that such buffers can never
    /// take what the stream needs to move on (commands with data in the capsule stand before the pulled data in it).
    pub(crate) fn take_pulled(self: &Arc<Self>, length: usize) -> Option<Buffer> {
        let limit = self.memory.limit_bytes / 4 * 3;
        self.take_within(length, self.limit_bytes / 2, limit, self.host.get())
    }

    fn take_within(
        self: &Arc<Self>,
        length: usize,
        own_limit: usize,
        limit: usize,
        host: Option<&Arc<HostShare>>,
    ) -> Option<Buffer> {
        let class = CLASSES.iter().position(|&size| length <= size)?;
        let size = CLASSES[class];
        if !reserve(&self.used_bytes, size, own_limit) {
            return None;
        }
        // What is free before this buffer bounds what the host has with it.
        let free = limit.saturating_sub(self.memory.used_bytes());
        let fair = host.is_none_or(|host| reserve(&host.used_bytes, size, free));
        if !fair || !reserve(&self.memory.used_bytes, size, limit) {
            if let (true, Some(host)) = (fair, host) {
                host.used_bytes.fetch_sub(size, Ordering::AcqRel);
            }
            self.used_bytes.fetch_sub(size, Ordering::AcqRel);
            return None;
        }
        let reused = {
            let mut idle = self.memory.idle.lock().unwrap_or_else(|e| e.into_inner());
            idle.quiet = 0;
            let buffer = idle.buffers[class].pop();
            if buffer.is_some() {
                idle.bytes -= size;
            }
            buffer
        };
        let bytes = reused.unwrap_or_else(|| vec![0; size + ALIGNMENT].into_boxed_slice());
        // At most ALIGNMENT for bytes.
        let start = bytes.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT);
        Some(Buffer {
            bytes: Some(bytes),
            start,
            length,
            class,
            owner: self.clone(),
            host: host.cloned(),
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
        let range = self.start..self.start + self.length;
        self.bytes.as_ref().map_or(&[], |bytes| &bytes[range])
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        let range = self.start..self.start + self.length;
        self.bytes.as_mut().map_or(&mut [], |bytes| &mut bytes[range])
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
        if let Some(host) = &self.host {
            host.used_bytes.fetch_sub(size, Ordering::AcqRel);
        }
        self.owner.used_bytes.fetch_sub(size, Ordering::AcqRel);
        self.owner.memory.used_bytes.fetch_sub(size, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controller::HostKey;
    use crate::hosts::Hosts;

    #[test]
    fn limits_hold_and_drop_gives_back() {
        let memory = Memory::new(3 << 20);
        let (a, b) = (memory.allowance(2 << 20), memory.allowance(2 << 20));
        let first = a.take(1 << 20).unwrap();
        let second = a.take((1 << 20) - 5).unwrap();
        assert_eq!(second.len(), (1 << 20) - 5);
        assert_eq!(second.as_ptr() as usize % ALIGNMENT, 0);
        assert!(a.take(1).is_none(), "over the connection's share");
        let third = b.take(1 << 20).unwrap();
        assert!(b.take(1).is_none(), "over the target's limit");
        drop((first, second));
        assert!(b.take(1 << 20).is_some() && a.used_bytes() == 0);
        drop(third);
        assert_eq!(memory.used_bytes(), 0);
        assert!(a.take(17 << 20).is_none(), "longer than any command");
    }

    /// One host takes all that it gets; who comes later finds as much as it has, and both can still send capsules.
    #[test]
    fn a_greedy_host_leaves_as_much_as_it_takes() {
        const MIB: usize = 1 << 20;
        let memory = Memory::new(12 * MIB);
        let hosts = Hosts::default();
        let of = |name: u8| {
            let host = hosts.share(&HostKey {
                hostnqn: "host".into(),
                hostid: [name; 16],
            });
            // More connections than one: they share.
            let allowances: Vec<_> = (0..3).map(|_| memory.allowance(12 * MIB)).collect();
            allowances.iter().for_each(|own| own.belongs_to(&host));
            allowances
        };
        let take = |allowances: &[Arc<Allowance>]| {
            let taken = (0..12).filter_map(|n| allowances[n % 3].take_read(MIB));
            taken.collect::<Vec<_>>()
        };
        let (greedy, second, third) = (of(1), of(2), of(3));
        let first = take(&greedy);
        assert_eq!(first.len(), 6, "half of all");
        let others = (take(&second), take(&third));
        assert_eq!((others.0.len(), others.1.len()), (3, 2));
        assert!(
            greedy[0].take(MIB).is_some(),
            "a capsule's data are not held back"
        );
        drop(first);
        assert_eq!(take(&third).len(), 3, "five in all, when as much is free");
        drop(others);
        assert_eq!(take(&greedy).len(), 6, "all that was given back counts again");
        assert_eq!(memory.used_bytes(), 0);
    }

    #[test]
    fn idle_buffers_go_back_to_the_system() {
        let memory = Memory::new(1 << 20);
        let own = memory.allowance(1 << 20);
        drop(own.take(1000));
        let kept = |memory: &Memory| memory.idle.lock().unwrap().bytes;
        assert_eq!(kept(&memory), 4096);
        (1..QUIET_TICKS).for_each(|_| memory.trim());
        assert_eq!(kept(&memory), 4096);
        drop(own.take(1000));
        (1..QUIET_TICKS).for_each(|_| memory.trim());
        assert_eq!(kept(&memory), 4096, "used a moment ago");
        memory.trim();
        assert_eq!(kept(&memory), 0);
    }
}

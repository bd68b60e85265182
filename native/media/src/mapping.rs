//! Anonymous memory that several threads, and the kernel, read and write at once.
//!
//! # Why this is sound
//!
//! * The region is mapped once, never moved or shrunk, and unmapped when the last `Arc` of it goes.
//! * No Rust reference into it ever exists. Two threads that copy over each other see torn data, never undefined
//!   behaviour: on x86-64 a copy is one instruction (`rep movsb`, at memory speed), which to the language is as a device's
//!   DMA; elsewhere it is relaxed atomic words, which a compiler does not turn into wider ones (a third of the speed).
//! * Pointers for `writev` and `readv` are handed out only for a range that was checked to lie inside; what the kernel
//!   does there is outside of the language's memory model, exactly as with a device's DMA.
//! * Every range is checked here (panicking, as slice indexing does), so no caller needs to be trusted.

use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

pub struct Mapping {
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: the region is plain memory without thread affinity; all access is by relaxed atomics or by the kernel.
unsafe impl Send for Mapping {}
// SAFETY: as above; see the module's argument.
unsafe impl Sync for Mapping {}

const WORD: usize = 8;

impl Mapping {
    /// `length` zero bytes, which cost memory only where they are touched. `length` is a multiple of 8.
    pub fn new(length: usize) -> io::Result<Self> {
        if length == 0 || length % WORD != 0 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "a mapping has a positive multiple of 8 bytes",
            ));
        }
        // SAFETY: a new anonymous mapping at an address of the kernel's choice touches no existing memory.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                length,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start =
            NonNull::new(start.cast()).ok_or_else(|| io::Error::other("mmap returned a null address"))?;
        Ok(Mapping { start, length })
    }

    pub fn len(&self) -> usize {
        self.length
    }

    pub fn is_empty(&self) -> bool {
        false
    }

    /// The address of a checked range, for system calls; valid while `self` lives.
    pub fn range(&self, offset: usize, length: usize) -> *mut u8 {
        assert!(
            offset.checked_add(length).is_some_and(|end| end <= self.length),
            "range outside of the mapping"
        );
        self.start.as_ptr().wrapping_add(offset)
    }

    /// `offset` and the slice's length are multiples of 8.
    pub fn copy_out(&self, offset: usize, into: &mut [u8]) {
        copy_out(self, offset, into);
    }

    /// `offset` and the slice's length are multiples of 8.
    pub fn copy_in(&self, offset: usize, from: &[u8]) {
        copy_in(self, offset, from);
    }

    /// Zero a range, giving whole pages back to the system.
    pub fn zero(&self, offset: usize, length: usize) {
        const PAGE: usize = 4096;
        let end = offset + length;
        let (first, last) = (offset.next_multiple_of(PAGE).min(end), end / PAGE * PAGE);
        if first < last {
            let start = self.range(first, last - first);
            // SAFETY: the range lies in this private anonymous mapping, where the advice means "zeros from now on".
            if unsafe { libc::madvise(start.cast(), last - first, libc::MADV_DONTNEED) } == 0 {
                self.store_zero(offset, first - offset);
                self.store_zero(last, end - last);
                return;
            }
        }
        self.store_zero(offset, length);
    }

    fn store_zero(&self, offset: usize, length: usize) {
        for word in self.words(offset, length) {
            word.store(0, Ordering::Relaxed);
        }
    }

    fn words(&self, offset: usize, length: usize) -> &[AtomicU64] {
        assert!(
            offset % WORD == 0 && length % WORD == 0,
            "a mapping is copied in words of 8 bytes"
        );
        let start = self.range(offset, length);
        // SAFETY: in bounds (checked by `range`), aligned (the mapping is page aligned and `offset` a multiple of 8),
        // alive as long as `self`; atomics may be shared, and nothing reads this memory other than atomically.
        unsafe { std::slice::from_raw_parts(start.cast::<AtomicU64>(), length / WORD) }
    }
}

#[cfg(target_arch = "x86_64")]
fn copy_out(mapping: &Mapping, offset: usize, into: &mut [u8]) {
    let source = mapping.range(offset, into.len());
    // SAFETY: the source lies in the mapping (checked), the target is an exclusive slice of that length, outside of it.
    unsafe { copy(source, into.as_mut_ptr(), into.len()) };
}

#[cfg(target_arch = "x86_64")]
fn copy_in(mapping: &Mapping, offset: usize, from: &[u8]) {
    let target = mapping.range(offset, from.len());
    // SAFETY: the target lies in the mapping (checked), the source is a slice of that length, outside of it.
    unsafe { copy(from.as_ptr(), target, from.len()) };
}

/// # Safety
/// Both ranges are mapped for `length` bytes and do not overlap; one may be changed by others meanwhile.
#[cfg(target_arch = "x86_64")]
unsafe fn copy(source: *const u8, target: *mut u8, length: usize) {
    // SAFETY: the ranges are the caller's promise; the direction flag is clear by the ABI, and no flag is changed.
    unsafe {
        std::arch::asm!(
            "rep movsb",
            inout("rcx") length => _,
            inout("rsi") source => _,
            inout("rdi") target => _,
            options(nostack, preserves_flags)
        );
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn copy_out(mapping: &Mapping, offset: usize, into: &mut [u8]) {
    let words = mapping.words(offset, into.len());
    for (word, bytes) in words.iter().zip(into.chunks_exact_mut(WORD)) {
        bytes.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn copy_in(mapping: &Mapping, offset: usize, from: &[u8]) {
    let words = mapping.words(offset, from.len());
    for (word, bytes) in words.iter().zip(from.chunks_exact(WORD)) {
        let mut value = [0; WORD];
        value.copy_from_slice(bytes);
        word.store(u64::from_ne_bytes(value), Ordering::Relaxed);
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the region was mapped by `new` with this length, and nobody holds `self` any more.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.length) };
    }
}

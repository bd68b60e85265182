//! Memory under I/O.
//!
//! A [`Buffer`] is a range of somebody's memory (a `Vec`, a numpy array, a pinned tensor) that several parties hold at
//! once: the caller who waits, the I/O thread that fills it, the queue that may resend it. It is counted, so the memory
//! lives until the last of them lets go.
//!
//! # Why this is sound
//!
//! * The owner keeps the range valid and in place for as long as it lives ([`MemoryOwner`]'s contract), and every
//!   `Buffer` holds an `Arc` of it.
//! * Access goes through raw pointers and short-lived slices inside [`Buffer::copy_from`], [`Buffer::copy_to`] and the
//!   two `unsafe` slice functions. The rule that makes those slices exclusive is the engine's: a range is given to at
//!   most one read command at a time, and whoever waits for the transfer does not look before it is complete (its sink:
//!   only at what has come, while the device's thread says so). For memory
//!   that came from Python the rule is the documented one of `read_into`: the buffer is the device's until the call or
//!   transfer ends. A race there gives wrong bytes, as with any DMA; never an access outside of the range.
//! * A command that timed out gives its buffer up *before* its completion is reported; after that no code holds a
//!   pointer into it.

use std::sync::Arc;

/// Who keeps memory alive. Dropped when the last [`Buffer`] of it is.
///
/// # Safety
/// The pointer and length stay valid, unmoved and initialised for the whole life of the value, also while other threads
/// use them.
pub unsafe trait MemoryOwner: Send + Sync {
    fn as_ptr(&self) -> *mut u8;
    fn len(&self) -> usize;
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

struct VecOwner(Box<[u8]>);

// SAFETY: the boxed slice owns its allocation and is never moved or resized behind the Box.
unsafe impl MemoryOwner for VecOwner {
    fn as_ptr(&self) -> *mut u8 {
        self.0.as_ptr().cast_mut()
    }
    fn len(&self) -> usize {
        self.0.len()
    }
}

#[derive(Clone)]
pub struct Buffer {
    owner: Arc<dyn MemoryOwner>,
    start: usize,
    length: usize,
}

impl Buffer {
    pub fn from_owner(owner: Arc<dyn MemoryOwner>) -> Self {
        let length = owner.len();
        Buffer {
            owner,
            start: 0,
            length,
        }
    }

    pub fn from_vec(bytes: Vec<u8>) -> Self {
        Self::from_owner(Arc::new(VecOwner(bytes.into_boxed_slice())))
    }

    pub fn zeroed(length: usize) -> Self {
        Self::from_vec(vec![0; length])
    }

    pub fn len(&self) -> usize {
        self.length
    }

    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// The part `start .. start + length` of this buffer; `None` where it does not fit.
    pub fn slice(&self, start: usize, length: usize) -> Option<Buffer> {
        if start.checked_add(length)? > self.length {
            return None;
        }
        Some(Buffer {
            owner: self.owner.clone(),
            start: self.start + start,
            length,
        })
    }

    /// For `readv`/`writev`: valid for `len()` bytes while `self` (or a clone) lives.
    pub fn as_ptr(&self) -> *mut u8 {
        // `start + length` was checked against the owner's length, so this stays inside of one allocation.
        self.owner.as_ptr().wrapping_add(self.start)
    }

    /// # Safety
    /// Nobody writes to the range while the slice lives.
    pub unsafe fn bytes(&self) -> &[u8] {
        // SAFETY: in bounds by construction, alive by `owner`; not written to by the caller's promise.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.length) }
    }

    /// # Safety
    /// Nobody else reads or writes the range while the slice lives.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn bytes_mut(&self) -> &mut [u8] {
        // SAFETY: in bounds by construction, alive by `owner`; exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.as_ptr(), self.length) }
    }

    /// Copy `source` to `at`; panics if it does not fit.
    pub fn copy_from(&self, at: usize, source: &[u8]) {
        assert!(
            at.checked_add(source.len()).is_some_and(|end| end <= self.length),
            "copy_from out of range"
        );
        // SAFETY: the destination is in bounds; `source` is a distinct Rust slice, so the ranges cannot overlap.
        unsafe {
            std::ptr::copy_nonoverlapping(source.as_ptr(), self.as_ptr().wrapping_add(at), source.len())
        }
    }

    /// Copy from `at` into `target`; panics if it does not fit.
    pub fn copy_to(&self, at: usize, target: &mut [u8]) {
        assert!(
            at.checked_add(target.len()).is_some_and(|end| end <= self.length),
            "copy_to out of range"
        );
        // SAFETY: the source is in bounds; `target` is a distinct exclusive slice.
        unsafe {
            std::ptr::copy_nonoverlapping(self.as_ptr().wrapping_add(at), target.as_mut_ptr(), target.len())
        }
    }
}

/// Memory that says when it is let go of.
#[cfg(test)]
pub(crate) fn watched(bytes: Vec<u8>, dropped: impl FnOnce() + Send + Sync + 'static) -> Buffer {
    struct Watched<F: FnOnce()>(VecOwner, Option<F>);

    // SAFETY: that of the vector, which it owns.
    unsafe impl<F: FnOnce() + Send + Sync> MemoryOwner for Watched<F> {
        fn as_ptr(&self) -> *mut u8 {
            self.0.as_ptr()
        }
        fn len(&self) -> usize {
            self.0.len()
        }
    }

    impl<F: FnOnce()> Drop for Watched<F> {
        fn drop(&mut self) {
            if let Some(dropped) = self.1.take() {
                dropped();
            }
        }
    }

    Buffer::from_owner(Arc::new(Watched(
        VecOwner(bytes.into_boxed_slice()),
        Some(dropped),
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_stay_inside() {
        let b = Buffer::from_vec(vec![1, 2, 3, 4]);
        assert!(b.slice(1, 4).is_none() && b.slice(usize::MAX, 2).is_none());
        let s = b.slice(1, 2).unwrap().slice(1, 1).unwrap();
        s.copy_from(0, &[9]);
        let mut out = [0; 4];
        b.copy_to(0, &mut out);
        assert_eq!(out, [1, 2, 9, 4]);
    }
}

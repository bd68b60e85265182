//! The one place where the caller's memory becomes slices for the socket. Everything else here is safe code.
//!
//! A [`Buffer`] is in a queue pair's command table from submission to completion, so it lives as long as these slices,
//! which never outlive one system call or one copy.

use headrace_transfer::Buffer;

/// Bytes to send. Panics if the range is not inside.
pub(crate) fn source(buffer: &Buffer, at: usize, length: usize) -> &[u8] {
    // SAFETY: the caller of a write leaves the range alone until the request completes, and this crate drops the buffer
    // before it reports that; nobody of ours writes to the source of a write.
    let bytes = unsafe { buffer.bytes() };
    &bytes[at..at + length]
}

/// Room to receive into. Panics if the range is not inside.
#[allow(clippy::mut_from_ref)]
pub(crate) fn destination(buffer: &Buffer, at: usize, length: usize) -> &mut [u8] {
    // SAFETY: a range is given to at most one read command at a time and its caller does not look before completion, or at
    // what has come while this thread tells him so (`Sink::arrived`); the command table hands out one such slice at a time,
    // because it is borrowed for it.
    let bytes = unsafe { buffer.bytes_mut() };
    &mut bytes[at..at + length]
}

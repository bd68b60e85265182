//! `sendmsg` and `recvmsg` with flags, which the standard library does not offer: MSG_WAITALL saves a call wherever data
//! come in pieces.
//!
//! # Why this is sound
//!
//! `IoSlice` and `IoSliceMut` are guaranteed to have the layout of `iovec`, and the borrowed slices live for the call.

use std::io::{self, IoSlice, IoSliceMut};
use std::net::TcpStream;
use std::os::fd::AsRawFd;

/// Pieces of one call; the kernel's limit is 1024.
pub const PIECES: usize = 128;

fn count(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

pub fn receive(stream: &TcpStream, pieces: &mut [IoSliceMut<'_>], flags: libc::c_int) -> io::Result<usize> {
    // SAFETY: all-zero is a valid msghdr.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = pieces.as_mut_ptr().cast();
    message.msg_iovlen = pieces.len();
    // SAFETY: the pieces are exclusive slices that live for the call.
    count(unsafe { libc::recvmsg(stream.as_raw_fd(), &mut message, flags) })
}

pub fn send(stream: &TcpStream, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
    // SAFETY: all-zero is a valid msghdr.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = pieces.as_ptr().cast_mut().cast();
    message.msg_iovlen = pieces.len();
    // SAFETY: the pieces live for the call, and the kernel only reads them.
    count(unsafe { libc::sendmsg(stream.as_raw_fd(), &message, libc::MSG_NOSIGNAL) })
}

/// Fill all of `pieces`; an end of the stream before that is an error.
pub fn receive_all(stream: &TcpStream, pieces: &mut [IoSliceMut<'_>]) -> io::Result<()> {
    let mut rest = pieces;
    while !rest.is_empty() {
        match receive(stream, rest, libc::MSG_WAITALL)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            got => IoSliceMut::advance_slices(&mut rest, got),
        }
    }
    Ok(())
}

pub fn send_all(stream: &TcpStream, pieces: &mut [IoSlice<'_>]) -> io::Result<()> {
    let mut rest = pieces;
    while !rest.is_empty() {
        let sent = send(stream, rest)?;
        IoSlice::advance_slices(&mut rest, sent);
    }
    Ok(())
}

/// What piles up between the ends beyond it leaves the cache (decision 0021). 0: the kernel's choice.
pub fn bound_send_buffer(stream: &TcpStream, bytes: usize) -> io::Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    let bytes = libc::c_int::try_from(bytes).map_err(io::Error::other)?;
    // SAFETY: one live int, and its length.
    count(unsafe {
        libc::setsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_SNDBUF,
            std::ptr::from_ref(&bytes).cast(),
            std::mem::size_of_val(&bytes) as libc::socklen_t,
        )
    } as isize)
    .map(drop)
}

/// CPU seconds of this process, all its threads.
pub fn cpu_s() -> f64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: one live timespec to fill; the clock exists on every Linux.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

//! The system calls of the reactor, each behind a safe type: epoll, eventfd, and socket reads and writes that gather
//! slices and mapped media in one call.

use headrace_media::Mapping;
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

/// One piece of memory for `sendmsg` or `recvmsg`, alive as long as `'a`.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct Part<'a>(libc::iovec, PhantomData<&'a ()>);

impl<'a> Part<'a> {
    pub(crate) fn slice(bytes: &'a [u8]) -> Self {
        Part(
            libc::iovec {
                iov_base: bytes.as_ptr().cast_mut().cast(),
                iov_len: bytes.len(),
            },
            PhantomData,
        )
    }

    /// Panics where the range leaves the mapping.
    pub(crate) fn mapped(mapping: &'a Mapping, offset: usize, length: usize) -> Self {
        Part(
            libc::iovec {
                iov_base: mapping.range(offset, length).cast(),
                iov_len: length,
            },
            PhantomData,
        )
    }

    pub(crate) fn len(&self) -> usize {
        self.0.iov_len
    }

    /// Its first `count` bytes at most.
    #[cfg(test)]
    pub(crate) fn first(self, count: usize) -> Self {
        Part(
            libc::iovec {
                iov_len: self.0.iov_len.min(count),
                ..self.0
            },
            PhantomData,
        )
    }
}

/// A piece of memory to receive into.
#[repr(transparent)]
pub(crate) struct PartMut<'a>(libc::iovec, PhantomData<&'a mut ()>);

impl<'a> PartMut<'a> {
    pub(crate) fn slice(bytes: &'a mut [u8]) -> Self {
        PartMut(
            libc::iovec {
                iov_base: bytes.as_mut_ptr().cast(),
                iov_len: bytes.len(),
            },
            PhantomData,
        )
    }

    /// Panics where the range leaves the mapping.
    pub(crate) fn mapped(mapping: &'a Mapping, offset: usize, length: usize) -> Self {
        PartMut(
            libc::iovec {
                iov_base: mapping.range(offset, length).cast(),
                iov_len: length,
            },
            PhantomData,
        )
    }
}

fn count(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// Send without waiting; a closed peer is an error, never a signal.
pub(crate) fn send(socket: &impl AsRawFd, parts: &[Part<'_>]) -> io::Result<usize> {
    // SAFETY: all-zero is a valid msghdr.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    // Part is a transparent iovec; the kernel only reads through it.
    message.msg_iov = parts.as_ptr().cast_mut().cast();
    message.msg_iovlen = parts.len() as _;
    // SAFETY: the parts live for the call (their lifetime), and the kernel only reads them.
    count(unsafe {
        libc::sendmsg(
            socket.as_raw_fd(),
            &message,
            libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL,
        )
    })
}

/// Receive without waiting; 0 is the peer's end.
pub(crate) fn receive(socket: &impl AsRawFd, parts: &mut [PartMut<'_>]) -> io::Result<usize> {
    // SAFETY: all-zero is a valid msghdr.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = parts.as_mut_ptr().cast();
    message.msg_iovlen = parts.len() as _;
    // SAFETY: the parts are exclusive (or a mapping, which the kernel may write as a device would) for the call.
    count(unsafe { libc::recvmsg(socket.as_raw_fd(), &mut message, libc::MSG_DONTWAIT) })
}

/// Bytes that can be received now.
pub(crate) fn available(socket: &impl AsRawFd) -> io::Result<usize> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: FIONREAD writes one int.
    if unsafe { libc::ioctl(socket.as_raw_fd(), libc::FIONREAD, &mut bytes) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(usize::try_from(bytes).unwrap_or(0))
}

pub(crate) const READABLE: u32 = libc::EPOLLIN as u32 | libc::EPOLLRDHUP as u32;
pub(crate) const WRITABLE: u32 = libc::EPOLLOUT as u32;
pub(crate) const BROKEN: u32 = libc::EPOLLERR as u32 | libc::EPOLLHUP as u32;

pub(crate) struct Poller {
    epoll: OwnedFd,
    events: Vec<libc::epoll_event>,
}

impl Poller {
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: no pointers; the result is checked.
        let fd = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a new descriptor that nobody else owns.
        let epoll = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Poller {
            epoll,
            events: vec![libc::epoll_event { events: 0, u64: 0 }; 256],
        })
    }

    fn control(&self, operation: libc::c_int, fd: RawFd, interest: u32, token: u64) -> io::Result<()> {
        let mut event = libc::epoll_event {
            events: interest,
            u64: token,
        };
        // SAFETY: one live event struct, which the kernel copies.
        if unsafe { libc::epoll_ctl(self.epoll.as_raw_fd(), operation, fd, &mut event) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }

    pub(crate) fn add(&self, source: &impl AsRawFd, interest: u32, token: u64) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_ADD, source.as_raw_fd(), interest, token)
    }

    pub(crate) fn change(&self, source: &impl AsRawFd, interest: u32, token: u64) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_MOD, source.as_raw_fd(), interest, token)
    }

    pub(crate) fn remove(&self, source: &impl AsRawFd) {
        // Closing the descriptor removes it anyway; an error here changes nothing.
        let _ = self.control(libc::EPOLL_CTL_DEL, source.as_raw_fd(), 0, 0);
    }

    /// Wait up to `timeout` (`None`: for ever) and give (token, readiness) pairs.
    pub(crate) fn wait(&mut self, timeout: Option<Duration>, ready: &mut Vec<(u64, u32)>) -> io::Result<()> {
        ready.clear();
        // Rounded up, so that a deadline has passed when the wait ends.
        let timeout = timeout.map_or(-1, |t| t.as_micros().div_ceil(1000).min(i32::MAX as u128) as i32);
        // SAFETY: the events array is live and its length given.
        let count = unsafe {
            libc::epoll_wait(
                self.epoll.as_raw_fd(),
                self.events.as_mut_ptr(),
                self.events.len() as i32,
                timeout,
            )
        };
        if count < 0 {
            let error = io::Error::last_os_error();
            return if error.kind() == io::ErrorKind::Interrupted {
                Ok(())
            } else {
                Err(error)
            };
        }
        ready.extend(
            self.events[..count as usize]
                .iter()
                .map(|event| (event.u64, event.events)),
        );
        Ok(())
    }
}

/// SO_SNDBUF, which ends the kernel's own choice of it; the system may allow less (`net.core.wmem_max`).
pub(crate) fn bound_send_buffer(socket: &impl AsRawFd, bytes: usize) -> io::Result<()> {
    let bytes = libc::c_int::try_from(bytes).unwrap_or(libc::c_int::MAX);
    // SAFETY: the kernel reads one live int, whose size is given.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_SNDBUF,
            (&raw const bytes).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Let up to `count` connections wait to be accepted: all hosts of a target come back at once after its restart. The system
/// may allow fewer (`net.core.somaxconn`); the others then try again.
pub(crate) fn deepen_backlog(listener: &impl AsRawFd, count: i32) -> io::Result<()> {
    // SAFETY: no pointers; on a socket that listens already only the length of its line changes.
    if unsafe { libc::listen(listener.as_raw_fd(), count) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Raise this process's limit of open descriptors to `wanted`, or as far as it may; returns the limit as it is then.
pub(crate) fn allow_descriptors(wanted: usize) -> io::Result<usize> {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the kernel writes one live struct.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) } < 0 {
        return Err(io::Error::last_os_error());
    }
    let most = limit.rlim_max.min(wanted as libc::rlim_t);
    if limit.rlim_cur < most {
        limit.rlim_cur = most;
        // SAFETY: the kernel reads one live struct.
        if unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) } < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(usize::try_from(limit.rlim_cur).unwrap_or(usize::MAX))
}

/// Wakes a [`Poller`] from another thread.
pub(crate) struct Waker(OwnedFd);

impl AsRawFd for Waker {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl Waker {
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: no pointers; the result is checked.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a new descriptor that nobody else owns.
        Ok(Waker(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    pub(crate) fn wake(&self) {
        let one = 1u64.to_ne_bytes();
        // SAFETY: eight live bytes. The only error is a full counter, and then the poller is awake anyway.
        unsafe { libc::write(self.0.as_raw_fd(), one.as_ptr().cast(), one.len()) };
    }

    pub(crate) fn clear(&self) {
        let mut counter = [0u8; 8];
        // SAFETY: eight live bytes to read into. An empty counter is no error here.
        unsafe { libc::read(self.0.as_raw_fd(), counter.as_mut_ptr().cast(), counter.len()) };
    }
}

fn c_string(bytes: &[u8]) -> io::Result<std::ffi::CString> {
    std::ffi::CString::new(bytes).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))
}

/// Whether the file has the extended attribute; an error where its file system has none.
pub(crate) fn has_attribute(path: &Path, name: &str) -> io::Result<bool> {
    let (path, name) = (c_string(path.as_os_str().as_bytes())?, c_string(name.as_bytes())?);
    // SAFETY: both strings end with NUL and live through the call; with size 0 nothing is written.
    let result = unsafe { libc::getxattr(path.as_ptr(), name.as_ptr(), std::ptr::null_mut(), 0) };
    if result >= 0 {
        return Ok(true);
    }
    let error = io::Error::last_os_error();
    if error.raw_os_error() == Some(libc::ENODATA) {
        return Ok(false);
    }
    Err(error)
}

pub(crate) fn set_attribute(path: &Path, name: &str, value: &[u8]) -> io::Result<()> {
    let (path, name) = (c_string(path.as_os_str().as_bytes())?, c_string(name.as_bytes())?);
    // SAFETY: both strings end with NUL, `value` is `value.len()` bytes, and all live through the call.
    let result = unsafe {
        libc::setxattr(
            path.as_ptr(),
            name.as_ptr(),
            value.as_ptr().cast(),
            value.len(),
            0,
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

//! System calls that the standard library does not offer, each behind a safe function.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;

/// Write all of `from` at `offset` and return when it is durable: `pwritev2` with `RWF_DSYNC`.
pub(crate) fn write_durably(file: &File, mut offset: u64, mut from: &[u8]) -> io::Result<()> {
    while !from.is_empty() {
        let part = libc::iovec {
            iov_base: from.as_ptr().cast_mut().cast(),
            iov_len: from.len(),
        };
        // SAFETY: one iovec over a live slice, which the kernel only reads.
        let written =
            unsafe { libc::pwritev2(file.as_raw_fd(), &part, 1, offset as libc::off_t, libc::RWF_DSYNC) };
        match written {
            0 => return Err(io::ErrorKind::WriteZero.into()),
            n if n > 0 => {
                from = &from[n as usize..];
                offset += n as u64;
            }
            _ => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
    Ok(())
}

/// Read what is in the page cache without waiting for a device: `preadv2` with `RWF_NOWAIT`. Returns bytes read.
pub(crate) fn read_cached(file: &File, offset: u64, into: &mut [u8]) -> io::Result<usize> {
    let part = libc::iovec {
        iov_base: into.as_mut_ptr().cast(),
        iov_len: into.len(),
    };
    // SAFETY: one iovec over a live exclusive slice.
    let read = unsafe {
        libc::preadv2(
            file.as_raw_fd(),
            &part,
            1,
            offset as libc::off_t,
            libc::RWF_NOWAIT,
        )
    };
    usize::try_from(read).map_err(|_| io::Error::last_os_error())
}

/// `fallocate` that keeps the file's size; `mode` is `FALLOC_FL_PUNCH_HOLE` or `FALLOC_FL_ZERO_RANGE`.
pub(crate) fn fallocate(file: &File, mode: libc::c_int, offset: u64, length: u64) -> io::Result<()> {
    loop {
        // SAFETY: a system call on an open descriptor without pointers.
        let result = unsafe {
            libc::fallocate(
                file.as_raw_fd(),
                mode | libc::FALLOC_FL_KEEP_SIZE,
                offset as libc::off_t,
                length as libc::off_t,
            )
        };
        if result == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// Tell a block device that a range is not needed any more; what it reads as afterwards is not said.
pub(crate) fn discard(file: &File, offset: u64, length: u64) -> io::Result<()> {
    /// `_IO(0x12, 119)` of linux/fs.h.
    const BLKDISCARD: libc::c_ulong = 0x1277;
    let range = [offset, length];
    // SAFETY: the kernel reads two live u64.
    if unsafe { libc::ioctl(file.as_raw_fd(), BLKDISCARD as _, range.as_ptr()) } == 0 {
        return Ok(());
    }
    Err(io::Error::last_os_error())
}

/// The size of a block device in bytes: BLKGETSIZE64.
pub(crate) fn device_bytes(file: &File) -> io::Result<u64> {
    let mut bytes = 0u64;
    // SAFETY: the kernel writes one live u64.
    ask(unsafe { libc::ioctl(file.as_raw_fd(), BLKGETSIZE64 as _, &mut bytes) })?;
    Ok(bytes)
}

/// Bytes of a logical block of a block device: BLKSSZGET.
pub(crate) fn logical_block(file: &File) -> io::Result<u32> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the kernel writes one live int.
    ask(unsafe { libc::ioctl(file.as_raw_fd(), BLKSSZGET as _, &mut bytes) })?;
    u32::try_from(bytes).map_err(|_| io::ErrorKind::InvalidData.into())
}

/// Bytes of a physical block of a block device: BLKPBSZGET.
pub(crate) fn physical_block(file: &File) -> io::Result<u32> {
    let mut bytes: libc::c_uint = 0;
    // SAFETY: the kernel writes one live unsigned int.
    ask(unsafe { libc::ioctl(file.as_raw_fd(), BLKPBSZGET as _, &mut bytes) })?;
    Ok(bytes)
}

/// Whether the kernel lets nobody write to a block device: BLKROGET.
pub(crate) fn device_read_only(file: &File) -> io::Result<bool> {
    let mut flag: libc::c_int = 0;
    // SAFETY: the kernel writes one live int.
    ask(unsafe { libc::ioctl(file.as_raw_fd(), BLKROGET as _, &mut flag) })?;
    Ok(flag != 0)
}

// linux/fs.h: _IO(0x12, 94), _IO(0x12, 104), _IOR(0x12, 114, size_t), _IO(0x12, 123).
const BLKROGET: libc::c_ulong = 0x125e;
const BLKSSZGET: libc::c_ulong = 0x1268;
const BLKGETSIZE64: libc::c_ulong = 0x8008_1272;
const BLKPBSZGET: libc::c_ulong = 0x127b;

fn ask(answer: libc::c_int) -> io::Result<()> {
    if answer < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// What sysfs says about the queue of the block device that this file is, if it is one.
pub(crate) fn queue_attribute(file: &File, name: &str) -> Option<String> {
    let rdev = file.metadata().ok()?.rdev();
    let device = format!("/sys/dev/block/{}:{}", libc::major(rdev), libc::minor(rdev));
    // A partition has none; its disk's is one up.
    let text = std::fs::read_to_string(format!("{device}/queue/{name}"))
        .or_else(|_| std::fs::read_to_string(format!("{device}/../queue/{name}")));
    Some(text.ok()?.trim().to_string())
}

/// Take the advisory lock of the whole file, without waiting; it goes with the descriptor.
pub(crate) fn lock(file: &File, exclusive: bool) -> io::Result<()> {
    let kind = if exclusive { libc::LOCK_EX } else { libc::LOCK_SH };
    // SAFETY: a system call on an open descriptor without pointers.
    if unsafe { libc::flock(file.as_raw_fd(), kind | libc::LOCK_NB) } == 0 {
        return Ok(());
    }
    Err(io::Error::last_os_error())
}

/// The error means "this file system or kernel cannot", not "it failed".
pub(crate) fn unsupported(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL | libc::EPERM)
    )
}

/// The error means that there is no room for what was to be written.
pub(crate) fn no_room(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG)
    )
}

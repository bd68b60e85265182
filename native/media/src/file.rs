//! Blocks in a file or a block device.

use crate::{check, check_geometry, check_write, system, uring, Media};
use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{RwLock, RwLockReadGuard};

/// How bytes move between a file and memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Engine {
    /// The one that is faster for files in the page cache, which is `pread`: see module `uring` for the measurement.
    #[default]
    Auto,
    /// Refused where the system does not allow it.
    IoUring,
    Pread,
}

/// A file, or a block device, as media. The page cache makes it volatile: a write is durable after `fdatasync`.
pub struct FileMedia {
    file: File,
    size_bytes: AtomicU64,
    /// Held by writes, and alone by a change to a smaller size: nothing that was checked against the old size lands beyond
    /// the new one and makes the file longer again.
    shape: RwLock<()>,
    block_bytes: u32,
    read_only: bool,
    /// Through io_uring, else `pread` and `pwrite`.
    uring: bool,
    /// An `fdatasync` failed: the kernel has dropped dirty pages and will not say so twice.
    sync_failed: AtomicBool,
    /// The file system answers `RWF_NOWAIT`.
    nowait: AtomicBool,
}

impl FileMedia {
    /// The size is the file's, cut to whole blocks.
    pub fn open(path: &Path, block_bytes: u32, read_only: bool, engine: Engine) -> io::Result<Self> {
        let mut file = OpenOptions::new().read(true).write(!read_only).open(path)?;
        let length = file.seek(SeekFrom::End(0))?;
        if length < u64::from(block_bytes) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!(
                    "{} has {length} bytes, less than one block of {block_bytes}",
                    path.display()
                ),
            ));
        }
        let size_bytes = length - length % u64::from(block_bytes.max(1));
        check_geometry(size_bytes, block_bytes)?;
        let uring = engine == Engine::IoUring;
        if uring {
            uring::available().map_err(|why| {
                io::Error::new(
                    io::ErrorKind::Unsupported,
                    format!("this system does not allow io_uring: {why}"),
                )
            })?;
        }
        Ok(FileMedia {
            file,
            size_bytes: AtomicU64::new(size_bytes),
            shape: RwLock::default(),
            block_bytes,
            read_only,
            uring,
            sync_failed: AtomicBool::new(false),
            nowait: AtomicBool::new(true),
        })
    }

    /// Make a new sparse file of `size_bytes`; refuses one that exists.
    pub fn create(path: &Path, size_bytes: u64) -> io::Result<()> {
        let file = OpenOptions::new().write(true).create_new(true).open(path)?;
        file.set_len(size_bytes)?;
        file.sync_all()
    }

    /// For one that serves the file to others: no second server may have it open, unless both only read. Advisory, and
    /// gone with the process; where the file system has no locks it does nothing.
    pub fn lock(&self) -> io::Result<()> {
        match system::lock(&self.file, !self.read_only) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Err(io::Error::new(
                io::ErrorKind::WouldBlock,
                "in use by another server",
            )),
            Err(error) if system::unsupported(&error) => Ok(()),
            result => result,
        }
    }

    fn read_shape(&self) -> RwLockReadGuard<'_, ()> {
        self.shape.read().unwrap_or_else(|e| e.into_inner())
    }

    fn put(&self, offset: u64, from: &[u8]) -> io::Result<()> {
        if self.uring {
            uring::write(&self.file, offset, from, 0)
        } else {
            self.file.write_all_at(from, offset)
        }
    }

    fn check_synced(&self) -> io::Result<()> {
        if self.sync_failed.load(Ordering::Acquire) {
            return Err(io::Error::other(
                "an earlier sync failed, so writes may be lost; open the media again",
            ));
        }
        Ok(())
    }

    fn sync_result(&self, result: io::Result<()>) -> io::Result<()> {
        if result.is_err() {
            self.sync_failed.store(true, Ordering::Release);
        }
        result
    }
}

impl Media for FileMedia {
    fn size_bytes(&self) -> u64 {
        self.size_bytes.load(Ordering::Acquire)
    }
    fn block_bytes(&self) -> u32 {
        self.block_bytes
    }
    fn read_only(&self) -> bool {
        self.read_only
    }
    fn volatile_cache(&self) -> bool {
        true
    }
    fn engine(&self) -> &'static str {
        if self.uring {
            "io_uring"
        } else {
            "pread"
        }
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        check(self, offset, into.len() as u64)?;
        if self.uring {
            return uring::read(&self.file, offset, into);
        }
        self.file.read_exact_at(into, offset)
    }

    fn write(&self, offset: u64, from: &[u8], fua: bool) -> io::Result<()> {
        let _shape = self.read_shape();
        check_write(self, offset, from.len() as u64)?;
        if !fua {
            return self.put(offset, from);
        }
        self.check_synced()?;
        let durable = if self.uring {
            uring::write(&self.file, offset, from, libc::RWF_DSYNC)
        } else {
            system::write_durably(&self.file, offset, from)
        };
        match durable {
            Err(error) if system::unsupported(&error) => {
                self.put(offset, from)?;
                self.flush()
            }
            result => self.sync_result(result),
        }
    }

    fn flush(&self) -> io::Result<()> {
        self.check_synced()?;
        if self.read_only {
            return Ok(());
        }
        self.sync_result(if self.uring {
            uring::sync(&self.file)
        } else {
            self.file.sync_data()
        })
    }

    fn deallocate(&self, offset: u64, length: u64) -> io::Result<()> {
        let _shape = self.read_shape();
        check_write(self, offset, length)?;
        if length == 0 {
            return Ok(());
        }
        match system::fallocate(&self.file, libc::FALLOC_FL_PUNCH_HOLE, offset, length) {
            // It is a hint: a file system without holes keeps the bytes.
            Err(error) if system::unsupported(&error) => Ok(()),
            result => result,
        }
    }

    fn write_zeroes(&self, offset: u64, length: u64, fua: bool) -> io::Result<()> {
        let _shape = self.read_shape();
        check_write(self, offset, length)?;
        if length == 0 {
            return Ok(());
        }
        match system::fallocate(&self.file, libc::FALLOC_FL_PUNCH_HOLE, offset, length) {
            Err(error) if system::unsupported(&error) => {
                let zeros = vec![0; length.min(1 << 20) as usize];
                let mut at = 0;
                while at < length {
                    let piece = (length - at).min(zeros.len() as u64);
                    self.put(offset + at, &zeros[..piece as usize])?;
                    at += piece;
                }
            }
            result => result?,
        }
        if fua {
            self.flush()?;
        }
        Ok(())
    }

    /// A regular file becomes longer, sparse, or shorter; a block device has the size that it has.
    fn resize(&self, size_bytes: u64) -> io::Result<()> {
        check_geometry(size_bytes, self.block_bytes)?;
        if self.read_only {
            return check_write(self, 0, 0);
        }
        let _alone = self.shape.write().unwrap_or_else(|e| e.into_inner());
        if self.file.metadata()?.is_file() {
            if size_bytes < self.size_bytes() {
                self.size_bytes.store(size_bytes, Ordering::Release);
            }
            self.file.set_len(size_bytes)?;
        } else {
            let found = (&self.file).seek(SeekFrom::End(0))?;
            if size_bytes > found {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidInput,
                    format!("the device has {found} bytes, less than {size_bytes}"),
                ));
            }
        }
        self.size_bytes.store(size_bytes, Ordering::Release);
        Ok(())
    }

    fn try_read(&self, offset: u64, into: &mut [u8]) -> io::Result<bool> {
        check(self, offset, into.len() as u64)?;
        if !self.nowait.load(Ordering::Relaxed) {
            return Ok(false);
        }
        match system::read_cached(&self.file, offset, into) {
            Ok(count) => Ok(count == into.len()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) if system::unsupported(&error) => {
                self.nowait.store(false, Ordering::Relaxed);
                Ok(false)
            }
            // A real error will come again from `read`, with all of its context.
            Err(_) => Ok(false),
        }
    }
}

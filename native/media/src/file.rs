//! Blocks in a file or a block device.

use crate::{check, check_geometry, check_write, direct, system, uring, Media};
use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, FileTypeExt};
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

impl Engine {
    /// Why this system does not allow it, if it does not.
    pub fn available(self) -> Result<(), String> {
        match self {
            Engine::IoUring => uring::available(),
            Engine::Auto | Engine::Pread => Ok(()),
        }
    }
}

/// Whether bytes stay in the page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Cache {
    /// Files use it, block devices do not where the system allows that: a drive that is served has readers that cache for
    /// themselves, and writes that nobody reads soon.
    #[default]
    Auto,
    Use,
    /// O_DIRECT; refused where the system does not allow it.
    Bypass,
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
    /// Past the page cache: how memory must be aligned.
    direct: Option<usize>,
    block_device: bool,
    /// A block device past the page cache that says that it has no cache of its own.
    durable: bool,
    /// Deallocated ranges read as zeros, as far as was seen.
    zeroing: AtomicBool,
}

impl FileMedia {
    /// The size is the file's, cut to whole blocks.
    pub fn open(path: &Path, block_bytes: u32, read_only: bool, engine: Engine) -> io::Result<Self> {
        Self::open_as(path, block_bytes, read_only, engine, Cache::Use)
    }

    /// With a say about the page cache.
    pub fn open_as(
        path: &Path,
        block_bytes: u32,
        read_only: bool,
        engine: Engine,
        cache: Cache,
    ) -> io::Result<Self> {
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
        let block_device = file.metadata()?.file_type().is_block_device();
        if block_device {
            let sector = system::queue_attribute(&file, "logical_block_size");
            let sector = sector.and_then(|text| text.parse::<u32>().ok()).unwrap_or(512);
            if block_bytes < sector {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidInput,
                    format!(
                        "{} has blocks of {sector} bytes: a namespace of it needs block_bytes {sector} or more, found \
                         {block_bytes}",
                        path.display()
                    ),
                ));
            }
        }
        let wanted = cache == Cache::Bypass || (cache == Cache::Auto && block_device);
        let direct = match wanted.then(|| direct::open(path, block_bytes, read_only)) {
            Some(Ok((past_cache, alignment))) => {
                file = past_cache;
                Some(alignment)
            }
            Some(Err(error)) if cache == Cache::Bypass => {
                return Err(io::Error::new(
                    error.kind(),
                    format!("this system does not read it past the page cache (O_DIRECT): {error}"),
                ));
            }
            _ => None,
        };
        let queue = |name: &str| system::queue_attribute(&file, name).filter(|_| block_device);
        let durable = direct.is_some() && queue("write_cache").as_deref() == Some("write through");
        let zeroing = if block_device {
            queue("write_zeroes_max_bytes").is_some_and(|bytes| bytes != "0")
        } else {
            // Behind the end there is nothing to lose.
            let behind = length.next_multiple_of(1 << 20);
            !read_only && system::fallocate(&file, libc::FALLOC_FL_PUNCH_HOLE, behind, 4096).is_ok()
        };
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
            nowait: AtomicBool::new(direct.is_none()),
            direct,
            block_device,
            durable,
            zeroing: AtomicBool::new(zeroing),
        })
    }

    /// Make a new sparse file of `size_bytes`; refuses one that exists.
    pub fn create(path: &Path, size_bytes: u64) -> io::Result<()> {
        let file = OpenOptions::new().write(true).create_new(true).open(path)?;
        file.set_len(size_bytes)?;
        file.sync_all()?;
        // Its name, too: what hosts flush to it must be found after a loss of power.
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
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

    /// For one of several that use a device together: keeps out who wants it alone, and is refused where one has it alone.
    pub fn lock_shared(&self) -> io::Result<()> {
        match system::lock(&self.file, false) {
            Err(error) if system::unsupported(&error) => Ok(()),
            result => result,
        }
    }

    pub fn is_block_device(&self) -> bool {
        self.block_device
    }

    /// Durable when it returns, by the write itself: where the system cannot do that, it fails.
    pub(crate) fn write_through(&self, offset: u64, from: &[u8]) -> io::Result<()> {
        let _shape = self.read_shape();
        check_write(self, offset, from.len() as u64)?;
        self.put(offset, from, true)
    }

    /// Of a block device: the range is not needed any more, and may read as anything.
    pub(crate) fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
        system::discard(&self.file, offset, length)
    }

    fn read_shape(&self) -> RwLockReadGuard<'_, ()> {
        self.shape.read().unwrap_or_else(|e| e.into_inner())
    }

    /// The alignment that this memory lacks, and must have.
    fn misaligned(&self, memory: &[u8]) -> Option<usize> {
        self.direct
            .filter(|&alignment| !direct::is_aligned(memory.as_ptr(), alignment))
    }

    fn get(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        if let Some(alignment) = self.misaligned(into) {
            return direct::in_pieces(into.len(), alignment, |at, piece| {
                self.get(offset + at as u64, piece)?;
                into[at..at + piece.len()].copy_from_slice(piece);
                Ok(())
            });
        }
        if self.uring {
            return uring::read(&self.file, offset, into);
        }
        self.file.read_exact_at(into, offset)
    }

    fn put(&self, offset: u64, from: &[u8], fua: bool) -> io::Result<()> {
        if let Some(alignment) = self.misaligned(from) {
            return direct::in_pieces(from.len(), alignment, |at, piece| {
                piece.copy_from_slice(&from[at..at + piece.len()]);
                self.put(offset + at as u64, piece, fua)
            });
        }
        match (self.uring, fua) {
            (true, true) => uring::write(&self.file, offset, from, libc::RWF_DSYNC),
            (true, false) => uring::write(&self.file, offset, from, 0),
            (false, true) => system::write_durably(&self.file, offset, from),
            (false, false) => self.file.write_all_at(from, offset),
        }
    }

    /// Zeros, one way or another: the first that this file or device can do.
    fn put_zeros(&self, offset: u64, length: u64) -> io::Result<()> {
        for mode in [libc::FALLOC_FL_ZERO_RANGE, libc::FALLOC_FL_PUNCH_HOLE] {
            match system::fallocate(&self.file, mode, offset, length) {
                Err(error) if system::unsupported(&error) => {}
                result => return result,
            }
        }
        let zeros = vec![0; length.min(1 << 20) as usize];
        let mut at = 0;
        while at < length {
            let piece = (length - at).min(zeros.len() as u64);
            self.put(offset + at, &zeros[..piece as usize], false)?;
            at += piece;
        }
        Ok(())
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
        !self.durable
    }
    fn direct(&self) -> bool {
        self.direct.is_some()
    }
    fn deallocated_reads_zeros(&self) -> bool {
        self.zeroing.load(Ordering::Relaxed)
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
        self.get(offset, into)
    }

    fn write(&self, offset: u64, from: &[u8], fua: bool) -> io::Result<()> {
        let _shape = self.read_shape();
        check_write(self, offset, from.len() as u64)?;
        if !fua {
            return self.put(offset, from, false);
        }
        self.check_synced()?;
        match self.put(offset, from, true) {
            Err(error) if system::unsupported(&error) => {
                self.put(offset, from, false)?;
                self.flush()
            }
            // The call does not say whether writing or syncing had no room. Writing alone does: where it has none either,
            // nothing that was answered is lost.
            Err(error) if system::no_room(&error) => match self.put(offset, from, false) {
                Err(again) if system::no_room(&again) => Err(again),
                _ => self.sync_result(Err(error)),
            },
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
            // It is a hint: a file system without holes keeps the bytes, and a drive may leave anything.
            Err(error) if system::unsupported(&error) => {
                self.zeroing.store(false, Ordering::Relaxed);
                match self
                    .block_device
                    .then(|| system::discard(&self.file, offset, length))
                {
                    Some(Err(error)) if !system::unsupported(&error) => Err(error),
                    _ => Ok(()),
                }
            }
            result => result,
        }
    }

    fn write_zeroes(&self, offset: u64, length: u64, fua: bool) -> io::Result<()> {
        let _shape = self.read_shape();
        check_write(self, offset, length)?;
        if length == 0 {
            return Ok(());
        }
        self.put_zeros(offset, length)?;
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
        if !self.block_device {
            let before = self.size_bytes();
            // First the lesser of what is said and what is there, so that no read is cut short.
            self.size_bytes.store(before.min(size_bytes), Ordering::Release);
            if let Err(error) = self.file.set_len(size_bytes) {
                self.size_bytes.store(before, Ordering::Release);
                return Err(error);
            }
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
        self.sync_result(self.file.sync_all())
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

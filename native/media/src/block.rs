//! A block device of the kernel as the store of one who cannot see behind it: an NVMe namespace that the kernel connected, a
//! SCSI disk, a device-mapper target, a partition, a loop device.
//!
//! [`FileMedia`] moves the bytes, always past the page cache. What is added here comes from one fact: **the kernel hides what
//! happens behind the device.** It reconnects, fails over and sends again, and tells nobody.
//!
//! * A write that was answered from a volatile cache may be lost with a controller that nobody saw go, and a flush that succeeds
//!   afterwards proves nothing about it. So every write goes with `RWF_DSYNC`: the device has it on its medium, or says that it
//!   has not. [`Media::volatile_cache`] is `false` therefore.
//! * A write or a flush that failed has an unknown fate: what of it was carried out, and whether the rest is still under way.
//!   So the first failure stays: everything that would write, and every flush, fails with it until the device is opened again.
//!   Reads go on.
//! * Who else uses the device is asked before anything is written: the kernel's own claim (`O_EXCL`), which file systems,
//!   swap, device-mapper and md hold. It is tried and let go again, since every rank of a node opens the device for itself; what is held
//!   for as long as it is open is a shared `flock`, which keeps partitioning tools and a server of the same device out.

use crate::fault::{Fault, FaultKind};
use crate::{check, check_write, system, Cache, Engine, FileMedia, Media};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// How long another one may have the device for itself, as we have it while we ask: then it is claimed.
const CLAIM_PATIENCE: Duration = Duration::from_secs(2);

pub struct BlockMedia {
    file: FileMedia,
    /// The same device, to be asked about itself.
    probe: File,
    sysfs: String,
    logical_bytes: u32,
    physical_bytes: u32,
    /// The first write or flush that failed.
    failed: OnceLock<Fault>,
}

impl BlockMedia {
    /// `block_bytes`: `None` is the device's own logical block. A device that the kernel lets nobody write to opens for reading.
    pub fn open(
        path: &Path,
        block_bytes: Option<u32>,
        read_only: bool,
        engine: Engine,
    ) -> io::Result<BlockMedia> {
        let probe = open_plain(path)?;
        let logical_bytes = system::logical_block(&probe)?;
        let physical_bytes = system::physical_block(&probe)?;
        let block_bytes = choose_block(block_bytes, logical_bytes)?;
        let read_only = read_only || system::device_read_only(&probe)?;
        if !read_only {
            claim(path)?;
        }
        let engine = match engine {
            Engine::Auto if Engine::IoUring.available().is_ok() => Engine::IoUring,
            Engine::Auto => Engine::Pread,
            asked => asked,
        };
        let file =
            FileMedia::open_as(path, block_bytes, read_only, engine, Cache::Bypass).map_err(opening)?;
        if !read_only {
            file.lock_shared().map_err(|error| {
                if error.kind() != io::ErrorKind::WouldBlock {
                    return error;
                }
                Fault::new(FaultKind::Usage, "somebody has the block device for himself")
                    .found("an exclusive lock (flock)")
                    .next("see who, with lslocks: a server of it, or a tool that changes its partitions")
                    .into()
            })?;
        }
        let id = probe.metadata()?.rdev();
        let sysfs = format!("/sys/dev/block/{}:{}", libc::major(id), libc::minor(id));
        Ok(BlockMedia {
            file,
            probe,
            sysfs,
            logical_bytes,
            physical_bytes,
            failed: OnceLock::new(),
        })
    }

    pub fn logical_bytes(&self) -> u32 {
        self.logical_bytes
    }

    pub fn physical_bytes(&self) -> u32 {
        self.physical_bytes
    }

    /// Has to be there before anything is written: what failed once has an unknown fate.
    fn check_sound(&self) -> io::Result<()> {
        let Some(first) = self.failed.get() else {
            return Ok(());
        };
        let mut again = first.clone();
        if !again.what.starts_with("an earlier ") {
            again.what = format!("an earlier {}", again.what);
        }
        Err(again.into())
    }

    /// What the failure means; of one that writes, for everything that follows.
    fn understood(&self, verb: &str, writes: bool, error: &io::Error) -> io::Error {
        let mut fault = self.explain(verb, error);
        if writes {
            if fault.next_step.is_empty() {
                fault.next_step =
                    "its outcome is unknown: open the device again before anything is written".into();
            }
            let _ = self.failed.set(fault.clone());
        }
        fault.into()
    }

    fn explain(&self, verb: &str, error: &io::Error) -> Fault {
        let size = system::device_bytes(&self.probe).unwrap_or(0);
        if size == 0 || !Path::new(&self.sysfs).exists() {
            return Fault::new(
                FaultKind::Gone,
                format!("{verb} failed: the block device was removed"),
            )
            .found(error.to_string())
            .next("connect it again, and open it again");
        }
        if size < self.size_bytes() {
            return Fault::new(
                FaultKind::Gone,
                format!("{verb} failed: the block device has shrunk"),
            )
            .expected(format!("{} bytes", self.size_bytes()))
            .found(format!("{size} bytes"))
            .next("give it the size that it had, and open it again");
        }
        match error.raw_os_error() {
            Some(libc::EBADE) => Fault::new(
                FaultKind::Conflict,
                format!("{verb} failed: this node is fenced, another host holds the reservation"),
            )
            .found(error.to_string())
            .next("see who, with `nvme resv-report`; nothing is written before it is opened again"),
            Some(libc::ENXIO | libc::ENODEV | libc::ENOLINK) => Fault::new(
                FaultKind::Gone,
                format!("{verb} failed: the kernel has no path to the device"),
            )
            .found(error.to_string())
            .next("see dmesg, and `nvme list-subsys` or `multipath -ll`; open the device again"),
            Some(libc::ENODATA) => Fault::new(
                FaultKind::Failed,
                format!("{verb} failed: the medium has lost these blocks"),
            )
            .found(error.to_string()),
            Some(libc::ENOSPC) => Fault::new(
                FaultKind::Failed,
                format!("{verb} failed: what is behind the device is full"),
            )
            .found(error.to_string())
            .next("give the pool more room, and open the device again"),
            _ => Fault::new(FaultKind::Failed, format!("{verb} failed")).found(error.to_string()),
        }
    }

    fn done<T>(&self, verb: &str, writes: bool, result: io::Result<T>) -> io::Result<T> {
        result.map_err(|error| self.understood(verb, writes, &error))
    }
}

/// For reading, and surely a block device.
fn open_plain(path: &Path) -> io::Result<File> {
    // Without waiting: a FIFO of that name would wait for a writer.
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)
        .map_err(opening)?;
    if !file.metadata()?.file_type().is_block_device() {
        return Err(Fault::new(FaultKind::Usage, "not a block device")
            .expected("a device such as /dev/nvme1n1")
            .next("a file is opened with file:/PATH")
            .into());
    }
    Ok(file)
}

fn choose_block(wanted: Option<u32>, logical: u32) -> io::Result<u32> {
    let fault = |expected: String, found: String, next: &str| {
        Err(Fault::new(FaultKind::Usage, "no blocks of this size here")
            .expected(expected)
            .found(found)
            .next(next)
            .into())
    };
    match wanted {
        Some(block) if block < logical => fault(
            format!("block={logical} or more, as the device has"),
            format!("block={block}"),
            "leave the option out: the device's own block is taken",
        ),
        None if logical > 4096 => fault(
            "logical blocks of 512 or 4096 bytes".into(),
            format!("{logical} bytes"),
            "format the namespace with blocks of 4096 bytes",
        ),
        _ => Ok(wanted.unwrap_or(logical)),
    }
}

/// Refuse a device that is mounted or otherwise taken. Another process of ours has it for the same moment as we do.
fn claim(path: &Path) -> io::Result<()> {
    let end = Instant::now() + CLAIM_PATIENCE;
    let mut pause = Duration::from_millis(2);
    loop {
        let opened = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_EXCL)
            .open(path);
        match opened {
            Ok(_) => return Ok(()),
            Err(error) if error.raw_os_error() != Some(libc::EBUSY) => return Err(opening(error)),
            Err(_) if Instant::now() < end => std::thread::sleep(pause),
            Err(_) => {
                return Err(
                    Fault::new(FaultKind::Usage, "the block device is in use on this machine")
                        .expected("one that nobody has claimed")
                        .found("mounted, swap, or part of another device (EBUSY)")
                        .into(),
                )
            }
        }
        pause = (pause * 2).min(Duration::from_millis(50));
    }
}

fn opening(error: io::Error) -> io::Error {
    let fault = |kind, what: &str, next: &str| -> io::Error {
        Fault::new(kind, what).found(error.to_string()).next(next).into()
    };
    match error.raw_os_error() {
        Some(libc::ENOENT) => fault(
            FaultKind::Failed,
            "there is no such block device",
            "see what there is: lsblk; a namespace is connected with nvme connect",
        ),
        Some(libc::EACCES | libc::EPERM) => fault(
            FaultKind::Failed,
            "this user may not open the block device",
            "give the user access to it: its group (ls -l), or a udev rule",
        ),
        Some(libc::ENXIO | libc::ENODEV | libc::ENOMEDIUM) => fault(
            FaultKind::Gone,
            "there is nothing behind the block device",
            "connect it again",
        ),
        _ => error,
    }
}

impl Media for BlockMedia {
    fn size_bytes(&self) -> u64 {
        self.file.size_bytes()
    }
    fn block_bytes(&self) -> u32 {
        self.file.block_bytes()
    }
    fn read_only(&self) -> bool {
        self.file.read_only()
    }
    /// Every write is durable when it is answered.
    fn volatile_cache(&self) -> bool {
        false
    }
    fn engine(&self) -> &'static str {
        self.file.engine()
    }
    fn direct(&self) -> bool {
        true
    }
    fn writes_through(&self) -> bool {
        true
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        check(self, offset, into.len() as u64)?;
        self.done("read", false, self.file.read(offset, into))
    }

    /// Durable with or without `fua`.
    fn write(&self, offset: u64, from: &[u8], _fua: bool) -> io::Result<()> {
        check_write(self, offset, from.len() as u64)?;
        self.check_sound()?;
        self.done("write", true, self.file.write_through(offset, from))
    }

    fn flush(&self) -> io::Result<()> {
        if self.read_only() {
            return Ok(());
        }
        self.check_sound()?;
        self.done("flush", true, self.file.flush())
    }

    fn deallocate(&self, offset: u64, length: u64) -> io::Result<()> {
        check_write(self, offset, length)?;
        self.check_sound()?;
        if length == 0 {
            return Ok(());
        }
        match self.file.discard(offset, length) {
            // Then as zeros, if the device has a command for them.
            Err(error) if system::unsupported(&error) => {
                self.done("deallocate", true, self.file.deallocate(offset, length))
            }
            result => self.done("deallocate", true, result),
        }
    }
}

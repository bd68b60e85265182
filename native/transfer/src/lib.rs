//! Transfers: what a device is, who owns the memory while a command is under way, and batches over many devices.
//!
//! * [`buffer`]: memory that stays alive until the last command on it ended (unsafe lives here, and where it is asked for bytes)
//! * [`device`]: the [`BlockDevice`] trait; NVMe/TCP hosts and local media both implement it
//! * [`error`]: what can go wrong, and whose fault it was
//! * [`events`]: what a device did lately, in a ring
//! * [`single`]: one request and its waiter
//! * [`segment`], [`piece`], [`engine`], `verify`: a batch's rows, how they are cut into requests, how these move, and what is checked as they come
//! * [`stripes`], [`ranges`], [`pages`]: byte ranges of what is dealt out over devices, as batches; their checksums from tables
//! * [`checksum`]: CRC32C with the block's identity mixed in
//! * [`beat`]: a heartbeat of blocks that were made beforehand
//! * [`local`]: files and memory as block devices

pub mod beat;
pub mod buffer;
pub mod checksum;
pub mod device;
pub mod engine;
pub mod error;
pub mod events;
pub mod local;
pub mod pages;
pub mod piece;
pub mod ranges;
pub mod segment;
pub mod single;
pub mod stripes;
mod verify;

pub use buffer::{Buffer, MemoryOwner};
pub use checksum::ChecksumSpec;
pub use device::{BlockDevice, DeviceInfo, Op, Request, Sink};
pub use engine::{submit_read, submit_write, Plan, Transfer};
pub use error::{ErrorKind, IoError};
pub use events::{Event, EventKind, Recorded, Recorder, Ring};
pub use local::MediaDevice;
pub use pages::PageCache;
pub use ranges::{submit_ranges, Source};
pub use segment::Segment;
pub use single::{submit_one, Pending};
pub use stripes::Stripes;

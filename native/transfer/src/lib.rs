//! Transfers: what a device is, who owns the memory while a command is under way, and batches over many devices.
//!
//! * [`buffer`]: memory that stays alive until the last command on it ended (the one unsafe module here)
//! * [`device`]: the [`BlockDevice`] trait; NVMe/TCP hosts and local media both implement it
//! * [`error`]: what can go wrong, and whose fault it was

pub mod buffer;
pub mod device;
pub mod error;

pub use buffer::{Buffer, MemoryOwner};
pub use device::{BlockDevice, DeviceInfo, Op, Request, Sink};
pub use error::{ErrorKind, IoError};

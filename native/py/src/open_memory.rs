//! `mem:` devices.

use crate::device::{opened, Device};
use headrace_media::MemoryMedia;
use headrace_transfer::events::EVENTS_DEFAULT;
use headrace_transfer::{ErrorKind, IoError, MediaDevice};
use pyo3::prelude::*;
use std::io;
use std::sync::Arc;

/// Copies are as fast as memory; a second worker lets a read pass a long one.
const WORKERS: usize = 2;

fn open(size_bytes: u64, block_bytes: u32, events: usize) -> Result<Arc<MediaDevice>, IoError> {
    let address = format!("mem:{size_bytes}");
    let media = MemoryMedia::new(size_bytes, block_bytes).map_err(|error| {
        let kind = match error.kind() {
            io::ErrorKind::InvalidInput => ErrorKind::Usage,
            _ => ErrorKind::Failed,
        };
        IoError::new(kind, "cannot make a memory device")
            .at(&address)
            .found(error.to_string())
    })?;
    MediaDevice::start(Box::new(media), "memory", address, WORKERS, events)
}

#[pyfunction]
#[pyo3(signature = (size_bytes, *, block_bytes, events = EVENTS_DEFAULT))]
pub fn open_memory(py: Python<'_>, size_bytes: u64, block_bytes: u32, events: usize) -> PyResult<Device> {
    let result = py.detach(|| open(size_bytes, block_bytes, events));
    opened(py, result)
}

//! `block:` devices.

use crate::device::{opened, Device};
use crate::open_file::engine;
use headrace_media::{BlockMedia, Fault};
use headrace_transfer::events::EVENTS_DEFAULT;
use headrace_transfer::{ErrorKind, IoError, MediaDevice};
use pyo3::prelude::*;
use std::path::Path;
use std::sync::Arc;

/// Calls under way at a time. With io_uring each is up to eight pieces of 256 KiB.
const WORKERS: usize = 16;

fn open(
    path: &str,
    block_bytes: Option<u32>,
    read_only: bool,
    io_engine: &str,
    events: usize,
) -> Result<Arc<MediaDevice>, IoError> {
    let media =
        BlockMedia::open(Path::new(path), block_bytes, read_only, engine(io_engine)?).map_err(|error| {
            match Fault::of(&error) {
                Some(fault) => IoError::from_fault(fault).at(path),
                None => IoError::new(ErrorKind::Failed, "cannot open the block device")
                    .at(path)
                    .found(error.to_string()),
            }
        })?;
    MediaDevice::start(Box::new(media), "block", path, WORKERS, events)
}

/// `block_bytes`: `None` is what the device says.
#[pyfunction]
#[pyo3(signature = (path, *, block_bytes, read_only, io_engine, events = EVENTS_DEFAULT))]
pub fn open_block(
    py: Python<'_>,
    path: &str,
    block_bytes: Option<u32>,
    read_only: bool,
    io_engine: &str,
    events: usize,
) -> PyResult<Device> {
    let result = py.detach(|| open(path, block_bytes, read_only, io_engine, events));
    opened(py, result)
}

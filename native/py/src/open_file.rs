//! `file:` devices.

use crate::device::{opened, Device};
use crate::errors;
use headrace_media::{Engine, FileMedia};
use headrace_transfer::events::EVENTS_DEFAULT;
use headrace_transfer::{ErrorKind, IoError, MediaDevice};
use pyo3::prelude::*;
use std::path::Path;

/// Media calls under way at a time: enough to keep a drive busy, few enough for a shared machine.
const WORKERS: usize = 4;

pub fn engine(name: &str) -> Result<Engine, IoError> {
    match name {
        "auto" => Ok(Engine::Auto),
        "io_uring" => Ok(Engine::IoUring),
        "pread" => Ok(Engine::Pread),
        _ => Err(IoError::new(ErrorKind::Usage, "no such I/O engine")
            .expected("auto, io_uring or pread")
            .found(name)),
    }
}

fn open(
    path: &str,
    block_bytes: u32,
    read_only: bool,
    io_engine: &str,
    events: usize,
) -> Result<std::sync::Arc<MediaDevice>, IoError> {
    let media =
        FileMedia::open(Path::new(path), block_bytes, read_only, engine(io_engine)?).map_err(|error| {
            let kind = match error.kind() {
                std::io::ErrorKind::InvalidInput => ErrorKind::Usage,
                _ => ErrorKind::Failed,
            };
            IoError::new(kind, "cannot open the file")
                .at(path)
                .found(error.to_string())
                .next(match error.kind() {
                    std::io::ErrorKind::NotFound => "check the path; with ?create=SIZE it is made",
                    std::io::ErrorKind::PermissionDenied => "make it readable and writable for this user",
                    _ => "check what is there",
                })
        })?;
    if media.is_block_device() {
        // Here it would go through the page cache, and trust a flush that proves nothing where the kernel reconnects.
        return Err(
            IoError::new(ErrorKind::Usage, "a file: address of a block device")
                .at(path)
                .expected("a file")
                .next(format!("open it as block:{path}")),
        );
    }
    MediaDevice::start(Box::new(media), "file", path, WORKERS, events)
}

#[pyfunction]
#[pyo3(signature = (path, *, block_bytes, read_only, io_engine, events = EVENTS_DEFAULT))]
pub fn open_file(
    py: Python<'_>,
    path: &str,
    block_bytes: u32,
    read_only: bool,
    io_engine: &str,
    events: usize,
) -> PyResult<Device> {
    let result = py.detach(|| open(path, block_bytes, read_only, io_engine, events));
    opened(py, result)
}

/// A sparse file of `size_bytes`; an existing file of exactly that size is left as it is.
#[pyfunction]
pub fn create_file(py: Python<'_>, path: &str, size_bytes: u64) -> PyResult<()> {
    py.detach(|| FileMedia::create(Path::new(path), size_bytes))
        .map_err(|error| {
            let error = IoError::new(ErrorKind::Failed, "cannot create the file")
                .at(path)
                .found(error.to_string());
            errors::raise_unopened(py, &error)
        })
}

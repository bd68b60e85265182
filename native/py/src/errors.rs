//! `IoError` to the exceptions of `headrace.errors`.

use headrace_transfer::{ErrorKind, IoError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

fn class_name(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::Usage => "UsageError",
        ErrorKind::Refused => "ConnectRefused",
        ErrorKind::Timeout => "DeviceTimeout",
        ErrorKind::Gone => "DeviceGone",
        ErrorKind::Protocol => "ProtocolError",
        ErrorKind::Failed => "CommandFailed",
        ErrorKind::Conflict => "ReservationConflict",
        ErrorKind::Unknown => "OutcomeUnknown",
        ErrorKind::Closed => "DeviceClosed",
        ErrorKind::Checksum => "ChecksumMismatch",
    }
}

fn build(py: Python<'_>, class_name: &str, error: &IoError) -> PyResult<PyErr> {
    let class = py.import("headrace.errors")?.getattr(class_name)?;
    let details = PyDict::new(py);
    for (name, text) in [
        ("where", &error.place),
        ("expected", &error.expected),
        ("found", &error.found),
        ("next_step", &error.next_step),
    ] {
        if !text.is_empty() {
            details.set_item(name, &**text)?;
        }
    }
    Ok(PyErr::from_value(class.call((&*error.what,), Some(&details))?))
}

/// The exception for `error`.
pub fn raise(py: Python<'_>, error: &IoError) -> PyErr {
    build(py, class_name(error.kind), error).unwrap_or_else(|failure| failure)
}

/// The exception for what failed before there was a device, so that no command can have failed: `DeviceError` itself.
pub fn raise_unopened(py: Python<'_>, error: &IoError) -> PyErr {
    let name = if error.kind == ErrorKind::Failed {
        "DeviceError"
    } else {
        class_name(error.kind)
    };
    build(py, name, error).unwrap_or_else(|failure| failure)
}

//! Flush several devices at once, without a thread for each.

use crate::device::Device;
use crate::wait;
use headrace_transfer::{submit_one, Op, Pending};
use pyo3::prelude::*;

/// Raises the first error when every flush has ended.
#[pyfunction]
pub fn flush(py: Python<'_>, devices: Vec<PyRef<'_, Device>>) -> PyResult<()> {
    let devices: Vec<_> = devices.iter().map(|device| device.device().clone()).collect();
    let flushes: Vec<Pending> = py.detach(|| {
        devices
            .iter()
            .map(|device| submit_one(device.as_ref(), Op::Flush, 0))
            .collect()
    });
    let mut first = Ok(());
    for pending in flushes {
        let ended = wait::until(py, None, |timeout| pending.wait(timeout));
        first = first.and(ended.map(|_| ()));
    }
    first
}

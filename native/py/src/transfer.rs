//! A batch under way.

use crate::device::Device;
use crate::{errors, memory, wait};
use headrace_transfer::ranges::Origins;
use headrace_transfer::{ErrorKind, IoError, Transfer as Batch};
use pyo3::prelude::*;

/// A range, where in it, and how many wanted bytes; member and offset.
type Place = (u32, u64, u64, u32, u64);

#[pyclass(frozen, module = "headrace._native")]
pub struct Transfer {
    batch: Batch,
    /// Devices close when Python drops them; a batch under way keeps them open for as long as somebody may wait for it.
    _devices: Vec<Py<Device>>,
    /// The process that started it: the threads that would end it, and locks that they may hold, are not in a forked child.
    process: u32,
    /// Of a batch that was cut out of ranges.
    origins: Origins,
}

impl Transfer {
    pub fn new(batch: Batch, devices: Vec<Py<Device>>) -> Self {
        Self::of_ranges(batch, devices, Origins::new())
    }

    pub fn of_ranges(batch: Batch, devices: Vec<Py<Device>>, origins: Origins) -> Self {
        Transfer {
            batch,
            _devices: devices,
            process: std::process::id(),
            origins,
        }
    }

    fn check_process(&self, py: Python<'_>) -> PyResult<()> {
        if self.process == std::process::id() {
            return Ok(());
        }
        let what = "a transfer belongs to the process that started it";
        Err(errors::raise(py, &IoError::new(ErrorKind::Closed, what)))
    }
}

#[pymethods]
impl Transfer {
    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        self.check_process(py)?;
        let done = self.batch.done();
        memory::drain(py);
        Ok(done)
    }

    #[pyo3(signature = (timeout_s))]
    fn wait(&self, py: Python<'_>, timeout_s: Option<f64>) -> PyResult<bool> {
        self.check_process(py)?;
        wait::until(py, wait::duration(timeout_s), |timeout| self.batch.wait(timeout))
    }

    /// Member, offset and length there of a request that it waits for, and how many it has under way.
    fn waiting(&self, py: Python<'_>) -> PyResult<Option<(u32, u64, u64, usize)>> {
        self.check_process(py)?;
        let waiting = py.detach(|| self.batch.waiting());
        Ok(waiting.map(|at| (at.member, at.offset, at.length, at.requests)))
    }

    fn failed_segment(&self, py: Python<'_>) -> PyResult<Option<usize>> {
        self.check_process(py)?;
        Ok(self.batch.failed_segment())
    }

    /// Of a batch of ranges: what failed.
    fn failed_range(&self, py: Python<'_>) -> PyResult<Option<Place>> {
        self.check_process(py)?;
        let place = |index: usize| {
            let (range, within) = *self.origins.get(index)?;
            let segment = self.batch.segment(index)?;
            Some((range, within, segment.take, segment.member, segment.offset))
        };
        Ok(self.batch.failed_segment().and_then(place))
    }
}

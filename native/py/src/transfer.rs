//! A batch under way.

use crate::device::Device;
use crate::{memory, wait};
use headrace_transfer::Transfer as Batch;
use pyo3::prelude::*;

#[pyclass(frozen, module = "headrace._native")]
pub struct Transfer {
    batch: Batch,
    /// Devices close when Python drops them; a batch under way keeps them open for as long as somebody may wait for it.
    _devices: Vec<Py<Device>>,
}

impl Transfer {
    pub fn new(batch: Batch, devices: Vec<Py<Device>>) -> Self {
        Transfer {
            batch,
            _devices: devices,
        }
    }
}

#[pymethods]
impl Transfer {
    fn done(&self, py: Python<'_>) -> bool {
        let done = self.batch.done();
        memory::drain(py);
        done
    }

    #[pyo3(signature = (timeout_s))]
    fn wait(&self, py: Python<'_>, timeout_s: Option<f64>) -> PyResult<bool> {
        wait::until(py, wait::duration(timeout_s), |timeout| self.batch.wait(timeout))
    }

    fn failed_segment(&self) -> Option<usize> {
        self.batch.failed_segment()
    }
}

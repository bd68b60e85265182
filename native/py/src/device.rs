//! An open device.

use crate::{errors, memory, wait};
use headrace_host::NvmeTcpDevice;
use headrace_transfer::{submit_one, BlockDevice, ErrorKind, IoError, Op};
use pyo3::prelude::*;
use std::sync::{Arc, Weak};
use std::time::Duration;

#[pyclass(frozen, module = "headrace._native")]
pub struct Device {
    /// `None` only while it is being dropped.
    device: Option<Arc<dyn BlockDevice>>,
    /// The same one, where it speaks NVMe/TCP.
    nvme: Weak<NvmeTcpDevice>,
    /// The process that opened it: threads do not survive a fork, so the child must not try to end them.
    process: u32,
}

impl Device {
    pub fn new(device: Arc<dyn BlockDevice>) -> Self {
        Device {
            device: Some(device),
            nvme: Weak::new(),
            process: std::process::id(),
        }
    }

    pub fn device(&self) -> &Arc<dyn BlockDevice> {
        match &self.device {
            Some(device) => device,
            None => unreachable!("a device that is being dropped has no callers"),
        }
    }

    pub fn new_nvme(device: Arc<NvmeTcpDevice>) -> Self {
        let nvme = Arc::downgrade(&device);
        let mut device = Device::new(device);
        device.nvme = nvme;
        device
    }

    /// A view of an open device.
    pub fn view(device: Arc<dyn BlockDevice>, nvme: Weak<NvmeTcpDevice>) -> Self {
        let mut view = Device::new(device);
        view.nvme = nvme;
        view
    }

    /// Where commands of NVMe can be sent; `UsageError` where that makes no sense.
    pub fn nvme(&self, py: Python<'_>) -> PyResult<Arc<NvmeTcpDevice>> {
        self.nvme.upgrade().ok_or_else(|| {
            let error = IoError::new(ErrorKind::Usage, "this device takes no NVMe commands")
                .expected("an nvme+tcp: device");
            errors::raise(py, &error)
        })
    }

    fn one(&self, py: Python<'_>, op: Op, offset: u64) -> PyResult<()> {
        let device = self.device();
        let pending = py.detach(|| submit_one(device.as_ref(), op, offset));
        wait::until(py, None, |timeout| pending.wait(timeout)).map(|_| ())
    }
}

#[pymethods]
impl Device {
    #[getter]
    fn size_bytes(&self) -> u64 {
        self.device().info().size_bytes
    }

    #[getter]
    fn block_bytes(&self) -> u32 {
        self.device().info().block_bytes
    }

    #[getter]
    fn max_transfer_bytes(&self) -> u64 {
        self.device().info().max_transfer_bytes
    }

    #[getter]
    fn volatile_cache(&self) -> bool {
        self.device().info().volatile_cache
    }

    #[getter]
    fn read_only(&self) -> bool {
        self.device().info().read_only
    }

    fn loss_count(&self) -> u64 {
        self.device().loss_count()
    }

    fn read_into(&self, py: Python<'_>, offset: u64, buffer: &Bound<'_, PyAny>) -> PyResult<()> {
        self.one(
            py,
            Op::Read {
                into: memory::writable(buffer)?,
            },
            offset,
        )
    }

    fn write(&self, py: Python<'_>, offset: u64, data: &Bound<'_, PyAny>, fua: bool) -> PyResult<()> {
        self.one(
            py,
            Op::Write {
                from: memory::readable(data)?,
                fua,
            },
            offset,
        )
    }

    fn flush(&self, py: Python<'_>) -> PyResult<()> {
        self.one(py, Op::Flush, 0)
    }

    fn deallocate(&self, py: Python<'_>, offset: u64, length: u64) -> PyResult<()> {
        self.one(py, Op::Deallocate { length }, offset)
    }

    #[pyo3(signature = (timeout_s = 5.0))]
    fn close(&self, py: Python<'_>, timeout_s: f64) {
        if self.process == std::process::id() {
            let timeout = wait::duration(Some(timeout_s)).unwrap_or(Duration::from_secs(5));
            py.detach(|| self.device().close(timeout));
        }
        memory::drain(py);
    }

    fn describe(&self) -> String {
        self.device().describe().to_string()
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let Some(device) = self.device.take() else { return };
        if self.process != std::process::id() {
            // Its threads are the parent's; ending it here would wait for threads that do not exist.
            std::mem::forget(device);
            return;
        }
        // Closed here, by a thread of Python's, so that no I/O thread ever is the one that ends a device.
        Python::attach(|py| {
            py.detach(|| {
                device.close(Duration::from_secs(5));
                // A view may be the last to let the device go, which ends it now.
                drop(device);
            });
        });
    }
}

/// Turn what an `open` gave into the class or the exception.
pub fn opened<D: BlockDevice + 'static>(
    py: Python<'_>,
    result: Result<Arc<D>, headrace_transfer::IoError>,
) -> PyResult<Device> {
    match result {
        Ok(device) => Ok(Device::new(device)),
        Err(error) => Err(errors::raise_unopened(py, &error)),
    }
}

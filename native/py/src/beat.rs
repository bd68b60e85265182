//! A heartbeat that needs no GIL.

use crate::device::Device;
use crate::{errors, wait};
use headrace_transfer::beat::{Beat as Heart, News, Place};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::time::{Duration, Instant};

/// How long a signal may wait for its handler.
const SLICE: Duration = Duration::from_millis(100);

#[pyclass(frozen, module = "headrace._native")]
pub struct Beat {
    /// `None` only while it is being dropped.
    heart: Option<Heart>,
    process: u32,
}

impl Beat {
    fn heart(&self) -> &Heart {
        match &self.heart {
            Some(heart) => heart,
            None => unreachable!("a heart that is being dropped has no callers"),
        }
    }
}

#[pymethods]
impl Beat {
    #[new]
    #[pyo3(signature = (devices, offsets, first, *, interval_s, confirm))]
    fn new(
        devices: Vec<PyRef<'_, Device>>,
        offsets: Vec<u64>,
        first: Vec<u8>,
        interval_s: f64,
        confirm: bool,
    ) -> PyResult<Self> {
        if devices.len() != offsets.len() {
            return Err(PyValueError::new_err("one offset for each device"));
        }
        let places = devices.iter().zip(offsets).map(|(device, offset)| Place {
            device: device.device().clone(),
            offset,
        });
        let interval = wait::seconds("interval_s", interval_s)?;
        Ok(Beat {
            heart: Some(Heart::start(places.collect(), first, interval, confirm)?),
            process: std::process::id(),
        })
    }

    fn feed(&self, blocks: Vec<Vec<u8>>) {
        self.heart().feed(blocks);
    }

    /// "low", "changed", "ended", or None when the time has passed; raises what fenced the device.
    fn news(&self, py: Python<'_>, timeout_s: f64) -> PyResult<Option<&'static str>> {
        let timeout = wait::seconds("timeout_s", timeout_s)?;
        match py.detach(|| self.heart().news(timeout)) {
            None => Ok(None),
            Some(News::Low) => Ok(Some("low")),
            Some(News::Changed) => Ok(Some("changed")),
            Some(News::Ended) => Ok(Some("ended")),
            Some(News::Fenced(error)) => Err(errors::raise(py, &error)),
        }
    }

    fn resume(&self) {
        self.heart().resume();
    }

    /// False where the beat under way has not ended within the time.
    fn stop(&self, py: Python<'_>, timeout_s: f64) -> PyResult<bool> {
        let deadline = Instant::now() + wait::seconds("timeout_s", timeout_s)?;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if py.detach(|| self.heart().stop(left.min(SLICE))) {
                return Ok(true);
            }
            if left.is_zero() {
                return Ok(false);
            }
            py.check_signals()?;
        }
    }

    fn written(&self) -> u64 {
        self.heart().written()
    }

    /// The last failure, None where the last beat succeeded.
    fn trouble(&self) -> Option<String> {
        self.heart().trouble().map(|error| error.to_string())
    }
}

impl Drop for Beat {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // Its thread is the parent's, and may have held the lock at the fork.
            std::mem::forget(self.heart.take());
        }
    }
}

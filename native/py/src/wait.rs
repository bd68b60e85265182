//! Waiting with the GIL released, and Ctrl-C heard.

use crate::{errors, memory};
use headrace_transfer::IoError;
use pyo3::prelude::*;
use std::time::{Duration, Instant};

/// How long a signal may wait for its handler.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(100);

/// A time-out in seconds as Python gives it; `None` and what no clock can hold mean "as long as it takes".
pub fn duration(seconds: Option<f64>) -> Option<Duration> {
    seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds.max(0.0)).ok())
}

/// Call `attempt` with the GIL released until it gives a result or `timeout` passed (then: false).
pub fn until(
    py: Python<'_>,
    timeout: Option<Duration>,
    attempt: impl Fn(Duration) -> Option<Result<(), IoError>> + Sync,
) -> PyResult<bool> {
    let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let slice = left.map_or(SIGNAL_INTERVAL, |left| left.min(SIGNAL_INTERVAL));
        let outcome = py.detach(|| attempt(slice));
        memory::drain(py);
        match outcome {
            Some(Ok(())) => return Ok(true),
            Some(Err(error)) => return Err(errors::raise(py, &error)),
            None => py.check_signals()?,
        }
        if left.is_some_and(|left| left <= slice) {
            return Ok(false);
        }
    }
}

//! Waiting with the GIL released, and Ctrl-C heard.

use crate::{errors, memory};
use headrace_transfer::IoError;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use std::sync::{mpsc, Mutex, PoisonError};
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

/// Run `work`, which has a deadline of its own, on a thread, so that Ctrl-C is heard meanwhile. After Ctrl-C nobody waits
/// for it any more: it ends by its deadline, and what it gave is dropped there.
pub fn interruptible<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce() -> T + Send + 'static,
) -> PyResult<T> {
    let (sender, receiver) = mpsc::sync_channel(1);
    // A receiver is not `Sync`, and other threads run while the GIL is released.
    let receiver = Mutex::new(receiver);
    // The receiver is gone after Ctrl-C only; then the result is nobody's.
    let work = move || drop(sender.send(work()));
    let worker = std::thread::Builder::new()
        .name("headrace-open".into())
        .spawn(work)?;
    loop {
        let outcome = py.detach(|| {
            receiver
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .recv_timeout(SIGNAL_INTERVAL)
        });
        match outcome {
            Ok(result) => {
                let _ = py.detach(|| worker.join());
                return Ok(result);
            }
            Err(mpsc::RecvTimeoutError::Timeout) => py.check_signals()?,
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                return Err(PyRuntimeError::new_err("a thread of the native engine panicked"));
            }
        }
    }
}

/// A duration that Python gives in seconds.
pub fn seconds(name: &str, value: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(value)
        .map_err(|error| PyValueError::new_err(format!("{name}: {error}, found {value}")))
}

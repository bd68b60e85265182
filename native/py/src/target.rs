//! The embedded target.

use crate::{errors, wait};
use headrace_target::{Target as Running, TargetConfig};
use headrace_transfer::{ErrorKind, IoError};
use pyo3::prelude::*;
use std::time::Duration;

/// How long a target that is dropped lets commands under way end.
const DROP_TIMEOUT: Duration = Duration::from_secs(5);

#[pyclass(frozen, module = "headrace._native")]
pub struct Target {
    /// `None` only while it is being dropped.
    running: Option<Running>,
    /// Its threads do not survive a fork, so the child must not try to end them.
    process: u32,
}

impl Target {
    fn running(&self) -> &Running {
        match &self.running {
            Some(running) => running,
            None => unreachable!("a target that is being dropped has no callers"),
        }
    }
}

fn start(config: &str) -> Result<Running, IoError> {
    let config = TargetConfig::from_json(config)
        .and_then(|config| config.validate().map(|()| config))
        .map_err(|what| IoError::new(ErrorKind::Usage, what))?;
    Running::start(config).map_err(|what| IoError::new(ErrorKind::Failed, what))
}

fn failed(py: Python<'_>, what: String) -> PyErr {
    errors::raise_unopened(py, &IoError::new(ErrorKind::Failed, what))
}

#[pymethods]
impl Target {
    #[new]
    fn new(py: Python<'_>, config: &str) -> PyResult<Self> {
        match py.detach(|| start(config)) {
            Ok(running) => Ok(Target {
                running: Some(running),
                process: std::process::id(),
            }),
            Err(error) => Err(errors::raise_unopened(py, &error)),
        }
    }

    #[getter]
    fn addresses(&self) -> Vec<(String, u16)> {
        self.running()
            .addresses()
            .iter()
            .map(|address| (address.ip().to_string(), address.port()))
            .collect()
    }

    fn status(&self, py: Python<'_>) -> String {
        py.detach(|| self.running().status()).to_string()
    }

    fn stop(&self, py: Python<'_>, timeout_s: f64) -> PyResult<()> {
        if self.process != std::process::id() {
            return Ok(());
        }
        let timeout = wait::duration(Some(timeout_s)).unwrap_or(DROP_TIMEOUT);
        py.detach(|| self.running().stop(timeout))
            .map_err(|what| failed(py, what))
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        let Some(running) = self.running.take() else {
            return;
        };
        if self.process != std::process::id() {
            std::mem::forget(running);
            return;
        }
        Python::attach(|py| {
            let outcome = py.detach(move || running.stop(DROP_TIMEOUT));
            if let Err(what) = outcome {
                failed(py, what).write_unraisable(py, None);
            }
        });
    }
}

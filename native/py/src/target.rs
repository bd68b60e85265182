//! The embedded target.

use crate::{errors, wait};
use headrace_target::{ControlError, HostAccess, NamespaceConfig, Target as Running, TargetConfig};
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

fn refused(py: Python<'_>, error: ControlError) -> PyErr {
    let (kind, what) = match error {
        ControlError::Asked(what) => (ErrorKind::Usage, what),
        ControlError::Failed(what) => (ErrorKind::Failed, what),
    };
    errors::raise_unopened(py, &IoError::new(kind, what))
}

fn from_json<T: serde::de::DeserializeOwned>(text: &str) -> Result<T, ControlError> {
    serde_json::from_str(text).map_err(|error| ControlError::Asked(error.to_string()))
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

    fn add_namespace(&self, py: Python<'_>, nqn: &str, namespace: &str) -> PyResult<()> {
        py.detach(|| {
            let config: NamespaceConfig = from_json(namespace)?;
            self.running().add_namespace(nqn, &config)
        })
        .map_err(|error| refused(py, error))
    }

    fn remove_namespace(&self, py: Python<'_>, nqn: &str, nsid: u32, timeout_s: f64) -> PyResult<bool> {
        let timeout = wait::duration(Some(timeout_s)).unwrap_or_default();
        py.detach(|| self.running().remove_namespace(nqn, nsid, timeout))
            .map_err(|error| refused(py, error))
    }

    fn resize_namespace(
        &self,
        py: Python<'_>,
        nqn: &str,
        nsid: u32,
        size_bytes: u64,
        force: bool,
    ) -> PyResult<()> {
        py.detach(|| self.running().resize_namespace(nqn, nsid, size_bytes, force))
            .map_err(|error| refused(py, error))
    }

    #[pyo3(signature = (nqn, group, portal, state))]
    fn set_ana_state(
        &self,
        py: Python<'_>,
        nqn: &str,
        group: u32,
        portal: Option<&str>,
        state: &str,
    ) -> PyResult<()> {
        py.detach(|| self.running().set_ana_state(nqn, group, portal, state))
            .map_err(|error| refused(py, error))
    }

    fn disconnect_host(&self, py: Python<'_>, hostnqn: &str) -> PyResult<usize> {
        py.detach(|| self.running().disconnect_host(hostnqn))
            .map_err(|error| refused(py, error))
    }

    /// `hostnqn` None: every host that is not named.
    #[pyo3(signature = (nqn, hostnqn, read_only))]
    fn allow_host(&self, py: Python<'_>, nqn: &str, hostnqn: Option<&str>, read_only: bool) -> PyResult<()> {
        let access = if read_only {
            HostAccess::ReadOnly
        } else {
            HostAccess::ReadWrite
        };
        py.detach(|| self.running().allow_host(nqn, hostnqn, access))
            .map_err(|error| refused(py, error))
    }

    #[pyo3(signature = (nqn, hostnqn))]
    fn deny_host(&self, py: Python<'_>, nqn: &str, hostnqn: Option<&str>) -> PyResult<usize> {
        py.detach(|| self.running().deny_host(nqn, hostnqn))
            .map_err(|error| refused(py, error))
    }

    fn drain(&self, py: Python<'_>, timeout_s: f64) -> bool {
        let timeout = wait::duration(Some(timeout_s)).unwrap_or_default();
        py.detach(|| self.running().drain(timeout))
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

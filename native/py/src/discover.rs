//! The discovery log page.

use crate::errors;
use crate::open_nvme_tcp::id;
use crate::wait::{interruptible, seconds};
use headrace_host::{DiscoverOptions, Route};
use pyo3::prelude::*;

#[pyfunction]
#[pyo3(signature = (host, port, *, hostnqn, hostid, connect_timeout_s))]
pub fn discover(
    py: Python<'_>,
    host: String,
    port: u16,
    hostnqn: String,
    hostid: &[u8],
    connect_timeout_s: f64,
) -> PyResult<String> {
    let options = DiscoverOptions {
        host,
        port,
        route: Route::default(),
        hostnqn,
        hostid: id("hostid", hostid)?,
        connect_timeout: seconds("connect_timeout_s", connect_timeout_s)?,
    };
    match interruptible(py, move || headrace_host::discover(options))? {
        Ok(log) => Ok(log.to_string()),
        Err(error) => Err(errors::raise(py, &error)),
    }
}

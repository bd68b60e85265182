//! Discovery log pages.

use crate::errors;
use crate::open_nvme_tcp::{id, route};
use crate::wait::{interruptible, seconds};
use headrace_host::{DiscoverOptions, Portal, SurveyOptions};
use pyo3::prelude::*;

#[pyfunction]
#[pyo3(signature = (portals, *, referrals, hostnqn, hostid, host_traddr, host_iface, connect_timeout_s))]
#[allow(clippy::too_many_arguments)]
pub fn discover(
    py: Python<'_>,
    portals: Vec<(String, u16)>,
    referrals: bool,
    hostnqn: String,
    hostid: &[u8],
    host_traddr: Option<&str>,
    host_iface: Option<String>,
    connect_timeout_s: f64,
) -> PyResult<String> {
    let options = SurveyOptions {
        starts: portals
            .into_iter()
            .map(|(host, port)| Portal { host, port })
            .collect(),
        referrals,
        each: DiscoverOptions {
            host: String::new(),
            port: 0,
            route: route(host_traddr, host_iface, None)?,
            hostnqn,
            hostid: id("hostid", hostid)?,
            connect_timeout: seconds("connect_timeout_s", connect_timeout_s)?,
        },
    };
    match interruptible(py, move || headrace_host::survey(&options))? {
        Ok(found) => Ok(found.to_string()),
        Err(error) => Err(errors::raise(py, &error)),
    }
}

//! `nvme+tcp:` devices.

use crate::device::Device;
use crate::errors;
use crate::wait::{interruptible, seconds};
use headrace_host::{HostOptions, Inflight, NamespaceKey, NvmeTcpDevice, Policy, Portal, Route};
use headrace_transfer::events::EVENTS_DEFAULT;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use std::time::Duration;

/// An identifier of 16 bytes.
pub fn id(name: &str, bytes: &[u8]) -> PyResult<[u8; 16]> {
    bytes
        .try_into()
        .map_err(|_| PyTypeError::new_err(format!("{name}: expected 16 bytes")))
}

fn policy(name: &str) -> PyResult<Policy> {
    match name {
        "queue-depth" => Ok(Policy::QueueDepth),
        "round-robin" => Ok(Policy::RoundRobin),
        other => Err(PyValueError::new_err(format!("policy: {other:?}"))),
    }
}

pub fn route(host_traddr: Option<&str>, host_iface: Option<String>, tos: Option<u8>) -> PyResult<Route> {
    let host_traddr = host_traddr
        .map(str::parse)
        .transpose()
        .map_err(|error| PyValueError::new_err(format!("host_traddr: {error}")))?;
    Ok(Route {
        host_traddr,
        host_iface,
        tos,
    })
}

#[pyfunction]
#[pyo3(signature = (portals, subsysnqn, nsid, *, uuid, nguid, hostnqn, hostid, header_digest, data_digest, queues, depth,
                    policy, host_traddr, host_iface, tos, hpda, maxr2t, poll_us, inflight_bytes,
                    keep_alive_s, connect_timeout_s, io_timeout_s, loss_timeout_s, events = EVENTS_DEFAULT))]
#[allow(clippy::too_many_arguments)]
pub fn open_nvme_tcp(
    py: Python<'_>,
    portals: Vec<(String, u16)>,
    subsysnqn: String,
    nsid: u32,
    uuid: Option<&[u8]>,
    nguid: Option<&[u8]>,
    hostnqn: String,
    hostid: &[u8],
    header_digest: bool,
    data_digest: bool,
    queues: u16,
    depth: u16,
    policy: &str,
    host_traddr: Option<&str>,
    host_iface: Option<String>,
    tos: Option<u8>,
    hpda: u8,
    maxr2t: u8,
    poll_us: u32,
    inflight_bytes: Option<u64>,
    keep_alive_s: f64,
    connect_timeout_s: f64,
    io_timeout_s: f64,
    loss_timeout_s: f64,
    events: usize,
) -> PyResult<Device> {
    let namespace = match (uuid, nguid) {
        (Some(uuid), _) => NamespaceKey::Uuid(id("uuid", uuid)?),
        (None, Some(nguid)) => NamespaceKey::Nguid(id("nguid", nguid)?),
        (None, None) => NamespaceKey::Nsid(nsid),
    };
    let options = HostOptions {
        portals: portals
            .into_iter()
            .map(|(host, port)| Portal { host, port })
            .collect(),
        policy: self::policy(policy)?,
        route: route(host_traddr, host_iface, tos)?,
        subsysnqn,
        namespace,
        hostnqn,
        hostid: id("hostid", hostid)?,
        header_digest,
        data_digest,
        queues,
        depth,
        hpda,
        maxr2t,
        poll: Duration::from_micros(poll_us.into()),
        inflight: match inflight_bytes {
            None => Inflight::Auto,
            Some(0) => Inflight::Off,
            Some(bytes) => Inflight::AtMost(bytes),
        },
        keep_alive: seconds("keep_alive_s", keep_alive_s)?,
        connect_timeout: seconds("connect_timeout_s", connect_timeout_s)?,
        io_timeout: seconds("io_timeout_s", io_timeout_s)?,
        loss_timeout: (loss_timeout_s != f64::INFINITY)
            .then(|| seconds("loss_timeout_s", loss_timeout_s))
            .transpose()?,
        events,
        ..Default::default()
    };
    let result = interruptible(py, move || NvmeTcpDevice::open(options))?;
    match result {
        Ok(device) => Ok(Device::new_nvme(device)),
        Err(error) => Err(errors::raise_unopened(py, &error)),
    }
}

//! `nvme+tcp:` devices.

use crate::device::{opened, Device};
use crate::wait::{interruptible, seconds};
use headrace_host::{HostOptions, NamespaceKey, NvmeTcpDevice, Portal};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

/// A host identifier: 16 bytes.
pub fn hostid(bytes: &[u8]) -> PyResult<[u8; 16]> {
    bytes
        .try_into()
        .map_err(|_| PyTypeError::new_err("hostid: expected 16 bytes"))
}

#[pyfunction]
#[pyo3(signature = (host, port, subsysnqn, nsid, *, hostnqn, hostid, header_digest, data_digest, queues, depth,
                    keep_alive_s, connect_timeout_s, io_timeout_s, loss_timeout_s))]
#[allow(clippy::too_many_arguments)]
pub fn open_nvme_tcp(
    py: Python<'_>,
    host: String,
    port: u16,
    subsysnqn: String,
    nsid: u32,
    hostnqn: String,
    hostid: &[u8],
    header_digest: bool,
    data_digest: bool,
    queues: u16,
    depth: u16,
    keep_alive_s: f64,
    connect_timeout_s: f64,
    io_timeout_s: f64,
    loss_timeout_s: f64,
) -> PyResult<Device> {
    let options = HostOptions {
        portals: vec![Portal { host, port }],
        subsysnqn,
        namespace: NamespaceKey::Nsid(nsid),
        hostnqn,
        hostid: self::hostid(hostid)?,
        header_digest,
        data_digest,
        queues,
        depth,
        keep_alive: seconds("keep_alive_s", keep_alive_s)?,
        connect_timeout: seconds("connect_timeout_s", connect_timeout_s)?,
        io_timeout: seconds("io_timeout_s", io_timeout_s)?,
        loss_timeout: (loss_timeout_s != f64::INFINITY)
            .then(|| seconds("loss_timeout_s", loss_timeout_s))
            .transpose()?,
        ..Default::default()
    };
    let result = interruptible(py, move || NvmeTcpDevice::open(options))?;
    opened(py, result)
}

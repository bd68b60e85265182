//! Commands as the caller builds them.

use crate::device::Device;
use crate::errors;
use crate::wait::{interruptible, seconds};
use headrace_host::{Command, CommandData};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// Status type, status code, do not retry, its name, DW0, DW1, data.
type Answer<'py> = (u8, u8, bool, String, u32, u32, Bound<'py, PyBytes>);

#[pyfunction]
#[pyo3(signature = (device, *, admin, opcode, nsid, cdw, data_out, read_bytes, timeout_s))]
#[allow(clippy::too_many_arguments)]
pub fn command<'py>(
    py: Python<'py>,
    device: &Device,
    admin: bool,
    opcode: u8,
    nsid: Option<u32>,
    cdw: [u32; 6],
    data_out: Option<Vec<u8>>,
    read_bytes: usize,
    timeout_s: f64,
) -> PyResult<Answer<'py>> {
    let command = Command {
        admin,
        opcode,
        nsid,
        cdw,
        data: match data_out {
            Some(bytes) => CommandData::Out(bytes),
            None if read_bytes > 0 => CommandData::In(read_bytes),
            None => CommandData::None,
        },
        timeout: seconds("timeout_s", timeout_s)?,
    };
    let nvme = device.nvme(py)?;
    let answer =
        interruptible(py, move || nvme.command(command))?.map_err(|error| errors::raise(py, &error))?;
    let status = answer.status;
    Ok((
        status.sct,
        status.sc,
        status.dnr,
        status.to_string(),
        answer.dw0,
        answer.dw1,
        PyBytes::new(py, &answer.data),
    ))
}

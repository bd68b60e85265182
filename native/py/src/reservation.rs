//! Reservations, and the guard of writes.

use crate::device::Device;
use crate::errors;
use crate::wait::{interruptible, seconds};
use headrace_host::{AcquireAction, Change, NvmeTcpDevice, RegisterAction, ReleaseAction, ReservationType};
use headrace_transfer::IoError;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::sync::Arc;

fn kind(value: u8) -> PyResult<ReservationType> {
    ReservationType::from_u8(value)
        .ok_or_else(|| PyValueError::new_err(format!("no such reservation type: {value}")))
}

fn run<T: Send + 'static>(
    py: Python<'_>,
    device: &Device,
    work: impl FnOnce(Arc<NvmeTcpDevice>) -> Result<T, IoError> + Send + 'static,
) -> PyResult<T> {
    let nvme = device.nvme(py)?;
    interruptible(py, move || work(nvme))?.map_err(|error| errors::raise(py, &error))
}

/// `action`: `register`, `unregister` or `replace`.
#[pyfunction]
#[pyo3(signature = (device, action, *, key, new_key, ignore_existing, persist, timeout_s))]
#[allow(clippy::too_many_arguments)]
pub fn reservation_register(
    py: Python<'_>,
    device: &Device,
    action: &str,
    key: u64,
    new_key: u64,
    ignore_existing: bool,
    persist: Option<bool>,
    timeout_s: f64,
) -> PyResult<()> {
    let change = Change::Register {
        action: match action {
            "register" => RegisterAction::Register,
            "unregister" => RegisterAction::Unregister,
            "replace" => RegisterAction::Replace,
            other => return Err(PyValueError::new_err(format!("no such action: {other}"))),
        },
        ignore_existing,
        persist,
        key,
        new_key,
    };
    let timeout = seconds("timeout_s", timeout_s)?;
    run(py, device, move |nvme| nvme.reserve(&change, timeout))
}

/// `action`: `acquire`, `preempt` or `preempt_and_abort`.
#[pyfunction]
#[pyo3(signature = (device, action, *, key, victim, r#type, timeout_s))]
pub fn reservation_acquire(
    py: Python<'_>,
    device: &Device,
    action: &str,
    key: u64,
    victim: u64,
    r#type: u8,
    timeout_s: f64,
) -> PyResult<()> {
    let change = Change::Acquire {
        action: match action {
            "acquire" => AcquireAction::Acquire,
            "preempt" => AcquireAction::Preempt,
            "preempt_and_abort" => AcquireAction::PreemptAndAbort,
            other => return Err(PyValueError::new_err(format!("no such action: {other}"))),
        },
        kind: kind(r#type)?,
        key,
        victim,
    };
    let timeout = seconds("timeout_s", timeout_s)?;
    run(py, device, move |nvme| nvme.reserve(&change, timeout))
}

/// Without a type: clear.
#[pyfunction]
#[pyo3(signature = (device, *, key, r#type, timeout_s))]
pub fn reservation_release(
    py: Python<'_>,
    device: &Device,
    key: u64,
    r#type: Option<u8>,
    timeout_s: f64,
) -> PyResult<()> {
    let change = Change::Release {
        action: match r#type {
            Some(_) => ReleaseAction::Release,
            None => ReleaseAction::Clear,
        },
        kind: r#type.map(kind).transpose()?,
        key,
    };
    let timeout = seconds("timeout_s", timeout_s)?;
    run(py, device, move |nvme| nvme.reserve(&change, timeout))
}

/// CNTLID, holds, host identifier, key.
type Registrant<'py> = (u16, bool, Bound<'py, PyBytes>, u64);

/// GEN, RTYPE, PTPLS, REGCTL, and the registrants.
#[pyfunction]
#[pyo3(signature = (device, *, timeout_s))]
pub fn reservation_report<'py>(
    py: Python<'py>,
    device: &Device,
    timeout_s: f64,
) -> PyResult<(u32, u8, bool, u16, Vec<Registrant<'py>>)> {
    let timeout = seconds("timeout_s", timeout_s)?;
    let report = run(py, device, move |nvme| nvme.reservation_report(timeout))?;
    let registrants = report.registrants.iter();
    Ok((
        report.generation,
        report.rtype,
        report.persistent,
        report.registered,
        registrants
            .map(|r| (r.cntlid, r.holds, PyBytes::new(py, &r.hostid), r.key))
            .collect(),
    ))
}

#[pyfunction]
#[pyo3(signature = (device, *, key, r#type, timeout_s))]
pub fn guard_writes(py: Python<'_>, device: &Device, key: u64, r#type: u8, timeout_s: f64) -> PyResult<()> {
    let kind = kind(r#type)?;
    let timeout = seconds("timeout_s", timeout_s)?;
    run(py, device, move |nvme| nvme.guard_writes(key, kind, timeout))
}

#[pyfunction]
pub fn unguard_writes(py: Python<'_>, device: &Device) -> PyResult<()> {
    run(py, device, |nvme| nvme.unguard())
}

//! What only a device of several paths has: how they are, ranges of unknown fate, traffic classes.

use crate::device::Device;
use crate::errors;
use headrace_host::TrafficClass;
use headrace_transfer::{ErrorKind, IoError};
use pyo3::prelude::*;
use std::sync::Arc;

/// JSON: one object for each path.
#[pyfunction]
pub fn paths(py: Python<'_>, device: &Device) -> PyResult<String> {
    let device = device.nvme(py)?;
    let said = py.detach(|| device.describe_paths());
    Ok(said.to_string())
}

/// Offset, length, path, generation, seconds since it was lost.
type Range = (u64, u64, String, u64, f64);

#[pyfunction]
pub fn unsettled(py: Python<'_>, device: &Device) -> PyResult<Vec<Range>> {
    let device = device.nvme(py)?;
    let ranges = py.detach(|| device.unsettled());
    let tuple = |range: headrace_host::Unsettled| {
        let age_s = range.since.elapsed().as_secs_f64();
        (range.offset, range.length, range.path, range.generation, age_s)
    };
    Ok(ranges.into_iter().map(tuple).collect())
}

/// Path (`None`: it waits to be sent), whether it reads, offset, length, seconds since it was sent, sendings.
type Command = (Option<String>, bool, u64, u64, f64, u32);

/// What touches these bytes of the namespace.
#[pyfunction]
pub fn under_way(py: Python<'_>, device: &Device, offset: u64, length: u64) -> PyResult<Vec<Command>> {
    let device = device.nvme(py)?;
    let bytes = offset..offset.saturating_add(length);
    let found = py
        .detach(|| device.under_way(bytes))
        .map_err(|error| errors::raise(py, &error))?;
    let tuple = |each: headrace_host::UnderWay| {
        let path = each.portal.map(|portal| portal.to_string());
        let age_s = each.age.as_secs_f64();
        (path, each.reads, each.offset, each.length, age_s, each.sent)
    };
    Ok(found.into_iter().map(tuple).collect())
}

#[pyfunction]
pub fn settle(py: Python<'_>, device: &Device, generation: u64) -> PyResult<usize> {
    let device = device.nvme(py)?;
    Ok(py.detach(|| device.settle(generation)))
}

#[pyfunction]
pub fn reconnect(py: Python<'_>, device: &Device) -> PyResult<()> {
    let device = device.nvme(py)?;
    py.detach(|| device.reconnect());
    Ok(())
}

/// The device for one class of traffic; closing it ends nothing.
#[pyfunction]
pub fn lane(py: Python<'_>, device: &Device, name: &str) -> PyResult<Device> {
    let class = TrafficClass::ALL
        .into_iter()
        .find(|class| class.name() == name)
        .ok_or_else(|| {
            let error = IoError::new(ErrorKind::Usage, "no such class of traffic")
                .expected("feed, checkpoint or metadata")
                .found(name);
            errors::raise(py, &error)
        })?;
    let device = device.nvme(py)?;
    let view = device.lane(class);
    Ok(Device::view(view, Arc::downgrade(&device)))
}

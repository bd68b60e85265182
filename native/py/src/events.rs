//! What a device did lately.

use crate::device::Device;
use headrace_transfer::events::EVENT_BYTES;
use pyo3::prelude::*;
use pyo3::types::PyByteArray;

/// Events as `headrace.device.events.EVENT` has them, how many there were and how many of these are not here any more, and
/// why it is not known what is under way (empty where it is). `None`: this device records nothing.
type Found<'py> = Option<(Bound<'py, PyByteArray>, u64, u64, String)>;

#[pyfunction]
pub fn events<'py>(py: Python<'py>, device: &Device) -> PyResult<Found<'py>> {
    let device = device.device();
    let Some((bytes, found)) = py.detach(|| {
        let found = device.events()?;
        let mut bytes = Vec::with_capacity(found.events.len() * EVENT_BYTES);
        for event in &found.events {
            bytes.extend_from_slice(&event.encode());
        }
        Some((bytes, found))
    }) else {
        return Ok(None);
    };
    let array = PyByteArray::new(py, &bytes);
    Ok(Some((array, found.recorded, found.lost, found.trouble)))
}

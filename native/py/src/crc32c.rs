//! CRC32C for structures; blocks of data are the engine's.

use crate::memory;
use pyo3::prelude::*;

/// Below this the GIL costs more to release than it gives.
const DETACH_BYTES: usize = 64 << 10;

#[pyfunction]
#[pyo3(signature = (data, seed = 0))]
pub fn crc32c(py: Python<'_>, data: &Bound<'_, PyAny>, seed: u32) -> PyResult<u32> {
    let buffer = memory::readable(data)?;
    let sum = {
        // SAFETY: the caller leaves its buffer alone during the call.
        let bytes = unsafe { buffer.bytes() };
        if bytes.len() < DETACH_BYTES {
            ::crc32c::crc32c_append(seed, bytes)
        } else {
            py.detach(|| ::crc32c::crc32c_append(seed, bytes))
        }
    };
    drop(buffer);
    memory::drain(py);
    Ok(sum)
}

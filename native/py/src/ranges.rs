//! Reads of byte ranges: sources with their stripes and checksums, and batches of ranges of them.

use crate::device::Device;
use crate::transfer::Transfer;
use crate::{errors, memory};
use headrace_transfer::ranges::{self, Range, Reading, Sums};
use headrace_transfer::{Buffer, IoError, PageCache, Stripes};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use std::sync::Arc;

#[pyclass(frozen, module = "headrace._native")]
pub struct Source {
    source: Arc<ranges::Source>,
}

/// Length and width of each run, member and offset of each column.
type Rows<'py> = (
    Bound<'py, PyAny>,
    Bound<'py, PyAny>,
    Bound<'py, PyAny>,
    Bound<'py, PyAny>,
);

fn stripes(
    rows: &Rows<'_>,
    length: u64,
    block_bytes: u64,
    stripe_bytes: u64,
) -> PyResult<Result<Stripes, IoError>> {
    let widths = memory::column_u32(&rows.1, "run_width", None)?;
    let lengths = memory::column_u64(&rows.0, "run_length", widths.len())?;
    let members = memory::column_u32(&rows.2, "column_member", None)?;
    let offsets = memory::column_u64(&rows.3, "column_offset", members.len())?;
    let runs: Vec<_> = lengths.into_iter().zip(widths).collect();
    let columns = members.into_iter().zip(offsets).collect();
    Ok(Stripes::new(&runs, columns, length, block_bytes, stripe_bytes))
}

#[pymethods]
impl Source {
    #[new]
    #[pyo3(signature = (birth, length_bytes, block_bytes, stripe_bytes, rows, sums, table))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        birth: u64,
        length_bytes: u64,
        block_bytes: u64,
        stripe_bytes: u64,
        rows: Rows<'_>,
        sums: &Bound<'_, PyAny>,
        table: Option<(u64, Rows<'_>)>,
    ) -> PyResult<Self> {
        let data = stripes(&rows, length_bytes, block_bytes, stripe_bytes)?;
        let numbers = memory::column_u32(sums, "sums", None)?;
        let table = table
            .map(|(page_bytes, rows)| {
                // A length that does not fit into 64 bits fits no table either.
                let length = length_bytes.div_ceil(block_bytes.max(1)).saturating_mul(4);
                stripes(&rows, length, page_bytes, stripe_bytes)
            })
            .transpose()?;
        memory::drain(py);
        let made = data.and_then(|data| {
            let sums = match table {
                None => Sums::Here(numbers),
                Some(stripes) => Sums::Table {
                    stripes: stripes?,
                    roots: numbers,
                },
            };
            ranges::Source::new(birth, data, sums)
        });
        match made {
            Ok(source) => Ok(Source {
                source: Arc::new(source),
            }),
            Err(error) => Err(errors::raise(py, &error)),
        }
    }
}

#[pyclass(frozen, module = "headrace._native")]
pub struct ChecksumPages {
    pages: Arc<PageCache>,
}

#[pymethods]
impl ChecksumPages {
    #[new]
    fn new(limit_bytes: usize) -> Self {
        ChecksumPages {
            pages: Arc::new(PageCache::new(limit_bytes)),
        }
    }

    /// A page that was read and verified elsewhere.
    fn keep(&self, py: Python<'_>, birth: u64, page: u64, sums: &Bound<'_, PyAny>) -> PyResult<()> {
        let sums = memory::column_u32(sums, "sums", None)?;
        memory::drain(py);
        let numbers = sums.iter().flat_map(|sum| sum.to_le_bytes()).collect();
        self.pages.keep((birth, page), Buffer::from_vec(numbers));
        Ok(())
    }

    #[getter]
    fn kept_bytes(&self) -> usize {
        self.pages.bytes()
    }
}

#[pyfunction]
#[pyo3(signature = (devices, volume_id, sources, source, start, length, buffers, buffer, buffer_offset, pages, room))]
#[allow(clippy::too_many_arguments)]
pub fn submit_ranges(
    py: Python<'_>,
    devices: Vec<Py<Device>>,
    volume_id: &[u8],
    sources: Vec<Py<Source>>,
    source: Option<&Bound<'_, PyAny>>,
    start: &Bound<'_, PyAny>,
    length: &Bound<'_, PyAny>,
    buffers: Vec<Bound<'_, PyAny>>,
    buffer: Option<&Bound<'_, PyAny>>,
    buffer_offset: &Bound<'_, PyAny>,
    pages: Option<Py<ChecksumPages>>,
    room: u64,
) -> PyResult<Transfer> {
    let buffer_offset = memory::column_u64(buffer_offset, "buffer_offset", None)?;
    let count = buffer_offset.len();
    let start = memory::column_u64(start, "start", Some(count))?;
    let length = memory::column_u64(length, "length", Some(count))?;
    let small = |object: Option<&Bound<'_, PyAny>>, name| match object {
        Some(object) => memory::column_u32(object, name, Some(count)),
        None => Ok(vec![0; count]),
    };
    let (source, buffer) = (small(source, "source")?, small(buffer, "buffer")?);
    let rows: Vec<Range> = (0..count)
        .map(|i| Range {
            source: source[i],
            buffer: buffer[i],
            buffer_offset: buffer_offset[i],
            start: start[i],
            length: length[i],
        })
        .collect();
    let reading = Reading {
        devices: devices
            .iter()
            .map(|device| device.bind(py).get().device().clone())
            .collect(),
        volume_id: volume_id
            .try_into()
            .map_err(|_| PyTypeError::new_err("volume_id: expected 16 bytes"))?,
        sources: sources
            .iter()
            .map(|source| source.bind(py).get().source.clone())
            .collect(),
        buffers: buffers.iter().map(memory::writable).collect::<PyResult<_>>()?,
        room,
    };
    let pages = pages.map(|pages| pages.bind(py).get().pages.clone());
    let begun = py.detach(|| {
        let (batch, origins) = ranges::submit_ranges(reading, &rows, pages.as_ref())?;
        Ok((batch, origins))
    });
    memory::drain(py);
    match begun {
        Ok((batch, origins)) => Ok(Transfer::of_ranges(batch, devices, origins)),
        Err(error) => Err(errors::raise(py, &error)),
    }
}

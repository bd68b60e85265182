//! Batches: columns in, a transfer out.

use crate::device::Device;
use crate::transfer::Transfer;
use crate::{errors, memory};
use headrace_transfer::{engine, Buffer, ChecksumSpec, IoError, Plan, Segment};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

/// The columns that reads and writes share.
struct Columns<'a, 'py> {
    member: &'a Bound<'py, PyAny>,
    offset: &'a Bound<'py, PyAny>,
    length: &'a Bound<'py, PyAny>,
    /// Reads only.
    part: Option<(&'a Bound<'py, PyAny>, &'a Bound<'py, PyAny>)>,
    buffer: &'a Bound<'py, PyAny>,
    buffer_offset: &'a Bound<'py, PyAny>,
    birth: &'a Bound<'py, PyAny>,
    first_block: &'a Bound<'py, PyAny>,
}

impl Columns<'_, '_> {
    fn segments(&self) -> PyResult<Vec<Segment>> {
        let member = memory::column_u32(self.member, "member", None)?;
        let count = member.len();
        let offset = memory::column_u64(self.offset, "offset", count)?;
        let length = memory::column_u64(self.length, "length", count)?;
        let part = match self.part {
            Some((skip, take)) => Some((
                memory::column_u64(skip, "skip", count)?,
                memory::column_u64(take, "take", count)?,
            )),
            None => None,
        };
        let buffer = memory::column_u32(self.buffer, "buffer", Some(count))?;
        let buffer_offset = memory::column_u64(self.buffer_offset, "buffer_offset", count)?;
        let birth = memory::column_u64(self.birth, "birth", count)?;
        let first_block = memory::column_u64(self.first_block, "first_block", count)?;
        Ok((0..count)
            .map(|i| Segment {
                offset: offset[i],
                length: length[i],
                skip: part.as_ref().map_or(0, |(skip, _)| skip[i]),
                take: part.as_ref().map_or(length[i], |(_, take)| take[i]),
                buffer_offset: buffer_offset[i],
                birth: birth[i],
                first_block: first_block[i],
                member: member[i],
                buffer: buffer[i],
                first_checksum: 0,
                spills: false,
            })
            .collect())
    }
}

fn plan(
    py: Python<'_>,
    devices: &[Py<Device>],
    columns: &Columns<'_, '_>,
    checksum_block_bytes: u64,
    volume_id: &[u8],
    buffers: Vec<Buffer>,
) -> PyResult<Plan> {
    let volume_id: [u8; 16] = volume_id
        .try_into()
        .map_err(|_| PyTypeError::new_err("volume_id: expected 16 bytes"))?;
    Ok(Plan {
        devices: devices
            .iter()
            .map(|device| device.bind(py).get().device().clone())
            .collect(),
        segments: columns.segments()?,
        buffers,
        checksum: ChecksumSpec::new(checksum_block_bytes, volume_id),
    })
}

fn finish(
    py: Python<'_>,
    batch: Result<engine::Transfer, IoError>,
    devices: Vec<Py<Device>>,
) -> PyResult<Transfer> {
    memory::drain(py);
    match batch {
        Ok(batch) => Ok(Transfer::new(batch, devices)),
        Err(error) => Err(errors::raise(py, &error)),
    }
}

#[pyfunction]
#[pyo3(signature = (devices, member, offset, length, skip, take, buffer, buffer_offset, birth, first_block,
                    checksum_block_bytes, volume_id, buffers, checksums))]
#[allow(clippy::too_many_arguments)]
pub fn submit_read(
    py: Python<'_>,
    devices: Vec<Py<Device>>,
    member: &Bound<'_, PyAny>,
    offset: &Bound<'_, PyAny>,
    length: &Bound<'_, PyAny>,
    skip: &Bound<'_, PyAny>,
    take: &Bound<'_, PyAny>,
    buffer: &Bound<'_, PyAny>,
    buffer_offset: &Bound<'_, PyAny>,
    birth: &Bound<'_, PyAny>,
    first_block: &Bound<'_, PyAny>,
    checksum_block_bytes: u64,
    volume_id: &[u8],
    buffers: Vec<Bound<'_, PyAny>>,
    checksums: Option<&Bound<'_, PyAny>>,
) -> PyResult<Transfer> {
    let part = Some((skip, take));
    let columns = Columns {
        member,
        offset,
        length,
        part,
        buffer,
        buffer_offset,
        birth,
        first_block,
    };
    let buffers = buffers.iter().map(memory::writable).collect::<PyResult<_>>()?;
    let plan = plan(py, &devices, &columns, checksum_block_bytes, volume_id, buffers)?;
    let checksums = checksums
        .map(|array| memory::column_u32(array, "checksums", None))
        .transpose()?;
    let batch = py.detach(|| engine::submit_read(plan, checksums));
    finish(py, batch, devices)
}

#[pyfunction]
#[pyo3(signature = (devices, member, offset, length, buffer, buffer_offset, birth, first_block,
                    checksum_block_bytes, volume_id, buffers, checksums))]
#[allow(clippy::too_many_arguments)]
pub fn submit_write(
    py: Python<'_>,
    devices: Vec<Py<Device>>,
    member: &Bound<'_, PyAny>,
    offset: &Bound<'_, PyAny>,
    length: &Bound<'_, PyAny>,
    buffer: &Bound<'_, PyAny>,
    buffer_offset: &Bound<'_, PyAny>,
    birth: &Bound<'_, PyAny>,
    first_block: &Bound<'_, PyAny>,
    checksum_block_bytes: u64,
    volume_id: &[u8],
    buffers: Vec<Bound<'_, PyAny>>,
    checksums: Option<&Bound<'_, PyAny>>,
) -> PyResult<Transfer> {
    let columns = Columns {
        member,
        offset,
        length,
        part: None,
        buffer,
        buffer_offset,
        birth,
        first_block,
    };
    let buffers = buffers.iter().map(memory::readable).collect::<PyResult<_>>()?;
    let plan = plan(py, &devices, &columns, checksum_block_bytes, volume_id, buffers)?;
    let checksums = checksums.map(memory::writable).transpose()?;
    let batch = py.detach(move || engine::submit_write(plan, checksums.as_ref()));
    finish(py, batch, devices)
}

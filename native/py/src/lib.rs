//! The Python module `headrace._native`: glue, one file a verb, no logic.

use pyo3::prelude::*;

mod beat;
mod crc32c;
mod device;
mod discover;
mod errors;
mod events;
mod flush;
mod memory;
mod open_block;
mod open_file;
mod open_memory;
mod open_nvme_tcp;
mod passthrough;
mod paths;
mod ranges;
mod reservation;
mod submit;
mod target;
mod transfer;
mod wait;

#[pymodule(gil_used = true)]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<device::Device>()?;
    module.add_class::<transfer::Transfer>()?;
    module.add_class::<ranges::Source>()?;
    module.add_class::<ranges::ChecksumPages>()?;
    module.add_class::<beat::Beat>()?;
    module.add_class::<target::Target>()?;
    module.add_function(wrap_pyfunction!(open_block::open_block, module)?)?;
    module.add_function(wrap_pyfunction!(open_file::open_file, module)?)?;
    module.add_function(wrap_pyfunction!(open_file::create_file, module)?)?;
    module.add_function(wrap_pyfunction!(open_memory::open_memory, module)?)?;
    module.add_function(wrap_pyfunction!(open_nvme_tcp::open_nvme_tcp, module)?)?;
    module.add_function(wrap_pyfunction!(discover::discover, module)?)?;
    module.add_function(wrap_pyfunction!(events::events, module)?)?;
    module.add_function(wrap_pyfunction!(flush::flush, module)?)?;
    module.add_function(wrap_pyfunction!(submit::submit_read, module)?)?;
    module.add_function(wrap_pyfunction!(submit::submit_write, module)?)?;
    module.add_function(wrap_pyfunction!(ranges::submit_ranges, module)?)?;
    module.add_function(wrap_pyfunction!(passthrough::command, module)?)?;
    module.add_function(wrap_pyfunction!(reservation::reservation_register, module)?)?;
    module.add_function(wrap_pyfunction!(reservation::reservation_acquire, module)?)?;
    module.add_function(wrap_pyfunction!(reservation::reservation_release, module)?)?;
    module.add_function(wrap_pyfunction!(reservation::reservation_report, module)?)?;
    module.add_function(wrap_pyfunction!(reservation::guard_writes, module)?)?;
    module.add_function(wrap_pyfunction!(reservation::unguard_writes, module)?)?;
    module.add_function(wrap_pyfunction!(paths::paths, module)?)?;
    module.add_function(wrap_pyfunction!(paths::unsettled, module)?)?;
    module.add_function(wrap_pyfunction!(paths::under_way, module)?)?;
    module.add_function(wrap_pyfunction!(paths::settle, module)?)?;
    module.add_function(wrap_pyfunction!(paths::reconnect, module)?)?;
    module.add_function(wrap_pyfunction!(paths::lane, module)?)?;
    module.add_function(wrap_pyfunction!(crc32c::crc32c, module)?)?;
    Ok(())
}

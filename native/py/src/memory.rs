//! Python's buffers as `headrace_transfer::Buffer`.
//!
//! # The unsafe argument
//!
//! * `PyObject_GetBuffer` promises that the memory stays where it is, with its length, until `PyBuffer_Release`. A
//!   [`View`] is such a promise; it is released exactly once, in `drain`, with the GIL held.
//! * Reading and writing the memory needs no GIL; exclusive use is the caller's duty as with any `readinto` (see
//!   `headrace_transfer::buffer`): a race gives wrong bytes, never an access outside of the range.
//! * The last owner is often an I/O thread. That one must never wait for the GIL (a training process can hold it for a
//!   minute, and the keep-alive would stop), so dropping only moves the view to a list, which the next call from Python
//!   releases. The list is a stack of nodes with an atomic head: a fork can happen at any moment, and a lock that another
//!   thread held then would stay locked in the child for ever.
//! * The declarations below are ours because the limited API has the buffer protocol only from Python 3.11 on. CPython
//!   3.10 has the same two functions and the same structure (`Include/cpython/object.h`), outside of it.

use headrace_transfer::{Buffer, MemoryOwner};
use pyo3::exceptions::PyTypeError;
use pyo3::ffi::{PyObject, Py_ssize_t};
use pyo3::prelude::*;
use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::Arc;

#[repr(C)]
struct PyBufferStruct {
    buf: *mut c_void,
    obj: *mut PyObject,
    len: Py_ssize_t,
    itemsize: Py_ssize_t,
    readonly: c_int,
    ndim: c_int,
    format: *mut c_char,
    shape: *mut Py_ssize_t,
    strides: *mut Py_ssize_t,
    suboffsets: *mut Py_ssize_t,
    internal: *mut c_void,
}

// `Include/cpython/object.h`: PyBUF_SIMPLE asks for contiguous bytes.
const PYBUF_SIMPLE: c_int = 0;
const PYBUF_WRITABLE: c_int = 1;

extern "C" {
    fn PyObject_GetBuffer(object: *mut PyObject, view: *mut PyBufferStruct, flags: c_int) -> c_int;
    fn PyBuffer_Release(view: *mut PyBufferStruct);
}

struct Node {
    view: PyBufferStruct,
    next: *mut Node,
}

/// Views that nobody needs any more, to be released by whoever holds the GIL next.
static RETIRED: AtomicPtr<Node> = AtomicPtr::new(std::ptr::null_mut());

/// A held view of a Python object's memory.
struct View(*mut Node);

// SAFETY: the memory of a held view may be used from any thread (see above); the node is only freed by `drain`, after
// the one `View` that owns it was dropped.
unsafe impl Send for View {}
// SAFETY: as above; `&View` gives out only the pointer and the length, which do not change.
unsafe impl Sync for View {}

// SAFETY: the exporter keeps the range in place until PyBuffer_Release, which `drain` calls after this value is gone.
unsafe impl MemoryOwner for View {
    fn as_ptr(&self) -> *mut u8 {
        // SAFETY: the node lives until `drop`.
        let start: *mut u8 = unsafe { (*self.0).view.buf.cast() };
        // An empty exporter may say null; slices need a pointer that is not.
        if start.is_null() {
            std::ptr::NonNull::dangling().as_ptr()
        } else {
            start
        }
    }
    fn len(&self) -> usize {
        // SAFETY: the node lives until `drop`; a length is never negative.
        unsafe { (*self.0).view.len as usize }
    }
}

impl Drop for View {
    fn drop(&mut self) {
        let mut head = RETIRED.load(Ordering::Relaxed);
        loop {
            // SAFETY: until the exchange below succeeds, the node is this thread's alone.
            unsafe { (*self.0).next = head };
            match RETIRED.compare_exchange_weak(head, self.0, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => head = now,
            }
        }
    }
}

/// Release what was retired. Called at both ends of every call from Python.
pub fn drain(_py: Python<'_>) {
    let mut node = RETIRED.swap(std::ptr::null_mut(), Ordering::Acquire);
    while !node.is_null() {
        // SAFETY: the whole list was taken in one exchange, so every node in it is ours; each came from `Box::into_raw`,
        // holds a view that was never released, and the GIL is held.
        let mut owned = unsafe { Box::from_raw(node) };
        node = owned.next;
        // SAFETY: as above.
        unsafe { PyBuffer_Release(&mut owned.view) };
    }
}

fn view(object: &Bound<'_, PyAny>, flags: c_int) -> PyResult<Arc<View>> {
    let view = PyBufferStruct {
        buf: std::ptr::null_mut(),
        obj: std::ptr::null_mut(),
        len: 0,
        itemsize: 0,
        readonly: 0,
        ndim: 0,
        format: std::ptr::null_mut(),
        shape: std::ptr::null_mut(),
        strides: std::ptr::null_mut(),
        suboffsets: std::ptr::null_mut(),
        internal: std::ptr::null_mut(),
    };
    // Filled where it stays: exporters may keep pointers into the structure.
    let mut node = Box::new(Node {
        view,
        next: std::ptr::null_mut(),
    });
    // SAFETY: a live object, a structure to fill, the GIL held.
    if unsafe { PyObject_GetBuffer(object.as_ptr(), &mut node.view, flags) } != 0 {
        return Err(PyErr::fetch(object.py()));
    }
    Ok(Arc::new(View(Box::into_raw(node))))
}

/// Memory to read from.
pub fn readable(object: &Bound<'_, PyAny>) -> PyResult<Buffer> {
    Ok(Buffer::from_owner(view(object, PYBUF_SIMPLE)?))
}

/// Memory to write to.
pub fn writable(object: &Bound<'_, PyAny>) -> PyResult<Buffer> {
    Ok(Buffer::from_owner(view(object, PYBUF_WRITABLE)?))
}

/// A copy of a column of `count` numbers of `N` bytes; Python code may change the array meanwhile, so what is validated
/// is the copy.
fn column<const N: usize>(
    object: &Bound<'_, PyAny>,
    name: &str,
    count: Option<usize>,
) -> PyResult<Vec<[u8; N]>> {
    let buffer = readable(object)?;
    if buffer.len() % N != 0 || count.is_some_and(|count| buffer.len() != count * N) {
        return Err(PyTypeError::new_err(format!(
            "{name}: expected {} numbers of {N} bytes, found {} bytes",
            count.map_or("an array of".into(), |count| count.to_string()),
            buffer.len()
        )));
    }
    let mut numbers = vec![[0; N]; buffer.len() / N];
    buffer.copy_to(0, numbers.as_flattened_mut());
    Ok(numbers)
}

/// `count`: `None` where any length will do.
pub fn column_u64(
    object: &Bound<'_, PyAny>,
    name: &str,
    count: impl Into<Option<usize>>,
) -> PyResult<Vec<u64>> {
    Ok(column::<8>(object, name, count.into())?
        .into_iter()
        .map(u64::from_ne_bytes)
        .collect())
}

/// `count`: `None` where any length will do.
pub fn column_u32(object: &Bound<'_, PyAny>, name: &str, count: Option<usize>) -> PyResult<Vec<u32>> {
    Ok(column::<4>(object, name, count)?
        .into_iter()
        .map(u32::from_ne_bytes)
        .collect())
}

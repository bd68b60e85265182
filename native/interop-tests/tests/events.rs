//! What our target tells by itself, and what our host makes of it: both ends of the asynchronous events.

mod common;

use common::{close, config, memory, options, read, start, write, NQN};
use headrace_host::NvmeTcpDevice;
use headrace_transfer::{BlockDevice, ErrorKind};
use serde_json::json;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !done() {
        assert!(Instant::now() < end, "{what} did not come about");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Several times in a row: an event that was not let out again would be missed the second time.
#[test]
fn a_namespace_is_resized_under_an_open_device() {
    let (target, port) = start(config(0, memory(4 * MIB), json!({})));
    let device = NvmeTcpDevice::open(options(port)).unwrap();
    write(&device, 3 * MIB, &[7; 4096]).unwrap();
    for size in [8 * MIB, 16 * MIB, 12 * MIB, 32 * MIB] {
        target.resize_namespace(NQN, 1, size, true).unwrap();
        until("the size", || device.info().size_bytes == size);
        write(&device, size - 4096, &[9; 4096]).unwrap();
        assert_eq!(read(&device, size - 4096, 4096).unwrap(), [9; 4096]);
        assert_eq!(read(&device, size, 4096).unwrap_err().kind, ErrorKind::Usage);
    }
    assert_eq!(read(&device, 3 * MIB, 4096).unwrap(), [7; 4096]);
    assert_eq!(device.loss_count(), 0);
    close(&device);
}

#[test]
fn ana_states_are_heard_of_again_and_again() {
    let (target, port) = start(config(0, memory(4 * MIB), json!({})));
    let device = NvmeTcpDevice::open(options(port)).unwrap();
    for state in ["non-optimized", "optimized", "non-optimized"] {
        target.set_ana_state(NQN, 1, None, state).unwrap();
        until(state, || device.describe()["ana"]["state"] == state);
        write(&device, 0, &[1; 4096]).unwrap();
    }
    assert_eq!(device.loss_count(), 0);
    close(&device);
}

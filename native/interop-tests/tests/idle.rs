//! A process with open devices that do nothing uses no CPU, and leaves nothing behind. Alone in its binary: the I/O thread
//! is shared by all devices of a process.

mod common;

use common::{close, config, memory, options, read, start};
use headrace_host::NvmeTcpDevice;
use serde_json::json;
use std::time::Duration;

/// CPU time of the I/O thread so far, and whether there is one.
fn host_thread() -> Option<Duration> {
    std::fs::read_dir("/proc/self/task")
        .unwrap()
        .flatten()
        .find_map(|task| {
            let text = |name: &str| std::fs::read_to_string(task.path().join(name)).unwrap_or_default();
            (text("comm").trim() == "headrace-host")
                .then(|| Duration::from_nanos(text("schedstat").split(' ').next().unwrap().parse().unwrap()))
        })
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn idle_devices_cost_nothing_and_leave_nothing() {
    let (target, port) = start(config(0, memory(1 << 20), json!({})));
    let before = descriptors();
    // Some of them look for answers without sleeping, which they must not do while there are none to come.
    let devices: Vec<_> = (0..8)
        .map(|number| {
            let mut options = options(port);
            options.poll = Duration::from_millis(if number % 2 == 0 { 50 } else { 0 });
            NvmeTcpDevice::open(options).unwrap()
        })
        .collect();
    for device in &devices {
        read(device, 0, 4096).unwrap();
    }
    let spent = host_thread().unwrap();
    let span = Duration::from_secs(3);
    std::thread::sleep(span);
    let used = host_thread().unwrap() - spent;
    assert!(used < span / 200, "{used:?} of CPU in {span:?} of idleness");
    devices.iter().for_each(|device| close(device));
    drop(devices);
    // Joined it is; the kernel lists a thread for a moment longer than that.
    for _ in 0..1000 {
        if host_thread().is_none() {
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(
        host_thread().is_none(),
        "the I/O thread ends with the last device"
    );
    // The target takes a moment to see that its peers are gone.
    for _ in 0..1000 {
        if descriptors() <= before {
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(descriptors() <= before);
    target.stop(Duration::from_secs(5)).unwrap();
}

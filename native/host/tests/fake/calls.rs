//! Blocking calls for tests, with a deadline that no test should reach.

#![allow(dead_code)]

use headrace_host::NvmeTcpDevice;
use headrace_transfer::{submit_one, BlockDevice, Buffer, IoError, Op};
use std::time::Duration;

const LONG: Duration = Duration::from_secs(20);

pub fn read(device: &NvmeTcpDevice, offset: u64, length: usize) -> Result<Vec<u8>, IoError> {
    let into = Buffer::zeroed(length);
    submit_one(device, Op::Read { into: into.clone() }, offset)
        .wait(LONG)
        .expect("an end")?;
    let mut bytes = vec![0; length];
    into.copy_to(0, &mut bytes);
    Ok(bytes)
}

pub fn write(device: &NvmeTcpDevice, offset: u64, bytes: &[u8]) -> Result<(), IoError> {
    let from = Buffer::from_vec(bytes.to_vec());
    submit_one(device, Op::Write { from, fua: false }, offset)
        .wait(LONG)
        .expect("an end")
}

pub fn flush(device: &NvmeTcpDevice) -> Result<(), IoError> {
    submit_one(device, Op::Flush, 0).wait(LONG).expect("an end")
}

/// Bytes that differ from block to block.
pub fn pattern(length: usize, seed: u8) -> Vec<u8> {
    // In words: tests are compiled without optimisation.
    let mut bytes = vec![0; length];
    for (n, word) in bytes.chunks_mut(8).enumerate() {
        let mixed = ((n as u64 + 1) ^ u64::from(seed) << 56).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        word.copy_from_slice(&(mixed ^ mixed >> 32).to_le_bytes()[..word.len()]);
    }
    bytes
}

pub fn close(device: &NvmeTcpDevice) {
    device.close(Duration::from_secs(2));
}

/// Wait for something that comes about by itself.
pub fn until(what: &str, condition: impl Fn() -> bool) {
    let begin = std::time::Instant::now();
    while !condition() {
        assert!(begin.elapsed() < LONG, "{what}: not in time");
        std::thread::sleep(Duration::from_millis(5));
    }
}

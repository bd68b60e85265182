//! A target in this process, or in one that can be killed, and a host that opens it.

#![allow(dead_code)]

use headrace_host::{HostOptions, NvmeTcpDevice, Portal};
use headrace_target::{Target, TargetConfig};
use headrace_transfer::{submit_one, BlockDevice, Buffer, IoError, Op};
use serde_json::{json, Value};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

pub const NQN: &str = "nqn.2026-01.test:interop";
const LONG: Duration = Duration::from_secs(30);

pub fn config(port: u16, media: Value, extra: Value) -> TargetConfig {
    let mut namespace = json!({ "nsid": 1, "media": media });
    let mut config = json!({
        "listen": [{ "host": "127.0.0.1", "port": port }],
        "subsystems": [{ "nqn": NQN, "namespaces": [] }],
    });
    for (key, value) in extra.as_object().unwrap() {
        match key.as_str() {
            "volatile_cache_bytes" | "block_bytes" | "read_only" | "uuid" => namespace[key] = value.clone(),
            _ => config[key] = value.clone(),
        }
    }
    config["subsystems"][0]["namespaces"] = json!([namespace]);
    serde_json::from_value(config).unwrap()
}

pub fn memory(size: u64) -> Value {
    json!({ "kind": "memory", "size_bytes": size })
}

pub fn start(config: TargetConfig) -> (Target, u16) {
    let target = Target::start(config).unwrap();
    let port = target.addresses()[0].port();
    (target, port)
}

pub fn options(port: u16) -> HostOptions {
    HostOptions {
        portals: vec![Portal::new("127.0.0.1", port)],
        subsysnqn: NQN.into(),
        hostnqn: "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-3333-4444-555555555555".into(),
        hostid: [0x11; 16],
        depth: 32,
        keep_alive: Duration::from_secs(5),
        connect_timeout: Duration::from_secs(5),
        io_timeout: Duration::from_secs(10),
        loss_timeout: Some(Duration::from_secs(20)),
        ..Default::default()
    }
}

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

pub fn pattern(length: usize, seed: u64) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..length)
        .map(|_| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            x as u8
        })
        .collect()
}

pub fn close(device: &NvmeTcpDevice) {
    device.close(Duration::from_secs(5));
}

/// A target with a volatile cache, in a process of its own that is killed when this is dropped.
pub struct Killable {
    child: Child,
    pub port: u16,
}

impl Drop for Killable {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// Serve the file at `path`. The process is this test program: each that uses it has the ignored test `serve_until_killed`,
/// which calls the function of that name here.
pub fn serve(path: &Path, port: u16) -> Killable {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "serve_until_killed", "--ignored", "--nocapture"])
        .env("HEADRACE_TEST_PORT", port.to_string())
        .env("HEADRACE_TEST_FILE", path)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let port = lines
        .map_while(Result::ok)
        .find_map(|line| {
            line.split_once("port ")
                .and_then(|(_, port)| port.trim().parse().ok())
        })
        .expect("the target says its port");
    Killable { child, port }
}

pub fn serve_until_killed() {
    let port = std::env::var("HEADRACE_TEST_PORT").unwrap().parse().unwrap();
    let media = json!({ "kind": "file", "path": std::env::var("HEADRACE_TEST_FILE").unwrap() });
    let (_target, port) = start(config(port, media, json!({ "volatile_cache_bytes": 32 << 20 })));
    println!("port {port}");
    // Longer than any test that forgets it.
    std::thread::sleep(Duration::from_secs(60));
}

//! Not a gate (that is `benchmarks/`): prints what the host does against the target on this machine, for whoever works on
//! either. `cargo test --release -p headrace-interop-tests --test throughput -- --ignored --nocapture`

mod common;

use common::{config, memory, options, start};
use headrace_host::NvmeTcpDevice;
use headrace_transfer::{BlockDevice, Buffer, IoError, Op, Request, Sink};
use serde_json::json;
use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{mpsc, Arc, Weak};
use std::time::Instant;

/// Keeps `depth` requests under way until `total` were made, from the completions themselves.
struct Pump {
    this: Weak<Pump>,
    device: Arc<NvmeTcpDevice>,
    buffers: Vec<Buffer>,
    length: u64,
    total: u64,
    write: bool,
    made: AtomicU64,
    ended: AtomicU64,
    done: mpsc::Sender<()>,
}

impl Pump {
    fn request(&self, token: u64) -> Option<Request> {
        let number = self.made.fetch_add(1, Ordering::Relaxed);
        if number >= self.total {
            return None;
        }
        let buffer = self.buffers[token as usize].clone();
        let op = if self.write {
            Op::Write {
                from: buffer,
                fua: false,
            }
        } else {
            Op::Read { into: buffer }
        };
        let blocks = self.device.info().size_bytes / self.length;
        // Sequential when large, scattered when small.
        let place = if self.length >= 1 << 20 {
            number
        } else {
            number.wrapping_mul(7919)
        };
        Some(Request {
            op,
            offset: place % blocks * self.length,
            token,
            sink: self.this.upgrade()?,
        })
    }
}

impl Sink for Pump {
    fn complete(&self, token: u64, result: Result<(), IoError>) {
        result.unwrap();
        if let Some(request) = self.request(token) {
            self.device.submit(vec![request]);
        }
        if self.ended.fetch_add(1, Ordering::Relaxed) + 1 == self.total {
            self.done.send(()).unwrap();
        }
    }
}

fn measure(device: &Arc<NvmeTcpDevice>, length: u64, depth: usize, total: u64, write: bool) -> f64 {
    let (done, wait) = mpsc::channel();
    let pump = Arc::new_cyclic(|this| Pump {
        this: this.clone(),
        device: device.clone(),
        buffers: (0..depth).map(|_| Buffer::zeroed(length as usize)).collect(),
        length,
        total,
        write,
        made: AtomicU64::new(0),
        ended: AtomicU64::new(0),
        done,
    });
    let begin = Instant::now();
    device.submit(
        (0..depth as u64)
            .filter_map(|token| pump.request(token))
            .collect(),
    );
    wait.recv().unwrap();
    (total * length) as f64 / begin.elapsed().as_secs_f64()
}

/// CPU time of this process's threads by name, in nanoseconds.
fn cpu() -> HashMap<String, u64> {
    let mut times = HashMap::new();
    for task in std::fs::read_dir("/proc/self/task").unwrap().flatten() {
        let text = |name: &str| std::fs::read_to_string(task.path().join(name)).unwrap_or_default();
        let spent = text("schedstat")
            .split(' ')
            .next()
            .and_then(|t| t.parse().ok())
            .unwrap_or(0u64);
        *times.entry(text("comm").trim().to_string()).or_default() += spent;
    }
    times
}

/// The same bytes over a bare socket: one thread writes out of 256 MiB, one reads into `depth` buffers.
fn bare(length: usize, depth: usize, total: u64) -> f64 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let sender = std::thread::Builder::new()
        .name("bare-send".into())
        .spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let memory = vec![1u8; 256 << 20];
            let mut go = [0];
            stream.read_exact(&mut go).unwrap();
            for i in 0..total as usize {
                let at = i * length % memory.len();
                stream.write_all(&memory[at..at + length]).unwrap();
            }
            stream.read_exact(&mut go).unwrap();
        })
        .unwrap();
    let receiver = std::thread::Builder::new()
        .name("bare-receive".into())
        .spawn(move || {
            let mut stream = TcpStream::connect(address).unwrap();
            let mut buffers = vec![vec![0u8; length]; depth];
            let begin = Instant::now();
            stream.write_all(&[1]).unwrap();
            for i in 0..total as usize {
                stream.read_exact(&mut buffers[i % depth]).unwrap();
            }
            let took = begin.elapsed().as_secs_f64();
            let spent = cpu();
            stream.write_all(&[1]).unwrap();
            (took, spent)
        })
        .unwrap();
    let (took, spent) = receiver.join().unwrap();
    sender.join().unwrap();
    let gigabytes = (total * length as u64) as f64 / 1e9;
    let of = |name: &str| spent.get(name).copied().unwrap_or(0) as f64 / 1e9 / gigabytes;
    println!(
        "bare socket                                 {:8.2} GB/s            CPU s/GB: receive {:.3}, send {:.3}",
        gigabytes / took,
        of("bare-receive"),
        of("bare-send")
    );
    gigabytes / took
}

#[test]
#[ignore = "a measurement"]
fn figures() {
    let (_target, port) = start(config(0, memory(256 << 20), json!({})));
    for digests in [false, true] {
        let mut options = options(port);
        (options.header_digest, options.data_digest) = (digests, digests);
        let device = NvmeTcpDevice::open(options).unwrap();
        for (name, length, depth, total, write) in [
            ("read 1 MiB, depth 16", 1 << 20, 16, 4096, false),
            ("write 1 MiB, depth 16", 1 << 20, 16, 4096, true),
            ("read 128 KiB, depth 32", 128 << 10, 32, 16384, false),
            ("read 4 KiB, depth 32", 4096, 32, 200_000, false),
            ("read 4 KiB, depth 1", 4096, 1, 20_000, false),
        ] {
            measure(&device, length, depth, total / 8, write);
            let before = cpu();
            let rate = measure(&device, length, depth, total, write);
            let after = cpu();
            let gigabytes = (total * length) as f64 / 1e9;
            let spent = |part: &str| {
                let of = |times: &HashMap<String, u64>| -> u64 {
                    times
                        .iter()
                        .filter(|(name, _)| name.contains(part))
                        .map(|(_, spent)| spent)
                        .sum()
                };
                (of(&after) - of(&before)) as f64 / 1e9 / gigabytes
            };
            println!(
                "digests {digests:5}  {name:24} {:8.2} GB/s {:10.0} /s  CPU s/GB: host {:.3}, target {:.3}",
                rate / 1e9,
                rate / length as f64,
                spent("headrace-host"),
                spent("target"),
            );
            if length == 1 << 20 && !write {
                bare(length as usize, depth, total);
            }
        }
    }
}

//! Not a gate (that is `benchmarks/`): prints what the host does against the target on this machine, for whoever works on
//! either. `cargo test --release -p headrace-interop-tests --test throughput -- --ignored --nocapture`

mod common;

use common::{config, memory, options, start};
use headrace_host::NvmeTcpDevice;
use headrace_transfer::{BlockDevice, Buffer, IoError, Op, Request, Sink};
use serde_json::json;
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
            let rate = measure(&device, length, depth, total, write);
            println!(
                "digests {digests:5}  {name:24} {:8.2} GB/s {:10.0} /s",
                rate / 1e9,
                rate / length as f64
            );
        }
    }
}

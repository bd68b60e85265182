//! Host and target with a bad network between them: bytes come in odd pieces, late, and connections are cut at random
//! places. Invariant: every request ends well, and what is read is what was written. The seed is printed and can be given
//! in HEADRACE_SEED; HEADRACE_SECONDS makes it a soak.

mod common;

use common::{close, config, flush, memory, options, pattern, read, start};
use headrace_host::NvmeTcpDevice;
use headrace_transfer::{submit_one, BlockDevice, Buffer, Op};
use serde_json::json;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

/// Forward one direction until its life is over: then both directions of the connection are.
fn forward(mut from: TcpStream, mut to: TcpStream, mut random: Random, mut life: u64) {
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let most = 1 + match random.below(4) {
            0 => random.below(100),
            1 => random.below(5000),
            _ => random.below(buffer.len() as u64 - 1),
        };
        let Ok(count @ 1..) = from.read(&mut buffer[..most as usize]) else {
            break;
        };
        let count = (count as u64).min(life);
        if random.below(50) == 0 {
            std::thread::sleep(Duration::from_millis(random.below(5)));
        }
        if to.write_all(&buffer[..count as usize]).is_err() {
            break;
        }
        life -= count;
        if life == 0 {
            break;
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}

struct Proxy {
    port: u16,
    stop: Arc<AtomicBool>,
    /// Connections are cut while this holds.
    faulty: Arc<AtomicBool>,
    cuts: Arc<AtomicU64>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Proxy {
    fn start(target: u16, seed: u64) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let (stop, faulty, cuts) = (
            Arc::new(AtomicBool::new(false)),
            Arc::new(AtomicBool::new(true)),
            Arc::new(AtomicU64::new(0)),
        );
        let (stopped, bad, counted) = (stop.clone(), faulty.clone(), Arc::clone(&cuts));
        let thread = std::thread::spawn(move || {
            let mut random = Random(seed);
            let mut threads = Vec::new();
            for stream in listener.incoming() {
                if stopped.load(Ordering::SeqCst) {
                    break;
                }
                let (near, far) = (
                    stream.unwrap(),
                    TcpStream::connect(("127.0.0.1", target)).unwrap(),
                );
                near.set_nodelay(true).unwrap();
                far.set_nodelay(true).unwrap();
                for (from, to) in [(near.try_clone(), far.try_clone()), (Ok(far), Ok(near))] {
                    let (from, to): (TcpStream, TcpStream) = (from.unwrap(), to.unwrap());
                    let life = if bad.load(Ordering::SeqCst) && (threads.is_empty() || random.below(3) > 0) {
                        1 + random.below(4 << 20)
                    } else {
                        u64::MAX
                    };
                    counted.fetch_add(u64::from(life < u64::MAX), Ordering::SeqCst);
                    let random = Random(random.below(u64::MAX) | 1);
                    threads.push(std::thread::spawn(move || forward(from, to, random, life)));
                }
            }
            for thread in threads {
                thread.join().unwrap();
            }
        });
        Proxy {
            port,
            stop,
            faulty,
            cuts,
            thread: Some(thread),
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(("127.0.0.1", self.port));
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn open(port: u16, random: &mut Random) -> Arc<NvmeTcpDevice> {
    let mut options = options(port);
    (options.header_digest, options.data_digest) = (random.below(2) == 0, random.below(2) == 0);
    options.queues = 1 + random.below(3) as u16;
    options.depth = 1 + random.below(40) as u16;
    // The first connection may be cut as well.
    let begin = Instant::now();
    loop {
        match NvmeTcpDevice::open(options.clone()) {
            Ok(device) => return device,
            Err(error) => assert!(begin.elapsed() < Duration::from_secs(20), "{error}"),
        }
    }
}

#[test]
fn no_request_is_lost_and_no_byte_is_wrong() {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    let seed = number("HEADRACE_SEED").unwrap_or_else(|| {
        std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .unwrap()
            .as_nanos() as u64
    });
    println!("HEADRACE_SEED={seed}");
    let until = Instant::now() + Duration::from_secs(number("HEADRACE_SECONDS").unwrap_or(4));
    let mut random = Random(seed | 1);
    let (target, target_port) = start(config(0, memory(4 << 20), json!({ "max_h2c_data_bytes": 65536 })));
    let (mut losses, mut requests) = (0, 0u64);
    while Instant::now() < until {
        let proxy = Proxy::start(target_port, random.below(u64::MAX) | 1);
        let device = open(proxy.port, &mut random);
        let mut model = vec![0u8; 4 << 20];
        let whole = Buffer::zeroed(model.len());
        submit_one(
            &*device,
            Op::Write {
                from: whole,
                fua: false,
            },
            0,
        )
        .wait(Duration::from_secs(60))
        .unwrap()
        .unwrap();
        for round in 0..2 {
            // Writes that do not overlap, all at once; then reads of everything, all at once.
            let mut pending = Vec::new();
            let mut at = 0;
            while at < model.len() {
                let length = (4096 * (1 + random.below(if round % 2 == 0 { 8 } else { 500 })) as usize)
                    .min(model.len() - at);
                if random.below(3) > 0 {
                    let bytes = pattern(length, random.below(u64::MAX));
                    model[at..at + length].copy_from_slice(&bytes);
                    let op = Op::Write {
                        from: Buffer::from_vec(bytes),
                        fua: false,
                    };
                    pending.push(submit_one(&*device, op, at as u64));
                }
                at += length;
            }
            requests += pending.len() as u64;
            for one in pending {
                one.wait(Duration::from_secs(60))
                    .expect("every request ends")
                    .unwrap();
            }
            flush(&device).unwrap();
            let into = Buffer::zeroed(model.len());
            let step = 4096 << random.below(10);
            let pending: Vec<_> = (0..model.len() / step)
                .map(|i| {
                    let piece = into.slice(i * step, step).unwrap();
                    submit_one(&*device, Op::Read { into: piece }, (i * step) as u64)
                })
                .collect();
            requests += pending.len() as u64;
            for one in pending {
                one.wait(Duration::from_secs(60))
                    .expect("every request ends")
                    .unwrap();
            }
            let mut got = vec![0; model.len()];
            into.copy_to(0, &mut got);
            assert!(got == model, "seed {seed}");
        }
        losses += device.loss_count();
        assert!(proxy.cuts.load(Ordering::SeqCst) > 0);
        proxy.faulty.store(false, Ordering::SeqCst);
        close(&device);
    }
    println!("{requests} requests, {losses} associations lost");
    // What the target has is what the host wrote, by a way without a proxy.
    let device = NvmeTcpDevice::open(options(target_port)).unwrap();
    read(&device, 0, 4096).unwrap();
    close(&device);
    target.stop(Duration::from_secs(5)).unwrap();
}

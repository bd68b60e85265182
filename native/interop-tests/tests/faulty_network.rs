//! Host and target, whole, with a bad network between them: bytes come in odd pieces, late, and connections are cut or fall
//! silent at random places; and a target that ends without warning. Invariant: every request ends well, what is read is what
//! was written, what is durable stays. The seed is printed and can be given in HEADRACE_SEED; HEADRACE_SECONDS makes it a
//! soak.

mod common;

use common::{close, config, flush, memory, options, pattern, read, serve, start};
use headrace_host::{NvmeTcpDevice, Portal, TrafficClass};
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

/// Forward one direction until its life is over: then both directions of the connection are. Or nothing comes through any
/// more and nobody is told, which each side must find out by itself.
/// `silence`: one of a device's connections may fall silent. The host gives a command up that meets two in a row.
fn forward(mut from: TcpStream, mut to: TcpStream, mut random: Random, mut life: u64, silence: &AtomicBool) {
    let may_fall_silent = random.below(6) == 0;
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
        if life == 0 && may_fall_silent && silence.swap(false, Ordering::SeqCst) {
            while from.read(&mut buffer).is_ok_and(|count| count > 0) {}
        }
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
    fn start(target: u16, seed: u64, silence: &Arc<AtomicBool>) -> Proxy {
        let silence = silence.clone();
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
                let near = stream.unwrap();
                let Ok(far) = TcpStream::connect(("127.0.0.1", target)) else {
                    // The target is down: the host sees its connection end.
                    continue;
                };
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
                    let silence = silence.clone();
                    threads.push(std::thread::spawn(move || {
                        forward(from, to, random, life, &silence)
                    }));
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

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap())
}

/// Printed, so that a failure can be tried again: HEADRACE_SEED. Threads and sockets take part, so it is the same weather,
/// not the same run; what must be exact is in `native/sim`.
fn seed() -> u64 {
    let seed = number("HEADRACE_SEED").unwrap_or_else(|| {
        std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .unwrap()
            .as_nanos() as u64
    });
    println!("HEADRACE_SEED={seed}");
    seed
}

/// Each port is a path.
fn open(ports: &[u16], random: &mut Random) -> Arc<NvmeTcpDevice> {
    let mut options = options(ports[0]);
    options.portals = ports.iter().map(|&port| Portal::new("127.0.0.1", port)).collect();
    options.keep_alive = Duration::from_secs(1);
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
    let seed = seed();
    let until = Instant::now() + Duration::from_secs(number("HEADRACE_SECONDS").unwrap_or(4));
    let mut random = Random(seed | 1);
    let (target, target_port) = start(config(0, memory(4 << 20), json!({ "max_h2c_data_bytes": 65536 })));
    let (mut losses, mut requests) = (0, 0u64);
    while Instant::now() < until {
        // One path, or two that fail each by itself.
        let silence = Arc::new(AtomicBool::new(true));
        let proxies: Vec<Proxy> = (0..1 + random.below(2))
            .map(|_| Proxy::start(target_port, random.below(u64::MAX) | 1, &silence))
            .collect();
        let ports: Vec<u16> = proxies.iter().map(|proxy| proxy.port).collect();
        let device = open(&ports, &mut random);
        let lanes = TrafficClass::ALL.map(|class| device.lane(class));
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
                    pending.push(submit_one(&*lanes[random.below(3) as usize], op, at as u64));
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
                    let lane = &lanes[random.below(3) as usize];
                    submit_one(&**lane, Op::Read { into: piece }, (i * step) as u64)
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
        for proxy in &proxies {
            assert!(proxy.cuts.load(Ordering::SeqCst) > 0);
            proxy.faulty.store(false, Ordering::SeqCst);
        }
        close(&device);
    }
    println!("{requests} requests, {losses} associations lost");
    // What the target has is what the host wrote, by a way without a proxy.
    let device = NvmeTcpDevice::open(options(target_port)).unwrap();
    read(&device, 0, 4096).unwrap();
    close(&device);
    target.stop(Duration::from_secs(5)).unwrap();
}

/// A region's bytes; each is written with these and no others, however often, so that a late copy of them does no harm.
fn region(number: usize) -> Vec<u8> {
    pattern(REGION, number as u64 + 1)
}

const REGION: usize = 16 << 10;
const REGIONS: usize = 2048;

/// Not a test: see `common::serve`.
#[test]
#[ignore = "run by another test, in a process of its own"]
fn serve_until_killed() {
    common::serve_until_killed();
}

/// A target with a volatile cache that ends without warning, again and again, behind a bad network. What was written and
/// flushed between two equal looks at the loss counter is there afterwards; where the counter moved, it is written again.
#[test]
fn what_was_flushed_with_an_equal_loss_counter_outlives_the_target() {
    let seed = seed();
    let mut random = Random(seed | 1);
    let path = std::env::temp_dir().join(format!("headrace-power-{}-{seed}", std::process::id()));
    let size = (REGIONS * REGION) as u64;
    std::fs::File::create(&path).unwrap().set_len(size).unwrap();
    let first = serve(&path, 0);
    let port = first.port;
    let proxy = Proxy::start(port, random.below(u64::MAX) | 1, &Arc::new(AtomicBool::new(true)));
    let device = open(&[proxy.port], &mut random);

    let done = Arc::new(AtomicBool::new(false));
    let power = {
        let (done, path) = (done.clone(), path.clone());
        let mut random = Random(random.below(u64::MAX) | 1);
        std::thread::spawn(move || {
            let (mut target, mut failures) = (first, 0u64);
            while !done.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(50 + random.below(700)));
                drop(target);
                failures += 1;
                target = serve(&path, port);
            }
            drop(target);
            failures
        })
    };
    let until = Instant::now() + Duration::from_secs(number("HEADRACE_SECONDS").unwrap_or(4));
    let (mut next, mut durable, mut repeated) = (0, 0, 0);
    while Instant::now() < until && next < REGIONS {
        let end = REGIONS.min(next + 1 + random.below(12) as usize);
        let before = repeated;
        loop {
            assert!(repeated - before < 200, "seed {seed}: never between two losses");
            let losses = device.loss_count();
            let pending: Vec<_> = (next..end)
                .map(|number| {
                    let op = Op::Write {
                        from: Buffer::from_vec(region(number)),
                        fua: false,
                    };
                    submit_one(&*device, op, (number * REGION) as u64)
                })
                .collect();
            for one in pending {
                one.wait(Duration::from_secs(60))
                    .expect("every request ends")
                    .unwrap();
            }
            flush(&device).unwrap();
            if device.loss_count() == losses {
                break;
            }
            repeated += 1;
        }
        next = end;
        durable = end;
    }
    done.store(true, Ordering::SeqCst);
    let failures = power.join().unwrap();
    println!(
        "{durable} regions durable, {repeated} batches repeated, {} associations lost, {failures} ends of the target",
        device.loss_count()
    );
    assert!(durable > 0 && failures > 0 && device.loss_count() > 0);
    close(&device);

    let target = serve(&path, port);
    let device = NvmeTcpDevice::open(options(port)).unwrap();
    for number in 0..durable {
        let found = read(&device, (number * REGION) as u64, REGION).unwrap();
        assert!(found == region(number), "seed {seed}: region {number} was lost");
    }
    close(&device);
    drop(target);
    std::fs::remove_file(path).unwrap();
}

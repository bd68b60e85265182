//! One namespace by several ways, with real sockets in between that are cut, or hold back what they carry.

mod common;

use common::{close, config, flush, memory, options, pattern, read, write, NQN};
use headrace_host::{HostOptions, NvmeTcpDevice, Policy, Portal};
use headrace_target::Target;
use headrace_transfer::{submit_one, BlockDevice, Buffer, Op};
use serde_json::json;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

fn until(what: &str, condition: impl Fn() -> bool) {
    let begin = Instant::now();
    while !condition() {
        assert!(begin.elapsed() < Duration::from_secs(20), "{what}: not in time");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[derive(Default)]
struct Switches {
    stop: AtomicBool,
    /// Nobody gets through: what comes is closed at once.
    cut: AtomicBool,
    /// Of these first connections nothing reaches the target any more, not even their end, until `release`.
    frozen: AtomicUsize,
    release: AtomicBool,
    /// What was held back has been delivered.
    delivered: AtomicUsize,
    accepted: AtomicUsize,
    sockets: Mutex<Vec<TcpStream>>,
}

/// Between a host and a target.
struct Proxy {
    port: u16,
    switches: Arc<Switches>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Proxy {
    fn start(target: u16) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let switches = Arc::new(Switches::default());
        let shared = switches.clone();
        let thread = std::thread::spawn(move || {
            let mut threads = Vec::new();
            for near in listener.incoming() {
                let near = near.unwrap();
                if shared.stop.load(Ordering::SeqCst) {
                    break;
                }
                if shared.cut.load(Ordering::SeqCst) {
                    continue;
                }
                let number = shared.accepted.fetch_add(1, Ordering::SeqCst);
                let far = TcpStream::connect(("127.0.0.1", target)).unwrap();
                near.set_nodelay(true).unwrap();
                far.set_nodelay(true).unwrap();
                {
                    let mut sockets = shared.sockets.lock().unwrap();
                    sockets.push(near.try_clone().unwrap());
                    sockets.push(far.try_clone().unwrap());
                }
                let (near2, far2) = (near.try_clone().unwrap(), far.try_clone().unwrap());
                let switches = shared.clone();
                threads.push(std::thread::spawn(move || {
                    to_target(near, far, number, &switches)
                }));
                threads.push(std::thread::spawn(move || to_host(far2, near2)));
            }
            drop(listener);
            for thread in threads {
                thread.join().unwrap();
            }
        });
        Proxy {
            port,
            switches,
            thread: Some(thread),
        }
    }

    fn cut(&self) {
        self.switches.cut.store(true, Ordering::SeqCst);
        for socket in self.switches.sockets.lock().unwrap().drain(..) {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }

    fn mend(&self) {
        self.switches.cut.store(false, Ordering::SeqCst);
    }
}

fn to_target(mut near: TcpStream, mut far: TcpStream, number: usize, switches: &Switches) {
    let mut buffer = vec![0; 256 * 1024];
    loop {
        let count = near.read(&mut buffer).unwrap_or(0);
        let held = number < switches.frozen.load(Ordering::SeqCst);
        while held && !switches.release.load(Ordering::SeqCst) && !switches.stop.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(2));
        }
        if count == 0 {
            // The ends of what was frozen come last, like the rest of a slow network's queue.
            while held
                && switches.delivered.load(Ordering::SeqCst) == 0
                && !switches.stop.load(Ordering::SeqCst)
            {
                std::thread::sleep(Duration::from_millis(2));
            }
            std::thread::sleep(Duration::from_millis(if held { 200 } else { 0 }));
            break;
        }
        if far.write_all(&buffer[..count]).is_err() {
            break;
        }
        switches.delivered.fetch_add(usize::from(held), Ordering::SeqCst);
    }
    let _ = far.shutdown(Shutdown::Both);
}

fn to_host(mut far: TcpStream, mut near: TcpStream) {
    let mut buffer = vec![0; 256 * 1024];
    while let Ok(count @ 1..) = far.read(&mut buffer) {
        if near.write_all(&buffer[..count]).is_err() {
            // The host is gone; the target is not told by this direction.
            return;
        }
    }
    let _ = near.shutdown(Shutdown::Both);
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.switches.stop.store(true, Ordering::SeqCst);
        self.cut();
        let _ = TcpStream::connect(("127.0.0.1", self.port));
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A target that listens twice, and a proxy before each port.
fn two_ways(extra: serde_json::Value) -> (Target, [Proxy; 2], HostOptions) {
    let mut both = json!({
        "listen": [{ "host": "127.0.0.1", "port": 0 }, { "host": "127.0.0.1", "port": 0 }],
    });
    for (key, value) in extra.as_object().unwrap() {
        both[key] = value.clone();
    }
    let target = Target::start(config(0, memory(64 << 20), both)).unwrap();
    let ports: Vec<u16> = target.addresses().iter().map(|address| address.port()).collect();
    let proxies = [Proxy::start(ports[0]), Proxy::start(ports[1])];
    let mut options = options(0);
    options.portals = proxies
        .iter()
        .map(|proxy| Portal::new("127.0.0.1", proxy.port))
        .collect();
    assert_eq!(options.subsysnqn, NQN);
    (target, proxies, options)
}

/// Reads and writes of many threads, verified, while each way in turn is cut and mended. No error reaches anybody.
#[test]
fn ways_are_cut_in_turn_under_verified_io() {
    let (target, proxies, mut options) = two_ways(json!({}));
    options.policy = Policy::RoundRobin;
    options.loss_timeout = Some(Duration::from_secs(20));
    let device = NvmeTcpDevice::open(options).unwrap();
    until("both paths", || device.paths().iter().all(|path| path.usable));
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..4u64)
            .map(|worker| {
                let (device, stop) = (&device, &stop);
                scope.spawn(move || {
                    let (base, mut round) = (worker * (8 << 20), 0u64);
                    // At least once around, however busy the machine is.
                    while !stop.load(Ordering::SeqCst) || round < 5 {
                        let lengths = [4096usize, 65536, 12288, 1 << 20];
                        let length = lengths[round as usize % 4];
                        let offset = base + round * 4096 % (4 << 20);
                        let bytes = pattern(length, round ^ worker << 40);
                        write(device, offset, &bytes).unwrap();
                        assert_eq!(read(device, offset, length).unwrap(), bytes, "round {round}");
                        if round % 16 == 0 {
                            flush(device).unwrap();
                        }
                        round += 1;
                    }
                })
            })
            .collect();
        for turn in 0..4 {
            let proxy = &proxies[turn % 2];
            std::thread::sleep(Duration::from_millis(150));
            proxy.cut();
            until("the loss", || !device.paths()[turn % 2].usable);
            std::thread::sleep(Duration::from_millis(150));
            proxy.mend();
            device.reconnect();
            until("the path is back", || device.paths()[turn % 2].usable);
        }
        stop.store(true, Ordering::SeqCst);
        for worker in workers {
            worker.join().unwrap();
        }
    });
    let said = device.describe();
    assert_eq!(device.loss_count(), 4);
    assert_eq!(
        (&said["stalls"], &said["counters"]["errors"]),
        (&0.into(), &0.into()),
        "{said}"
    );
    for path in device.paths() {
        assert!(path.reads > 0 && path.writes > 0 && path.losses == 2, "{path:?}");
    }
    close(&device);
    drop(device);
    drop(proxies);
    drop(target);
}

/// The volatile caches of the real target are its controllers': writes over two ways, one flush, and power is lost.
#[test]
fn a_flush_covers_what_was_written_by_either_way() {
    let (_target, _proxies, mut options) = two_ways(json!({ "volatile_cache_bytes": 32 << 20 }));
    options.policy = Policy::RoundRobin;
    let device = NvmeTcpDevice::open(options).unwrap();
    until("both paths", || device.paths().iter().all(|path| path.usable));
    for i in 0..8 {
        write(&device, i * 4096, &pattern(4096, i)).unwrap();
    }
    flush(&device).unwrap();
    let flushes: u64 = device.describe()["counters"]["flushes"].as_u64().unwrap();
    assert_eq!((flushes, device.loss_count()), (2, 0));
    for i in 0..8 {
        assert_eq!(read(&device, i * 4096, 4096).unwrap(), pattern(4096, i));
    }
}

/// A write is held back by the network, given up, and sent again: it succeeds. Then something newer is written. Then the
/// first copy arrives.
fn late_first_copy(obey: bool) -> (Vec<u8>, Vec<u8>) {
    let target = Target::start(config(0, memory(4 << 20), json!({}))).unwrap();
    let proxy = Proxy::start(target.addresses()[0].port());
    let mut options = options(proxy.port);
    options.io_timeout = Duration::from_secs(1);
    let device = NvmeTcpDevice::open(options).unwrap();
    let (old, new) = (pattern(4096, 1), pattern(4096, 2));
    assert!(device.unsettled().is_empty());
    proxy
        .switches
        .frozen
        .store(proxy.switches.accepted.load(Ordering::SeqCst), Ordering::SeqCst);
    let from = Buffer::from_vec(old.clone());
    let pending = submit_one(&*device, Op::Write { from, fua: false }, 0);
    pending.wait(Duration::from_secs(20)).unwrap().unwrap();
    assert_eq!(device.loss_count(), 1);
    let unsettled = device.unsettled();
    assert_eq!(unsettled.len(), 1);
    let ghost = &unsettled[0];
    assert_eq!(
        (ghost.offset, ghost.length, ghost.generation),
        (0, 4096, device.loss_count())
    );
    assert_eq!(ghost.path, format!("127.0.0.1:{}", proxy.port));
    // What a volume does: other bytes go where no ghost can reach them.
    let haunted = |at: u64| {
        unsettled
            .iter()
            .any(|range| at < range.offset + range.length && range.offset < at + 4096)
    };
    let place = (0..).step_by(4096).find(|&at| !obey || !haunted(at)).unwrap();
    write(&device, place, &new).unwrap();
    assert_eq!(read(&device, place, 4096).unwrap(), new);
    proxy.switches.release.store(true, Ordering::SeqCst);
    until("the late copy", || {
        proxy.switches.delivered.load(Ordering::SeqCst) > 0
    });
    // For the target to do it, if it does.
    match obey {
        true => std::thread::sleep(Duration::from_millis(500)),
        false => until("the late copy is there", || {
            read(&device, place, 4096).unwrap() == old
        }),
    }
    let found = read(&device, place, 4096).unwrap();
    assert_eq!(device.settle(device.loss_count()), 0);
    assert!(device.unsettled().is_empty());
    close(&device);
    (found, new)
}

#[test]
fn newer_data_are_safe_from_a_late_copy_where_unsettled_is_obeyed() {
    let (found, new) = late_first_copy(true);
    assert_eq!(found, new);
}

/// The danger is real: the same, with the rule off.
#[test]
fn newer_data_are_lost_to_a_late_copy_where_unsettled_is_not_obeyed() {
    let (found, new) = late_first_copy(false);
    assert_ne!(found, new);
    assert_eq!(found, pattern(4096, 1));
}

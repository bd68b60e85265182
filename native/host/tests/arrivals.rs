//! Whoever watches a long read, or a write, is told of every byte that comes, or goes, as often as it does.

#[path = "fake/calls.rs"]
mod calls;
mod fake;

use calls::{close, pattern, until};
use fake::{Action, Fake, Script, BLOCK, BLOCKS};
use headrace_host::{HostOptions, NvmeTcpDevice};
use headrace_transfer::{BlockDevice, Buffer, IoError, Op, Request, Sink};
use headrace_wire::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{mpsc, Arc, Mutex};
use std::time::Duration;

const LENGTH: usize = 1 << 20;
const LONG: Duration = Duration::from_secs(20);

/// Keeps what it is told of, at the moment when it is.
struct Onlooker {
    memory: Buffer,
    told: Mutex<Vec<u8>>,
    /// Bytes at a time.
    counts: Mutex<Vec<usize>>,
    end: Mutex<mpsc::Sender<Result<(), IoError>>>,
}

impl Sink for Onlooker {
    fn complete(&self, _: u64, result: Result<(), IoError>) {
        self.end.lock().unwrap().send(result).unwrap();
    }
    fn watches(&self) -> bool {
        true
    }
    fn arrived(&self, token: u64, at: usize, count: usize) {
        assert_eq!(token, 5);
        let came = self.memory.slice(at, count).expect("inside of the request");
        came.copy_to(0, &mut self.told.lock().unwrap()[at..at + count]);
        self.counts.lock().unwrap().push(count);
    }
    fn departed(&self, token: u64, at: usize, count: usize) {
        self.arrived(token, at, count);
    }
}

fn begin(device: &NvmeTcpDevice, length: usize) -> (Arc<Onlooker>, mpsc::Receiver<Result<(), IoError>>) {
    begin_with(device, Buffer::zeroed(length), |into| Op::Read { into })
}

fn begin_with(
    device: &NvmeTcpDevice,
    memory: Buffer,
    op: fn(Buffer) -> Op,
) -> (Arc<Onlooker>, mpsc::Receiver<Result<(), IoError>>) {
    let (end, ended) = mpsc::channel();
    let length = memory.len();
    let sink = Arc::new(Onlooker {
        memory: memory.clone(),
        told: Mutex::new(vec![0; length]),
        counts: Mutex::default(),
        end: Mutex::new(end),
    });
    device.submit(vec![Request {
        op: op(memory),
        offset: 0,
        token: 5,
        sink: sink.clone(),
    }]);
    (sink, ended)
}

fn reads(script: Script, options: fn(HostOptions) -> HostOptions) -> Vec<usize> {
    let fake = Fake::start(script);
    let bytes = pattern(LENGTH, 3);
    fake.set_media(0, &bytes);
    let device = NvmeTcpDevice::open(options(fake.options())).unwrap();
    let (sink, ended) = begin(&device, LENGTH);
    ended.recv_timeout(LONG).unwrap().unwrap();
    assert!(*sink.told.lock().unwrap() == bytes);
    close(&device);
    let counts = sink.counts.lock().unwrap().clone();
    counts
}

/// `action` to the first read, then none.
fn first_read(action: fn() -> Action) -> Script {
    let count = AtomicUsize::new(0);
    Script {
        hook: Box::new(move |_, sqe, _| {
            if sqe.opcode() == io::READ && count.fetch_add(1, Ordering::SeqCst) == 0 {
                action()
            } else {
                Action::Normal
            }
        }),
        ..Default::default()
    }
}

#[test]
fn of_all_bytes_in_pieces_that_fit_a_cache() {
    let plain = reads(Script::default(), |options| options);
    assert_eq!(plain.iter().sum::<usize>(), LENGTH);
    assert!(plain.iter().all(|&count| count <= 256 << 10), "{plain:?}");
    // Commands of 128 KiB, and data in PDUs of 9 KiB.
    let cut = Script {
        mdts: 5,
        c2h_bytes: 9 << 10,
        success: true,
        ..Default::default()
    };
    assert_eq!(reads(cut, |options| options).iter().sum::<usize>(), LENGTH);
}

#[test]
fn again_where_a_connection_vanished_in_the_middle() {
    let again = reads(first_read(|| Action::Vanish(700_000)), |options| options);
    assert!(again.iter().sum::<usize>() >= LENGTH);
}

#[test]
fn again_where_the_data_digest_was_wrong() {
    let again = reads(first_read(|| Action::BadDataDigest), |mut options| {
        options.data_digest = true;
        options
    });
    assert!(again.iter().sum::<usize>() > LENGTH);
}

#[test]
fn again_where_a_restarted_target_takes_less_at_a_time_and_has_other_bytes() {
    let mut fake = Fake::start(Script {
        hook: Box::new(|_, sqe, _| match sqe.opcode() {
            io::READ => Action::Vanish(700_000),
            _ => Action::Normal,
        }),
        ..Default::default()
    });
    fake.set_media(0, &pattern(LENGTH, 1));
    let device = NvmeTcpDevice::open(fake.options()).unwrap();
    let (sink, ended) = begin(&device, LENGTH);
    until("data come", || !sink.counts.lock().unwrap().is_empty());
    let port = fake.port;
    fake.stop();
    let media = pattern(BLOCKS * BLOCK, 2);
    let smaller = Script {
        mdts: 4,
        ..Default::default()
    };
    let _back = Fake::start_at(port, smaller, media.clone());
    ended.recv_timeout(LONG).unwrap().unwrap();
    assert!(*sink.told.lock().unwrap() == media[..LENGTH]);
    close(&device);
}

#[test]
fn of_nothing_where_a_read_is_short() {
    let fake = Fake::start(Script::default());
    let device = NvmeTcpDevice::open(fake.options()).unwrap();
    let (sink, ended) = begin(&device, 64 << 10);
    ended.recv_timeout(LONG).unwrap().unwrap();
    assert!(sink.counts.lock().unwrap().is_empty());
    close(&device);
}

/// A write of these bytes, with the first command to write met by `action`: gives the counts that were told.
fn writes(length: usize, action: fn() -> Action, script: Script) -> Vec<usize> {
    let count = AtomicUsize::new(0);
    let fake = Fake::start(Script {
        hook: Box::new(move |_, sqe, _| {
            if sqe.opcode() == io::WRITE && count.fetch_add(1, Ordering::SeqCst) == 0 {
                action()
            } else {
                Action::Normal
            }
        }),
        ..script
    });
    let device = NvmeTcpDevice::open(fake.options()).unwrap();
    let bytes = pattern(length, 5);
    let (sink, ended) = begin_with(&device, Buffer::from_vec(bytes.clone()), |from| Op::Write {
        from,
        fua: false,
    });
    ended.recv_timeout(LONG).unwrap().unwrap();
    assert!(*sink.told.lock().unwrap() == bytes);
    close(&device);
    let counts = sink.counts.lock().unwrap().clone();
    counts
}

#[test]
fn of_all_bytes_that_are_written_in_pieces_that_fit_a_cache() {
    for length in [LENGTH, 4096] {
        let cut = Script {
            mdts: 5,
            maxh2cdata: 9 << 10,
            r2t_bytes: 50_000,
            ..Default::default()
        };
        for script in [Script::default(), cut] {
            let counts = writes(length, || Action::Normal, script);
            assert_eq!(counts.iter().sum::<usize>(), length);
            assert!(counts.iter().all(|&count| count <= 256 << 10), "{counts:?}");
        }
    }
}

#[test]
fn again_where_a_connection_vanished_in_the_middle_of_a_write() {
    let counts = writes(LENGTH, || Action::VanishInWrite(700_000), Script::default());
    assert!(counts.iter().sum::<usize>() > LENGTH);
}

//! `MediaDevice`: the contract of a device, over memory.

use headrace_media::{Media, MemoryMedia};
use headrace_transfer::{
    submit_one, BlockDevice, Buffer, ErrorKind, Event, EventKind, IoError, MediaDevice, Op, Pending,
};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

fn device() -> Arc<MediaDevice> {
    let media = MemoryMedia::new(1 << 20, 4096).unwrap();
    MediaDevice::start(Box::new(media), "memory", "mem:test", 3, 1024).unwrap()
}

fn end(pending: &Pending) -> Result<(), IoError> {
    pending.wait(Duration::from_secs(20)).expect("in time")
}

#[test]
fn reads_what_was_written() {
    let device = device();
    let data = Buffer::from_vec(vec![7; 8192]);
    end(&submit_one(
        device.as_ref(),
        Op::Write {
            from: data,
            fua: false,
        },
        4096,
    ))
    .unwrap();
    end(&submit_one(device.as_ref(), Op::Flush, 0)).unwrap();
    let into = Buffer::zeroed(12288);
    end(&submit_one(device.as_ref(), Op::Read { into: into.clone() }, 0)).unwrap();
    let mut bytes = vec![1; 12288];
    into.copy_to(0, &mut bytes);
    assert_eq!((bytes[4095], bytes[4096], bytes[12287]), (0, 7, 7));
    assert_eq!(device.describe()["counters"]["reads"], 1);
}

#[test]
fn what_does_not_fit_is_the_callers_fault() {
    let device = device();
    for (offset, length) in [(1, 4096), (0, 100), (1 << 20, 4096), (u64::MAX - 4095, 4096)] {
        let op = Op::Read {
            into: Buffer::zeroed(length),
        };
        let error = end(&submit_one(device.as_ref(), op, offset)).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Usage, "{offset} {length}");
    }
}

#[test]
fn a_closed_device_says_so_and_closing_again_does_nothing() {
    let device = device();
    let pending: Vec<_> = (0..100)
        .map(|i| {
            submit_one(
                device.as_ref(),
                Op::Read {
                    into: Buffer::zeroed(4096),
                },
                i * 4096,
            )
        })
        .collect();
    device.close(Duration::from_secs(20));
    for pending in &pending {
        end(pending).expect("what was queued before the close has time to end");
    }
    let late = submit_one(device.as_ref(), Op::Flush, 0);
    assert_eq!(end(&late).unwrap_err().kind, ErrorKind::Closed);
    device.close(Duration::from_secs(20));
}

#[test]
fn the_last_reference_may_go_on_a_worker() {
    struct Last(
        std::sync::Mutex<Option<Arc<MediaDevice>>>,
        std::sync::mpsc::Sender<()>,
    );
    impl headrace_transfer::Sink for Last {
        fn complete(&self, _token: u64, _result: Result<(), IoError>) {
            // Give the test time to let its own reference go.
            std::thread::sleep(Duration::from_millis(50));
            drop(self.0.lock().unwrap().take());
            self.1.send(()).unwrap();
        }
    }
    let device = device();
    let (sender, receiver) = std::sync::mpsc::channel();
    let sink = Arc::new(Last(std::sync::Mutex::new(Some(device.clone())), sender));
    device.submit(vec![headrace_transfer::Request {
        op: Op::Flush,
        offset: 0,
        token: 0,
        sink,
    }]);
    drop(device);
    receiver
        .recv_timeout(Duration::from_secs(20))
        .expect("no worker waits for itself");
}

/// Memory whose reads wait for a lock, and fail then.
struct Hangs(MemoryMedia, &'static Mutex<()>);

impl Media for Hangs {
    fn size_bytes(&self) -> u64 {
        self.0.size_bytes()
    }

    fn block_bytes(&self) -> u32 {
        self.0.block_bytes()
    }

    fn read_only(&self) -> bool {
        false
    }

    fn volatile_cache(&self) -> bool {
        false
    }

    fn engine(&self) -> &'static str {
        "hangs"
    }

    fn read(&self, _offset: u64, _into: &mut [u8]) -> std::io::Result<()> {
        drop(self.1.lock());
        Err(std::io::Error::other("broken"))
    }

    fn write(&self, offset: u64, from: &[u8], fua: bool) -> std::io::Result<()> {
        self.0.write(offset, from, fua)
    }

    fn flush(&self) -> std::io::Result<()> {
        self.0.flush()
    }

    fn deallocate(&self, offset: u64, length: u64) -> std::io::Result<()> {
        self.0.deallocate(offset, length)
    }
}

#[test]
fn what_hangs_and_what_waits_behind_it_are_events_without_an_end() {
    static GATE: Mutex<()> = Mutex::new(());
    let media = Hangs(MemoryMedia::new(1 << 20, 4096).unwrap(), &GATE);
    let device = MediaDevice::start(Box::new(media), "memory", "mem:test", 1, 1024).unwrap();
    let gate = GATE.lock().unwrap();
    let read = |offset| {
        let into = Buffer::zeroed(4096);
        submit_one(device.as_ref(), Op::Read { into }, offset)
    };
    let pending = [read(4096), read(8192), submit_one(device.as_ref(), Op::Flush, 0)];
    let told = || device.events().unwrap().events;
    let deadline = Instant::now() + Duration::from_secs(20);
    while told().first().is_none_or(|event| event.kind != EventKind::Read) {
        assert!(Instant::now() < deadline, "{:?}", told());
        std::thread::yield_now();
    }
    let shown = |event: &Event| (event.kind, event.offset, event.status, event.ended_ns > 0);
    let open: Vec<_> = told().iter().map(shown).collect();
    assert_eq!(
        open,
        [
            (EventKind::Read, 4096, 0, false),
            (EventKind::WaitingRead, 8192, 0, false),
            (EventKind::WaitingWrite, 0, 0, false)
        ]
    );
    drop(gate);
    let ends = pending.each_ref().map(|each| end(each).is_ok());
    assert_eq!(ends, [false, false, true]);
    let ended: Vec<_> = told().iter().map(shown).collect();
    assert_eq!(
        ended,
        [
            (EventKind::Read, 4096, 0x8005, true),
            (EventKind::Read, 8192, 0x8005, true),
            (EventKind::Flush, 0, 0, true)
        ]
    );
}

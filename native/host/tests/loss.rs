//! Targets that vanish, stall, and come back, or do not.

#[path = "fake/calls.rs"]
mod calls;
mod fake;

use calls::{close, flush, pattern, read, until, write};
use fake::{Action, Fake, Script, BLOCK, BLOCKS};
use headrace_host::NvmeTcpDevice;
use headrace_transfer::{submit_one, BlockDevice, Buffer, ErrorKind, Op};
use headrace_wire::{admin, io};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A hook that does `first` to the first matching I/O command.
fn once(opcode: u8, first: fn() -> Action) -> Script {
    let count = AtomicUsize::new(0);
    Script {
        hook: Box::new(move |qid, sqe, _| {
            let hit = qid == 1 && sqe.opcode() == opcode && count.fetch_add(1, Ordering::SeqCst) == 0;
            if hit {
                first()
            } else {
                Action::Normal
            }
        }),
        ..Default::default()
    }
}

#[test]
fn a_read_is_sent_again_when_its_connection_vanishes() {
    for cut in [0, 1, 1000, 65536] {
        let actions: [(usize, fn() -> Action); 4] = [
            (0, || Action::Vanish(0)),
            (1, || Action::Vanish(1)),
            (1000, || Action::Vanish(1000)),
            (65536, || Action::Vanish(65536)),
        ];
        let action = actions.iter().find(|(at, _)| *at == cut).unwrap().1;
        let fake = Fake::start(once(io::READ, action));
        let bytes = pattern(65536, 1);
        fake.set_media(0, &bytes);
        let device = NvmeTcpDevice::open(fake.options()).unwrap();
        assert_eq!(read(&device, 0, 65536).unwrap(), bytes);
        assert_eq!(device.loss_count(), 1);
        assert_eq!(fake.io_commands(), [io::READ, io::READ]);
        let told = device.describe();
        assert_eq!(
            (told["reconnects"].as_u64(), told["associations_lost"].as_u64()),
            (Some(1), Some(1))
        );
        close(&device);
    }
}

#[test]
fn a_write_is_sent_again_with_the_same_bytes() {
    let fake = Fake::start(Script {
        maxh2cdata: 8192,
        ..once(io::WRITE, || Action::VanishInWrite(20000))
    });
    let device = NvmeTcpDevice::open(fake.options()).unwrap();
    let bytes = pattern(200 * 1024, 4);
    let c0 = device.loss_count();
    write(&device, 4096, &bytes).unwrap();
    flush(&device).unwrap();
    assert_eq!(device.loss_count(), c0 + 1);
    assert_eq!(&fake.media()[4096..4096 + bytes.len()], bytes);
    let c1 = device.loss_count();
    write(&device, 4096, &bytes).unwrap();
    flush(&device).unwrap();
    assert_eq!(device.loss_count(), c1);
}

#[test]
fn the_loss_is_counted_before_a_later_flush_completes() {
    let fake = Fake::start(once(io::FLUSH, || Action::Vanish(0)));
    let device = NvmeTcpDevice::open(fake.options()).unwrap();
    let c0 = device.loss_count();
    write(&device, 0, &pattern(512, 1)).unwrap();
    flush(&device).unwrap();
    assert_ne!(
        device.loss_count(),
        c0,
        "the flush that succeeded ran on another association than the write"
    );
}

#[test]
fn a_target_that_restarts_is_found_again_with_everything_that_was_under_way() {
    let mut fake = Fake::start(Script {
        hook: Box::new(|qid, sqe, _| match (qid, sqe.opcode()) {
            (1, io::READ | io::WRITE) => Action::Silent,
            _ => Action::Normal,
        }),
        ..Default::default()
    });
    let device = NvmeTcpDevice::open(fake.options()).unwrap();
    let written = pattern(64 * 1024, 9);
    let media = pattern(BLOCKS * BLOCK, 3);
    let mut writes = Vec::new();
    let mut reads = Vec::new();
    for i in 0..40u64 {
        let from = Buffer::from_vec(written.clone());
        writes.push(submit_one(&*device, Op::Write { from, fua: false }, i * 65536));
        let into = Buffer::zeroed(4096);
        reads.push((
            i,
            into.clone(),
            submit_one(&*device, Op::Read { into }, (4 << 20) + i * 4096),
        ));
    }
    std::thread::sleep(Duration::from_millis(100));
    let port = fake.port;
    fake.stop();
    // Connection refused for a while.
    std::thread::sleep(Duration::from_millis(400));
    assert_eq!(device.describe()["state"], "lost");
    let back = Fake::start_at(port, Script::default(), media.clone());
    for one in writes {
        one.wait(Duration::from_secs(10)).unwrap().unwrap();
    }
    for (i, into, one) in reads {
        one.wait(Duration::from_secs(10)).unwrap().unwrap();
        let mut bytes = vec![0; 4096];
        into.copy_to(0, &mut bytes);
        assert_eq!(bytes, media[(4 << 20) + i as usize * 4096..][..4096]);
    }
    for i in 0..40 {
        assert_eq!(&back.media()[i * 65536..][..65536], written);
    }
    assert_eq!(device.loss_count(), 1);
    close(&device);
}

#[test]
fn a_name_is_looked_up_again_while_its_target_is_away() {
    let mut fake = Fake::start(Script::default());
    let mut options = fake.options();
    options.portals[0].host = "localhost".into();
    let device = NvmeTcpDevice::open(options).unwrap();
    let port = fake.port;
    fake.stop();
    std::thread::sleep(Duration::from_millis(700));
    let bytes = pattern(BLOCKS * BLOCK, 2);
    let _back = Fake::start_at(port, Script::default(), bytes.clone());
    assert_eq!(read(&device, 0, 4096).unwrap(), bytes[..4096]);
    assert!(device.describe()["reconnect_attempts"].as_u64() >= Some(2));
}

#[test]
fn io_fails_after_the_loss_timeout_and_works_again_when_the_target_is_back() {
    let mut fake = Fake::start(Script::default());
    let mut options = fake.options();
    options.loss_timeout = Some(Duration::from_millis(600));
    let device = NvmeTcpDevice::open(options).unwrap();
    fake.stop();
    let begin = Instant::now();
    let error = read(&device, 0, 512).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Gone);
    assert!(error.to_string().contains("did not come back"), "{error}");
    assert!(
        begin.elapsed() >= Duration::from_millis(300),
        "{:?}",
        begin.elapsed()
    );
    // While it fails, it fails at once: the quickest of some, for the machine may be busy.
    let quickest = (0..10)
        .map(|_| {
            let begin = Instant::now();
            assert_eq!(write(&device, 0, &[0; 512]).unwrap_err().kind, ErrorKind::Gone);
            begin.elapsed()
        })
        .min();
    assert!(quickest < Some(Duration::from_millis(300)), "{quickest:?}");
    let said = device.describe();
    assert_eq!(said["state"], "failing");
    assert!(
        said["stalled"] == true && said["stalled_s"].as_f64() > Some(0.5),
        "{said}"
    );
    let bytes = pattern(BLOCKS * BLOCK, 4);
    let _back = Fake::start_at(fake.port, Script::default(), bytes.clone());
    until("the device is back", || device.describe()["state"] == "connected");
    assert_eq!(read(&device, 0, 4096).unwrap(), bytes[..4096]);
    let said = device.describe();
    assert_eq!(
        (&said["stalled"], &said["stalled_s"], &said["stalls"]),
        (&false.into(), &0.0.into(), &1.into())
    );
    close(&device);
}

#[test]
fn another_namespace_under_the_same_name_is_refused() {
    let mut fake = Fake::start(Script::default());
    let device = NvmeTcpDevice::open(fake.options()).unwrap();
    let port = fake.port;
    fake.stop();
    let _back = Fake::start_at(
        port,
        Script {
            uuid: [8; 16],
            ..Default::default()
        },
        vec![0; BLOCKS * BLOCK],
    );
    let error = read(&device, 0, 512).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Gone);
    assert!(
        error.to_string().contains("0707") && error.to_string().contains("0808"),
        "{error}"
    );
}

#[test]
fn smaller_limits_after_a_restart_are_obeyed() {
    let mut fake = Fake::start(Script {
        hook: Box::new(|qid, sqe, _| match (qid, sqe.opcode()) {
            (1, io::WRITE) => Action::Silent,
            _ => Action::Normal,
        }),
        ..Default::default()
    });
    let device = NvmeTcpDevice::open(fake.options()).unwrap();
    let bytes = pattern(1 << 20, 6);
    let from = Buffer::from_vec(bytes.clone());
    let pending = submit_one(&*device, Op::Write { from, fua: false }, 0);
    std::thread::sleep(Duration::from_millis(50));
    let port = fake.port;
    fake.stop();
    let back = Fake::start_at(
        port,
        Script {
            mdts: 1,
            ..Default::default()
        },
        vec![0; BLOCKS * BLOCK],
    );
    pending.wait(Duration::from_secs(10)).unwrap().unwrap();
    assert_eq!(&back.media()[..1 << 20], bytes);
    assert!(back
        .seen()
        .iter()
        .filter(|s| s.sqe.opcode() == io::WRITE)
        .all(|s| s.sqe.nlb() <= 16));
}

#[test]
fn a_silent_command_is_tried_twice_and_then_times_out() {
    let fake = Fake::start(Script {
        hook: Box::new(|qid, sqe, _| match (qid, sqe.opcode(), sqe.slba()) {
            (1, io::READ, 0) => Action::Silent,
            _ => Action::Normal,
        }),
        ..Default::default()
    });
    let mut options = fake.options();
    options.io_timeout = Duration::from_millis(700);
    let device = NvmeTcpDevice::open(options).unwrap();
    let begin = Instant::now();
    let silent = Buffer::zeroed(512);
    let pending = submit_one(&*device, Op::Read { into: silent.clone() }, 0);
    // Others are not held up for good.
    read(&device, 4096, 512).unwrap();
    let error = pending.wait(Duration::from_secs(10)).unwrap().unwrap_err();
    assert_eq!(error.kind, ErrorKind::Timeout);
    assert!(error.to_string().contains("LBA 0"), "{error}");
    assert!(
        begin.elapsed() >= Duration::from_millis(1400),
        "{:?}",
        begin.elapsed()
    );
    assert_eq!(device.loss_count(), 2);
    read(&device, 4096, 512).unwrap();
}

#[test]
fn a_late_answer_never_touches_a_buffer_that_was_handed_back() {
    let fake = Fake::start(Script {
        hook: Box::new(|qid, sqe, _| match (qid, sqe.opcode()) {
            (1, io::READ) => Action::Late(Duration::from_millis(600)),
            _ => Action::Normal,
        }),
        ..Default::default()
    });
    fake.set_media(0, &pattern(65536, 1));
    let mut options = fake.options();
    options.io_timeout = Duration::from_millis(150);
    let device = NvmeTcpDevice::open(options).unwrap();
    let buffer = Buffer::zeroed(65536);
    let error = submit_one(&*device, Op::Read { into: buffer.clone() }, 0)
        .wait(Duration::from_secs(10))
        .unwrap()
        .unwrap_err();
    assert_eq!(error.kind, ErrorKind::Timeout);
    buffer.copy_from(0, &[0xEE; 65536]);
    // Both answers come now.
    std::thread::sleep(Duration::from_millis(900));
    let mut bytes = vec![0; 65536];
    buffer.copy_to(0, &mut bytes);
    assert!(bytes.iter().all(|&byte| byte == 0xEE));
}

#[test]
fn a_silent_keep_alive_loses_the_association_without_io() {
    let quiet = Arc::new(AtomicUsize::new(0));
    let told = quiet.clone();
    let fake = Fake::start(Script {
        hook: Box::new(move |qid, sqe, _| {
            let hit = qid == 0 && sqe.opcode() == admin::KEEP_ALIVE;
            if hit && told.fetch_add(1, Ordering::SeqCst) < 3 {
                Action::Silent
            } else {
                Action::Normal
            }
        }),
        ..Default::default()
    });
    let mut options = fake.options();
    options.keep_alive = Duration::from_millis(200);
    let device = NvmeTcpDevice::open(options).unwrap();
    until("the loss", || device.loss_count() > 0);
    read(&device, 0, 512).unwrap();
}

#[test]
fn a_peer_that_never_answers_is_given_up_within_the_connect_timeout() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let fake = Fake::start(Script::default());
    let mut options = fake.options();
    options.portals[0].port = listener.local_addr().unwrap().port();
    options.connect_timeout = Duration::from_millis(400);
    let begin = Instant::now();
    let error = NvmeTcpDevice::open(options).err().unwrap();
    assert_eq!(error.kind, ErrorKind::Timeout);
    assert!(error.to_string().contains("ICReq"), "{error}");
    // Of the other time-outs none is shorter than 5 s.
    assert!(
        (350..4500).contains(&begin.elapsed().as_millis()),
        "{:?}",
        begin.elapsed()
    );
    // Another controller's dead connect delays nobody.
    assert!(NvmeTcpDevice::open(fake.options()).is_ok());
}

#[test]
fn close_gives_what_is_queued_its_time_and_no_more() {
    let fake = Fake::start(Script {
        hook: Box::new(|qid, sqe, _| match (qid, sqe.opcode()) {
            (1, io::READ) => Action::Silent,
            _ => Action::Normal,
        }),
        ..Default::default()
    });
    let device = NvmeTcpDevice::open(fake.options()).unwrap();
    let mut pending = Vec::new();
    for _ in 0..50 {
        pending.push(submit_one(
            &*device,
            Op::Read {
                into: Buffer::zeroed(4096),
            },
            0,
        ));
    }
    let begin = Instant::now();
    device.close(Duration::from_millis(300));
    // Of the other time-outs none is shorter than 5 s.
    assert!(
        (250..4500).contains(&begin.elapsed().as_millis()),
        "{:?}",
        begin.elapsed()
    );
    for one in pending {
        let error = one.wait(Duration::from_secs(10)).unwrap().unwrap_err();
        assert_eq!(error.kind, ErrorKind::Closed);
    }
    let error = read(&device, 0, 512).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Closed);
}

#[test]
fn close_while_lost_does_not_wait_for_anybody() {
    let mut fake = Fake::start(Script::default());
    let device = NvmeTcpDevice::open(fake.options()).unwrap();
    fake.stop();
    std::thread::sleep(Duration::from_millis(50));
    let begin = Instant::now();
    device.close(Duration::from_secs(60));
    assert!(begin.elapsed() < Duration::from_secs(30), "{:?}", begin.elapsed());
}

#[test]
fn devices_come_and_go_without_leaving_anything() {
    let fake = Fake::start(Script::default());
    for _ in 0..53 {
        let device = NvmeTcpDevice::open(fake.options()).unwrap();
        read(&device, 0, 4096).unwrap();
    }
    assert_eq!(fake.shutdowns(), 53);
}

#[test]
fn the_last_reference_may_go_in_a_completion() {
    use headrace_transfer::{IoError, Request, Sink};
    use std::sync::Mutex;
    struct Holder(Mutex<Option<Arc<NvmeTcpDevice>>>, std::sync::mpsc::SyncSender<()>);
    impl Sink for Holder {
        fn complete(&self, _: u64, result: Result<(), IoError>) {
            result.unwrap();
            drop(self.0.lock().unwrap().take());
            self.1.send(()).unwrap();
        }
    }
    let fake = Fake::start(Script::default());
    let device = NvmeTcpDevice::open(fake.options()).unwrap();
    let (to, from) = std::sync::mpsc::sync_channel(1);
    let holder = Arc::new(Holder(Mutex::new(Some(device)), to));
    let request = Request {
        op: Op::Flush,
        offset: 0,
        token: 0,
        sink: holder.clone(),
    };
    let device = holder.0.lock().unwrap().clone().unwrap();
    device.submit(vec![request]);
    drop(device);
    from.recv_timeout(Duration::from_secs(5)).unwrap();
    until("the orderly end happens all the same", || fake.shutdowns() > 0);
}

/// Counts the Keep Alives of one device while others hang in every stage of their bring-up.
#[test]
fn dead_connects_of_others_delay_no_keep_alive() {
    let fake = Fake::start(Script::default());
    let mut options = fake.options();
    options.keep_alive = Duration::from_millis(100);
    let device = NvmeTcpDevice::open(options.clone()).unwrap();
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let stuck = Fake::start(Script {
        ready_after: usize::MAX,
        ..Default::default()
    });
    let mut others = Vec::new();
    for port in [
        silent.local_addr().unwrap().port(),
        stuck.port,
        silent.local_addr().unwrap().port(),
    ] {
        let mut options = options.clone();
        options.portals[0].port = port;
        options.connect_timeout = Duration::from_millis(1000);
        others.push(std::thread::spawn(move || {
            NvmeTcpDevice::open(options).err().unwrap().kind
        }));
    }
    for other in others {
        assert_eq!(other.join().unwrap(), ErrorKind::Timeout);
    }
    let sent = fake
        .seen()
        .iter()
        .filter(|s| s.qid == 0 && s.sqe.opcode() == admin::KEEP_ALIVE)
        .count();
    // Twenty where nothing else runs. Of a thread that waits for any of them not one would come.
    assert!(sent >= 5, "{sent} Keep Alives in a second");
    assert_eq!(device.loss_count(), 0);
}

#[test]
fn many_devices_and_threads_share_one_io_thread() {
    let fakes: Vec<Fake> = (0..4)
        .map(|_| {
            Fake::start(Script {
                c2h_bytes: 5000,
                ..Default::default()
            })
        })
        .collect();
    for (i, fake) in fakes.iter().enumerate() {
        fake.set_media(0, &pattern(1 << 20, i as u8));
    }
    let devices: Vec<_> = (0..24)
        .map(|i| NvmeTcpDevice::open(fakes[i % 4].options()).unwrap())
        .collect();
    std::thread::scope(|scope| {
        for worker in 0..4 {
            let devices = &devices;
            scope.spawn(move || {
                for round in 0..40u64 {
                    let at = round * 24 + worker;
                    let device = &devices[at as usize % 24];
                    let want = &pattern(1 << 20, (at % 24 % 4) as u8)[(at * 512) as usize..][..8192];
                    assert_eq!(read(device, at * 512, 8192).unwrap(), want);
                }
            });
        }
    });
}

#[test]
fn a_sink_that_panics_harms_nobody_else() {
    use headrace_transfer::{IoError, Request, Sink};
    struct Bad;
    impl Sink for Bad {
        fn complete(&self, _: u64, _: Result<(), IoError>) {
            panic!("meant by the test");
        }
    }
    let fake = Fake::start(Script::default());
    let device = NvmeTcpDevice::open(fake.options()).unwrap();
    device.submit(vec![Request {
        op: Op::Flush,
        offset: 0,
        token: 0,
        sink: Arc::new(Bad),
    }]);
    read(&device, 0, 512).unwrap();
}

#[test]
fn a_command_that_ends_every_association_is_given_up() {
    let fake = Fake::start(Script {
        hook: Box::new(|qid, sqe, _| match (qid, sqe.opcode()) {
            (1, io::WRITE) => Action::Vanish(0),
            _ => Action::Normal,
        }),
        ..Default::default()
    });
    let mut options = fake.options();
    // Longer than a busy machine needs for one association.
    options.loss_timeout = Some(Duration::from_secs(5));
    let device = NvmeTcpDevice::open(options).unwrap();
    let error = write_for(&device, Duration::from_secs(60)).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Failed);
    assert!(error.to_string().contains("the association was lost"), "{error}");
    read(&device, 0, 512).unwrap();
}

fn write_for(device: &NvmeTcpDevice, time: Duration) -> Result<(), headrace_transfer::IoError> {
    let op = Op::Write {
        from: Buffer::zeroed(512),
        fua: false,
    };
    submit_one(device, op, 0).wait(time).expect("an end")
}

//! A device against the scripted controller: bring-up, and every way that data take.

#[path = "fake/calls.rs"]
mod calls;
mod fake;

use calls::{close, flush, pattern, read, until, write};
use fake::{Action, Fake, Script, BLOCK, BLOCKS};
use headrace_host::{Command, CommandData, NamespaceKey, NvmeTcpDevice};
use headrace_transfer::{submit_one, BlockDevice, Buffer, ErrorKind, Op};
use headrace_wire::fabrics::ConnectResponse;
use headrace_wire::{admin, io, Status};
use std::time::{Duration, Instant};

#[test]
fn bring_up_is_the_specified_sequence() {
    let fake = Fake::start(Script {
        ready_after: 2,
        ..Default::default()
    });
    let device = NvmeTcpDevice::open(fake.options()).unwrap();
    let steps: Vec<(u16, u8, u8, u32)> = fake
        .seen()
        .iter()
        .map(|s| {
            let fabrics = s.sqe.opcode() == admin::FABRICS;
            let detail = if s.sqe.opcode() == admin::IDENTIFY {
                s.sqe.cdw(10)
            } else {
                s.sqe.cdw(11)
            };
            (
                s.qid,
                s.sqe.opcode(),
                if fabrics { s.sqe.fctype() } else { 0 },
                if fabrics && s.sqe.fctype() == 1 { 0 } else { detail },
            )
        })
        .collect();
    let expected = [
        (0, 0x7F, 1, 0),
        (0, 0x7F, 4, 0),
        (0, 0x7F, 4, 8),
        (0, 0x7F, 0, 0x14),
        (0, 0x7F, 4, 0x1C),
        (0, 0x7F, 4, 0x1C),
        (0, 0x7F, 4, 0x1C),
        (0, 0x06, 0, 1),
        // Three queues, one for each traffic class, of which the first is connected.
        (0, 0x09, 0, 0x2_0002),
        (0, 0x09, 0, 0x1F),
        (1, 0x7F, 1, 0),
        (0, 0x06, 0, 0),
        (0, 0x06, 0, 3),
    ];
    // Behind them come the event requests, at some time.
    assert_eq!(steps[..expected.len().min(steps.len())], expected);
    assert!(steps[expected.len()..]
        .iter()
        .all(|step| step.1 == admin::ASYNC_EVENT_REQUEST));
    // Connect of the I/O queue names the controller that the first Connect gave.
    assert_eq!(&fake.seen()[10].data[16..18], &[0x55, 0]);
    let info = device.info();
    assert_eq!(
        (info.size_bytes, info.block_bytes, info.volatile_cache),
        ((BLOCKS * BLOCK) as u64, 512, true)
    );
    let told = device.describe();
    assert_eq!(
        (told["state"].as_str(), told["model"].as_str()),
        (Some("connected"), Some("fake"))
    );
    assert_eq!(
        (told["cntlid"].as_u64(), told["depth"].as_u64()),
        (Some(0x55), Some(16))
    );
    close(&device);
    assert_eq!(fake.shutdowns(), 1);
    assert_eq!(device.describe()["state"], "closed");
    assert_eq!(read(&device, 0, 512).unwrap_err().kind, ErrorKind::Closed);
    close(&device);
}

/// Every combination of what the controller and the host choose moves the same bytes.
#[test]
fn data_survive_every_way_of_moving() {
    for (header, data) in [(false, false), (true, false), (false, true), (true, true)] {
        for success in [false, true] {
            for (c2h, r2t, maxh2c, cpda) in [
                (usize::MAX, usize::MAX, 1 << 20, 0),
                (1000, 9000, 4096, 31),
                (4096, 65536, 8192, 3),
            ] {
                let fake = Fake::start(Script {
                    c2h_bytes: c2h,
                    r2t_bytes: r2t,
                    maxh2cdata: maxh2c,
                    cpda,
                    success,
                    ..Default::default()
                });
                let mut options = fake.options();
                (options.header_digest, options.data_digest) = (header, data);
                let device = NvmeTcpDevice::open(options).unwrap();
                for (at, length) in [
                    (0, 512),
                    (4096, 4096),
                    (8192, 4608),
                    (65536, 300 * 1024),
                    (1 << 20, 3 << 20),
                ] {
                    let bytes = pattern(length, at as u8 ^ length as u8);
                    write(&device, at, &bytes).unwrap();
                    assert_eq!(&fake.media()[at as usize..][..length], bytes);
                    assert_eq!(read(&device, at, length).unwrap(), bytes);
                }
                flush(&device).unwrap();
                close(&device);
            }
        }
    }
}

#[test]
fn writes_go_in_the_capsule_up_to_ioccsz_and_then_by_r2t() {
    let fake = Fake::start(Script {
        maxh2cdata: 4096,
        ..Default::default()
    });
    let device = NvmeTcpDevice::open(fake.options()).unwrap();
    write(&device, 0, &pattern(4096, 1)).unwrap();
    write(&device, 0, &pattern(4608, 2)).unwrap();
    let seen = fake.seen();
    let writes: Vec<_> = seen
        .iter()
        .filter(|s| s.qid == 1 && s.sqe.opcode() == io::WRITE)
        .collect();
    assert_eq!((writes[0].pieces.len(), writes[0].data.len()), (0, 4096));
    assert_eq!(writes[1].pieces, [4096, 512]);
}

#[test]
fn requests_are_cut_by_mdts_and_by_the_boundary() {
    let fake = Fake::start(Script {
        mdts: 2,
        noiob: 16,
        ..Default::default()
    });
    let device = NvmeTcpDevice::open(fake.options()).unwrap();
    assert_eq!(device.info().max_transfer_bytes, 16384);
    let bytes = pattern(40 * 512, 3);
    write(&device, 8 * 512, &bytes).unwrap();
    assert_eq!(read(&device, 8 * 512, bytes.len()).unwrap(), bytes);
    let cuts: Vec<(u64, u32)> = fake
        .seen()
        .iter()
        .filter(|s| s.qid == 1 && s.sqe.opcode() == io::READ)
        .map(|s| (s.sqe.slba(), s.sqe.nlb()))
        .collect();
    assert_eq!(cuts, [(8, 8), (16, 16), (32, 16)]);
}

#[test]
fn fua_and_deallocate_reach_the_controller() {
    let fake = Fake::start(Script::default());
    let device = NvmeTcpDevice::open(fake.options()).unwrap();
    let wait = Duration::from_secs(5);
    let from = Buffer::zeroed(512);
    submit_one(&*device, Op::Write { from, fua: true }, 0)
        .wait(wait)
        .unwrap()
        .unwrap();
    submit_one(&*device, Op::Deallocate { length: 8192 }, 4096)
        .wait(wait)
        .unwrap()
        .unwrap();
    let seen = fake.seen();
    assert!(seen
        .iter()
        .any(|s| s.qid == 1 && s.sqe.opcode() == io::WRITE && s.sqe.fua()));
    let dsm = seen
        .iter()
        .find(|s| s.qid == 1 && s.sqe.opcode() == io::DATASET_MANAGEMENT)
        .unwrap();
    assert_eq!((dsm.sqe.cdw(10), dsm.sqe.cdw(11)), (0, 4));
    assert_eq!(dsm.data, [0, 0, 0, 0, 16, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn several_queues_share_the_work() {
    let fake = Fake::start(Script {
        queues: 3,
        ..Default::default()
    });
    let mut options = fake.options();
    (options.queues, options.depth) = (8, 2);
    let device = NvmeTcpDevice::open(options).unwrap();
    assert_eq!(device.describe()["queues"], 3);
    let pending: Vec<_> = (0..60)
        .map(|i| {
            submit_one(
                &*device,
                Op::Read {
                    into: Buffer::zeroed(512),
                },
                i * 512,
            )
        })
        .collect();
    for one in pending {
        one.wait(Duration::from_secs(5)).unwrap().unwrap();
    }
    // How many each gets depends on how fast it answers: one that stands still keeps what fits it, and no more.
    let reads = |qid| {
        fake.seen()
            .iter()
            .filter(|s| s.qid == qid && s.sqe.opcode() == io::READ)
            .count()
    };
    let each: Vec<usize> = (1..=3).map(reads).collect();
    assert_eq!(each.iter().sum::<usize>(), 60, "{each:?}");
    assert!(each.iter().all(|&count| count > 0), "{each:?}");
}

#[test]
fn bad_requests_are_refused_without_a_command() {
    let fake = Fake::start(Script::default());
    let device = NvmeTcpDevice::open(fake.options()).unwrap();
    let size = (BLOCKS * BLOCK) as u64;
    for (offset, length) in [
        (1, 512),
        (0, 100),
        (size, 512),
        (size - 512, 1024),
        (u64::MAX - 511, 512),
    ] {
        assert_eq!(
            read(&device, offset, length).unwrap_err().kind,
            ErrorKind::Usage,
            "{offset} {length}"
        );
    }
    assert!(read(&device, 0, 0).unwrap().is_empty());
    assert!(fake.io_commands().is_empty());
}

#[test]
fn refused_connects_name_the_field_and_the_remedy() {
    let cases = [
        (
            Status::CONNECT_INVALID_PARAMETERS,
            ConnectResponse::invalid(256, true).0,
            "SUBNQN",
        ),
        (
            Status::CONNECT_INVALID_PARAMETERS,
            ConnectResponse::invalid(512, true).0,
            "HOSTNQN",
        ),
        (
            Status::CONNECT_INVALID_PARAMETERS,
            ConnectResponse::invalid(44, false).0,
            "SQSIZE",
        ),
        (
            Status::CONNECT_INVALID_HOST,
            0,
            "allow the host name nqn.2026-01.test:host",
        ),
        (Status::AUTHENTICATION_REQUIRED, 0, "authentication"),
    ];
    for (status, dw0, says) in cases {
        let fake = Fake::start(Script {
            hook: Box::new(move |_, _, _| Action::Status(status.do_not_retry(), dw0)),
            ..Default::default()
        });
        let begin = Instant::now();
        let mut options = fake.options();
        options.connect_timeout = Duration::from_secs(60);
        let error = NvmeTcpDevice::open(options).err().unwrap();
        assert!(begin.elapsed() < Duration::from_secs(30), "it is final");
        assert_eq!(error.kind, ErrorKind::Refused);
        assert!(error.to_string().contains(says), "{error}");
        assert!(
            error.to_string().contains("nqn.2026-01.test:subsystem"),
            "{error}"
        );
    }
}

#[test]
fn a_busy_controller_is_asked_again() {
    let fake = Fake::start(Script {
        hook: Box::new(|_, _, number| {
            if number < 2 {
                Action::Status(Status::CONNECT_CONTROLLER_BUSY, 0)
            } else {
                Action::Normal
            }
        }),
        ..Default::default()
    });
    assert!(NvmeTcpDevice::open(fake.options()).is_ok());
}

#[test]
fn an_io_queue_may_be_refused_too() {
    let fake = Fake::start(Script {
        hook: Box::new(|_, sqe, _| {
            let io_connect = sqe.opcode() == admin::FABRICS && sqe.fctype() == 1 && sqe.0[42] == 1;
            let refuse = Status::CONNECT_INVALID_PARAMETERS.do_not_retry();
            if io_connect {
                Action::Status(refuse, ConnectResponse::invalid(42, false).0)
            } else {
                Action::Normal
            }
        }),
        ..Default::default()
    });
    let error = NvmeTcpDevice::open(fake.options()).err().unwrap();
    assert!(error.to_string().contains("fewer queues"), "{error}");
}

#[test]
fn wrong_ports_namespaces_and_formats_are_named() {
    let fake = Fake::start(Script::default());
    let mut options = fake.options();
    options.namespace = NamespaceKey::Nsid(2);
    let error = NvmeTcpDevice::open(options).err().unwrap();
    assert_eq!(error.kind, ErrorKind::Refused);
    assert!(error.to_string().contains("namespace 2"), "{error}");

    let mut options = fake.options();
    options.portals[0].port = fake::free_port();
    let error = NvmeTcpDevice::open(options).err().unwrap();
    assert_eq!(error.kind, ErrorKind::Refused);
    assert!(error.to_string().contains("cannot connect"), "{error}");

    let huge = Fake::start(Script {
        lbads: 20,
        ..Default::default()
    });
    let error = NvmeTcpDevice::open(huge.options()).err().unwrap();
    assert!(error.to_string().contains("2^20"), "{error}");
}

#[test]
fn bad_options_are_named() {
    let fake = Fake::start(Script::default());
    type Break = fn(&mut headrace_host::HostOptions);
    let cases: [(&str, Break); 9] = [
        ("nsid", |o| o.namespace = NamespaceKey::Nsid(0)),
        ("queues", |o| o.queues = 0),
        ("depth", |o| o.depth = 2000),
        ("subsysnqn", |o| o.subsysnqn = "n".repeat(224)),
        ("host", |o| o.portals[0].host.clear()),
        ("io_timeout", |o| o.io_timeout = Duration::ZERO),
        ("portals", |o| o.portals.clear()),
        ("portals", |o| o.portals.push(o.portals[0].clone())),
        ("port", |o| o.portals[0].port = 0),
    ];
    for (name, spoil) in cases {
        let mut options = fake.options();
        spoil(&mut options);
        let error = NvmeTcpDevice::open(options).err().unwrap();
        assert_eq!(error.kind, ErrorKind::Usage);
        assert!(error.to_string().contains(name), "{error}");
    }
    assert_eq!(fake.connections(), 0);
}

#[test]
fn names_resolve() {
    let fake = Fake::start(Script::default());
    let mut options = fake.options();
    // Both ::1 and 127.0.0.1 on many machines: the address where nobody listens is passed over.
    options.portals[0].host = "localhost".into();
    assert!(NvmeTcpDevice::open(options).is_ok());
}

#[test]
fn transient_statuses_are_tried_again_and_others_are_not() {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::Arc;
    let reads = Arc::new(AtomicUsize::new(0));
    let counted = reads.clone();
    let fake = Fake::start(Script {
        hook: Box::new(move |qid, sqe, _| match (qid, sqe.opcode()) {
            (1, io::READ) if counted.fetch_add(1, Ordering::SeqCst) < 2 => {
                Action::Status(Status::NAMESPACE_NOT_READY, 0)
            }
            (1, io::FLUSH) => Action::Status(Status::INTERNAL_ERROR, 0),
            (1, io::WRITE) => Action::Status(Status::NAMESPACE_NOT_READY.do_not_retry(), 0),
            _ => Action::Normal,
        }),
        ..Default::default()
    });
    let device = NvmeTcpDevice::open(fake.options()).unwrap();
    read(&device, 0, 512).unwrap();
    assert_eq!(reads.load(Ordering::SeqCst), 3);
    let error = flush(&device).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Failed);
    let text = error.to_string();
    assert!(
        text.contains("Flush failed") && text.contains("Internal Error"),
        "{text}"
    );
    let error = write(&device, 512 * 5, &[0; 1024]).unwrap_err().to_string();
    assert!(
        error.contains("LBA 5 to 6") && error.contains("Namespace Not Ready"),
        "{error}"
    );
    assert_eq!(
        fake.io_commands().iter().filter(|&&op| op == io::WRITE).count(),
        1
    );
    assert_eq!(device.loss_count(), 0);
}

#[test]
fn an_early_refusal_gives_the_buffer_back_only_when_its_data_are_sent() {
    let fake = Fake::start(Script {
        hook: Box::new(|qid, sqe, _| match (qid, sqe.opcode()) {
            (1, io::WRITE) => Action::RefuseEarly(Status::WRITE_FAULT.do_not_retry()),
            _ => Action::Normal,
        }),
        ..Default::default()
    });
    let mut options = fake.options();
    options.data_digest = true;
    let device = NvmeTcpDevice::open(options).unwrap();
    for _ in 0..5 {
        let error = write(&device, 0, &pattern(1 << 20, 1)).unwrap_err();
        assert!(error.to_string().contains("Write Fault"), "{error}");
    }
    // The fake checks every digest; the connection is as it was.
    read(&device, 0, 4096).unwrap();
    assert_eq!((device.loss_count(), fake.connections()), (0, 2));
}

#[test]
fn an_idle_device_keeps_alive() {
    let fake = Fake::start(Script::default());
    let mut options = fake.options();
    options.keep_alive = Duration::from_millis(400);
    let device = NvmeTcpDevice::open(options).unwrap();
    let begin = Instant::now();
    let sent = || {
        let seen = fake.seen();
        seen.iter()
            .filter(|s| s.qid == 0 && s.sqe.opcode() == admin::KEEP_ALIVE)
            .count() as u32
    };
    // Two in each interval: never more, and on a busy machine still more than one.
    until("keep alives", || sent() >= 5);
    let (count, halves) = (sent(), begin.elapsed().as_millis() as u32 / 200);
    assert!(
        (count - 1..2 * count).contains(&halves),
        "{count} Keep Alives in {halves} halves"
    );
    assert_eq!(device.loss_count(), 0);
}

/// Commands of others never take the whole admin queue.
#[test]
fn passed_through_commands_leave_room_for_keep_alive() {
    const VENDOR: u8 = 0xC0;
    let fake = Fake::start(Script {
        hook: Box::new(|_, sqe, _| match sqe.opcode() {
            VENDOR => Action::Silent,
            _ => Action::Normal,
        }),
        ..Script::default()
    });
    let mut options = fake.options();
    options.keep_alive = Duration::from_millis(200);
    let device = NvmeTcpDevice::open(options).unwrap();
    let unanswered: Vec<_> = (0..40)
        .map(|_| {
            let device = device.clone();
            std::thread::spawn(move || {
                device.command(Command {
                    admin: true,
                    opcode: VENDOR,
                    nsid: None,
                    cdw: [0; 6],
                    data: CommandData::None,
                    timeout: Duration::from_secs(60),
                })
            })
        })
        .collect();
    let seen = |opcode| fake.seen().iter().filter(|s| s.sqe.opcode() == opcode).count();
    until("the queue is as full as it gets", || seen(VENDOR) >= 15);
    let before = seen(admin::KEEP_ALIVE);
    until("Keep Alives", || seen(admin::KEEP_ALIVE) >= before + 4);
    assert_eq!(device.loss_count(), 0);
    device.close(Duration::from_millis(100));
    for one in unanswered {
        assert!(one.join().unwrap().is_err());
    }
}

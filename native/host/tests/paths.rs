//! Several paths to one namespace: what they share, and what one of them may do without the caller noticing.

#[path = "fake/calls.rs"]
mod calls;
mod fake;

use calls::{close, flush, pattern, read, until, write};
use fake::{Action, Fake, Media, Script, BLOCK, BLOCKS};
use headrace_host::{HostOptions, NvmeTcpDevice, PathState, Policy};
use headrace_transfer::{submit_one, BlockDevice, Buffer, ErrorKind, Op};
use headrace_wire::ana::{AnaGroup, AnaLog, AnaState};
use headrace_wire::event::{config, kind, notice, AsyncEvent};
use headrace_wire::identify::cmic;
use headrace_wire::log::lid;
use headrace_wire::{admin, io, Status};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Controllers over one medium, and the options of a device that uses all of them.
fn subsystem(scripts: Vec<Script>) -> (Vec<Fake>, HostOptions, Arc<Media>) {
    let media = Media::new(vec![0; BLOCKS * BLOCK]);
    let fakes: Vec<_> = scripts
        .into_iter()
        .map(|script| Fake::start_over(0, script, media.clone()))
        .collect();
    let mut options = fakes[0].options();
    options.portals = fakes
        .iter()
        .map(|fake| fake.options().portals[0].clone())
        .collect();
    (fakes, options, media)
}

fn open(options: HostOptions) -> Arc<NvmeTcpDevice> {
    let device = NvmeTcpDevice::open(options).unwrap();
    until("all paths are ready", || {
        device.paths().iter().all(|path| path.state == PathState::Ready)
    });
    device
}

fn used(fake: &Fake, opcode: u8) -> usize {
    fake.io_commands().iter().filter(|&&code| code == opcode).count()
}

#[test]
fn round_robin_uses_both_paths_alike() {
    let (fakes, mut options, _) = subsystem(vec![Script::default(), Script::default()]);
    options.policy = Policy::RoundRobin;
    let device = open(options);
    for i in 0..40 {
        write(&device, i * 4096, &pattern(4096, i as u8)).unwrap();
    }
    for i in 0..40 {
        assert_eq!(read(&device, i * 4096, 4096).unwrap(), pattern(4096, i as u8));
    }
    for fake in &fakes {
        assert_eq!((used(fake, io::WRITE), used(fake, io::READ)), (20, 20));
    }
    for path in device.paths() {
        assert_eq!((path.reads, path.writes, path.under_way), (20, 20, 0));
        assert!(path.usable && path.latency.count == 40 && path.latency.p50_s > 0.0);
    }
    close(&device);
    assert_eq!((fakes[0].shutdowns(), fakes[1].shutdowns()), (1, 1));
}

#[test]
fn a_dead_paths_commands_go_to_another() {
    // The first never answers writes, and dies with all of them under way.
    let (mut fakes, options, _) = subsystem(vec![
        Script {
            hook: Box::new(|qid, sqe, _| match (qid, sqe.opcode()) {
                (1, io::WRITE) => Action::Silent,
                _ => Action::Normal,
            }),
            ..Default::default()
        },
        Script::default(),
    ]);
    let device = open(options);
    let bytes = pattern(32 * 65536, 5);
    let mut pending = Vec::new();
    for i in 0..32 {
        let from = Buffer::from_vec(bytes[i * 65536..][..65536].to_vec());
        pending.push(submit_one(
            &*device,
            Op::Write { from, fua: false },
            i as u64 * 65536,
        ));
    }
    until("the other path did its share", || {
        used(&fakes[1], io::WRITE) >= 16
    });
    fakes[0].stop();
    for one in pending {
        one.wait(Duration::from_secs(10)).unwrap().unwrap();
    }
    assert_eq!(fakes[1].media()[..bytes.len()], bytes);
    assert_eq!(device.loss_count(), 1);
    let said = device.describe();
    assert_eq!(
        (&said["state"], &said["stalls"]),
        (&"connected".into(), &0.into())
    );
    assert!(said["counters"]["resends"].as_u64() >= Some(1), "{said}");
    let paths = device.paths();
    assert!(!paths[0].usable && paths[1].usable);
    assert!(!paths[0].why.is_empty() && paths[1].why.is_empty());
}

#[test]
fn a_flush_runs_on_every_path_that_answered_writes() {
    let (fakes, mut options, media) = subsystem(vec![Script::default(), Script::default()]);
    options.policy = Policy::RoundRobin;
    let device = open(options);
    let bytes = pattern(8 * 4096, 6);
    for i in 0..8 {
        write(&device, i * 4096, &bytes[i as usize * 4096..][..4096]).unwrap();
    }
    assert_ne!(media.durable.lock().unwrap()[..bytes.len()], bytes);
    flush(&device).unwrap();
    assert_eq!(media.durable.lock().unwrap()[..bytes.len()], bytes);
    assert_eq!((used(&fakes[0], io::FLUSH), used(&fakes[1], io::FLUSH)), (1, 1));
    // Nothing was written since: one flush, to any.
    flush(&device).unwrap();
    assert_eq!(used(&fakes[0], io::FLUSH) + used(&fakes[1], io::FLUSH), 3);
    // Only one path has anything to flush.
    write(&device, 0, &bytes[..512]).unwrap();
    flush(&device).unwrap();
    assert_eq!(used(&fakes[0], io::FLUSH) + used(&fakes[1], io::FLUSH), 4);
    // FUA needs none.
    let more = pattern(4096, 7);
    let from = Buffer::from_vec(more.clone());
    submit_one(&*device, Op::Write { from, fua: true }, 1 << 20)
        .wait(Duration::from_secs(5))
        .unwrap()
        .unwrap();
    assert_eq!(media.durable.lock().unwrap()[1 << 20..][..4096], more);
    assert_eq!(device.loss_count(), 0);
}

// ANA.

fn ana_log(state: AnaState) -> AnaLog {
    AnaLog {
        chgcnt: 1,
        groups: vec![AnaGroup {
            id: 7,
            chgcnt: 1,
            state,
            nsids: vec![],
        }],
    }
}

fn ana(state: AnaState) -> Script {
    Script {
        oaes: config::ANA,
        cmic: cmic::ANA,
        ana: ana_log(state),
        ..Default::default()
    }
}

/// The controller says so by itself, and the device has heard it.
fn change(device: &NvmeTcpDevice, fakes: &[Fake], at: usize, state: AnaState) {
    let event = AsyncEvent {
        kind: kind::NOTICE,
        info: notice::ANA,
        lid: lid::ANA,
    };
    fakes[at].set_ana(ana_log(state));
    until("a request for events", || fakes[at].raise(event));
    until("the ANA state", || device.paths()[at].ana == Some(state));
}

#[test]
fn ana_states_are_obeyed() {
    let (fakes, mut options, _) = subsystem(vec![ana(AnaState::Optimized), ana(AnaState::NonOptimized)]);
    options.policy = Policy::RoundRobin;
    let device = open(options);
    let reads = |device: &NvmeTcpDevice| {
        let before = [used(&fakes[0], io::READ), used(&fakes[1], io::READ)];
        for _ in 0..6 {
            read(device, 0, 4096).unwrap();
        }
        [
            used(&fakes[0], io::READ) - before[0],
            used(&fakes[1], io::READ) - before[1],
        ]
    };
    assert_eq!(reads(&device), [6, 0]);
    for state in [AnaState::Inaccessible, AnaState::PersistentLoss, AnaState::Change] {
        change(&device, &fakes, 0, state);
        assert_eq!(reads(&device), [0, 6]);
        let path = &device.paths()[0];
        assert!(!path.usable && path.state == PathState::Ready && path.why.contains(state.name()));
    }
    change(&device, &fakes, 0, AnaState::NonOptimized);
    assert_eq!(reads(&device), [3, 3]);
    change(&device, &fakes, 1, AnaState::Optimized);
    assert_eq!(reads(&device), [0, 6]);
    assert_eq!(device.loss_count(), 0);
}

#[test]
fn without_an_accessible_path_io_waits_and_then_fails_until_there_is_one() {
    let (fakes, mut options, _) = subsystem(vec![ana(AnaState::Optimized), ana(AnaState::Optimized)]);
    options.loss_timeout = Some(Duration::from_millis(700));
    let device = open(options);
    change(&device, &fakes, 0, AnaState::Inaccessible);
    change(&device, &fakes, 1, AnaState::Inaccessible);
    until("the stall", || device.describe()["stalled"] == true);
    let pending = submit_one(
        &*device,
        Op::Read {
            into: Buffer::zeroed(512),
        },
        0,
    );
    assert!(pending.wait(Duration::from_millis(100)).is_none());
    change(&device, &fakes, 1, AnaState::NonOptimized);
    pending.wait(Duration::from_secs(5)).unwrap().unwrap();
    change(&device, &fakes, 1, AnaState::Inaccessible);
    let error = read(&device, 0, 512).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Gone);
    assert!(error.to_string().contains("inaccessible"), "{error}");
    assert_eq!(device.describe()["state"], "failing");
    change(&device, &fakes, 0, AnaState::Optimized);
    read(&device, 0, 512).unwrap();
    assert_eq!(
        (device.loss_count(), &device.describe()["stalls"]),
        (0, &2.into())
    );
}

/// The caches of two controllers: what one holds is lost for a flush when it lets nothing in any more.
#[test]
fn a_path_that_can_not_be_flushed_moves_the_loss_counter() {
    let (fakes, options, media) = subsystem(vec![ana(AnaState::Optimized), ana(AnaState::NonOptimized)]);
    let device = open(options);
    let bytes = pattern(4096, 3);
    write(&device, 0, &bytes).unwrap();
    change(&device, &fakes, 0, AnaState::Inaccessible);
    assert_eq!(device.loss_count(), 0);
    flush(&device).unwrap();
    assert_ne!(media.durable.lock().unwrap()[..4096], bytes);
    assert_eq!(device.loss_count(), 1);
    write(&device, 0, &bytes).unwrap();
    flush(&device).unwrap();
    assert_eq!(media.durable.lock().unwrap()[..4096], bytes);
    assert_eq!(device.loss_count(), 1);
}

/// The same, told by the status of the flush.
#[test]
fn a_flush_that_its_path_refuses_moves_the_loss_counter() {
    let (fakes, mut options, media) = subsystem(vec![
        answers(io::FLUSH, Status::ANA_INACCESSIBLE.do_not_retry()),
        Script::default(),
    ]);
    options.policy = Policy::RoundRobin;
    let device = open(options);
    let bytes = pattern(8192, 3);
    write(&device, 0, &bytes[..4096]).unwrap();
    write(&device, 4096, &bytes[4096..]).unwrap();
    flush(&device).unwrap();
    assert_eq!(device.loss_count(), 1);
    assert_ne!(media.durable.lock().unwrap()[..8192], bytes);
    assert!(used(&fakes[1], io::FLUSH) >= 1);
}

/// A transient status of a flush is waited out where the writes are.
#[test]
fn a_flush_that_is_tried_again_stays_with_its_path() {
    let refused = Arc::new(AtomicBool::new(false));
    let once = refused.clone();
    let script = Script {
        hook: Box::new(move |qid, sqe, _| match (qid, sqe.opcode()) {
            (1, io::FLUSH) if !once.swap(true, Ordering::SeqCst) => Action::Status(Status::INTERRUPTED, 0),
            _ => Action::Normal,
        }),
        ..Default::default()
    };
    let (fakes, mut options, media) = subsystem(vec![script, Script::default()]);
    options.policy = Policy::RoundRobin;
    let device = open(options);
    let bytes = pattern(8192, 3);
    write(&device, 0, &bytes[..4096]).unwrap();
    write(&device, 4096, &bytes[4096..]).unwrap();
    // The next turn is the other path's.
    read(&device, 0, 512).unwrap();
    flush(&device).unwrap();
    assert!(refused.load(Ordering::SeqCst));
    assert_eq!(device.loss_count(), 0);
    assert_eq!(media.durable.lock().unwrap()[..8192], bytes);
    assert_eq!((used(&fakes[0], io::FLUSH), used(&fakes[1], io::FLUSH)), (2, 1));
}

// Statuses.

/// A controller that gives every I/O command of this kind one answer.
fn answers(opcode: u8, status: Status) -> Script {
    Script {
        hook: Box::new(move |qid, sqe, _| match qid {
            1.. if sqe.opcode() == opcode => Action::Status(status, 0),
            _ => Action::Normal,
        }),
        ..Default::default()
    }
}

#[test]
fn statuses_of_the_path_never_reach_the_caller_while_another_is_there() {
    for status in [
        Status::ANA_INACCESSIBLE,
        Status::ANA_PERSISTENT_LOSS,
        Status::ANA_TRANSITION,
        Status::INTERNAL_PATH_ERROR,
        Status::CONTROLLER_PATH_ERROR,
    ] {
        let (fakes, mut options, media) =
            subsystem(vec![answers(io::WRITE, status.do_not_retry()), Script::default()]);
        options.policy = Policy::RoundRobin;
        let device = open(options);
        let begin = Instant::now();
        for i in 0..10 {
            write(&device, i * 4096, &pattern(4096, i as u8)).unwrap();
        }
        // Long before `loss_timeout`, which is 10 s.
        assert!(begin.elapsed() < Duration::from_secs(8), "{:?}", begin.elapsed());
        for i in 0..10 {
            assert_eq!(
                media.bytes.lock().unwrap()[i * 4096..][..4096],
                pattern(4096, i as u8)
            );
        }
        let refused = used(&fakes[0], io::WRITE);
        assert!(refused >= 1);
        assert_eq!(device.paths()[0].errors, refused as u64);
        assert_eq!(device.loss_count(), 0);
    }
}

#[test]
fn with_one_path_its_statuses_are_waited_out_as_long_as_a_loss_would_be() {
    let bad = Arc::new(AtomicBool::new(true));
    let is_bad = bad.clone();
    let script = Script {
        hook: Box::new(move |qid, sqe, _| match (qid, sqe.opcode()) {
            (1, io::READ) if is_bad.load(Ordering::SeqCst) => {
                Action::Status(Status::INTERNAL_PATH_ERROR.do_not_retry(), 0)
            }
            _ => Action::Normal,
        }),
        ..Default::default()
    };
    let (_fakes, mut options, _) = subsystem(vec![script]);
    options.loss_timeout = Some(Duration::from_millis(800));
    let device = open(options);
    let error = read(&device, 0, 512).unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains("Internal Path Error") && text.contains("attempts"),
        "{text}"
    );
    assert!(text.contains("127.0.0.1:"), "{text}");
    let pending = submit_one(
        &*device,
        Op::Read {
            into: Buffer::zeroed(512),
        },
        0,
    );
    std::thread::sleep(Duration::from_millis(200));
    bad.store(false, Ordering::SeqCst);
    pending.wait(Duration::from_secs(5)).unwrap().unwrap();
}

// Loss.

/// What "When is it durable" (ARCHITECTURE.md) asks of a writer: the same bytes again whenever the counter moved.
#[test]
fn the_loss_counter_guards_writes_that_two_volatile_caches_answered() {
    let (mut fakes, mut options, media) = subsystem(vec![Script::default(), Script::default()]);
    options.policy = Policy::RoundRobin;
    let device = open(options);
    let bytes = pattern(16 * 4096, 8);
    let all = |device: &NvmeTcpDevice| {
        for i in 0..16 {
            write(device, i * 4096, &bytes[i as usize * 4096..][..4096]).unwrap();
        }
    };
    let before = device.loss_count();
    all(&device);
    // A controller goes, with what it had answered and not flushed.
    fakes[0].stop();
    flush(&device).unwrap();
    assert_ne!(media.durable.lock().unwrap()[..bytes.len()], bytes);
    let after = device.loss_count();
    assert_eq!(after, before + 1);
    all(&device);
    flush(&device).unwrap();
    assert_eq!(device.loss_count(), after);
    assert_eq!(media.durable.lock().unwrap()[..bytes.len()], bytes);
    // The other one, too: the counter is the sum.
    fakes[1].stop();
    until("both are lost", || device.loss_count() == after + 1);
    let losses: Vec<u64> = device.paths().iter().map(|path| path.losses).collect();
    assert_eq!(losses, [1, 1]);
}

#[test]
fn with_no_end_io_waits_and_the_stall_can_be_seen() {
    let (mut fakes, mut options, media) = subsystem(vec![Script::default()]);
    options.loss_timeout = None;
    let device = open(options);
    fakes[0].stop();
    let pending = submit_one(
        &*device,
        Op::Read {
            into: Buffer::zeroed(512),
        },
        0,
    );
    until("the stall", || {
        device.describe()["stalled_s"].as_f64() > Some(0.3)
    });
    assert!(pending.wait(Duration::from_millis(100)).is_none());
    let said = device.describe();
    assert_eq!(
        (&said["state"], &said["stalled"], &said["stalls"]),
        (&"lost".into(), &true.into(), &1.into())
    );
    let _back = Fake::start_over(fakes[0].port, Script::default(), media);
    pending.wait(Duration::from_secs(10)).unwrap().unwrap();
    assert_eq!(device.describe()["stalled"], false);
}

// Coming up, and not.

#[test]
fn a_path_that_flaps_is_held_back_while_another_is_there() {
    let flapping = Script {
        hook: Box::new(|qid, sqe, _| match (qid, sqe.opcode()) {
            (1, io::READ) => Action::Vanish(0),
            _ => Action::Normal,
        }),
        ..Default::default()
    };
    let (mut fakes, mut options, _) = subsystem(vec![flapping, Script::default()]);
    options.policy = Policy::RoundRobin;
    let device = open(options);
    until("the path is held back", || {
        read(&device, 0, 512).unwrap();
        device.paths()[0].state == PathState::HeldBack
    });
    let path = &device.paths()[0];
    assert!(path.why.contains("3 times") && path.losses == 3, "{path:?}");
    let (connections, loss) = (fakes[0].connections(), device.loss_count());
    std::thread::sleep(Duration::from_millis(600));
    read(&device, 0, 512).unwrap();
    assert_eq!((fakes[0].connections(), device.loss_count()), (connections, loss));
    // Nothing else is left: it is better than nothing, before the 5 s that it was held back for are over.
    let begin = Instant::now();
    fakes[1].stop();
    until("the path is back", || device.paths()[0].state == PathState::Ready);
    assert!(begin.elapsed() < Duration::from_secs(4), "{:?}", begin.elapsed());
    write(&device, 0, &[1; 512]).unwrap();
}

#[test]
fn a_host_that_is_not_wanted_stops_asking_until_it_is_told_to() {
    let refuse = Arc::new(AtomicBool::new(false));
    let scripts = (0..2).map(|_| {
        let refused = refuse.clone();
        Script {
            hook: Box::new(move |qid, sqe, _| {
                let connect = qid == 0 && sqe.opcode() == admin::FABRICS && sqe.fctype() == 1;
                if !refused.load(Ordering::SeqCst) {
                    Action::Normal
                } else if connect {
                    Action::Status(Status::CONNECT_INVALID_HOST.do_not_retry(), 0)
                } else {
                    Action::Vanish(0)
                }
            }),
            ..Default::default()
        }
    });
    let (fakes, options, _) = subsystem(scripts.collect());
    let device = open(options);
    refuse.store(true, Ordering::SeqCst);
    let begin = Instant::now();
    let error = write(&device, 0, &[1; 512]).unwrap_err();
    // Long before `loss_timeout`, which is 10 s.
    assert!(begin.elapsed() < Duration::from_secs(8), "{:?}", begin.elapsed());
    assert_eq!(error.kind, ErrorKind::Gone);
    let text = error.to_string();
    assert!(
        text.contains("Connect Invalid Host") && text.contains("no path"),
        "{text}"
    );
    assert!(device.paths().iter().all(|path| path.state == PathState::Refused));
    let connections = fakes[0].connections();
    std::thread::sleep(Duration::from_millis(700));
    assert_eq!(fakes[0].connections(), connections);
    refuse.store(false, Ordering::SeqCst);
    device.reconnect();
    until("the device is back", || device.describe()["state"] == "connected");
    write(&device, 0, &[1; 512]).unwrap();
}

#[test]
fn a_portal_of_another_namespace_is_never_used() {
    let (fakes, mut options, _) = subsystem(vec![
        Script::default(),
        Script {
            uuid: [8; 16],
            ..Default::default()
        },
    ]);
    // The first to come up says which one it is.
    let other = options.portals.pop().unwrap();
    let device = open(options.clone());
    drop(device);
    options.portals.push(other);
    let device = NvmeTcpDevice::open(options).unwrap();
    until("one is refused", || {
        device.paths().iter().any(|path| path.state == PathState::Refused)
    });
    let refused = device
        .paths()
        .iter()
        .position(|p| p.state == PathState::Refused)
        .unwrap();
    let why = device.paths()[refused].why.clone();
    assert!(why.contains("another namespace") && why.contains("0808"), "{why}");
    for _ in 0..10 {
        read(&device, 0, 512).unwrap();
    }
    assert_eq!(used(&fakes[refused], io::READ), 0);
    assert_eq!(device.describe()["state"], "connected");
}

#[test]
fn the_first_path_that_is_ready_opens_the_device() {
    let (mut fakes, options, media) = subsystem(vec![Script::default(), Script::default()]);
    fakes[0].stop();
    let device = NvmeTcpDevice::open(options.clone()).unwrap();
    read(&device, 0, 512).unwrap();
    let path = device.paths()[0].clone();
    assert!(!path.usable && path.why.contains("cannot connect"), "{path:?}");
    let _back = Fake::start_over(fakes[0].port, Script::default(), media);
    until("both are ready", || device.paths().iter().all(|path| path.usable));
    assert_eq!(device.describe()["stalls"], 0);
    fakes[1].stop();
    read(&device, 0, 512).unwrap();
}

#[test]
fn without_any_path_the_error_names_each() {
    let (mut fakes, options, _) = subsystem(vec![Script::default(), Script::default()]);
    fakes.iter_mut().for_each(Fake::stop);
    let error = NvmeTcpDevice::open(options.clone()).err().unwrap();
    assert_eq!(error.kind, ErrorKind::Refused);
    let text = error.to_string();
    for portal in options.portals {
        assert!(error.found.contains(&portal.to_string()), "{text}");
    }
}

#[test]
fn the_slow_path_gets_the_smaller_share() {
    let slow = Script {
        hook: Box::new(|qid, sqe, _| match (qid, sqe.opcode()) {
            // So long that a busy machine is no slower by the other path.
            (1, io::READ) => Action::Late(Duration::from_millis(250)),
            _ => Action::Normal,
        }),
        ..Default::default()
    };
    let (fakes, options, _) = subsystem(vec![slow, Script::default()]);
    let device = open(options);
    let mut pending = std::collections::VecDeque::new();
    for i in 0..200u64 {
        let into = Buffer::zeroed(4096);
        pending.push_back(submit_one(&*device, Op::Read { into }, i * 4096));
        if pending.len() == 4 {
            pending
                .pop_front()
                .unwrap()
                .wait(Duration::from_secs(10))
                .unwrap()
                .unwrap();
        }
    }
    for one in pending {
        one.wait(Duration::from_secs(10)).unwrap().unwrap();
    }
    let (slow, fast) = (used(&fakes[0], io::READ), used(&fakes[1], io::READ));
    assert!(
        slow >= 1 && slow * 4 < fast,
        "{slow} on the slow path, {fast} on the fast one"
    );
}

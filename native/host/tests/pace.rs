//! A path that is slow beside another one: it is seen, named and left alone, and comes back when it is not slow any more.

#[path = "fake/calls.rs"]
mod calls;
mod fake;

use calls::{close, pattern, read, until, write};
use fake::{Action, Fake, Media, Script, BLOCK, BLOCKS};
use headrace_host::{NvmeTcpDevice, PathState, Policy};
use headrace_transfer::{submit_one, BlockDevice, Buffer, Op};
use headrace_wire::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Two controllers over one medium, in turns; what the first does with these commands while `on`.
fn two(opcode: u8, action: fn() -> Action, on: &Arc<AtomicBool>) -> (Vec<Fake>, Arc<NvmeTcpDevice>) {
    let media = Media::new(vec![0; BLOCKS * BLOCK]);
    let on = on.clone();
    let odd = Script {
        hook: Box::new(move |qid, sqe, _| match (qid, sqe.opcode()) {
            (1, found) if found == opcode && on.load(Ordering::SeqCst) => action(),
            _ => Action::Normal,
        }),
        ..Default::default()
    };
    let fakes: Vec<_> = [odd, Script::default()]
        .into_iter()
        .map(|script| Fake::start_over(0, script, media.clone()))
        .collect();
    let mut options = fakes[0].options();
    options.portals = fakes
        .iter()
        .map(|fake| fake.options().portals[0].clone())
        .collect();
    options.policy = Policy::RoundRobin;
    options.io_timeout = Duration::from_secs(60);
    options.keep_alive = Duration::from_secs(60);
    let device = NvmeTcpDevice::open(options).unwrap();
    until("both paths", || {
        device.paths().iter().all(|path| path.state == PathState::Ready)
    });
    (fakes, device)
}

fn reads(fake: &Fake) -> usize {
    fake.io_commands()
        .iter()
        .filter(|&&code| code == io::READ)
        .count()
}

/// No path is slow for what took less. What takes more may have waited for a core: the machine may be busy.
const QUICK: Duration = Duration::from_millis(20);

/// How long the longest of these took.
fn longest(count: usize, look: impl Fn()) -> Duration {
    let took = (0..count).map(|_| {
        let begun = Instant::now();
        look();
        begun.elapsed()
    });
    took.max().unwrap_or_default()
}

#[test]
fn a_path_whose_answers_are_late_is_left_alone_until_they_are_in_time() {
    let on = Arc::new(AtomicBool::new(false));
    let (fakes, device) = two(io::READ, || Action::Late(Duration::from_millis(300)), &on);
    let bytes = pattern(4096, 3);
    write(&device, 0, &bytes).unwrap();
    let look = || assert_eq!(read(&device, 0, 4096).unwrap(), bytes);
    let first = longest(8, look);
    let before: Vec<_> = fakes.iter().map(reads).collect();
    if first.max(longest(8, look)) < QUICK {
        assert_eq!(
            fakes
                .iter()
                .map(reads)
                .zip(before)
                .map(|(now, then)| now - then)
                .max(),
            Some(4)
        );
        assert!(device
            .paths()
            .iter()
            .all(|path| !path.slow && path.slow_times == 0));
    }

    on.store(true, Ordering::SeqCst);
    until("it is slow", || {
        look();
        device.paths()[0].slow
    });
    let (before, begun) = (reads(&fakes[0]), Instant::now());
    (0..40).for_each(|_| look());
    // In turns it would be 20. Now and then it is tried.
    let tried = (reads(&fakes[0]) - before) as u64;
    assert!(tried <= 1 + begun.elapsed().as_secs(), "{tried} of 40");
    let path = &device.paths()[0];
    assert!(path.usable && path.slow_times >= 1, "{path:?}");
    assert!(!device.paths()[1].slow);

    on.store(false, Ordering::SeqCst);
    until("it is used again", || {
        look();
        !device.paths()[0].slow
    });
    close(&device);
}

#[test]
fn a_path_with_a_command_that_is_not_answered_gets_no_others_and_says_which() {
    let on = Arc::new(AtomicBool::new(true));
    let (mut fakes, device) = two(io::WRITE, || Action::Silent, &on);
    // In turns: the next one goes the first way, and stays there. A write is not sent twice.
    let from = Buffer::zeroed(4096);
    let stuck = submit_one(&*device, Op::Write { from, fua: false }, 64 * 4096);
    until("it was sent", || {
        device.under_way(0..u64::MAX).unwrap().len() == 1
    });
    let waits = || device.under_way(64 * 4096..64 * 4096 + 1).unwrap().pop().unwrap();
    let portal = device.paths()[0].portal.clone();
    assert_eq!(
        (
            waits().portal,
            waits().reads,
            waits().offset,
            waits().length,
            waits().sent
        ),
        (Some(portal), false, 64 * 4096, 4096, 1)
    );
    assert!(device.under_way(0..64 * 4096).unwrap().is_empty());
    until("it waits for long", || waits().age > Duration::from_millis(1100));
    let before = reads(&fakes[0]);
    for _ in 0..20 {
        assert_eq!(read(&device, 0, 4096).unwrap(), vec![0; 4096]);
    }
    assert_eq!(reads(&fakes[0]), before);
    assert!(device.paths()[0].slow && device.paths()[0].usable);
    fakes[0].stop();
    stuck.wait(Duration::from_secs(20)).unwrap().unwrap();
    assert!(device.under_way(0..u64::MAX).unwrap().is_empty());
    close(&device);
}

#[test]
fn reads_that_wait_on_a_frozen_path_are_sent_by_the_other_and_late_answers_touch_nothing() {
    const LATE: Duration = Duration::from_millis(700);
    let on = Arc::new(AtomicBool::new(false));
    let (fakes, device) = two(io::READ, || Action::Late(LATE), &on);
    let bytes = pattern(8 * 4096, 3);
    write(&device, 0, &bytes).unwrap();
    let look = || assert_eq!(read(&device, 0, 4096).unwrap(), bytes[..4096]);
    let in_turns = longest(8, look) < QUICK;
    on.store(true, Ordering::SeqCst);
    // In turns: half of them go the first way, which answers one after another.
    let into: Vec<_> = (0..8).map(|_| Buffer::zeroed(4096)).collect();
    let submit = |at: usize| {
        let into = into[at].clone();
        submit_one(&*device, Op::Read { into }, at as u64 * 4096)
    };
    let begun = Instant::now();
    let waits: Vec<_> = (0..8).map(submit).collect();
    for wait in waits {
        wait.wait(Duration::from_secs(20)).unwrap().unwrap();
    }
    let first = &device.paths()[0];
    // Nobody looked too late: the machine may be busy.
    if in_turns && begun.elapsed() < LATE {
        assert_eq!(
            (first.under_way, first.slow, first.usable),
            (4, true, true),
            "{first:?}"
        );
        assert_eq!(reads(&fakes[1]), 4 + 4 + 4);
    }
    assert!(device.under_way(0..u64::MAX).unwrap().is_empty());
    for (at, into) in into.iter().enumerate() {
        let mut found = vec![0; 4096];
        into.copy_to(0, &mut found);
        assert_eq!(found, bytes[at * 4096..][..4096]);
        // The caller goes on with its memory.
        into.copy_from(0, &[0xee; 4096]);
    }
    until("all is answered", || device.paths()[0].under_way == 0);
    for into in into {
        let mut found = vec![0; 4096];
        into.copy_to(0, &mut found);
        assert_eq!(found, [0xee; 4096]);
    }
    let said = device.describe();
    assert!(said["counters"]["resends"].as_u64() >= Some(1), "{said}");
    on.store(false, Ordering::SeqCst);
    until("it is used again", || {
        look();
        !device.paths()[0].slow
    });
    close(&device);
}

#[test]
fn a_flush_that_takes_long_says_nothing_of_its_path() {
    let on = Arc::new(AtomicBool::new(true));
    let (_fakes, device) = two(io::FLUSH, || Action::Late(Duration::from_millis(400)), &on);
    let bytes = pattern(4096, 3);
    // In turns: both have something to flush, and of both it is known how quick they are.
    (0..2).for_each(|at| write(&device, at * 4096, &bytes).unwrap());
    let look = || assert_eq!(read(&device, 0, 4096).unwrap(), bytes);
    let first = longest(4, look);
    let slow_times = || {
        device
            .paths()
            .iter()
            .map(|path| path.slow_times)
            .collect::<Vec<_>>()
    };
    let before = slow_times();
    let flush = submit_one(&*device, Op::Flush, 0);
    std::thread::sleep(Duration::from_millis(300));
    let quick = first.max(longest(1, look)) < QUICK;
    flush.wait(Duration::from_secs(20)).unwrap().unwrap();
    if quick {
        assert_eq!(slow_times(), before);
    }
    close(&device);
}

//! Several paths to one namespace: what they share, and what one of them may do without the caller noticing.

#[path = "fake/calls.rs"]
mod calls;
mod fake;

use calls::{close, flush, pattern, read, until, write};
use fake::{Action, Fake, Media, Script, BLOCK, BLOCKS};
use headrace_host::{HostOptions, NvmeTcpDevice, PathState, Policy};
use headrace_transfer::{submit_one, BlockDevice, Buffer, Op};
use headrace_wire::io;
use std::sync::Arc;
use std::time::Duration;

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

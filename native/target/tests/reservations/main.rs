//! Reservations over the wire: what a host that was shut out can still do, which is nothing.

#[path = "../common/mod.rs"]
mod common;
mod offers;

use common::{config, eventually, pattern, start, Client, HOST, NQN};
use headrace_target::{Target, TargetConfig};
use headrace_wire::command::{admin, feature, io};
use headrace_wire::fabrics::CNTLID_DYNAMIC;
use headrace_wire::log::{get_log_page, lid};
use headrace_wire::pdu::{Digests, Pdu};
use headrace_wire::reservation::{
    report_command, AcquireAction, Change, Notification, RegisterAction, ReleaseAction, Report,
    ReservationType,
};
use headrace_wire::{Sgl, Sqe, Status};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

const BLOCK: u32 = 4096;
const REGISTRANTS: ReservationType = ReservationType::WriteExclusiveRegistrants;
const CONFLICT: Status = Status::RESERVATION_CONFLICT.do_not_retry();
const ABORTED: Status = Status::PREEMPT_ABORT.do_not_retry();

/// One host identifier's association: an admin queue and one I/O queue.
struct Host {
    admin: Client,
    queue: Client,
    cntlid: u16,
    number: u8,
}

fn queue(address: SocketAddr, number: u8, qid: u16, cntlid: u16, digests: Digests) -> (Client, u16) {
    let mut client = Client::open(address);
    client.initialise(digests, 0);
    let cqe = client.connect(qid, cntlid, |_, data| data.hostid = [number; 16]);
    assert!(cqe.status.is_success(), "{}", cqe.status);
    (client, cqe.dw0 as u16)
}

impl Host {
    fn connect(address: SocketAddr, number: u8) -> Host {
        Self::with(address, number, Digests::default())
    }

    fn with(address: SocketAddr, number: u8, digests: Digests) -> Host {
        let (mut admin, cntlid) = queue(address, number, 0, CNTLID_DYNAMIC, Digests::default());
        admin.enable();
        let (queue, _) = queue(address, number, 1, cntlid, digests);
        Host {
            admin,
            queue,
            cntlid,
            number,
        }
    }

    fn key(&self) -> u64 {
        0x100 + u64::from(self.number)
    }

    fn change(&mut self, change: Change) -> Status {
        let cid = self.queue.cid();
        let (sqe, data) = change.command(cid, 1);
        // In the capsule and pulled in turn.
        if cid % 2 == 0 {
            let length = data.len() as u32;
            let sqe = sqe.with_sgl(Sgl::InCapsule { offset: 0, length });
            return self.queue.command(sqe, &data).cqe.status;
        }
        self.queue.send_capsule(sqe, &[]);
        let r2t = self.queue.r2t();
        self.queue.send_data(&r2t, &data, 5);
        self.queue.answer(cid).cqe.status
    }

    fn register(&mut self, persist: Option<bool>) -> Status {
        let new_key = self.key();
        self.change(Change::Register {
            action: RegisterAction::Register,
            ignore_existing: false,
            persist,
            key: 0,
            new_key,
        })
    }

    fn acquire(&mut self, action: AcquireAction, kind: ReservationType, victim: u64) -> Status {
        let key = self.key();
        self.change(Change::Acquire {
            action,
            kind,
            key,
            victim,
        })
    }

    /// Registered, and holding.
    fn hold(&mut self, kind: ReservationType) {
        assert!(self.register(None).is_success());
        assert!(self.acquire(AcquireAction::Acquire, kind, 0).is_success());
    }

    fn report_in(&mut self, extended: bool, length: u32) -> Result<Vec<u8>, Status> {
        let cid = self.queue.cid();
        let answer = self.queue.command(report_command(cid, 1, extended, length), &[]);
        if answer.cqe.status.is_success() {
            Ok(answer.data)
        } else {
            Err(answer.cqe.status)
        }
    }

    fn report(&mut self) -> Report {
        Report::decode(&self.report_in(true, 4096).unwrap(), true).unwrap()
    }

    fn read(&mut self, slba: u64, blocks: u32) -> Vec<u8> {
        let answer = self.queue.read(slba, blocks, BLOCK);
        assert!(answer.cqe.status.is_success(), "{}", answer.cqe.status);
        answer.data
    }
}

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("headrace-resv-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn file_config(folder: &Path, extra: &str) -> TargetConfig {
    let path = folder.join("media");
    TargetConfig::from_json(&format!(
        r#"{{"subsystems": [{{"nqn": "{NQN}", "namespaces": [{{"nsid": 1, {extra}
            "media": {{"kind": "file", "path": {path:?}, "size_bytes": 67108864, "create": true}}}}]}}]}}"#
    ))
    .unwrap()
}

/// A writer that has its R2T and sends nothing is preempted; then its data come, whole or the second half of them.
#[test]
fn data_that_come_after_a_preempt_go_nowhere() {
    let folder = Folder::new("late");
    let with_digest = Digests {
        header: true,
        data: true,
    };
    let cases = [
        ("memory", start(""), Digests::default()),
        ("memory with digests", start(""), with_digest),
        (
            "file",
            Target::start(file_config(&folder.0, "")).unwrap(),
            Digests::default(),
        ),
    ];
    for (name, target, digests) in &cases {
        let address = target.addresses()[0];
        let old = pattern(16 * BLOCK as usize, 1);
        let new = pattern(16 * BLOCK as usize, 2);
        for (round, action) in [AcquireAction::Preempt, AcquireAction::PreemptAndAbort]
            .into_iter()
            .enumerate()
        {
            let (zombie_number, taker_number) = (2 * round as u8 + 1, 2 * round as u8 + 2);
            let mut zombie = Host::with(address, zombie_number, *digests);
            if round == 0 {
                zombie.hold(REGISTRANTS);
            } else {
                // It is the predecessor's now.
                assert!(zombie.register(None).is_success());
                let victim = 0x100 + u64::from(zombie_number) - 1;
                assert!(zombie
                    .acquire(AcquireAction::Preempt, REGISTRANTS, victim)
                    .is_success());
            }
            assert!(zombie.queue.write(0, &old, BLOCK, 1 << 20).status.is_success());
            // One write has sent nothing, one has sent half, when the preempt comes.
            let (none, half) = (
                zombie.queue.write_sqe(0, 8, BLOCK),
                zombie.queue.write_sqe(8, 8, BLOCK),
            );
            zombie.queue.send_capsule(none, &[]);
            let none = zombie.queue.r2t();
            zombie.queue.send_capsule(half, &[]);
            let half = zombie.queue.r2t();
            let split = 4 * BLOCK as usize;
            let part = |r2t: &headrace_wire::pdu::R2t, at: usize, bytes: &[u8], last| {
                Pdu::H2cData(headrace_wire::pdu::DataHeader {
                    cccid: r2t.cccid,
                    ttag: r2t.ttag,
                    datao: at as u32,
                    datal: bytes.len() as u32,
                    last,
                    success: false,
                })
            };
            let (begin, end) = (&new[8 * BLOCK as usize..][..split], &new[12 * BLOCK as usize..]);
            zombie.queue.send_pdu(&part(&half, 0, begin, false), begin);
            // A command of its own behind it, so that the half is in for certain.
            let cid = zombie.queue.cid();
            zombie.queue.send_capsule(
                Sqe::rw(io::READ, cid, 1, 0, 1).with_sgl(Sgl::Transport { length: BLOCK }),
                &[],
            );
            assert!(zombie.queue.answer(cid).cqe.status.is_success());

            let mut taker = Host::connect(address, taker_number);
            assert!(taker.register(None).is_success());
            let victim = zombie.key();
            assert!(taker.acquire(action, REGISTRANTS, victim).is_success());
            let before = taker.read(0, 16);

            let first = &new[..8 * BLOCK as usize];
            zombie.queue.send_data(&none, first, 10_000);
            let expected = if action == AcquireAction::Preempt {
                CONFLICT
            } else {
                ABORTED
            };
            assert_eq!(zombie.queue.answer(none.cccid).cqe.status, expected, "{name}");
            zombie.queue.send_pdu(&part(&half, split, end, true), end);
            assert_eq!(zombie.queue.answer(half.cccid).cqe.status, expected, "{name}");
            assert!(
                taker.read(0, 16) == before,
                "{name}: {action:?}: late data landed"
            );
            assert!(before[12 * BLOCK as usize..] == old[12 * BLOCK as usize..]);
            // New ones are refused before their data move.
            let late = zombie.queue.write_sqe(0, 8, BLOCK);
            assert_eq!(zombie.queue.command(late, &[]).cqe.status, CONFLICT);
            let cid = zombie.queue.cid();
            assert_eq!(
                zombie.queue.command(Sqe::new(io::FLUSH, cid, 1), &[]).cqe.status,
                CONFLICT
            );
            // Reading goes on.
            zombie.read(0, 16);
            drop(zombie);
            let _ = taker.cntlid;
            drop(taker);
        }
        let status = target.status();
        assert!(
            status["subsystems"][0]["namespaces"][0]["conflicts"]
                .as_u64()
                .unwrap()
                > 0
        );
    }
}

/// Writers that never pause are preempted; from the answer on not one block changes.
#[test]
fn nothing_moves_after_the_answer() {
    let folder = Folder::new("stream");
    let memory = Target::start(config(r#""reactor_threads": 2"#)).unwrap();
    let file = Target::start(file_config(&folder.0, "")).unwrap();
    for (name, target) in [("memory", memory), ("file", file)] {
        let address = target.addresses()[0];
        let mut taker = Host::connect(address, 100);
        assert!(taker.register(None).is_success());
        let refused = Arc::new(AtomicU64::new(0));
        for round in 0..12u8 {
            let number = 101 + round;
            let mut victim = Host::connect(address, number);
            assert!(victim.register(None).is_success());
            if round == 0 {
                assert!(victim
                    .acquire(AcquireAction::Acquire, REGISTRANTS, 0)
                    .is_success());
            }
            let stop = Arc::new(AtomicBool::new(false));
            let written = Arc::new(AtomicU64::new(0));
            let (stopped, counted, refusals) = (stop.clone(), written.clone(), refused.clone());
            let writer = std::thread::spawn(move || {
                let mut n = 0u64;
                let mut ended = false;
                while !stopped.load(Ordering::Relaxed) {
                    // Several under way at once, of many blocks.
                    let sqes: Vec<Sqe> = (0..4)
                        .map(|k| victim.queue.write_sqe(k * 32, 32, BLOCK))
                        .collect();
                    for sqe in &sqes {
                        victim.queue.send_capsule(*sqe, &[]);
                    }
                    let data = vec![n as u8; 32 * BLOCK as usize];
                    let mut open = sqes.len();
                    // Those of one turn are at the media together, and answered in any order.
                    let before = ended;
                    while open > 0 {
                        match victim.queue.receive().unwrap().pdu {
                            Pdu::R2t(r2t) => victim.queue.send_data(&r2t, &data, 50_000),
                            Pdu::CapsuleResp(cqe) if cqe.status.is_success() => {
                                assert!(!before, "a write was accepted after one was refused");
                                counted.fetch_add(1, Ordering::Relaxed);
                                open -= 1;
                            }
                            Pdu::CapsuleResp(cqe) => {
                                assert!(cqe.status == CONFLICT || cqe.status == ABORTED, "{}", cqe.status);
                                refusals.fetch_add(1, Ordering::Relaxed);
                                ended = true;
                                open -= 1;
                            }
                            other => panic!("unexpected {other:?}"),
                        }
                    }
                    n += 1;
                }
            });
            eventually("the victim does not write", || {
                written.load(Ordering::Relaxed) > 8
            });
            let victim_key = 0x100 + u64::from(number);
            // The first one holds; of the others the registration goes and the taker's reservation stays.
            assert!(taker
                .acquire(AcquireAction::PreemptAndAbort, REGISTRANTS, victim_key)
                .is_success());
            let before = taker.read(0, 128);
            let so_far = refused.load(Ordering::Relaxed);
            eventually("nothing was refused", || {
                refused.load(Ordering::Relaxed) > so_far + 8
            });
            assert!(
                taker.read(0, 128) == before,
                "{name}, round {round}: a write landed after the answer"
            );
            stop.store(true, Ordering::Relaxed);
            writer.join().unwrap();
        }
        assert_eq!(target.status()["totals"]["panics"], 0);
    }
}

#[test]
fn report_in_every_length() {
    let target = start("");
    let address = target.addresses()[0];
    let mut first = Host::connect(address, 1);
    first.hold(ReservationType::ExclusiveAccessRegistrants);
    // A second controller of the same host shares the registration.
    let mut again = Host::connect(address, 1);
    assert!(again
        .queue
        .write_in_capsule(0, &pattern(4096, 5), BLOCK)
        .status
        .is_success());
    let mut other = Host::connect(address, 2);
    assert_eq!(other.queue.read(0, 1, BLOCK).cqe.status, CONFLICT);
    assert!(other.register(None).is_success());
    let report = again.report();
    assert_eq!(
        (
            report.generation,
            report.rtype,
            report.registered,
            report.persistent
        ),
        (2, 4, 2, false)
    );
    let found: Vec<_> = report
        .registrants
        .iter()
        .map(|r| (r.cntlid, r.holds, r.hostid, r.key))
        .collect();
    assert_eq!(
        found,
        [(0xFFFF, true, [1; 16], 0x101), (0xFFFF, false, [2; 16], 0x102)]
    );
    let whole = first.report_in(true, 4096).unwrap();
    for length in [4, 24, 64, 68, 192, 1 << 20] {
        let piece = first.report_in(true, length).unwrap();
        let common = piece.len().min(whole.len());
        assert_eq!(piece.len(), length as usize);
        assert!(piece[..common] == whole[..common] && piece[common..].iter().all(|&b| b == 0));
    }
    assert_eq!(
        first.report_in(false, 4096).unwrap_err(),
        Status::HOST_ID_INCONSISTENT.do_not_retry()
    );
    assert_eq!(
        first.report_in(true, (1 << 20) + 4).unwrap_err(),
        Status::INVALID_FIELD.do_not_retry()
    );
}

#[test]
fn what_linux_sends() {
    let target = start("");
    let mut host = Host::connect(target.addresses()[0], 1);
    host.hold(REGISTRANTS);
    // 16 bytes with a Release.
    let cid = host.queue.cid();
    let change = Change::Release {
        action: ReleaseAction::Release,
        kind: Some(REGISTRANTS),
        key: host.key(),
    };
    let (sqe, mut data) = change.command(cid, 1);
    data.resize(16, 0);
    let sqe = sqe.with_sgl(Sgl::InCapsule {
        offset: 0,
        length: 16,
    });
    assert!(host.queue.command(sqe, &data).cqe.status.is_success());
    assert_eq!(host.report().rtype, 0);
    // Too few, and reserved values.
    let (sqe, data) = change.command(host.queue.cid(), 1);
    let sqe = sqe.with_sgl(Sgl::InCapsule { offset: 0, length: 4 });
    let status = host.queue.command(sqe, &data[..4]).cqe.status;
    assert_eq!(status, Status::SGL_DATA_LENGTH.do_not_retry());
    let sqe = Sqe::new(io::RESERVATION_ACQUIRE, host.queue.cid(), 1)
        .with_cdw(10, 7)
        .with_sgl(Sgl::InCapsule {
            offset: 0,
            length: 16,
        });
    let status = host.queue.command(sqe, &[0; 16]).cqe.status;
    assert_eq!(status, Status::INVALID_FIELD.do_not_retry());
}

fn log_page(client: &mut Client) -> Notification {
    let cid = client.cid();
    let answer = client.command(get_log_page(cid, 0, lid::RESERVATION, 0, 64), &[]);
    Notification::decode(&answer.data).unwrap()
}

#[test]
fn others_are_told() {
    let target = start("");
    let address = target.addresses()[0];
    let mut victim = Host::connect(address, 1);
    victim.hold(ReservationType::WriteExclusive);
    let mut watcher = Host::connect(address, 3);
    assert!(watcher.register(None).is_success());
    let mut taker = Host::connect(address, 2);
    assert!(taker.register(None).is_success());
    assert_eq!(log_page(&mut victim.admin), Notification::default());
    let event = |client: &mut Client| {
        let cid = client.cid();
        client.send_capsule(Sqe::new(admin::ASYNC_EVENT_REQUEST, cid, 0), &[]);
        cid
    };
    let held = event(&mut victim.admin);
    let other = event(&mut watcher.admin);
    let key = victim.key();
    assert!(taker
        .acquire(AcquireAction::Preempt, REGISTRANTS, key)
        .is_success());
    // Type 6, log page 80h.
    assert_eq!(victim.admin.answer(held).cqe.dw0, 0x80_0006);
    assert_eq!(watcher.admin.answer(other).cqe.dw0, 0x80_0006);
    let told = |count, kind, further| Notification {
        count,
        kind,
        further,
        nsid: 1,
    };
    assert_eq!(log_page(&mut victim.admin), told(1, 1, 0));
    assert_eq!(log_page(&mut victim.admin), Notification::default());
    assert_eq!(log_page(&mut watcher.admin), told(1, 2, 0));
    // The one who did it is not told.
    assert_eq!(log_page(&mut taker.admin), Notification::default());

    // The mask: releases are not of interest; Clear is.
    let cid = watcher.admin.cid();
    let mask = Sqe::new(admin::SET_FEATURES, cid, 1)
        .with_cdw(10, u32::from(feature::RESERVATION_NOTIFICATION_MASK))
        .with_cdw(11, 1 << 2);
    assert!(watcher.admin.command(mask, &[]).cqe.status.is_success());
    let cid = watcher.admin.cid();
    let get =
        Sqe::new(admin::GET_FEATURES, cid, 1).with_cdw(10, u32::from(feature::RESERVATION_NOTIFICATION_MASK));
    assert_eq!(watcher.admin.command(get, &[]).cqe.dw0, 4);
    let key = taker.key();
    let end = |action, kind| Change::Release { action, kind, key };
    assert!(taker
        .change(end(ReleaseAction::Release, Some(REGISTRANTS)))
        .is_success());
    assert_eq!(log_page(&mut watcher.admin), Notification::default());
    assert!(taker.change(end(ReleaseAction::Clear, None)).is_success());
    assert_eq!(log_page(&mut watcher.admin), told(2, 3, 0));
    // A page that was not taken yet, and an event request that comes later.
    assert!(watcher.register(None).is_success());
    assert!(taker.register(None).is_success());
    assert!(taker.change(end(ReleaseAction::Clear, None)).is_success());
    let late = event(&mut watcher.admin);
    assert_eq!(watcher.admin.answer(late).cqe.dw0, 0x80_0006);
    assert_eq!(log_page(&mut watcher.admin), told(3, 3, 0));
    // A controller reset forgets pages and masks.
    assert!(watcher.register(None).is_success());
    assert!(taker.register(None).is_success());
    assert!(taker.change(end(ReleaseAction::Clear, None)).is_success());
    assert!(watcher.admin.set_property(0x14, 0).is_success());
    watcher.admin.enable();
    assert_eq!(log_page(&mut watcher.admin), Notification::default());
    let get = Sqe::new(admin::GET_FEATURES, watcher.admin.cid(), 1).with_cdw(10, get.cdw(10));
    assert_eq!(watcher.admin.command(get, &[]).cqe.dw0, 0);
}

/// What costs nothing where there is no reservation: a crowd of hosts that register and leave while others write.
#[test]
fn many_hosts_at_once() {
    let target = start(r#""reactor_threads": 2"#);
    let address = target.addresses()[0];
    let deadline = Instant::now() + Duration::from_secs(60);
    let hosts: Vec<_> = (1..=6u8)
        .map(|number| {
            std::thread::spawn(move || {
                let mut host = Host::connect(address, number);
                for round in 0..20u64 {
                    assert!(Instant::now() < deadline);
                    let at = u64::from(number) * 64;
                    assert!(host.register(None).is_success());
                    let data = pattern(64 << 10, round * 8 + u64::from(number));
                    assert!(host.queue.write(at, &data, BLOCK, 20_000).status.is_success());
                    assert!(host.read(at, 16) == data);
                    let key = host.key();
                    let leave = Change::Register {
                        action: RegisterAction::Unregister,
                        ignore_existing: false,
                        persist: None,
                        key,
                        new_key: 0,
                    };
                    assert!(host.change(leave).is_success());
                }
            })
        })
        .collect();
    hosts.into_iter().for_each(|host| host.join().unwrap());
    let mut host = Host::connect(address, 1);
    let report = host.report();
    assert_eq!((report.registered, report.generation), (0, 240));
    assert!(HOST.starts_with("nqn."));
}

//! Associations: how they begin, how they end, and what their end guarantees.

mod common;

use common::{admin, config, eventually, io, pattern, start, Client};
use headrace_target::Target;
use headrace_wire::event::async_event_request;
use headrace_wire::fabrics::CNTLID_DYNAMIC;
use headrace_wire::pdu::{DataHeader, Digests, Pdu};
use headrace_wire::{Sgl, Sqe, Status};
use serde_json::json;
use std::time::{Duration, Instant};

#[test]
fn two_hundred_hosts_come_and_go() {
    let target = start("");
    let address = target.addresses()[0];
    drop(admin(address));
    eventually("the first stays", || target.status()["connections"] == 0);
    for round in 0..200 {
        let (first, cntlid) = admin(address);
        let mut queue = io(address, cntlid, Digests::default(), 0);
        if round % 2 == 0 {
            assert!(queue.read(0, 1, 4096).cqe.status.is_success());
        } else {
            // Gone with a command half under way.
            let sqe = queue.write_sqe(0, 16, 4096);
            queue.send_capsule(sqe, &[]);
        }
        // In either order.
        if round % 3 == 0 {
            drop(first);
            queue.expect_closed();
        } else {
            drop(queue);
            drop(first);
        }
    }
    eventually("controllers or connections stay", || {
        let status = target.status();
        status["controllers"] == json!([]) && status["connections"] == 0 && status["buffer_bytes"] == 0
    });
    assert_eq!(target.status()["totals"]["controllers_created"], 201);
    assert_eq!(target.status()["totals"]["panics"], 0);
}

#[test]
fn keep_alive_expires_and_takes_all_queues() {
    let target = start("");
    let address = target.addresses()[0];
    let mut first = Client::open(address);
    first.initialise(Digests::default(), 0);
    let cqe = first.connect(0, CNTLID_DYNAMIC, |connect, _| connect.kato_ms = 950);
    first.enable();
    let cntlid = cqe.dw0 as u16;
    let mut queue = io(address, cntlid, Digests::default(), 0);
    assert_eq!(
        target.status()["controllers"][0]["keep_alive_ms"],
        1000,
        "rounded up to the granularity"
    );
    // Traffic keeps it alive as the command does.
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_millis(2500) {
        assert!(queue.read(0, 1, 4096).cqe.status.is_success());
        std::thread::sleep(Duration::from_millis(50));
    }
    let begin = Instant::now();
    queue.expect_closed();
    first.expect_closed();
    assert!(
        begin.elapsed() > Duration::from_millis(900),
        "{:?}",
        begin.elapsed()
    );
    eventually("the controller stays", || {
        target.status()["controllers"] == json!([])
    });
    assert_eq!(target.status()["totals"]["controllers_expired"], 1);
}

#[test]
fn several_hosts_at_once_do_not_see_each_other() {
    let target = start(r#""reactor_threads": 2"#);
    let address = target.addresses()[0];
    let workers: Vec<_> = (0..6u64)
        .map(|n| {
            std::thread::spawn(move || {
                let mut first = Client::open(address);
                first.initialise(Digests::default(), 0);
                let name = format!("nqn.2026-01.io.headrace:host{n}");
                let change = |data: &mut headrace_wire::fabrics::ConnectData| {
                    data.hostnqn.clone_from(&name);
                    data.hostid = [n as u8; 16];
                };
                let cqe = first.connect(0, CNTLID_DYNAMIC, |_, data| change(data));
                first.enable();
                let mut queue = Client::open(address);
                queue.initialise(
                    Digests {
                        header: true,
                        data: n % 2 == 0,
                    },
                    0,
                );
                assert!(queue
                    .connect(1, cqe.dw0 as u16, |_, data| change(data))
                    .status
                    .is_success());
                for round in 0..30 {
                    let data = pattern(64 << 10, n * 1000 + round);
                    assert!(queue.write(n * 16, &data, 4096, 20_000).status.is_success());
                    assert!(queue.read(n * 16, 16, 4096).data == data);
                }
                cqe.dw0
            })
        })
        .collect();
    let mut ids: Vec<u32> = workers.into_iter().map(|worker| worker.join().unwrap()).collect();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), 6, "CNTLIDs are unique");
}

#[test]
fn the_association_ends_with_its_admin_connection_only() {
    let target = start("");
    let address = target.addresses()[0];
    let (mut first, cntlid) = admin(address);
    let queue = io(address, cntlid, Digests::default(), 0);
    drop(queue);
    eventually("the queue stays", || {
        target.status()["controllers"][0]["queues"] == json!([0])
    });
    assert!(first.property(8, false).cqe.status.is_success());
    // The same queue again.
    let mut queue = io(address, cntlid, Digests::default(), 0);
    drop(first);
    queue.expect_closed();
    let mut late = Client::open(address);
    late.initialise(Digests::default(), 0);
    assert_eq!(
        late.connect(2, cntlid, |_, _| {}).status,
        Status::CONNECT_INVALID_PARAMETERS.do_not_retry()
    );
}

#[test]
fn too_many_connections_are_closed_at_once() {
    let target = start(r#""max_connections": 3"#);
    let address = target.addresses()[0];
    let kept: Vec<_> = (0..3)
        .map(|_| {
            let mut client = Client::open(address);
            client.initialise(Digests::default(), 0);
            client
        })
        .collect();
    Client::open(address).expect_closed();
    drop(kept);
    eventually("slots stay taken", || target.status()["connections"] == 0);
    Client::open(address).initialise(Digests::default(), 0);
}

/// Memory for two longest commands, thirty asked for at once: they wait for each other, none fails, none hangs.
#[test]
fn little_memory_means_waiting_not_failing() {
    let extra = r#""connection_memory_bytes": 2097152, "memory_bytes": 2097152"#;
    let target = start(extra);
    let address = target.addresses()[0];
    let (_first, cntlid) = admin(address);
    // With a data digest reads need buffers too.
    let mut queue = io(
        address,
        cntlid,
        Digests {
            header: false,
            data: true,
        },
        0,
    );
    let data = pattern(1 << 20, 8);
    let mut writes = Vec::new();
    for n in 0..12u64 {
        let sqe = queue.write_sqe(n * 256, 256, 4096);
        queue.send_capsule(sqe, &[]);
        writes.push(sqe.cid());
        // Writes with their data in the capsule stand between those whose data must be pulled.
        let cid = queue.cid();
        let sqe = Sqe::rw(1, cid, 1, 8192 + n, 1).with_sgl(Sgl::InCapsule {
            offset: 0,
            length: 4096,
        });
        queue.send_capsule(sqe, &data[..4096]);
        writes.push(cid);
    }
    while !writes.is_empty() {
        match queue.receive().unwrap().pdu {
            Pdu::R2t(r2t) => queue.send_data(&r2t, &data, 128 << 10),
            Pdu::CapsuleResp(cqe) => {
                assert!(cqe.status.is_success(), "{}", cqe.status);
                writes.retain(|&cid| cid != cqe.cid);
            }
            other => panic!("{other:?}"),
        }
    }
    for cid in 100..112 {
        let slba = u64::from(cid - 100) * 256;
        queue.send_capsule(
            Sqe::rw(2, cid, 1, slba, 256).with_sgl(Sgl::Transport { length: 1 << 20 }),
            &[],
        );
    }
    for _ in 100..112 {
        assert!(queue.receive().unwrap().data == data);
    }
    eventually("buffers stay taken", || target.status()["buffer_bytes"] == 0);
}

#[test]
fn a_port_in_use_and_a_missing_file_are_said_plainly() {
    let target = start("");
    let mut second = config("");
    second.listen[0].port = target.addresses()[0].port();
    let error = Target::start(second).err().unwrap();
    assert!(error.starts_with("cannot listen on 127.0.0.1:"), "{error}");
    let mut third = config("");
    third.subsystems[0].namespaces[0].media = headrace_target::MediaConfig::File {
        path: "/nowhere/at/all".into(),
        size_bytes: None,
        create: false,
        direct: headrace_target::Direct::Auto,
    };
    let error = Target::start(third).err().unwrap();
    assert!(error.contains("/nowhere/at/all: No such file"), "{error}");
}

/// A write that was never acknowledged leaves each block whole, old or new, wherever its data stop.
#[test]
fn a_connection_lost_within_a_write_tears_no_block() {
    let target = start("");
    let address = target.addresses()[0];
    let (_first, cntlid) = admin(address);
    let mut written = 0;
    for round in 0..40usize {
        let mut queue = io(address, cntlid, Digests::default(), 0);
        let old = vec![round as u8 + 1; 256 << 10];
        assert!(queue.write(0, &old, 4096, 128 << 10).status.is_success());
        let sqe = queue.write_sqe(0, 64, 4096);
        queue.send_capsule(sqe, &[]);
        let r2t = queue.r2t();
        let data = pattern(256 << 10, round as u64);
        let header = Pdu::H2cData(DataHeader {
            cccid: r2t.cccid,
            ttag: r2t.ttag,
            datao: 0,
            datal: data.len() as u32,
            last: true,
            success: false,
        });
        let bytes = queue.encode(&header, &data);
        // An answer that is not read: every other end is a reset, not a close.
        if round % 2 == 0 {
            let cid = queue.cid();
            let read = Sqe::rw(2, cid, 1, 1000, 1).with_sgl(Sgl::Transport { length: 4096 });
            queue.send_capsule(read, &[]);
        }
        let end = 24 + 6131 * (round + 1);
        for piece in bytes[..end].chunks(61 + 9973 * (round % 5)) {
            queue.send(piece);
        }
        drop(queue);
        eventually("the queue stays", || {
            target.status()["controllers"][0]["queues"] == json!([0])
        });
        let mut queue = io(address, cntlid, Digests::default(), 0);
        let found = queue.read(0, 64, 4096).data;
        for (n, block) in found.chunks(4096).enumerate() {
            let at = n * 4096;
            let new = *block == data[at..at + 4096];
            assert!(
                new || *block == old[at..at + 4096],
                "block {n} of round {round} is torn"
            );
            written += usize::from(new);
        }
        drop(queue);
        eventually("the queue stays", || {
            target.status()["controllers"][0]["queues"] == json!([0])
        });
    }
    assert!(written > 0, "no data came before any connection was lost");
    let notes = target.status()["notes"].to_string();
    assert!(!notes.contains("announced"), "{notes}");
}

/// What waits on the admin queue when a controller is reset is aborted: a host asks again, under the same CIDs.
#[test]
fn a_reset_aborts_event_requests() {
    let target = start("");
    let (mut client, _) = admin(target.addresses()[0]);
    for _ in 0..2 {
        for cid in 900..904 {
            client.send_capsule(async_event_request(cid), &[]);
        }
        // Answered in order, so nobody has refused them.
        let keep_alive = client.cid();
        client.send_capsule(Sqe::new(0x18, keep_alive, 0), &[]);
        match client.receive().unwrap().pdu {
            Pdu::CapsuleResp(cqe) => assert_eq!((cqe.cid, cqe.status), (keep_alive, Status::SUCCESS)),
            other => panic!("{other:?}"),
        }
        assert!(client.set_property(0x14, 0).is_success());
        client.enable();
    }
}

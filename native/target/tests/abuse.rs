//! Hosts without manners, and how the others fare.

mod common;

use common::{admin, eventually, io, pattern, start, Client, HOST};
use headrace_target::{Target, TargetConfig};
use headrace_wire::fabrics::CNTLID_DYNAMIC;
use headrace_wire::pdu::{Digests, Pdu};
use headrace_wire::{Sgl, Sqe, Status};
use std::io::Write;
use std::time::{Duration, Instant};

const DIGESTS: Digests = Digests {
    header: false,
    data: true,
};

/// A byte now and then is no progress: whoever trickles holds memory that others want.
#[test]
fn a_trickle_is_not_progress() {
    let target = start(r#""progress_timeout_ms": 300"#);
    let address = target.addresses()[0];
    let (mut first, cntlid) = admin(address);
    let mut queue = io(address, cntlid, Digests::default(), 0);
    let sqe = Sqe::rw(1, 9, 1, 0, 1).with_sgl(Sgl::InCapsule {
        offset: 0,
        length: 4096,
    });
    let bytes = queue.encode(&Pdu::CapsuleCmd(sqe), &[0x55; 4096]);
    let started = Instant::now();
    let dropped = bytes.iter().any(|byte| {
        std::thread::sleep(Duration::from_millis(5));
        queue.stream.write_all(&[*byte]).is_err()
    });
    assert!(dropped, "4 KiB took {:?}", started.elapsed());
    assert!(first.property(8, false).cqe.status.is_success());
}

/// One address before Connect, one host after it: neither keeps the others out.
#[test]
fn no_host_has_all_connections() {
    let target = start(r#""max_connections": 8, "max_host_connections": 3"#);
    let address = target.addresses()[0];
    let silent: Vec<Client> = (0..3).map(|_| Client::open(address)).collect();
    eventually("they are not accepted", || target.status()["connections"] == 3);
    Client::open(address).expect_closed();
    drop(silent);
    eventually("they stay", || target.status()["connections"] == 0);
    let (mut first, cntlid) = admin(address);
    let _queue = io(address, cntlid, Digests::default(), 0);
    let connect = |qid: u16, hostid: u8| {
        let mut client = Client::open(address);
        client.initialise(Digests::default(), 0);
        let cntlid = if qid == 0 { CNTLID_DYNAMIC } else { cntlid };
        let status = client
            .connect(qid, cntlid, |_, data| data.hostid = [hostid; 16])
            .status;
        (client, status)
    };
    let third = connect(2, 7);
    assert!(third.1.is_success());
    let fourth = connect(3, 7);
    assert_eq!(fourth.1, Status::CONNECT_CONTROLLER_BUSY);
    let other = connect(0, 8);
    assert!(other.1.is_success(), "another host");
    drop(third);
    eventually("a place is not given back", || connect(2, 7).1.is_success());
    assert!(first.property(8, false).cqe.status.is_success());
}

/// A host asks for far more than it reads, on many queues, and keeps asking; another's reads and writes go on. Files, and
/// digests, so that every answer needs a buffer.
#[test]
fn who_reads_nothing_disturbs_nobody() {
    let path =
        std::path::PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("abuse-{}", std::process::id()));
    let text = format!(
        r#"{{"memory_bytes": 33554432, "connection_memory_bytes": 33554432, "progress_timeout_ms": 600000, "subsystems":
        [{{"nqn": "{}", "namespaces": [{{"nsid": 1, "media": {{"kind": "file", "path": {:?}, "create": true,
        "size_bytes": 67108864}}}}]}}]}}"#,
        common::NQN,
        path
    );
    let target = Target::start(TargetConfig::from_json(&text).unwrap()).unwrap();
    std::fs::remove_file(&path).unwrap();
    let address = target.addresses()[0];
    let (_greedy, cntlid) = admin(address);
    let mut greedy = Vec::new();
    for qid in 1..=8 {
        let mut client = Client::open(address);
        client.initialise(DIGESTS, 0);
        assert!(client.connect(qid, cntlid, |_, _| {}).status.is_success());
        for cid in 0..30 {
            let sqe = Sqe::rw(2, cid, 1, 0, 256).with_sgl(Sgl::Transport { length: 1 << 20 });
            client.send_capsule(sqe, &[]);
        }
        greedy.push(client);
    }
    eventually("the greedy host gets no buffers", || {
        target.status()["buffer_bytes"].as_u64().unwrap() >= 16 << 20
    });
    std::thread::sleep(Duration::from_millis(100));
    let used = target.status()["buffer_bytes"].as_u64().unwrap();
    assert!(used <= 16 << 20, "half of the memory at most, found {used}");
    let mut good = Client::open(address);
    good.initialise(DIGESTS, 0);
    let other = |data: &mut headrace_wire::fabrics::ConnectData| data.hostid = [9; 16];
    let cqe = good.connect(0, CNTLID_DYNAMIC, |_, data| other(data));
    assert!(cqe.status.is_success());
    good.enable();
    let mut queue = Client::open(address);
    queue.initialise(DIGESTS, 0);
    assert!(queue
        .connect(1, cqe.dw0 as u16, |_, data| other(data))
        .status
        .is_success());
    for n in 0..20 {
        let data = pattern(1 << 20, n);
        assert!(queue
            .write(1024 + n * 256, &data, 4096, 1 << 20)
            .status
            .is_success());
        assert!(queue.read(1024 + n * 256, 256, 4096).data == data);
    }
    drop(greedy);
    eventually("buffers stay taken", || target.status()["buffer_bytes"] == 0);
}

/// Runs itself again with few descriptors allowed.
#[test]
fn too_few_descriptors_are_said_plainly() {
    if std::env::var_os("FEW_DESCRIPTORS").is_some() {
        let error = Target::start(common::config(r#""max_connections": 100"#))
            .err()
            .unwrap();
        assert!(
            error.contains("max_connections 100 needs 356 open files"),
            "{error}"
        );
        assert!(error.contains("may have 350"), "{error}");
        // Unasked, the target takes as many connections as there is room for, and says how many.
        let target = start("");
        assert_eq!(target.status()["max_connections"], 94);
        return;
    }
    let mut shell = std::process::Command::new("sh");
    let exe = std::env::current_exe().unwrap();
    let status = shell
        .args([
            "-c",
            "ulimit -n 350 && exec \"$0\" --exact too_few_descriptors_are_said_plainly",
        ])
        .arg(exe)
        .env("FEW_DESCRIPTORS", HOST)
        .status()
        .unwrap();
    assert!(status.success());
    let target = start("");
    assert!(target.status()["max_connections"].as_u64().unwrap() >= 64);
}

//! Our host against our target.

mod common;

use common::{close, config, flush, memory, options, pattern, read, serve, start, write};
use headrace_host::{discover, DiscoverOptions, HostOptions, NamespaceKey, NvmeTcpDevice};
use headrace_transfer::{submit_one, BlockDevice, Buffer, ErrorKind, Op};
use serde_json::json;
use std::time::Duration;

const MIB: u64 = 1 << 20;

#[test]
fn data_survive_with_every_digest_and_limit() {
    for (header, data) in [(false, false), (true, true), (true, false), (false, true)] {
        for (h2c, mdts, capsule) in [(1 << 20, 1 << 20, 16384), (4096, 65536, 0), (131072, 8192, 65536)] {
            let extra = json!({ "max_h2c_data_bytes": h2c, "mdts_bytes": mdts, "in_capsule_bytes": capsule });
            let (target, port) = start(config(0, memory(16 * MIB), extra));
            let mut options = options(port);
            (options.header_digest, options.data_digest, options.queues) = (header, data, 2);
            let device = NvmeTcpDevice::open(options).unwrap();
            for (i, (at, length)) in [
                (0, 4096),
                (4096, 8192),
                (65536, 5 * 4096),
                (MIB, 3 << 20),
                (8 * MIB, 1 << 20),
            ]
            .into_iter()
            .enumerate()
            {
                let bytes = pattern(length, i as u64 + 1);
                write(&device, at, &bytes).unwrap();
                assert!(
                    read(&device, at, length).unwrap() == bytes,
                    "{h2c} {mdts} {capsule} {length}"
                );
            }
            flush(&device).unwrap();
            assert_eq!(device.loss_count(), 0);
            close(&device);
            target.stop(Duration::from_secs(5)).unwrap();
        }
    }
}

#[test]
fn many_requests_of_all_sizes_at_once() {
    let (_target, port) = start(config(0, memory(64 * MIB), json!({})));
    let mut options = options(port);
    (options.data_digest, options.queues, options.depth) = (true, 3, 7);
    let device = NvmeTcpDevice::open(options).unwrap();
    let whole = pattern(64 << 20, 7);
    let mut pending = Vec::new();
    let mut at = 0;
    let mut i = 0usize;
    while at < whole.len() {
        let length = (4096 * (1 + i * 37 % 100)).min(whole.len() - at);
        let from = Buffer::from_vec(whole[at..at + length].to_vec());
        pending.push(submit_one(
            &*device,
            Op::Write {
                from,
                fua: i % 9 == 0,
            },
            at as u64,
        ));
        at += length;
        i += 1;
    }
    for one in pending.drain(..) {
        one.wait(Duration::from_secs(30)).unwrap().unwrap();
    }
    let into = Buffer::zeroed(whole.len());
    for i in 0..1024 {
        let i = i * 389 % 1024;
        let piece = into.slice(i << 16, 1 << 16).unwrap();
        pending.push(submit_one(&*device, Op::Read { into: piece }, (i << 16) as u64));
    }
    for one in pending {
        one.wait(Duration::from_secs(30)).unwrap().unwrap();
    }
    let mut got = vec![0; whole.len()];
    into.copy_to(0, &mut got);
    assert!(got == whole);
}

#[test]
fn files_keep_their_bytes_over_a_restart() {
    let path = std::env::temp_dir().join(format!("headrace-interop-{}", std::process::id()));
    let media = json!({ "kind": "file", "path": path, "size_bytes": 8 * MIB, "create": true });
    let (target, port) = start(config(
        0,
        media.clone(),
        json!({ "volatile_cache_bytes": 4 * MIB }),
    ));
    let device = NvmeTcpDevice::open(options(port)).unwrap();
    assert!(device.info().volatile_cache);
    let bytes = pattern(MIB as usize, 3);
    write(&device, 4096, &bytes).unwrap();
    flush(&device).unwrap();
    submit_one(&*device, Op::Deallocate { length: 65536 }, 4096 + 65536)
        .wait(Duration::from_secs(5))
        .unwrap()
        .unwrap();
    target.stop(Duration::from_secs(5)).unwrap();
    // One server a file: it is let go with the target.
    drop(target);
    let again = config(port, media, json!({ "volatile_cache_bytes": 4 * MIB }));
    std::thread::sleep(Duration::from_millis(300));
    let (_target, _) = start(again);
    let back = read(&device, 4096, bytes.len()).unwrap();
    assert!(back[..65536] == bytes[..65536] && back[131072..] == bytes[131072..]);
    assert_eq!(device.loss_count(), 1);
    close(&device);
    std::fs::remove_file(path).unwrap();
}

#[test]
fn a_target_restarted_under_load_loses_no_request() {
    let path = std::env::temp_dir().join(format!("headrace-load-{}", std::process::id()));
    let media = json!({ "kind": "file", "path": path, "size_bytes": 64 * MIB, "create": true });
    let (target, port) = start(config(0, media.clone(), json!({})));
    let mut target = Some(target);
    let device = NvmeTcpDevice::open(options(port)).unwrap();
    let bytes = pattern(MIB as usize, 5);
    for round in 0..3 {
        let pending: Vec<_> = (0..48)
            .map(|i| {
                let from = Buffer::from_vec(bytes.clone());
                submit_one(&*device, Op::Write { from, fua: false }, i * MIB)
            })
            .collect();
        std::thread::sleep(Duration::from_millis(3));
        // One server a file: it is let go with the target, which is stopped as it is dropped.
        drop(target.take());
        std::thread::sleep(Duration::from_millis(150));
        target = Some(start(config(port, media.clone(), json!({}))).0);
        for one in pending {
            one.wait(Duration::from_secs(30)).unwrap().unwrap();
        }
        flush(&device).unwrap();
        for i in 0..48 {
            assert!(
                read(&device, i * MIB, bytes.len()).unwrap() == bytes,
                "round {round}, request {i}"
            );
        }
    }
    assert_eq!(device.loss_count(), 3);
    close(&device);
    std::fs::remove_file(path).unwrap();
}

#[test]
fn refusals_name_the_subsystem_and_the_namespace() {
    let (_target, port) = start(config(0, memory(MIB), json!({})));
    let mut wrong = options(port);
    wrong.subsysnqn = "nqn.2026-01.test:other".into();
    let error = NvmeTcpDevice::open(wrong).err().unwrap();
    assert_eq!(error.kind, ErrorKind::Refused);
    assert!(
        error.to_string().contains("SUBNQN") && error.to_string().contains("test:other"),
        "{error}"
    );
    let mut wrong = options(port);
    wrong.namespace = NamespaceKey::Nsid(9);
    let error = NvmeTcpDevice::open(wrong).err().unwrap();
    assert!(error.to_string().contains("9"), "{error}");
}

#[test]
fn discovery_names_what_the_target_serves() {
    let (_target, port) = start(config(0, memory(MIB), json!({})));
    let asked = DiscoverOptions {
        host: "127.0.0.1".into(),
        route: Default::default(),
        port,
        hostnqn: options(port).hostnqn,
        hostid: [1; 16],
        connect_timeout: Duration::from_secs(5),
    };
    let log = discover(asked).unwrap();
    let records = log["records"].as_array().unwrap();
    let found = records
        .iter()
        .find(|record| record["subnqn"] == common::NQN)
        .unwrap();
    assert_eq!(
        (found["trtype"].as_str(), found["trsvcid"].as_str()),
        (Some("tcp"), Some(&*port.to_string()))
    );
    assert_eq!(found["traddr"], "127.0.0.1");
}

/// Not a test: see `common::serve`.
#[test]
#[ignore = "run by another test, in a process of its own"]
fn serve_until_killed() {
    common::serve_until_killed();
}

/// The durability rule, against a cache that dies with its process.
#[test]
fn writes_lost_with_a_killed_target_are_told_by_the_loss_counter() {
    let path = std::env::temp_dir().join(format!("headrace-kill-{}", std::process::id()));
    std::fs::File::create(&path).unwrap().set_len(16 * MIB).unwrap();
    let target = serve(&path, 0);
    let port = target.port;
    let device = NvmeTcpDevice::open(options(port)).unwrap();
    let bytes = pattern(MIB as usize, 8);
    let c0 = device.loss_count();
    write(&device, 0, &bytes).unwrap();
    drop(target);
    let target = serve(&path, port);
    // The flush succeeds, on a new association, and proves nothing.
    flush(&device).unwrap();
    assert_ne!(device.loss_count(), c0);
    assert!(
        read(&device, 0, bytes.len()).unwrap() != bytes,
        "the write died with the cache"
    );
    let c1 = device.loss_count();
    write(&device, 0, &bytes).unwrap();
    flush(&device).unwrap();
    assert_eq!(device.loss_count(), c1);
    drop(target);
    let target = serve(&path, port);
    assert!(
        read(&device, 0, bytes.len()).unwrap() == bytes,
        "flushed is flushed"
    );
    close(&device);
    drop(target);
    std::fs::remove_file(path).unwrap();
}

/// Every HPDA that there is, with digests in every combination and several R2Ts allowed, against a target that obeys it.
#[test]
fn every_alignment_moves_the_same_bytes() {
    let (_target, port) = start(config(0, memory(MIB), json!({})));
    for hpda in 0..32u8 {
        let device = NvmeTcpDevice::open(HostOptions {
            hpda,
            maxr2t: hpda % 4,
            header_digest: hpda & 1 != 0,
            data_digest: hpda & 2 != 0,
            ..options(port)
        })
        .unwrap();
        let bytes: Vec<u8> = (0..38 * 4096).map(|i| (i / 3) as u8 ^ hpda).collect();
        write(&device, 4096, &bytes).unwrap();
        assert!(read(&device, 4096, bytes.len()).unwrap() == bytes, "HPDA {hpda}");
        assert_eq!(device.loss_count(), 0);
        device.close(Duration::from_secs(2));
    }
}

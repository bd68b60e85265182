//! Data in every shape: sizes, pieces, digests, alignment, engines.

mod common;

use common::{admin, config, io, pattern, start, Client};
use headrace_target::{Target, TargetConfig};
use headrace_wire::pdu::{DataHeader, Digests, Pdu};
use headrace_wire::{crc32c, Sgl, Sqe, Status};
use std::time::Duration;

const KIB: usize = 1024;
const BOTH: Digests = Digests {
    header: true,
    data: true,
};

fn digests() -> [Digests; 4] {
    let d = |header, data| Digests { header, data };
    [d(false, false), d(true, false), d(false, true), d(true, true)]
}

#[test]
fn every_size_class_with_every_digest_and_alignment() {
    let target = start("");
    let address = target.addresses()[0];
    let (_admin, cntlid) = admin(address);
    for (round, digest) in digests().into_iter().enumerate() {
        for hpda in [0, 3, 31] {
            let mut queue = io(address, cntlid, digest, hpda);
            for (n, length) in [4 * KIB, 8 * KIB, 16 * KIB, 20 * KIB, 256 * KIB, KIB * KIB]
                .into_iter()
                .enumerate()
            {
                let data = pattern(length, (round * 100 + n) as u64 + u64::from(hpda));
                let slba = (n * 300) as u64;
                assert!(queue.write(slba, &data, 4096, 128 * KIB).status.is_success());
                let answer = queue.read(slba, (length / 4096) as u32, 4096);
                assert!(answer.data == data, "{length} bytes, {digest:?}, HPDA {hpda}");
                if length <= 16 * KIB {
                    let data = pattern(length, n as u64 + 7777);
                    assert!(queue.write_in_capsule(slba, &data, 4096).status.is_success());
                    assert!(queue.read(slba, (length / 4096) as u32, 4096).data == data);
                }
            }
            drop(queue);
            common::eventually("the queue stays", || {
                target.status()["controllers"][0]["queues"] == serde_json::json!([0])
            });
        }
    }
}

#[test]
fn c2h_data_begins_where_the_host_asked() {
    let target = start("");
    let address = target.addresses()[0];
    let (_admin, cntlid) = admin(address);
    let mut queue = io(address, cntlid, BOTH, 31);
    let cid = queue.cid();
    queue.send_capsule(
        Sqe::rw(2, cid, 1, 0, 1).with_sgl(Sgl::Transport { length: 4096 }),
        &[],
    );
    assert_eq!(queue.receive().unwrap().pdo, 128);
}

#[test]
fn h2c_data_in_any_pieces() {
    let target = start("");
    let address = target.addresses()[0];
    let (_admin, cntlid) = admin(address);
    let mut queue = io(address, cntlid, Digests::default(), 0);
    for (n, piece) in [4, 1000, 4096, 65536, 1 << 20].into_iter().enumerate() {
        let data = pattern(if piece == 4 { 4096 } else { 128 * KIB }, n as u64);
        assert!(queue.write(0, &data, 4096, piece).status.is_success());
        assert!(queue.read(0, (data.len() / 4096) as u32, 4096).data == data);
    }
}

/// The same conversation, sent one byte at a time, gives the same answers.
#[test]
fn byte_by_byte() {
    let target = start("");
    let address = target.addresses()[0];
    let (_admin, cntlid) = admin(address);
    let mut queue = io(address, cntlid, BOTH, 0);
    let data = pattern(4096, 3);
    let cid = queue.cid();
    let sqe = Sqe::rw(1, cid, 1, 9, 1).with_sgl(Sgl::InCapsule {
        offset: 0,
        length: 4096,
    });
    let bytes = queue.encode(&Pdu::CapsuleCmd(sqe), &data);
    for byte in &bytes {
        queue.send(&[*byte]);
    }
    assert!(queue.answer(cid).cqe.status.is_success());
    assert!(queue.read(9, 1, 4096).data == data);
}

/// Many commands in one segment, answered in whatever order they end.
#[test]
fn a_full_queue_at_once() {
    let target = start("");
    let address = target.addresses()[0];
    let (_admin, cntlid) = admin(address);
    let mut queue = io(address, cntlid, Digests::default(), 0);
    let data = pattern(64 * KIB, 5);
    queue.write(0, &data, 4096, 64 * KIB);
    let mut bytes = Vec::new();
    for cid in 100..116u16 {
        let sqe = Sqe::rw(2, cid, 1, u64::from(cid - 100), 1).with_sgl(Sgl::Transport { length: 4096 });
        bytes.extend(queue.encode(&Pdu::CapsuleCmd(sqe), &[]));
    }
    queue.send(&bytes);
    for _ in 100..116 {
        let received = queue.receive().unwrap();
        let Pdu::C2hData(header) = received.pdu else {
            panic!("no data")
        };
        let at = usize::from(header.cccid - 100) * 4096;
        assert!(header.last && header.success && received.data == data[at..at + 4096]);
    }
}

#[test]
fn several_r2ts_interleaved() {
    let target = start("");
    let address = target.addresses()[0];
    let (_admin, cntlid) = admin(address);
    let mut queue = io(address, cntlid, BOTH, 0);
    let data = [pattern(64 * KIB, 1), pattern(64 * KIB, 2)];
    let mut r2ts = Vec::new();
    for n in 0..2u64 {
        let sqe = queue.write_sqe(n * 16, 16, 4096);
        queue.send_capsule(sqe, &[]);
        r2ts.push(queue.r2t());
    }
    assert_ne!(r2ts[0].ttag, r2ts[1].ttag);
    for part in 0..4 {
        for n in [1, 0] {
            let at = part * 16 * KIB;
            let header = DataHeader {
                cccid: r2ts[n].cccid,
                ttag: r2ts[n].ttag,
                datao: at as u32,
                datal: 16 * KIB as u32,
                last: part == 3,
                success: false,
            };
            queue.send_pdu(&Pdu::H2cData(header), &data[n][at..at + 16 * KIB]);
        }
    }
    assert!(queue.answer(r2ts[1].cccid).cqe.status.is_success());
    assert!(queue.answer(r2ts[0].cccid).cqe.status.is_success());
    for (slba, written) in [0, 16].into_iter().zip(&data) {
        assert!(queue.read(slba, 16, 4096).data == *written);
    }
}

#[test]
fn a_wrong_data_digest_fails_its_command_only() {
    let target = start("");
    let address = target.addresses()[0];
    let (_admin, cntlid) = admin(address);
    let mut queue = io(address, cntlid, BOTH, 0);
    let old = pattern(128 * KIB, 1);
    queue.write(0, &old, 4096, 64 * KIB);
    // In the capsule.
    let cid = queue.cid();
    let sqe = Sqe::rw(1, cid, 1, 0, 1).with_sgl(Sgl::InCapsule {
        offset: 0,
        length: 4096,
    });
    let mut bytes = queue.encode(&Pdu::CapsuleCmd(sqe), &pattern(4096, 2));
    bytes[200] ^= 1;
    queue.send(&bytes);
    assert_eq!(queue.answer(cid).cqe.status, Status::TRANSIENT_TRANSPORT);
    // In the first of two H2CData PDUs.
    let sqe = queue.write_sqe(0, 32, 4096);
    queue.send_capsule(sqe, &[]);
    let r2t = queue.r2t();
    for n in 0..2u32 {
        let header = DataHeader {
            cccid: r2t.cccid,
            ttag: r2t.ttag,
            datao: n * 65536,
            datal: 65536,
            last: n == 1,
            success: false,
        };
        let mut bytes = queue.encode(&Pdu::H2cData(header), &pattern(65536, 9));
        if n == 0 {
            let last = bytes.len() - 1;
            bytes[last] ^= 0x80;
        }
        queue.send(&bytes);
    }
    assert_eq!(queue.answer(r2t.cccid).cqe.status, Status::TRANSIENT_TRANSPORT);
    assert!(
        queue.read(0, 32, 4096).data == old,
        "damaged data reached the medium"
    );
    assert_eq!(target.status()["totals"]["digest_errors"], 2);
}

/// Whoever reads what another host is writing gets a mixture, never a digest that does not fit (`Client` looks at each).
#[test]
fn digests_of_what_is_being_written() {
    let target = start(r#""reactor_threads": 2"#);
    let address = target.addresses()[0];
    let (_admin, cntlid) = admin(address);
    // Connections go to the reactors in turn: these two to different ones.
    let mut reader = io(address, cntlid, BOTH, 0);
    let mut writer = Client::open(address);
    writer.initialise(Digests::default(), 0);
    assert!(writer.connect(2, cntlid, |_, _| {}).status.is_success());
    let mixed = std::thread::scope(|scope| {
        let reading = scope.spawn(|| {
            let mut mixed = 0;
            for _ in 0..100 {
                let sgl = Sgl::Transport { length: 1 << 20 };
                let sqes = [0; 4].map(|_| Sqe::rw(2, reader.cid(), 1, 0, 256).with_sgl(sgl));
                sqes.iter().for_each(|sqe| reader.send_capsule(*sqe, &[]));
                for sqe in sqes {
                    let answer = reader.answer(sqe.cid());
                    assert!(answer.cqe.status.is_success());
                    let (behind, before) = (&answer.data[1..], &answer.data[..answer.data.len() - 1]);
                    mixed += usize::from(behind != before);
                }
            }
            mixed
        });
        for round in (1..=255u8).cycle().take_while(|_| !reading.is_finished()) {
            let data = [round; KIB].repeat(KIB);
            assert!(writer.write(0, &data, 4096, 64 * KIB).status.is_success());
        }
        reading.join().unwrap()
    });
    assert!(mixed > 0, "nobody wrote while it was read");
}

#[test]
fn other_commands() {
    let target = start("");
    let address = target.addresses()[0];
    let (mut first, cntlid) = admin(address);
    let mut queue = io(address, cntlid, Digests::default(), 0);
    let data = pattern(32 * KIB, 1);
    queue.write(0, &data, 4096, 32 * KIB);
    // Write Zeroes.
    let cid = queue.cid();
    assert!(queue
        .command(Sqe::rw(8, cid, 1, 1, 2), &[])
        .cqe
        .status
        .is_success());
    let now = queue.read(0, 8, 4096).data;
    assert!(
        now[..4096] == data[..4096]
            && now[4096..12288].iter().all(|&b| b == 0)
            && now[12288..] == data[12288..]
    );
    // Dataset Management with two ranges.
    let mut ranges = headrace_wire::command::DsmRange { blocks: 1, slba: 3 }
        .encode()
        .to_vec();
    ranges.extend(headrace_wire::command::DsmRange { blocks: 2, slba: 6 }.encode());
    let dsm = |cid| Sqe::new(9, cid, 1).with_cdw(10, 1).with_cdw(11, 4);
    let cid = queue.cid();
    let cqe = queue
        .command(
            dsm(cid).with_sgl(Sgl::InCapsule {
                offset: 0,
                length: 32,
            }),
            &ranges,
        )
        .cqe;
    assert!(cqe.status.is_success());
    let now = queue.read(0, 8, 4096).data;
    assert!(now[12288..16384].iter().all(|&b| b == 0) && now[16384..24576] == data[16384..24576]);
    assert!(now[24576..].iter().all(|&b| b == 0));
    // Linux sends a whole page of descriptors, of which only the named number count.
    let mut page = headrace_wire::command::DsmRange { blocks: 1, slba: 4 }
        .encode()
        .to_vec();
    page.extend(headrace_wire::command::DsmRange { blocks: 1, slba: 5 }.encode());
    page.resize(4096, 0xFF);
    let cid = queue.cid();
    let sqe = Sqe::new(9, cid, 1).with_cdw(11, 4).with_sgl(Sgl::InCapsule {
        offset: 0,
        length: 4096,
    });
    assert!(queue.command(sqe, &page).cqe.status.is_success());
    let now = queue.read(0, 8, 4096).data;
    assert!(now[16384..20480].iter().all(|&b| b == 0) && now[20480..24576] == data[20480..24576]);
    queue.write(0, &data, 4096, 32 * KIB);
    // A range outside: nothing is done.
    ranges[16 + 8] = 0xFF;
    ranges[16 + 12] = 0xFF;
    let cid = queue.cid();
    let cqe = queue
        .command(
            dsm(cid).with_sgl(Sgl::InCapsule {
                offset: 0,
                length: 32,
            }),
            &ranges,
        )
        .cqe;
    assert_eq!(cqe.status, Status::LBA_RANGE.do_not_retry());
    // Compare.
    for (blocks, flip, expected) in [(2, false, Status::SUCCESS), (2, true, Status::COMPARE_FAILURE)] {
        let mut same = data[16384..24576].to_vec();
        same[5000] ^= u8::from(flip);
        let cid = queue.cid();
        let sqe = Sqe::rw(5, cid, 1, 4, blocks).with_sgl(Sgl::InCapsule {
            offset: 0,
            length: 8192,
        });
        assert_eq!(queue.command(sqe, &same).cqe.status, expected);
    }
    // Refusals by name.
    let refused = |queue: &mut Client, sqe: Sqe, status: Status| {
        let answer = queue.command(sqe, &[]);
        assert_eq!(answer.cqe.status, status.do_not_retry(), "{sqe:?}");
    };
    let transport = |length| Sgl::Transport { length };
    refused(
        &mut queue,
        Sqe::rw(2, 900, 1, 16384, 1).with_sgl(transport(4096)),
        Status::LBA_RANGE,
    );
    refused(
        &mut queue,
        Sqe::rw(2, 901, 1, u64::MAX, 1).with_sgl(transport(4096)),
        Status::LBA_RANGE,
    );
    refused(
        &mut queue,
        Sqe::rw(2, 902, 2, 0, 1).with_sgl(transport(4096)),
        Status::INVALID_NAMESPACE,
    );
    refused(
        &mut queue,
        Sqe::rw(2, 903, 0xFFFF_FFFF, 0, 1).with_sgl(transport(4096)),
        Status::INVALID_NAMESPACE,
    );
    refused(
        &mut queue,
        Sqe::rw(2, 904, 1, 0, 257).with_sgl(transport(257 * 4096)),
        Status::INVALID_FIELD,
    );
    refused(
        &mut queue,
        Sqe::rw(2, 905, 1, 0, 2).with_sgl(transport(4096)),
        Status::SGL_DATA_LENGTH,
    );
    refused(
        &mut queue,
        Sqe::rw(1, 906, 1, 0, 2).with_sgl(transport(4096)),
        Status::SGL_DATA_LENGTH,
    );
    refused(
        &mut queue,
        Sqe::rw(1, 907, 1, 0, 1).with_sgl(Sgl::Other(0x40)),
        Status::SGL_TYPE,
    );
    refused(&mut queue, Sqe::rw(4, 908, 1, 0, 1), Status::INVALID_OPCODE);
    refused(&mut queue, Sqe::rw(0x0C, 909, 1, 0, 1), Status::INVALID_OPCODE);
    let mut fused = Sqe::rw(2, 910, 1, 0, 1).with_sgl(transport(4096));
    fused.0[1] |= 1;
    refused(&mut queue, fused, Status::INVALID_FIELD);
    // Each of them is in the error log, the newest first.
    let cid = first.cid();
    let log = first
        .command(headrace_wire::log::get_log_page(cid, 0, 1, 0, 64), &[])
        .data;
    assert_eq!(
        (
            u64::from_le_bytes(log[..8].try_into().unwrap()),
            log[8],
            log[10..12].to_vec()
        ),
        (13, 1, 910u16.to_le_bytes().to_vec())
    );
}

fn file_config(path: &std::path::Path, extra: &str) -> TargetConfig {
    let path = path.display();
    let text = format!(
        r#"{{"subsystems": [{{"nqn": "{}", "namespaces": [{{"nsid": 1, "block_bytes": 512, {extra}
            "media": {{"kind": "file", "path": "{path}", "size_bytes": 16777216, "create": true}}}}]}}]}}"#,
        common::NQN
    );
    TargetConfig::from_json(&text).unwrap()
}

fn scratch(name: &str) -> std::path::PathBuf {
    let folder = std::path::PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let path = folder.join(format!("{name}-{}", std::process::id()));
    let _ = std::fs::remove_file(&path);
    path
}

#[test]
fn a_file_keeps_what_was_written() {
    let path = scratch("keeps");
    let data = pattern(512 * KIB, 4);
    for round in 0..2 {
        let target = Target::start(file_config(&path, "")).unwrap();
        let address = target.addresses()[0];
        let (mut first, cntlid) = admin(address);
        let cid = first.cid();
        let identify = first.command(
            Sqe::new(6, cid, 0)
                .with_cdw(10, 1)
                .with_sgl(Sgl::Transport { length: 4096 }),
            &[],
        );
        assert_eq!(identify.data[525], 7, "a page cache is a volatile cache");
        for digest in [Digests::default(), BOTH] {
            let mut queue = io(address, cntlid, digest, 0);
            if round == 0 {
                assert!(queue
                    .write(3, &data, 512, 200_000 / 512 * 512)
                    .status
                    .is_success());
                assert!(queue
                    .write_in_capsule(2000, &data[..1536], 512)
                    .status
                    .is_success());
                // FUA.
                let cid = queue.cid();
                let sqe = Sqe::rw(1, cid, 1, 2100, 1).with_sgl(Sgl::InCapsule {
                    offset: 0,
                    length: 512,
                });
                let sqe = sqe.with_cdw(12, sqe.cdw(12) | 1 << 30);
                assert!(queue.command(sqe, &data[..512]).cqe.status.is_success());
                let cid = queue.cid();
                assert!(queue.command(Sqe::new(0, cid, 1), &[]).cqe.status.is_success());
            }
            assert!(queue.read(3, 1024, 512).data == data);
            assert!(queue.read(2000, 3, 512).data == data[..1536]);
            assert!(queue.read(2100, 1, 512).data == data[..512]);
            drop(queue);
            common::eventually("the queue stays", || {
                target.status()["controllers"][0]["queues"] == serde_json::json!([0])
            });
        }
        target.stop(Duration::from_secs(5)).unwrap();
    }
    std::fs::remove_file(path).unwrap();
}

#[test]
fn a_volatile_cache_hides_the_file_until_flush() {
    let path = scratch("cache");
    let target = Target::start(file_config(&path, r#""volatile_cache_bytes": 8388608,"#)).unwrap();
    let address = target.addresses()[0];
    let (_admin, cntlid) = admin(address);
    let mut queue = io(address, cntlid, Digests::default(), 0);
    let data = pattern(64 * KIB, 6);
    assert!(queue.write(0, &data, 512, 64 * KIB).status.is_success());
    assert!(queue.read(0, 128, 512).data == data);
    assert!(
        std::fs::read(&path).unwrap()[..64 * KIB].iter().all(|&b| b == 0),
        "unflushed data are in the file"
    );
    let cid = queue.cid();
    assert!(queue.command(Sqe::new(0, cid, 1), &[]).cqe.status.is_success());
    assert!(std::fs::read(&path).unwrap()[..64 * KIB] == data);
    drop(target);
    std::fs::remove_file(path).unwrap();
}

#[test]
fn read_only_is_enforced() {
    let mut config = config("");
    let path = scratch("read-only");
    std::fs::write(&path, pattern(8192, 1)).unwrap();
    config.subsystems[0].namespaces[0].media = headrace_target::MediaConfig::File {
        path: path.clone(),
        size_bytes: None,
        create: false,
        direct: headrace_target::Direct::Auto,
    };
    config.subsystems[0].namespaces[0].read_only = true;
    let target = Target::start(config).unwrap();
    let address = target.addresses()[0];
    let (_admin, cntlid) = admin(address);
    let mut queue = io(address, cntlid, Digests::default(), 0);
    let status = queue.write_in_capsule(0, &[0; 4096], 4096).status;
    assert_eq!(status, Status::WRITE_PROTECTED.do_not_retry());
    assert!(queue.read(0, 2, 4096).data == pattern(8192, 1));
    std::fs::remove_file(path).unwrap();
}

#[test]
fn wrong_header_digest_is_fatal() {
    let target = start("");
    let address = target.addresses()[0];
    let (_admin, cntlid) = admin(address);
    let mut queue = io(address, cntlid, BOTH, 0);
    let mut bytes = queue.encode(&Pdu::CapsuleCmd(Sqe::new(0, 5, 1)), &[]);
    assert_eq!(bytes[72..76], crc32c(&bytes[..72]).to_le_bytes());
    bytes[20] ^= 4;
    queue.send(&bytes);
    assert_eq!(queue.term().fes, 3);
}

/// Over the wire: a file past the page cache and in it, zeros with and without DEAC, and what Identify says of them.
#[test]
fn files_past_the_page_cache() {
    for direct in ["on", "off"] {
        let path = std::path::PathBuf::from(env!("CARGO_TARGET_TMPDIR"))
            .join(format!("direct-{direct}-{}", std::process::id()));
        let text = format!(
            r#"{{"subsystems": [{{"nqn": "{}", "namespaces": [{{"nsid": 1, "block_bytes": 512, "media": {{"kind": "file",
            "path": {path:?}, "create": true, "size_bytes": 8388608, "direct": "{direct}"}}}}]}}]}}"#,
            common::NQN
        );
        let started = Target::start(headrace_target::TargetConfig::from_json(&text).unwrap());
        let target = match started {
            Ok(target) => target,
            Err(error) if direct == "on" => {
                assert!(error.contains("O_DIRECT"), "{error}");
                println!("not tested: {error}");
                continue;
            }
            Err(error) => panic!("{error}"),
        };
        let address = target.addresses()[0];
        let (mut first, cntlid) = admin(address);
        assert_eq!(
            target.status()["subsystems"][0]["namespaces"][0]["direct"],
            direct == "on"
        );
        let sqe = Sqe::new(6, 77, 1).with_sgl(Sgl::Transport { length: 4096 });
        let identify = first.command(sqe, &[]).data;
        let zeros = identify[33] == 9;
        assert!(zeros || identify[33] == 0, "DLFEAT {}", identify[33]);
        let mut queue = io(address, cntlid, Digests::default(), 0);
        let data = common::pattern(1 << 20, 6);
        assert!(queue.write(1, &data, 512, 300_000).status.is_success());
        assert!(queue
            .write_in_capsule(4096, &data[..1536], 512)
            .status
            .is_success());
        assert!(queue.read(1, 2048, 512).data == data);
        assert!(queue.read(4096, 3, 512).data == data[..1536]);
        // FUA and DEAC in every combination; the neighbours stay.
        let allocated = || std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(&path).unwrap());
        for (slba, flags) in [
            (9u64, 0u32),
            (17, 1 << 30),
            (25, 1 << 25),
            (33, 1 << 25 | 1 << 30),
        ] {
            let cid = queue.cid();
            let sqe = Sqe::rw(8, cid, 1, slba, 8);
            let flagged = sqe.cdw(12) | flags;
            assert!(queue
                .command(sqe.with_cdw(12, flagged), &[])
                .cqe
                .status
                .is_success());
            assert!(
                queue.read(slba, 8, 512).data.iter().all(|&byte| byte == 0),
                "{flags:x}"
            );
            assert!(queue.read(slba + 8, 1, 512).data == data[(slba as usize + 7) * 512..][..512]);
        }
        // With DEAC the room is given back, where that can be.
        let before = allocated();
        let cid = queue.cid();
        let sqe = Sqe::rw(8, cid, 1, 128, 1024);
        let flagged = sqe.cdw(12) | 1 << 25 | 1 << 30;
        assert!(queue
            .command(sqe.with_cdw(12, flagged), &[])
            .cqe
            .status
            .is_success());
        if zeros {
            assert!(
                allocated() < before,
                "{} sectors before, {} after",
                before,
                allocated()
            );
        }
        drop(target);
        std::fs::remove_file(&path).unwrap();
    }
}

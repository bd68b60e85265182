//! From ICReq to the first read, as a host does it.

mod common;

use common::{admin, config, io, pattern, start, Client, HOST, NQN};
use headrace_target::Target;
use headrace_wire::fabrics::{ConnectResponse, CATTR_NO_SQ_FLOW, CNTLID_DYNAMIC};
use headrace_wire::identify::{decode_descriptors, IdentifyController, IdentifyNamespace, NamespaceId};
use headrace_wire::log::{get_log_page, DiscoveryEntry, DiscoveryHeader};
use headrace_wire::pdu::Digests;
use headrace_wire::{Sgl, Sqe, Status, DISCOVERY_NQN};
use std::time::Duration;

fn identify(client: &mut Client, cns: u32, nsid: u32) -> common::Answer {
    let cid = client.cid();
    client.command(
        Sqe::new(6, cid, nsid)
            .with_cdw(10, cns)
            .with_sgl(Sgl::Transport { length: 4096 }),
        &[],
    )
}

#[test]
fn a_host_comes_up_reads_writes_and_leaves() {
    let target = start("");
    let address = target.addresses()[0];
    let mut first = Client::open(address);
    let answer = first.initialise(Digests::default(), 0);
    assert_eq!((answer.pfv, answer.cpda, answer.maxh2cdata), (0, 0, 1 << 20));
    let cqe = first.connect(0, CNTLID_DYNAMIC, |connect, _| connect.kato_ms = 5000);
    assert!(cqe.status.is_success());
    assert_eq!(cqe.sqhd, 0xFFFF, "flow control is off, as asked");
    let cntlid = cqe.dw0 as u16;
    assert_ne!(cntlid, 0);

    let cap = first.property(0, true).cqe;
    assert_eq!(
        (cap.dw0 & 0xFFFF, cap.dw0 >> 16 & 1, cap.dw1 >> 5 & 1),
        (1023, 1, 1),
        "MQES, CQR, NVM command set"
    );
    assert_eq!(first.property(8, false).cqe.dw0, 0x0002_0000);
    assert_eq!(first.property(0x1C, false).cqe.dw0, 0);
    // Not enabled yet.
    assert_eq!(
        identify(&mut first, 1, 0).cqe.status,
        Status::SEQUENCE_ERROR.do_not_retry()
    );
    first.enable();

    let answer = identify(&mut first, 1, 0);
    assert!(answer.by_flag);
    let controller = IdentifyController::decode(&answer.data).unwrap();
    assert_eq!(
        (
            controller.cntlid,
            controller.subnqn.as_str(),
            controller.cntrltype
        ),
        (cntlid, NQN, 1)
    );
    assert_eq!(
        (
            controller.mdts,
            controller.ioccsz,
            controller.iorcsz,
            controller.icdoff
        ),
        (8, 1028, 1, 0)
    );
    assert_eq!(controller.sgls & 1, 1);
    assert_ne!(controller.kas, 0);
    assert_eq!(controller.vwc & 1, 0, "memory has no cache");

    let cid = first.cid();
    let cqe = first
        .command(Sqe::new(9, cid, 0).with_cdw(10, 7).with_cdw(11, 3 | 3 << 16), &[])
        .cqe;
    assert_eq!((cqe.status, cqe.dw0), (Status::SUCCESS, 3 | 3 << 16));
    let cid = first.cid();
    assert!(first
        .command(Sqe::new(9, cid, 0).with_cdw(10, 0x0B).with_cdw(11, 0x1FF), &[])
        .cqe
        .status
        .is_success());

    let list = identify(&mut first, 2, 0).data;
    assert_eq!(&list[..8], &[1, 0, 0, 0, 0, 0, 0, 0]);
    let namespace = IdentifyNamespace::decode(&identify(&mut first, 0, 1).data).unwrap();
    assert_eq!((namespace.nsze, namespace.format().unwrap().lbads), (16384, 12));
    let ids = decode_descriptors(&identify(&mut first, 3, 1).data);
    assert!(ids.contains(&NamespaceId::Nguid(namespace.nguid)) && ids.len() == 3);
    for (cns, csi) in [(5, 0), (6, 0), (7, 0), (8, 0), (0x1C, 0)] {
        let cid = first.cid();
        let nsid = u32::from(cns != 7);
        let sqe = Sqe::new(6, cid, nsid)
            .with_cdw(10, cns)
            .with_cdw(11, csi)
            .with_sgl(Sgl::Transport { length: 4096 });
        assert!(first.command(sqe, &[]).cqe.status.is_success(), "CNS {cns:#x}");
    }
    for (lid, length) in [(1, 4096), (2, 512), (3, 512), (4, 4096), (5, 4096)] {
        let cid = first.cid();
        let answer = first.command(get_log_page(cid, 0xFFFF_FFFF, lid, 0, length), &[]);
        assert_eq!(
            (answer.cqe.status, answer.data.len()),
            (Status::SUCCESS, length as usize),
            "log {lid}"
        );
    }
    let cid = first.cid();
    assert!(
        first.command(Sqe::new(0x18, cid, 0), &[]).cqe.status.is_success(),
        "keep alive"
    );

    let mut queue = io(address, cntlid, Digests::default(), 0);
    let data = pattern(8192, 1);
    assert!(queue.write_in_capsule(2, &data, 4096).status.is_success());
    let answer = queue.read(2, 2, 4096);
    assert!(answer.by_flag && answer.data == data);
    for nsid in [1, 0xFFFF_FFFF] {
        let cid = queue.cid();
        assert!(
            queue.command(Sqe::new(0, cid, nsid), &[]).cqe.status.is_success(),
            "flush {nsid:#x}"
        );
    }
    let status = target.status();
    assert_eq!(status["controllers"][0]["hostnqn"], HOST);
    assert_eq!(status["controllers"][0]["queues"], serde_json::json!([0, 1]));
    assert_eq!(status["subsystems"][0]["namespaces"][0]["engine"], "memory");
    assert_eq!(status["subsystems"][0]["namespaces"][0]["written_bytes"], 8192);

    // An orderly end: CC.SHN, CSTS.SHST.
    assert!(first.set_property(0x14, 0x0046_4001).is_success());
    assert_eq!(first.property(0x1C, false).cqe.dw0 >> 2 & 3, 2);
    drop((first, queue));
    common::eventually("the controller stays", || {
        target.status()["controllers"] == serde_json::json!([])
    });
    target.stop(Duration::from_secs(5)).unwrap();
}

/// The Commands Supported and Effects page says of each opcode what is so.
#[test]
fn the_effects_page_is_true() {
    let target = start("");
    let address = target.addresses()[0];
    let (mut first, cntlid) = admin(address);
    let mut queue = io(address, cntlid, Digests::default(), 0);
    let cid = first.cid();
    let page = first
        .command(get_log_page(cid, 0xFFFF_FFFF, 5, 0, 4096), &[])
        .data;
    // Async Event Request is answered when something happens, Fabrics commands are no part of the page.
    for opcode in (0..=255u8).filter(|opcode| ![0x0C, 0x7F].contains(opcode)) {
        let claimed = |base: usize| page[base + usize::from(opcode) * 4] & 1 == 1;
        let unknown = Status::INVALID_OPCODE.do_not_retry();
        let cid = first.cid();
        let status = first.command(Sqe::new(opcode, cid, 1), &[]).cqe.status;
        assert_eq!(claimed(0), status != unknown, "admin {opcode:#x}: {status}");
        let cid = queue.cid();
        let status = queue.command(Sqe::new(opcode, cid, 1), &[]).cqe.status;
        assert_eq!(claimed(1024), status != unknown, "I/O {opcode:#x}: {status}");
    }
}

#[test]
fn connect_names_the_field_that_it_refuses() {
    let text = r#""max_queue_entries": 128"#;
    let mut config = config(text);
    config.subsystems[0].allow_hosts = vec![HOST.into()];
    let target = Target::start(config).unwrap();
    let address = target.addresses()[0];
    let (mut own, cntlid) = admin(address);
    let fresh = || {
        let mut client = Client::open(address);
        client.initialise(Digests::default(), 0);
        client
    };
    let invalid = Status::CONNECT_INVALID_PARAMETERS.do_not_retry();
    let field = |cqe: headrace_wire::Cqe| {
        (
            cqe.status,
            ConnectResponse(cqe.dw0).ipo(),
            ConnectResponse(cqe.dw0).in_data(),
        )
    };

    let cqe = fresh().connect(0, CNTLID_DYNAMIC, |_, data| {
        data.subnqn = "nqn.2026-01.io.headrace:none".into()
    });
    assert_eq!(field(cqe), (invalid, 256, true));
    let cqe = fresh().connect(0, CNTLID_DYNAMIC, |_, data| data.hostnqn = String::new());
    assert_eq!(field(cqe), (invalid, 512, true));
    let cqe = fresh().connect(0, CNTLID_DYNAMIC, |_, data| {
        data.hostnqn = "nqn.2026-01.io.other:host".into()
    });
    assert_eq!(cqe.status, Status::CONNECT_INVALID_HOST.do_not_retry());
    let cqe = fresh().connect(0, 5, |_, _| {});
    assert_eq!(field(cqe), (invalid, 16, true));
    for sqsize in [0, 128, 65535] {
        let cqe = fresh().connect(0, CNTLID_DYNAMIC, |connect, _| connect.sqsize = sqsize);
        assert_eq!(field(cqe), (invalid, 44, false), "SQSIZE {sqsize}");
    }
    let cqe = fresh().connect(0, CNTLID_DYNAMIC, |connect, _| connect.recfmt = 1);
    assert_eq!(cqe.status, Status::CONNECT_INCOMPATIBLE_FORMAT.do_not_retry());
    let cqe = fresh().connect(1, cntlid + 1, |_, _| {});
    assert_eq!(field(cqe), (invalid, 16, true));
    let cqe = fresh().connect(1000, cntlid, |_, _| {});
    assert_eq!(field(cqe), (invalid, 42, false));
    let cqe = fresh().connect(1, cntlid, |_, data| data.hostid = [8; 16]);
    assert_eq!(field(cqe), (invalid, 512, true));
    let _queue = io(address, cntlid, Digests::default(), 0);
    let cqe = fresh().connect(1, cntlid, |_, _| {});
    assert_eq!(field(cqe), (invalid, 42, false), "a queue that exists");
    // A refused host may try again on the same connection; a connected one may not.
    let mut client = fresh();
    client.connect(0, 5, |_, _| {});
    assert!(client.connect(0, CNTLID_DYNAMIC, |_, _| {}).status.is_success());
    assert_eq!(
        client.connect(0, CNTLID_DYNAMIC, |_, _| {}).status,
        Status::SEQUENCE_ERROR.do_not_retry()
    );
    assert!(
        own.property(8, false).cqe.status.is_success(),
        "the others' errors are not its own"
    );
}

#[test]
fn discovery_lists_what_this_host_may_use() {
    let mut config = config("");
    let mut hidden = config.subsystems[0].clone();
    hidden.nqn = "nqn.2026-01.io.headrace:hidden".into();
    hidden.allow_hosts = vec!["nqn.2026-01.io.other:host".into()];
    config.subsystems.push(hidden);
    config.listen[0].host = "0.0.0.0".into();
    let error = Target::start(config.clone()).err().unwrap();
    assert!(error.contains("lets other machines in"), "{error}");
    config.subsystems[0].other_hosts = Some(headrace_target::HostAccess::ReadWrite);
    let target = Target::start(config).unwrap();
    let port = target.addresses()[0].port();
    let mut client = Client::open(([127, 0, 0, 1], port).into());
    client.initialise(Digests::default(), 0);
    let cqe = client.connect(0, CNTLID_DYNAMIC, |_, data| data.subnqn = DISCOVERY_NQN.into());
    assert!(cqe.status.is_success());
    client.enable();
    let controller = IdentifyController::decode(&identify(&mut client, 1, 0).data).unwrap();
    assert_eq!(controller.cntrltype, 2);
    let cid = client.cid();
    let header = client.command(get_log_page(cid, 0, 0x70, 0, 1024), &[]).data;
    let header = DiscoveryHeader::decode(&header).unwrap();
    assert_eq!(header.numrec, 2);
    let cid = client.cid();
    let entries = client.command(get_log_page(cid, 0, 0x70, 1024, 2048), &[]).data;
    let entries: Vec<_> = entries
        .chunks(1024)
        .map(|b| DiscoveryEntry::decode(b).unwrap())
        .collect();
    assert_eq!(
        (entries[0].subtype, entries[0].subnqn.as_str()),
        (3, DISCOVERY_NQN)
    );
    let entry = &entries[1];
    assert_eq!(
        (entry.trtype, entry.adrfam, entry.subtype, entry.sectype),
        (3, 1, 2, 0)
    );
    assert_eq!(
        (
            entry.traddr.as_str(),
            entry.trsvcid.as_str(),
            entry.subnqn.as_str()
        ),
        ("127.0.0.1", &*port.to_string(), NQN)
    );
    let cid = client.cid();
    assert_eq!(
        client.command(get_log_page(cid, 0, 2, 0, 512), &[]).cqe.status,
        Status::INVALID_LOG_PAGE.do_not_retry()
    );
}

#[test]
fn with_flow_control_sqhd_moves_and_no_flag_replaces_the_completion() {
    let target = start("");
    let address = target.addresses()[0];
    let (_admin, cntlid) = admin(address);
    let mut queue = Client::open(address);
    queue.initialise(Digests::default(), 0);
    let cqe = queue.connect(1, cntlid, |connect, _| {
        connect.cattr &= !CATTR_NO_SQ_FLOW;
        connect.sqsize = 3;
    });
    assert_eq!((cqe.status, cqe.sqhd), (Status::SUCCESS, 1));
    for expected in [2, 3, 0, 1] {
        let answer = queue.read(0, 1, 4096);
        assert!(!answer.by_flag && answer.data.len() == 4096);
        assert_eq!((answer.cqe.sqhd, answer.cqe.sqid), (expected, 1));
    }
}

#[test]
fn a_reset_ends_the_io_queues_and_keeps_the_admin_queue() {
    let target = start("");
    let address = target.addresses()[0];
    let (mut first, cntlid) = admin(address);
    let mut queue = io(address, cntlid, Digests::default(), 0);
    assert!(first.set_property(0x14, 0x0046_0000).is_success());
    queue.expect_closed();
    assert_eq!(first.property(0x1C, false).cqe.dw0, 0);
    first.enable();
    let mut queue = io(address, cntlid, Digests::default(), 0);
    assert_eq!(queue.read(0, 1, 4096).data.len(), 4096);
}

//! What an administrator changes while hosts are connected: what they are told, and what their commands are answered.

mod common;

use common::{admin, config, eventually, io, pattern, Client, HOST, NQN};
use headrace_target::{HostAccess, NamespaceConfig, Target};
use headrace_wire::ana::{AnaLog, AnaState, GROUPS_ONLY};
use headrace_wire::event::{async_event_request, config as aen, notice, AsyncEvent, ChangedNamespaces};
use headrace_wire::fabrics::CNTLID_DYNAMIC;
use headrace_wire::identify::{cmic, IdentifyController, IdentifyNamespace, IndependentNamespace};
use headrace_wire::log::{get_log_page, lid, with_lsp, DiscoveryEntry, DiscoveryHeader};
use headrace_wire::pdu::Digests;
use headrace_wire::{Sgl, Sqe, Status, DISCOVERY_NQN};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

const WAIT: Duration = Duration::from_secs(10);

fn namespace(text: &str) -> NamespaceConfig {
    serde_json::from_str(text).unwrap()
}

fn memory(nsid: u32) -> NamespaceConfig {
    namespace(&format!(
        r#"{{"nsid": {nsid}, "media": {{"kind": "memory", "size_bytes": 1048576}}}}"#
    ))
}

fn file(nsid: u32, path: &Path) -> NamespaceConfig {
    namespace(&format!(
        r#"{{"nsid": {nsid}, "media": {{"kind": "file", "path": {path:?}, "size_bytes": 1048576, "create": true}}}}"#
    ))
}

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("headrace-runtime-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).ok();
    }
}

fn identify(client: &mut Client, cns: u32, nsid: u32) -> Vec<u8> {
    let cid = client.cid();
    let sqe = Sqe::new(6, cid, nsid)
        .with_cdw(10, cns)
        .with_sgl(Sgl::Transport { length: 4096 });
    let answer = client.command(sqe, &[]);
    assert!(answer.cqe.status.is_success(), "{}", answer.cqe.status);
    answer.data
}

fn log(client: &mut Client, lid: u8, length: u32) -> Vec<u8> {
    let cid = client.cid();
    client
        .command(get_log_page(cid, 0xFFFF_FFFF, lid, 0, length), &[])
        .data
}

fn changed(client: &mut Client) -> ChangedNamespaces {
    ChangedNamespaces::decode(&log(client, lid::CHANGED_NAMESPACES, 4096))
}

fn ana(client: &mut Client) -> AnaLog {
    AnaLog::decode(&log(client, lid::ANA, 4096)).unwrap()
}

/// Let these events out, and have one request for them held.
fn listen(client: &mut Client, events: u32) -> u16 {
    let cid = client.cid();
    let sqe = Sqe::new(9, cid, 0).with_cdw(10, 0x0B).with_cdw(11, events);
    assert!(client.command(sqe, &[]).cqe.status.is_success());
    ask(client)
}

fn ask(client: &mut Client) -> u16 {
    let cid = client.cid();
    client.send_capsule(async_event_request(cid), &[]);
    cid
}

fn event(client: &mut Client, request: u16) -> (u8, u8) {
    let event = AsyncEvent::from_dw0(client.answer(request).cqe.dw0);
    assert_eq!(event.kind, 2);
    (event.info, event.lid)
}

fn read(client: &mut Client, nsid: u32) -> Status {
    let cid = client.cid();
    let sqe = Sqe::rw(2, cid, nsid, 0, 1).with_sgl(Sgl::Transport { length: 4096 });
    client.command(sqe, &[]).cqe.status
}

fn write(client: &mut Client, nsid: u32, slba: u64, byte: u8) -> Status {
    let cid = client.cid();
    let sqe = Sqe::rw(1, cid, nsid, slba, 1).with_sgl(Sgl::InCapsule {
        offset: 0,
        length: 4096,
    });
    client.command(sqe, &[byte; 4096]).cqe.status
}

/// As one host, to a discovery controller.
fn discovery(address: SocketAddr) -> Client {
    let mut client = Client::open(address);
    client.initialise(Digests::default(), 0);
    let cqe = client.connect(0, CNTLID_DYNAMIC, |_, data| data.subnqn = DISCOVERY_NQN.into());
    assert!(cqe.status.is_success(), "{}", cqe.status);
    client.enable();
    client
}

fn discovery_log(client: &mut Client) -> (u64, Vec<DiscoveryEntry>) {
    let header = DiscoveryHeader::decode(&log(client, lid::DISCOVERY, 1024)).unwrap();
    let cid = client.cid();
    let length = header.numrec as u32 * 1024;
    let data = client
        .command(get_log_page(cid, 0, lid::DISCOVERY, 1024, length), &[])
        .data;
    let entries = data.chunks(1024).map(|b| DiscoveryEntry::decode(b).unwrap());
    (header.genctr, entries.collect())
}

#[test]
fn a_namespace_comes_and_goes() {
    let folder = Folder::new("comes");
    let target = common::start("");
    let address = target.addresses()[0];
    let (mut first, cntlid) = admin(address);
    let mut queue = io(address, cntlid, Digests::default(), 0);
    let request = listen(&mut first, aen::NAMESPACE_ATTRIBUTE);
    assert_eq!(read(&mut queue, 2), Status::INVALID_NAMESPACE.do_not_retry());
    assert_eq!(changed(&mut first), ChangedNamespaces::List(vec![]));

    let path = folder.0.join("two");
    target.add_namespace(NQN, &file(2, &path)).unwrap();
    assert_eq!(
        event(&mut first, request),
        (notice::NAMESPACE_ATTRIBUTE, lid::CHANGED_NAMESPACES)
    );
    // Its page was not read yet: no second event, but the list has them all.
    let request = ask(&mut first);
    target.add_namespace(NQN, &memory(7)).unwrap();
    assert_eq!(
        identify(&mut first, 2, 0)[..16],
        [1, 0, 0, 0, 2, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0]
    );
    assert_eq!(changed(&mut first), ChangedNamespaces::List(vec![2, 7]));
    assert_eq!(
        changed(&mut first),
        ChangedNamespaces::List(vec![]),
        "read is read"
    );
    assert!(write(&mut queue, 2, 3, 9).is_success() && read(&mut queue, 7).is_success());

    // A second server, or a second namespace, may not have the file now.
    let error = target.add_namespace(NQN, &file(3, &path)).unwrap_err();
    assert!(error.to_string().contains("in use"), "{error}");
    assert!(target.remove_namespace(NQN, 2, WAIT).unwrap(), "it was idle");
    assert_eq!(
        event(&mut first, request),
        (notice::NAMESPACE_ATTRIBUTE, lid::CHANGED_NAMESPACES)
    );
    assert_eq!(changed(&mut first), ChangedNamespaces::List(vec![2]));
    assert_eq!(
        write(&mut queue, 2, 0, 1),
        Status::INVALID_NAMESPACE.do_not_retry()
    );
    assert!(identify(&mut first, 0, 2).iter().all(|&byte| byte == 0));
    // Closed: it may be opened again, and holds what was written.
    target.add_namespace(NQN, &file(3, &path)).unwrap();
    let cid = queue.cid();
    let sqe = Sqe::rw(2, cid, 3, 3, 1).with_sgl(Sgl::Transport { length: 4096 });
    assert_eq!(queue.command(sqe, &[]).data, [9; 4096]);
    assert!(
        read(&mut queue, 1).is_success(),
        "the other namespaces do not notice"
    );

    for (nsid, says) in [(3, "already"), (9999, "from 1 to 4096")] {
        let error = target.add_namespace(NQN, &memory(nsid)).unwrap_err();
        assert!(error.to_string().contains(says), "{error}");
    }
    let error = target.remove_namespace(NQN, 50, WAIT).unwrap_err();
    assert!(error.to_string().contains("no namespace 50"), "{error}");
    let error = target.add_namespace("nqn.none", &memory(8)).unwrap_err();
    assert!(
        error.to_string().contains("no subsystem nqn.none, only"),
        "{error}"
    );
}

/// A command that was accepted before the removal is carried out, and only then the media is closed.
#[test]
fn a_removal_waits_for_commands_under_way() {
    let folder = Folder::new("waits");
    let path = folder.0.join("two");
    let target = common::start("");
    target.add_namespace(NQN, &file(2, &path)).unwrap();
    let address = target.addresses()[0];
    let (_admin, cntlid) = admin(address);
    let mut queue = io(address, cntlid, Digests::default(), 0);
    let cid = queue.cid();
    let sqe = Sqe::rw(1, cid, 2, 1, 2).with_sgl(Sgl::Transport { length: 8192 });
    queue.send_capsule(sqe, &[]);
    let r2t = queue.r2t();
    assert!(!target
        .remove_namespace(NQN, 2, Duration::from_millis(50))
        .unwrap());
    assert_eq!(
        target.status()["subsystems"][0]["closing"],
        serde_json::json!([2])
    );
    let again = target.add_namespace(NQN, &file(2, &path)).unwrap_err();
    assert!(again.to_string().contains("in use"), "{again}");
    let data = pattern(8192, 4);
    queue.send_data(&r2t, &data, 4096);
    assert!(queue.answer(cid).cqe.status.is_success());
    eventually("the media is never closed", || {
        target.add_namespace(NQN, &file(2, &path)).is_ok()
    });
    assert_eq!(std::fs::read(&path).unwrap()[4096..12288], data);
    assert_eq!(target.status()["subsystems"][0]["closing"], serde_json::json!([]));
}

#[test]
fn a_namespace_grows_and_shrinks_only_by_force() {
    let folder = Folder::new("grows");
    let path = folder.0.join("disk");
    let target = common::start("");
    target.add_namespace(NQN, &file(2, &path)).unwrap();
    target
        .add_namespace(
            NQN,
            &namespace(r#"{"nsid": 3, "media": {"kind": "memory", "size_bytes": 1048576}, "volatile_cache_bytes": 65536}"#),
        )
        .unwrap();
    let address = target.addresses()[0];
    let (mut first, cntlid) = admin(address);
    let mut queue = io(address, cntlid, Digests::default(), 0);
    for nsid in [2, 3] {
        let request = listen(&mut first, aen::NAMESPACE_ATTRIBUTE);
        assert_eq!(write(&mut queue, nsid, 256, 5), Status::LBA_RANGE.do_not_retry());
        target.resize_namespace(NQN, nsid, 2 << 20, false).unwrap();
        assert_eq!(event(&mut first, request).0, notice::NAMESPACE_ATTRIBUTE);
        assert_eq!(changed(&mut first), ChangedNamespaces::List(vec![nsid]));
        let described = IdentifyNamespace::decode(&identify(&mut first, 0, nsid)).unwrap();
        assert_eq!((described.nsze, described.ncap), (512, 512));
        assert!(write(&mut queue, nsid, 256, 5).is_success() && write(&mut queue, nsid, 511, 5).is_success());

        let error = target.resize_namespace(NQN, nsid, 1 << 20, false).unwrap_err();
        assert!(error.to_string().contains("must be forced"), "{error}");
        assert!(target.resize_namespace(NQN, nsid, 1000, true).is_err());
        target.resize_namespace(NQN, nsid, 1 << 20, true).unwrap();
        assert_eq!(changed(&mut first), ChangedNamespaces::List(vec![nsid]));
        assert_eq!(write(&mut queue, nsid, 256, 5), Status::LBA_RANGE.do_not_retry());
        // What went comes back as zeros.
        target.resize_namespace(NQN, nsid, 2 << 20, false).unwrap();
        let cid = queue.cid();
        let sqe = Sqe::rw(2, cid, nsid, 256, 256).with_sgl(Sgl::Transport { length: 1 << 20 });
        assert!(queue.command(sqe, &[]).data.iter().all(|&byte| byte == 0));
        changed(&mut first);
    }
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 2 << 20);
    let error = target.resize_namespace(NQN, 3, 1 << 40, false).unwrap_err();
    assert!(error.to_string().contains("where it lies"), "{error}");
}

/// A host that was told that there is no write cache sends no flush: what it writes to a namespace that has one, and came
/// later, must be durable at once.
#[test]
fn a_cache_that_comes_later_surprises_nobody() {
    let folder = Folder::new("cache");
    let path = folder.0.join("disk");
    let target = common::start("");
    let address = target.addresses()[0];
    let (mut first, cntlid) = admin(address);
    let mut queue = io(address, cntlid, Digests::default(), 0);
    let mut cached = file(2, &path);
    cached.volatile_cache_bytes = 1 << 20;
    target.add_namespace(NQN, &cached).unwrap();
    let vwc = |client: &mut Client| IdentifyController::decode(&identify(client, 1, 0)).unwrap().vwc & 1;
    assert_eq!(vwc(&mut first), 0, "what it was told stays");
    assert!(write(&mut queue, 2, 0, 8).is_success());
    assert_eq!(
        std::fs::read(&path).unwrap()[..4096],
        [8; 4096],
        "it is in a cache that nobody flushes"
    );
    // Who comes now is told, and its writes may rest in the cache.
    let (mut second, cntlid) = admin(address);
    let mut queue = io(address, cntlid, Digests::default(), 0);
    assert_eq!(vwc(&mut second), 1);
    assert!(write(&mut queue, 2, 0, 9).is_success());
    assert_eq!(std::fs::read(&path).unwrap()[..4096], [8; 4096]);
}

#[test]
fn ana_states_are_each_portals_own() {
    let mut config = config("");
    config.listen.push(config.listen[0].clone());
    config.listen[1].name = "b".into();
    config.subsystems[0].ana_groups = serde_json::from_str(
        r#"[{"id": 1, "states": {"b": "non-optimized"}}, {"id": 5, "state": "inaccessible"}]"#,
    )
    .unwrap();
    let target = Target::start(config).unwrap();
    let mut five = memory(5);
    five.ana_group = 5;
    target.add_namespace(NQN, &five).unwrap();
    let mut sides: Vec<(Client, Client)> = target
        .addresses()
        .iter()
        .map(|&address| {
            let (first, cntlid) = admin(address);
            (first, io(address, cntlid, Digests::default(), 0))
        })
        .collect();
    let (mut a, mut b) = (sides.remove(0), sides.remove(0));
    let controller = IdentifyController::decode(&identify(&mut a.0, 1, 0)).unwrap();
    assert_eq!(controller.cmic, 1 | 2 | cmic::ANA);
    assert_eq!((controller.anacap, controller.nanagrpid), (0x5F, 2));
    assert!(controller.anatt > 0 && controller.anagrpmax >= 5);
    assert_eq!(controller.oaes, aen::NAMESPACE_ATTRIBUTE | aen::ANA);
    assert!(
        controller.mnan > 0 && controller.mnan <= controller.nn,
        "as Linux insists"
    );
    for (nsid, group) in [(1, 1), (5, 5)] {
        let described = IdentifyNamespace::decode(&identify(&mut a.0, 0, nsid)).unwrap();
        let independent = IndependentNamespace::decode(&identify(&mut a.0, 8, nsid)).unwrap();
        assert_eq!((described.anagrpid, independent.anagrpid), (group, group));
        assert!(independent.ready && independent.nsattr == 0);
    }

    let states = |log: &AnaLog| {
        log.groups
            .iter()
            .map(|g| (g.id, g.state, g.nsids.clone()))
            .collect::<Vec<_>>()
    };
    let log = ana(&mut a.0);
    assert_eq!(log.chgcnt, 0);
    assert_eq!(
        states(&log),
        [
            (1, AnaState::Optimized, vec![1]),
            (5, AnaState::Inaccessible, vec![5])
        ]
    );
    assert_eq!(ana(&mut b.0).groups[0].state, AnaState::NonOptimized);
    let cid = b.0.cid();
    let page = with_lsp(get_log_page(cid, 0xFFFF_FFFF, lid::ANA, 0, 80), GROUPS_ONLY);
    let groups = AnaLog::decode(&b.0.command(page, &[]).data).unwrap().groups;
    assert!(groups.len() == 2 && groups.iter().all(|group| group.nsids.is_empty()));
    assert!(read(&mut a.1, 1).is_success() && read(&mut b.1, 1).is_success());
    assert_eq!(
        read(&mut a.1, 5),
        Status::ANA_INACCESSIBLE,
        "another path may do: no DNR"
    );

    // Only the side that it concerns is told.
    let (for_a, for_b) = (listen(&mut a.0, aen::ANA), listen(&mut b.0, aen::ANA));
    target.set_ana_state(NQN, 1, Some("b"), "change").unwrap();
    assert_eq!(event(&mut b.0, for_b), (notice::ANA, lid::ANA));
    assert_eq!(read(&mut b.1, 1), Status::ANA_TRANSITION);
    assert!(read(&mut a.1, 1).is_success());
    let log = ana(&mut b.0);
    assert_eq!(
        (log.chgcnt, log.groups[0].chgcnt, log.groups[1].chgcnt),
        (1, 1, 0)
    );
    assert_eq!(log.groups[0].state, AnaState::Change);
    let for_b = ask(&mut b.0);
    target
        .set_ana_state(NQN, 1, Some("b"), "persistent-loss")
        .unwrap();
    assert_eq!(event(&mut b.0, for_b).0, notice::ANA);
    for opcode in [0x01, 0x02, 0x05, 0x08, 0x09, 0x00] {
        let cid = b.1.cid();
        let sqe = Sqe::rw(opcode, cid, 1, 0, 1);
        assert_eq!(
            b.1.command(sqe, &[]).cqe.status,
            Status::ANA_PERSISTENT_LOSS,
            "opcode {opcode}"
        );
    }
    // An event of the other side would come before this answer.
    identify(&mut a.0, 1, 0);
    target.set_ana_state(NQN, 1, Some("1"), "non-optimized").unwrap();
    assert_eq!(
        event(&mut a.0, for_a).0,
        notice::ANA,
        "nothing before concerned it"
    );
    // No event for what stays as it is.
    let for_a = ask(&mut a.0);
    ana(&mut a.0);
    target.set_ana_state(NQN, 1, Some("1"), "non-optimized").unwrap();
    target.set_ana_state(NQN, 5, None, "optimized").unwrap();
    assert_eq!(event(&mut a.0, for_a).0, notice::ANA);
    assert_eq!(ana(&mut a.0).chgcnt, 4);
    assert!(read(&mut a.1, 5).is_success() && read(&mut b.1, 5).is_success());

    for (group, portal, state, says) in [
        (9, None, "optimized", "no ANA group 9"),
        (1, Some("c"), "optimized", "only 1, b"),
        (1, None, "fast", "found \"fast\""),
    ] {
        let error = target.set_ana_state(NQN, group, portal, state).unwrap_err();
        assert!(error.to_string().contains(says), "{error}");
    }
}

#[test]
fn hosts_are_allowed_protected_and_denied() {
    let target = common::start("");
    let address = target.addresses()[0];
    let (mut first, cntlid) = admin(address);
    let mut queue = io(address, cntlid, Digests::default(), 0);
    let mut directory = discovery(address);
    let heard = listen(&mut directory, aen::DISCOVERY);
    let (before, entries) = discovery_log(&mut directory);
    assert_eq!(entries.len(), 2);
    let request = listen(&mut first, aen::NAMESPACE_ATTRIBUTE);
    assert!(write(&mut queue, 1, 0, 1).is_success());

    target.allow_host(NQN, Some(HOST), HostAccess::ReadOnly).unwrap();
    assert_eq!(event(&mut first, request).0, notice::NAMESPACE_ATTRIBUTE);
    assert_eq!(changed(&mut first), ChangedNamespaces::List(vec![1]));
    for opcode in [0x01, 0x08, 0x09] {
        let cid = queue.cid();
        let status = queue.command(Sqe::rw(opcode, cid, 1, 0, 1), &[]).cqe.status;
        assert_eq!(status, Status::WRITE_PROTECTED.do_not_retry(), "opcode {opcode}");
    }
    assert!(read(&mut queue, 1).is_success());
    assert_eq!(
        IdentifyNamespace::decode(&identify(&mut first, 0, 1))
            .unwrap()
            .nsattr,
        1
    );
    assert_eq!(
        IndependentNamespace::decode(&identify(&mut first, 8, 1))
            .unwrap()
            .nsattr,
        1
    );
    target.allow_host(NQN, Some(HOST), HostAccess::ReadWrite).unwrap();
    assert!(write(&mut queue, 1, 0, 1).is_success());

    // Struck off by name, it is still one of all.
    assert_eq!(target.deny_host(NQN, Some(HOST)).unwrap(), 0);
    assert!(write(&mut queue, 1, 0, 1).is_success());
    let error = target.deny_host(NQN, Some(HOST)).unwrap_err();
    assert!(error.to_string().contains("deny that first"), "{error}");
    assert_eq!(target.deny_host(NQN, None).unwrap(), 1);
    queue.expect_closed();
    first.expect_closed();
    assert_eq!(event(&mut directory, heard), (notice::DISCOVERY, lid::DISCOVERY));
    let (after, entries) = discovery_log(&mut directory);
    assert!(after > before);
    assert_eq!((entries.len(), entries[0].subtype), (1, 3));
    let mut again = Client::open(address);
    again.initialise(Digests::default(), 0);
    let cqe = again.connect(0, CNTLID_DYNAMIC, |_, _| {});
    assert_eq!(cqe.status, Status::CONNECT_INVALID_HOST.do_not_retry());

    let heard = ask(&mut directory);
    target.allow_host(NQN, Some(HOST), HostAccess::ReadWrite).unwrap();
    assert_eq!(event(&mut directory, heard).0, notice::DISCOVERY);
    let (mut first, _) = admin(address);
    assert_eq!(target.disconnect_host(HOST).unwrap(), 2, "of both subsystems");
    first.expect_closed();
    directory.expect_closed();
    admin(address);
    assert!(target
        .allow_host(NQN, Some("host"), HostAccess::ReadOnly)
        .is_err());
}

#[test]
fn a_portal_for_discovery_serves_nothing_else() {
    let mut config = config("");
    config.listen.push(config.listen[0].clone());
    config.listen[1].discovery = true;
    let target = Target::start(config).unwrap();
    let [served, directory] = target.addresses()[..] else {
        panic!("two portals")
    };
    let (_, entries) = discovery_log(&mut discovery(directory));
    let told: Vec<_> = entries
        .iter()
        .map(|e| (e.subtype, e.trsvcid.clone(), e.portid))
        .collect();
    let (io_port, own_port) = (served.port().to_string(), directory.port().to_string());
    assert_eq!(
        told,
        [(3, io_port.clone(), 1), (3, own_port, 2), (2, io_port, 1)],
        "itself at both, the subsystem where it is served"
    );
    let mut client = Client::open(directory);
    client.initialise(Digests::default(), 0);
    let cqe = client.connect(0, CNTLID_DYNAMIC, |_, _| {});
    assert_eq!(cqe.status, Status::CONNECT_INVALID_PARAMETERS.do_not_retry());
    admin(served);
}

#[test]
fn a_subsystem_has_limits_of_its_own() {
    let mut config = config("");
    let subsystem = &mut config.subsystems[0];
    subsystem.mdts_bytes = Some(64 << 10);
    subsystem.in_capsule_bytes = Some(0);
    subsystem.max_queue_entries = Some(32);
    subsystem.max_io_queues = Some(2);
    let target = Target::start(config).unwrap();
    let address = target.addresses()[0];
    let (mut first, cntlid) = admin(address);
    let controller = IdentifyController::decode(&identify(&mut first, 1, 0)).unwrap();
    assert_eq!(
        (controller.mdts, controller.ioccsz, controller.maxcmd),
        (4, 4, 32)
    );
    assert_eq!(first.property(0, true).cqe.dw0 & 0xFFFF, 31);
    let mut queue = io(address, cntlid, Digests::default(), 0);
    assert_eq!(
        queue.read(0, 17, 4096).cqe.status,
        Status::INVALID_FIELD.do_not_retry()
    );
    assert!(queue.read(0, 16, 4096).cqe.status.is_success());
    let mut third = Client::open(address);
    third.initialise(Digests::default(), 0);
    assert!(!third.connect(3, cntlid, |_, _| {}).status.is_success());
    let cid = queue.cid();
    let sqe = Sqe::rw(1, cid, 1, 0, 1).with_sgl(Sgl::InCapsule {
        offset: 0,
        length: 4096,
    });
    queue.send_capsule(sqe, &[0; 4096]);
    assert_eq!(queue.term().fei, 4, "longer than its capsules may be");
}

#[test]
fn drained_when_the_last_command_is_through() {
    let target = common::start("");
    let address = target.addresses()[0];
    let (mut first, cntlid) = admin(address);
    ask(&mut first);
    let mut queue = io(address, cntlid, Digests::default(), 0);
    let cid = queue.cid();
    let sqe = Sqe::rw(1, cid, 1, 1, 2).with_sgl(Sgl::Transport { length: 8192 });
    queue.send_capsule(sqe, &[]);
    let r2t = queue.r2t();
    assert!(!target.drain(Duration::from_millis(100)), "a write is under way");
    assert!(std::net::TcpStream::connect(address).is_err(), "it listens still");
    // The admin queue lives as long as the other.
    assert_eq!(ana(&mut first).groups.len(), 1);
    queue.send_data(&r2t, &pattern(8192, 3), 4096);
    assert!(
        queue.answer(cid).cqe.status.is_success(),
        "what was accepted is answered"
    );
    queue.expect_closed();
    first.expect_closed();
    drop((first, queue));
    assert!(target.drain(WAIT));
    assert_eq!(target.status()["draining"], true);
    target.stop(WAIT).unwrap();
}

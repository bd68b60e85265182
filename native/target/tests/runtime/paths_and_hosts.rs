//! Which ways lead there, who may come, and that nobody comes any more.

use crate::*;

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

//! Namespaces come, go and change their size.

use crate::*;

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

/// A write that came before its namespace became smaller lands beyond the end of it: that is the host's mistake or the
/// administrator's, and nothing is wrong with the media.
#[test]
fn what_lies_beyond_a_new_end_is_no_error_of_the_media() {
    let folder = Folder::new("beyond");
    let target = common::start("");
    target
        .add_namespace(NQN, &file(2, &folder.0.join("disk")))
        .unwrap();
    let address = target.addresses()[0];
    let (_admin, cntlid) = admin(address);
    let mut queue = io(address, cntlid, Digests::default(), 0);
    let cid = queue.cid();
    // With FUA, whose failure would say that answered writes are lost.
    let sqe = Sqe::rw(1, cid, 2, 254, 2).with_sgl(Sgl::Transport { length: 8192 });
    let sqe = sqe.with_cdw(12, sqe.cdw(12) | 1 << 30);
    queue.send_capsule(sqe, &[]);
    let r2t = queue.r2t();
    target.resize_namespace(NQN, 2, 512 << 10, true).unwrap();
    queue.send_data(&r2t, &pattern(8192, 4), 4096);
    assert_eq!(queue.answer(cid).cqe.status, Status::LBA_RANGE.do_not_retry());
    let status = &target.status()["subsystems"][0]["namespaces"][1];
    assert_eq!(
        (&status["degraded"], &status["media_errors"]),
        (&false.into(), &0.into())
    );
    assert_eq!(std::fs::metadata(folder.0.join("disk")).unwrap().len(), 512 << 10);
}

/// What is refused in a configuration is refused while it runs.
#[test]
fn what_one_namespace_has_no_other_gets() {
    let folder = Folder::new("shared");
    let (disk, link) = (folder.0.join("disk"), folder.0.join("link"));
    let kept = folder.0.join("kept");
    std::fs::write(&kept, "").unwrap();
    let id = "00112233-4455-6677-8899-aabbccddee01";
    let target = common::start("");
    let mut first = file(2, &disk);
    first.reservations_path = Some(kept.clone());
    first.uuid = Some(id.into());
    first.nguid = Some(id.replace("01", "02"));
    // Only those who read share a file, and the lock of a file lets them.
    let read_only = |nsid, path: &Path| {
        let mut config = file(nsid, path);
        config.read_only = true;
        config
    };
    target.add_namespace(NQN, &first).unwrap();
    std::os::unix::fs::symlink(&disk, &link).unwrap();
    let other = folder.0.join("other");
    let beside = |change: &dyn Fn(&mut NamespaceConfig)| {
        let mut config = file(3, &other);
        change(&mut config);
        config
    };
    let same_file = [read_only(3, &disk), read_only(3, &link)];
    let same = [
        beside(&|c| c.reservations_path = Some(kept.clone())),
        beside(&|c| c.uuid = first.uuid.clone()),
        beside(&|c| c.nguid = first.nguid.clone()),
    ];
    for config in same_file.iter().chain(&same) {
        let error = target.add_namespace(NQN, config).unwrap_err().to_string();
        assert!(
            error.contains(&format!("in use by namespace 2 of {NQN}")),
            "{error}"
        );
        let mut both = common::config("");
        both.subsystems[0]
            .namespaces
            .extend([first.clone(), config.clone()]);
        let error = Target::start(both).err().unwrap();
        assert!(
            error.contains(&format!("in use by namespace 2 of {NQN}")),
            "{error}"
        );
    }
    assert!(!other.exists(), "made for nothing");
    target.remove_namespace(NQN, 2, WAIT).unwrap();
    for config in &same[1..] {
        target.add_namespace(NQN, config).unwrap();
        target.remove_namespace(NQN, 3, WAIT).unwrap();
    }
}

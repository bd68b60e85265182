//! What a namespace offers of reservations: that they outlive a restart, none to who may only read, or none at all.

use super::{file_config, Folder, Host, BLOCK, CONFLICT, REGISTRANTS};
use crate::common::{pattern, start, Client, NQN};
use headrace_target::{Target, TargetConfig};
use headrace_wire::command::{admin, feature};
use headrace_wire::reservation::{Change, RegisterAction};
use headrace_wire::{Sgl, Sqe, Status};

fn persistence(client: &mut Client, set: Option<u32>) -> (Status, u32) {
    let opcode = if set.is_some() {
        admin::SET_FEATURES
    } else {
        admin::GET_FEATURES
    };
    let sqe = Sqe::new(opcode, client.cid(), 1)
        .with_cdw(10, u32::from(feature::RESERVATION_PERSISTENCE))
        .with_cdw(11, set.unwrap_or(0));
    let cqe = client.command(sqe, &[]).cqe;
    (cqe.status, cqe.dw0)
}

/// Its data come with it: there may be no R2T.
fn register_in_capsule(host: &mut Host) -> Status {
    let (sqe, data) = Change::Register {
        action: RegisterAction::Register,
        ignore_existing: false,
        persist: None,
        key: 0,
        new_key: 1,
    }
    .command(host.queue.cid(), 1);
    let sqe = sqe.with_sgl(Sgl::InCapsule {
        offset: 0,
        length: 16,
    });
    host.queue.command(sqe, &data).cqe.status
}

fn rescap(client: &mut Client) -> u8 {
    let sqe = Sqe::new(admin::IDENTIFY, client.cid(), 1).with_sgl(Sgl::Transport { length: 4096 });
    client.command(sqe, &[]).data[31]
}

#[test]
fn memory_offers_no_persistence() {
    let target = start("");
    let mut host = Host::connect(target.addresses()[0], 1);
    assert_eq!(rescap(&mut host.admin), 0xFE);
    assert_eq!(host.register(Some(true)), Status::INVALID_FIELD.do_not_retry());
    assert_eq!(
        persistence(&mut host.admin, Some(1)).0,
        Status::INVALID_FIELD.do_not_retry()
    );
    assert_eq!(host.report().registered, 0);
}

#[test]
fn a_restart_forgets_nothing_that_was_to_persist() {
    let folder = Folder::new("persist");
    let state = folder.0.join("media.reservations");
    let start = || Target::start(file_config(&folder.0, ""));
    {
        let target = start().unwrap();
        let mut host = Host::connect(target.addresses()[0], 1);
        assert_eq!(rescap(&mut host.admin), 0xFF);
        host.hold(REGISTRANTS);
    }
    // Not asked to persist: it is gone.
    {
        let target = start().unwrap();
        let mut host = Host::connect(target.addresses()[0], 1);
        assert_eq!(host.report().registered, 0);
        assert!(!state.exists());
        host.hold(REGISTRANTS);
        assert_eq!(persistence(&mut host.admin, None), (Status::SUCCESS, 0));
        assert!(persistence(&mut host.admin, Some(1)).0.is_success());
        assert_eq!(persistence(&mut host.admin, None), (Status::SUCCESS, 1));
        let mut other = Host::connect(target.addresses()[0], 2);
        assert!(other.register(None).is_success());
    }
    {
        let target = start().unwrap();
        let mut stranger = Host::connect(target.addresses()[0], 9);
        let report = stranger.report();
        assert_eq!((report.generation, report.rtype, report.registered), (0, 3, 2));
        assert!(report.persistent && report.registrants[0].holds && !report.registrants[1].holds);
        let refused = stranger.queue.write_in_capsule(0, &pattern(4096, 1), BLOCK);
        assert_eq!(refused.status, CONFLICT);
        let mut host = Host::connect(target.addresses()[0], 1);
        assert!(host
            .queue
            .write_in_capsule(0, &pattern(4096, 1), BLOCK)
            .status
            .is_success());
    }
    let whole = std::fs::read(&state).unwrap();
    std::fs::write(&state, &whole[..whole.len() - 9]).unwrap();
    let error = start().err().expect("a damaged file was believed");
    assert!(
        error.contains("media.reservations") && error.contains("restore it"),
        "{error}"
    );
    std::fs::remove_file(&state).unwrap();
    let error = start().err().expect("a missing file was taken for none");
    assert!(
        error.contains("media.reservations") && error.contains("missing"),
        "{error}"
    );
    std::fs::write(&state, &whole).unwrap();
    {
        let target = start().unwrap();
        let mut host = Host::connect(target.addresses()[0], 1);
        assert!(host.report().persistent);
        assert!(persistence(&mut host.admin, Some(0)).0.is_success());
    }
    let target = start().unwrap();
    let mut host = Host::connect(target.addresses()[0], 1);
    assert_eq!((host.report().registered, host.report().persistent), (0, false));
}

/// It must not be able to shut out who may write.
#[test]
fn who_may_only_read_changes_no_reservation() {
    let config = TargetConfig::from_json(&format!(
        r#"{{"subsystems": [{{"nqn": "{NQN}", "other_hosts": "read-only", "namespaces": [
            {{"nsid": 1, "media": {{"kind": "memory", "size_bytes": 1048576}}}}]}}]}}"#
    ));
    let target = Target::start(config.unwrap()).unwrap();
    let mut host = Host::connect(target.addresses()[0], 1);
    let refused = Status::WRITE_PROTECTED.do_not_retry();
    assert_eq!(register_in_capsule(&mut host), refused);
    assert_eq!(persistence(&mut host.admin, Some(0)).0, refused);
    assert_eq!(host.report().registered, 0);
}

/// As it is with Linux nvmet where `resv_enable` is not set.
#[test]
fn where_none_are_offered_no_feature_of_them_answers() {
    let config = TargetConfig::from_json(&format!(
        r#"{{"subsystems": [{{"nqn": "{NQN}", "namespaces": [
            {{"nsid": 1, "no_reservations": true, "media": {{"kind": "memory", "size_bytes": 1048576}}}},
            {{"nsid": 2, "media": {{"kind": "memory", "size_bytes": 1048576}}}}]}}]}}"#
    ));
    let target = Target::start(config.unwrap()).unwrap();
    let mut host = Host::connect(target.addresses()[0], 1);
    assert_eq!(rescap(&mut host.admin), 0);
    let opcode = Status::INVALID_OPCODE.do_not_retry();
    assert_eq!(register_in_capsule(&mut host), opcode);
    assert_eq!(host.report_in(true, 4096), Err(opcode));
    let mut ask = |opcode, feature: u8, nsid, value| {
        let sqe = Sqe::new(opcode, host.admin.cid(), nsid)
            .with_cdw(10, u32::from(feature))
            .with_cdw(11, value);
        let cqe = host.admin.command(sqe, &[]).cqe;
        (cqe.status, cqe.dw0)
    };
    let field = Status::INVALID_FIELD.do_not_retry();
    for feature in [
        feature::RESERVATION_NOTIFICATION_MASK,
        feature::RESERVATION_PERSISTENCE,
    ] {
        for (opcode, value) in [
            (admin::GET_FEATURES, 0),
            (admin::SET_FEATURES, 0),
            (admin::SET_FEATURES, 1),
        ] {
            assert_eq!(
                ask(opcode, feature, 1, value).0,
                field,
                "{opcode:#x} {feature:#x}"
            );
            let nobody = ask(opcode, feature, 7, value & !1).0;
            assert_eq!(nobody, Status::INVALID_NAMESPACE.do_not_retry());
        }
        assert_eq!(ask(admin::GET_FEATURES, feature, 2, 0), (Status::SUCCESS, 0));
    }
    // All: those that have them.
    let mask = feature::RESERVATION_NOTIFICATION_MASK;
    assert!(ask(admin::SET_FEATURES, mask, u32::MAX, 4).0.is_success());
    assert_eq!(ask(admin::GET_FEATURES, mask, 2, 0), (Status::SUCCESS, 4));
    assert_eq!(ask(admin::GET_FEATURES, mask, 1, 0).0, field);
}

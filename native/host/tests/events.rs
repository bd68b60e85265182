//! What a controller tells by itself: asynchronous events, the pages behind them, and what the device makes of it.

#[path = "fake/calls.rs"]
mod calls;
mod fake;

use calls::{close, pattern, read, write};
use fake::{Action, Fake, Script, BLOCK, BLOCKS};
use headrace_host::{HostOptions, NamespaceKey, NvmeTcpDevice};
use headrace_transfer::{BlockDevice, ErrorKind};
use headrace_wire::ana::{AnaGroup, AnaLog, AnaState};
use headrace_wire::command::feature;
use headrace_wire::event::{config, kind, notice, AsyncEvent, ChangedNamespaces};
use headrace_wire::identify::{cmic, ctratt};
use headrace_wire::log::{lid, LogRequest};
use headrace_wire::{admin, Status};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

const NAMESPACE: AsyncEvent = AsyncEvent {
    kind: kind::NOTICE,
    info: notice::NAMESPACE_ATTRIBUTE,
    lid: lid::CHANGED_NAMESPACES,
};
const ANA: AsyncEvent = AsyncEvent {
    kind: kind::NOTICE,
    info: notice::ANA,
    lid: lid::ANA,
};
const SMART: AsyncEvent = AsyncEvent {
    kind: kind::SMART,
    info: 0,
    lid: lid::SMART,
};

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !done() {
        assert!(Instant::now() < end, "{what} did not come about");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn script() -> Script {
    Script {
        oaes: config::NAMESPACE_ATTRIBUTE | config::FIRMWARE | config::ANA,
        ..Default::default()
    }
}

fn open(fake: &Fake) -> Arc<NvmeTcpDevice> {
    let device = NvmeTcpDevice::open(fake.options()).unwrap();
    until("requests for events", || fake.waiting_requests() == 4);
    device
}

fn pages_read(fake: &Fake, lid: u8) -> usize {
    let logs = fake.seen();
    let logs = logs.iter().filter(|s| s.sqe.opcode() == admin::GET_LOG_PAGE);
    logs.map(|s| LogRequest::decode(&s.sqe))
        .filter(|request| {
            assert!(!request.rae, "the next event must be let out");
            request.lid == lid
        })
        .count()
}

fn ana_log(state: AnaState, chgcnt: u64) -> AnaLog {
    AnaLog {
        chgcnt,
        groups: vec![AnaGroup {
            id: 7,
            chgcnt,
            state,
            nsids: vec![],
        }],
    }
}

#[test]
fn only_what_is_offered_is_asked_for_and_less_where_that_is_refused() {
    let fake = Fake::start(script());
    let device = open(&fake);
    let asked = |fake: &Fake| -> Vec<u32> {
        let seen = fake.seen();
        let features = seen.iter().filter(|s| s.sqe.opcode() == admin::SET_FEATURES);
        features
            .filter(|s| s.sqe.cdw(10) as u8 == feature::ASYNC_EVENT_CONFIG)
            .map(|s| s.sqe.cdw(11))
            .collect()
    };
    assert_eq!(
        asked(&fake),
        [config::SMART | config::NAMESPACE_ATTRIBUTE | config::ANA]
    );
    close(&device);
    // A controller that takes the notices, and no SMART warnings.
    let fake = Fake::start(Script {
        hook: Box::new(|_, sqe, _| {
            let config =
                sqe.opcode() == admin::SET_FEATURES && sqe.cdw(10) as u8 == feature::ASYNC_EVENT_CONFIG;
            match config && sqe.cdw(11) & config::SMART != 0 {
                true => Action::Status(Status::INVALID_FIELD.do_not_retry(), 0),
                false => Action::Normal,
            }
        }),
        ..script()
    });
    let device = open(&fake);
    let notices = config::NAMESPACE_ATTRIBUTE | config::ANA;
    assert_eq!(asked(&fake), [config::SMART | notices, notices]);
    assert_eq!(device.describe()["events"]["asked_for"], notices);
    close(&device);
}

/// A controller without events, or with room for one request only, is one to work with.
#[test]
fn the_requests_obey_aerl_and_a_refusal() {
    let fake = Fake::start(Script { aerl: 0, ..script() });
    let device = NvmeTcpDevice::open(fake.options()).unwrap();
    until("the request", || fake.waiting_requests() == 1);
    assert!(fake.raise(SMART));
    until("the next request", || fake.waiting_requests() == 1);
    until("the health", || device.describe()["events"]["count"] == 1);
    close(&device);
    let refused = Arc::new(AtomicUsize::new(0));
    let count = refused.clone();
    let fake = Fake::start(Script {
        hook: Box::new(move |_, sqe, _| match sqe.opcode() {
            admin::ASYNC_EVENT_REQUEST => {
                count.fetch_add(1, Ordering::SeqCst);
                Action::Status(Status::INVALID_OPCODE.do_not_retry(), 0)
            }
            _ => Action::Normal,
        }),
        ..script()
    });
    let device = NvmeTcpDevice::open(fake.options()).unwrap();
    until("the refusals", || refused.load(Ordering::SeqCst) == 4);
    write(&device, 0, &pattern(BLOCK, 1)).unwrap();
    assert_eq!(refused.load(Ordering::SeqCst), 4, "asked again after a refusal");
    close(&device);
}

/// No answer to them is due: they outlive every time-out.
#[test]
fn waiting_requests_are_never_overdue() {
    let fake = Fake::start(script());
    let options = HostOptions {
        io_timeout: Duration::from_millis(200),
        connect_timeout: Duration::from_millis(2500),
        ..fake.options()
    };
    let device = NvmeTcpDevice::open(options).unwrap();
    std::thread::sleep(Duration::from_millis(3000));
    // Before this read, which has a time-out, and may be late.
    assert_eq!(device.loss_count(), 0);
    assert_eq!(read(&device, 0, BLOCK).unwrap().len(), BLOCK);
    close(&device);
}

#[test]
fn a_namespace_that_grows_is_as_large_at_once_and_one_that_shrinks_refuses_what_is_beyond() {
    let fake = Fake::start(script());
    let device = open(&fake);
    let size = (BLOCKS * BLOCK) as u64;
    let beyond = |device: &NvmeTcpDevice| read(device, size - BLOCK as u64, 2 * BLOCK);
    assert_eq!(beyond(&device).unwrap_err().kind, ErrorKind::Usage);
    fake.set_blocks(BLOCKS as u64 / 2);
    fake.set_changed(ChangedNamespaces::List(vec![1]));
    assert!(fake.raise(NAMESPACE));
    until("the smaller size", || device.info().size_bytes == size / 2);
    let error = read(&device, size / 2, BLOCK).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Usage);
    assert!(error.to_string().contains("leaves the device"), "{error}");
    write(&device, size / 2 - BLOCK as u64, &pattern(BLOCK, 3)).unwrap();
    // More than the list holds: everything is looked at.
    fake.set_blocks(BLOCKS as u64);
    fake.set_changed(ChangedNamespaces::TooMany);
    assert!(fake.raise(NAMESPACE));
    until("the old size", || device.info().size_bytes == size);
    read(&device, size / 2, BLOCK).unwrap();
    let last = device.describe()["events"]["last"].to_string();
    assert!(last.contains(&size.to_string()), "{last}");
    assert_eq!(device.loss_count(), 0);
    close(&device);
}

#[test]
fn other_namespaces_are_other_peoples_business() {
    let fake = Fake::start(script());
    let device = open(&fake);
    fake.set_blocks(8);
    fake.set_changed(ChangedNamespaces::List(vec![2, 3]));
    assert!(fake.raise(NAMESPACE));
    until("the list", || pages_read(&fake, lid::CHANGED_NAMESPACES) == 1);
    read(&device, 0, BLOCK).unwrap();
    assert_eq!(device.info().size_bytes, (BLOCKS * BLOCK) as u64);
    close(&device);
}

#[test]
fn a_namespace_that_goes_fails_io_until_it_is_back() {
    let fake = Fake::start(script());
    let mut options = fake.options();
    options.loss_timeout = Some(Duration::from_millis(500));
    let device = NvmeTcpDevice::open(options).unwrap();
    until("requests for events", || fake.waiting_requests() == 4);
    fake.set_blocks(0);
    fake.set_changed(ChangedNamespaces::List(vec![1]));
    assert!(fake.raise(NAMESPACE));
    until("the end", || device.describe()["state"] == "failing");
    let error = read(&device, 0, BLOCK).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Gone);
    assert!(error.to_string().contains("namespace 1 is not there"), "{error}");
    fake.set_blocks(BLOCKS as u64);
    until("the namespace", || device.describe()["state"] == "connected");
    read(&device, 0, BLOCK).unwrap();
}

#[test]
fn ana_is_read_before_the_first_command_and_after_each_change() {
    let fake = Fake::start(Script {
        cmic: cmic::ANA,
        ana: ana_log(AnaState::NonOptimized, 5),
        ..script()
    });
    let device = open(&fake);
    let told = device.describe()["ana"].clone();
    assert_eq!(
        (
            told["group"].as_u64(),
            told["state"].as_str(),
            told["change_count"].as_u64()
        ),
        (Some(7), Some("non-optimized"), Some(5))
    );
    fake.set_ana(ana_log(AnaState::Optimized, 6));
    assert!(fake.raise(ANA));
    until("the state", || device.describe()["ana"]["state"] == "optimized");
    assert_eq!(pages_read(&fake, lid::ANA), 2);
    close(&device);
}

/// Groups that claim more than the page holds.
#[test]
fn an_ana_log_that_lies_is_refused() {
    let fake = Fake::start(Script {
        cmic: cmic::ANA,
        ana: AnaLog {
            chgcnt: 1,
            groups: vec![AnaGroup {
                id: 7,
                chgcnt: 1,
                state: AnaState::Optimized,
                nsids: (1..2000).collect(),
            }],
        },
        ..script()
    });
    let error = NvmeTcpDevice::open(fake.options()).err().unwrap();
    assert_eq!(error.kind, ErrorKind::Protocol);
    assert!(error.to_string().contains("ANA log"), "{error}");
}

#[test]
fn health_is_told_and_a_flood_is_not_followed() {
    let fake = Fake::start(script());
    let device = open(&fake);
    assert!(fake.raise(SMART));
    until("the warning", || {
        device.describe()["events"]["last"] == "the controller warns about its health: SMART 0x04"
    });
    let begun = Instant::now();
    let mut raised = 0;
    while begun.elapsed() < Duration::from_millis(1500) {
        raised += usize::from(fake.raise(SMART));
    }
    // Two windows have begun at most, and each request that waits is one more.
    assert!(
        (8..=2 * 32 + 4 + 32).contains(&raised),
        "{raised} events were heard"
    );
    until("requests again", || fake.waiting_requests() == 4);
    read(&device, 0, BLOCK).unwrap();
    assert_eq!(device.loss_count(), 0);
    close(&device);
}

#[test]
fn a_namespace_is_found_by_its_uuid_or_nguid() {
    let others: Vec<(u32, [u8; 16])> = (2..40).map(|nsid| (nsid * 3, [nsid as u8 + 100; 16])).collect();
    let fake = Fake::start(Script { others, ..script() });
    for key in [NamespaceKey::Uuid([130; 16]), NamespaceKey::Nguid([130; 16])] {
        let device = NvmeTcpDevice::open(HostOptions {
            namespace: key,
            ..fake.options()
        })
        .unwrap();
        assert_eq!(device.describe()["nsid"], 90);
        write(&device, 0, &pattern(BLOCK, 9)).unwrap();
        let nsid = fake.seen().iter().rev().find(|s| s.qid > 0).map(|s| s.sqe.nsid());
        assert_eq!(nsid, Some(90));
        close(&device);
    }
    let error = NvmeTcpDevice::open(HostOptions {
        namespace: NamespaceKey::Uuid([0xAB; 16]),
        ..fake.options()
    })
    .err()
    .unwrap();
    assert_eq!(error.kind, ErrorKind::Refused);
    let text = error.to_string();
    assert!(
        text.contains("uuid=abababab-abab-abab-abab-abababababab") && text.contains("39 namespaces"),
        "{text}"
    );
}

/// A list that goes round in circles would be asked for ever.
#[test]
fn a_list_of_namespaces_that_does_not_ascend_is_refused() {
    let fake = Fake::start(Script {
        others: vec![(5, [5; 16]), (3, [3; 16])],
        ..script()
    });
    let error = NvmeTcpDevice::open(HostOptions {
        namespace: NamespaceKey::Uuid([3; 16]),
        ..fake.options()
    })
    .err()
    .unwrap();
    assert!(error.to_string().contains("does not ascend"), "{error}");
}

/// Traffic Based Keep Alive: twice as often, since such a controller looks only once a KATO. Two hosts side by side, so
/// that the machine's speed is the same for both.
#[test]
fn keep_alive_comes_more_often_where_traffic_counts() {
    let fakes: Vec<Fake> = [0, ctratt::TBKAS]
        .into_iter()
        .map(|ctratt| {
            Fake::start(Script {
                ctratt,
                ..Default::default()
            })
        })
        .collect();
    let devices: Vec<_> = fakes
        .iter()
        .map(|fake| {
            NvmeTcpDevice::open(HostOptions {
                keep_alive: Duration::from_millis(800),
                ..fake.options()
            })
            .unwrap()
        })
        .collect();
    let count = |fake: &Fake| {
        let seen = fake.seen();
        seen.iter()
            .filter(|s| s.sqe.opcode() == admin::KEEP_ALIVE)
            .count()
    };
    until("keep alives", || count(&fakes[1]) >= 12);
    let (plain, traffic) = (count(&fakes[0]), count(&fakes[1]));
    assert!(plain >= 1 && plain * 3 <= traffic * 2, "{plain} and {traffic}");
    assert_eq!(devices[1].describe()["link"]["traffic_keep_alive"], true);
    devices.iter().for_each(|device| close(device));
}

/// Nothing is said, and it is seen all the same: the size, and the ANA state.
#[test]
fn what_no_event_told_is_found() {
    let fake = Fake::start(Script {
        cmic: cmic::ANA,
        ana: ana_log(AnaState::Optimized, 5),
        hook: Box::new(|_, sqe, _| match sqe.opcode() {
            admin::ASYNC_EVENT_REQUEST => Action::Status(Status::INVALID_OPCODE.do_not_retry(), 0),
            _ => Action::Normal,
        }),
        ..script()
    });
    let device = NvmeTcpDevice::open(HostOptions {
        reconcile: Duration::from_millis(100),
        ..fake.options()
    })
    .unwrap();
    fake.set_blocks(2 * BLOCKS as u64);
    until("the size", || {
        device.info().size_bytes == 2 * (BLOCKS * BLOCK) as u64
    });
    fake.set_ana(ana_log(AnaState::NonOptimized, 6));
    until("the state", || {
        device.describe()["ana"]["state"] == "non-optimized"
    });
    // What was pending there is let out by the look, too.
    assert!(pages_read(&fake, lid::CHANGED_NAMESPACES) >= 1);
    close(&device);
}

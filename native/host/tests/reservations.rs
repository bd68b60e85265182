//! Reservation verbs and the guard of writes against a scripted controller: answers that are lost, and what is made of it.

#[path = "fake/calls.rs"]
mod calls;
mod fake;

use calls::{close, pattern, read, until};
use fake::{Action, Fake, Script, BLOCK};
use headrace_host::{
    AcquireAction, Change, Command, CommandData, NvmeTcpDevice, PathState, RegisterAction, ReleaseAction,
    Report, ReservationType,
};
use headrace_transfer::{submit_one, BlockDevice, Buffer, ErrorKind, IoError, Op};
use headrace_wire::ana::{AnaGroup, AnaLog, AnaState};
use headrace_wire::event::config;
use headrace_wire::identify::cmic;
use headrace_wire::pdu::{DataHeader, Digests};
use headrace_wire::reservation::{report_request, Registrant};
use headrace_wire::{admin, io, Pdu, Sqe, Status};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const LONG: Duration = Duration::from_secs(20);
const SHARED: ReservationType = ReservationType::WriteExclusiveRegistrants;
const OURS: u64 = 0x11;
const THEIRS: u64 = 0x22;
const CONFLICT: Status = Status::RESERVATION_CONFLICT.do_not_retry();

/// What the controller does with the next command that changes reservations.
enum Do {
    Answer(Status),
    /// Nothing, and the connection breaks.
    Lose,
    /// Carry it out, so that Report shows this, and the connection breaks.
    CarryOutAndLose(Report),
}

/// What it does with the next Report.
enum Say {
    Refuse(Status),
    Nothing,
}

struct Controller {
    report: Mutex<Report>,
    changes: Mutex<VecDeque<Do>>,
    reports: Mutex<VecDeque<Say>>,
    /// Commands that change something, as they came.
    sent: AtomicUsize,
}

fn report(kind: u8, registrants: &[(u8, u64, bool)]) -> Report {
    Report {
        rtype: kind,
        registered: registrants.len() as u16,
        registrants: registrants
            .iter()
            .map(|&(host, key, holds)| Registrant {
                cntlid: 0xFFFF,
                holds,
                hostid: [host; 16],
                key,
            })
            .collect(),
        ..Report::default()
    }
}

fn send_report(sqe: &Sqe, report: &Report) -> Action {
    let length = report_request(sqe).0 as usize;
    let mut data = vec![0; length];
    report.encode_into(true, &mut data);
    let mut bytes = Vec::new();
    let header = DataHeader {
        cccid: sqe.cid(),
        ttag: 0,
        datao: 0,
        datal: length as u32,
        last: true,
        success: true,
    };
    Pdu::C2hData(header).encode(length, Digests::default(), 0, &mut bytes);
    bytes.extend_from_slice(&data);
    Action::Raw(bytes)
}

/// The fake's host identifier is [9; 16].
fn start(first: Report, changes: Vec<Do>, reports: Vec<Say>) -> (Fake, Arc<NvmeTcpDevice>, Arc<Controller>) {
    let controller = Arc::new(Controller {
        report: Mutex::new(first),
        changes: Mutex::new(changes.into()),
        reports: Mutex::new(reports.into()),
        sent: AtomicUsize::new(0),
    });
    let own = controller.clone();
    let hook = move |qid: u16, sqe: &Sqe, _: usize| match sqe.opcode() {
        _ if qid == 0 => Action::Normal,
        io::RESERVATION_REPORT => match own.reports.lock().unwrap().pop_front() {
            None => send_report(sqe, &own.report.lock().unwrap()),
            Some(Say::Refuse(status)) => Action::Status(status, 0),
            Some(Say::Nothing) => Action::Silent,
        },
        io::RESERVATION_REGISTER | io::RESERVATION_ACQUIRE | io::RESERVATION_RELEASE => {
            own.sent.fetch_add(1, Ordering::SeqCst);
            match own.changes.lock().unwrap().pop_front().expect("one too many") {
                Do::Answer(status) => Action::Status(status, 0),
                Do::Lose => Action::Vanish(0),
                Do::CarryOutAndLose(report) => {
                    *own.report.lock().unwrap() = report;
                    Action::Vanish(0)
                }
            }
        }
        _ => Action::Normal,
    };
    let fake = Fake::start(Script {
        hook: Box::new(hook),
        ..Script::default()
    });
    let device = NvmeTcpDevice::open(fake.options()).unwrap();
    (fake, device, controller)
}

fn register() -> Change {
    Change::Register {
        action: RegisterAction::Register,
        ignore_existing: false,
        persist: None,
        key: 0,
        new_key: OURS,
    }
}

fn preempt(action: AcquireAction) -> Change {
    Change::Acquire {
        action,
        kind: SHARED,
        key: OURS,
        victim: THEIRS,
    }
}

/// How it ends, and how many commands that change something the controller saw.
fn reserve(first: Report, changes: Vec<Do>, change: &Change) -> (Result<(), IoError>, usize) {
    let (fake, device, controller) = start(first, changes, vec![]);
    let result = device.reserve(change, LONG);
    assert!(controller.changes.lock().unwrap().is_empty());
    close(&device);
    drop(fake);
    (result, controller.sent.load(Ordering::SeqCst))
}

#[test]
fn an_answer_that_was_lost_is_looked_up() {
    let nobody = || report(0, &[]);
    let registered = || report(0, &[(9, OURS, false)]);
    // It was carried out: not again.
    let (result, sent) = reserve(nobody(), vec![Do::CarryOutAndLose(registered())], &register());
    assert_eq!((result.map_err(|e| e.to_string()), sent), (Ok(()), 1));
    // It was not: again.
    let changes = vec![Do::Lose, Do::Lose, Do::Answer(Status::SUCCESS)];
    let (result, sent) = reserve(nobody(), changes, &register());
    assert_eq!((result.map_err(|e| e.to_string()), sent), (Ok(()), 3));
    // Not for ever.
    let (result, sent) = reserve(nobody(), (0..5).map(|_| Do::Lose).collect(), &register());
    assert_eq!((result.unwrap_err().kind, sent), (ErrorKind::Unknown, 5));
    // Another key is registered by now, and the second try is refused: that is what is told.
    let changes = vec![Do::Lose, Do::Answer(CONFLICT)];
    let (result, _) = reserve(report(0, &[(9, 5, false)]), changes, &register());
    assert_eq!(result.unwrap_err().kind, ErrorKind::Conflict);
}

#[test]
fn what_report_shows_of_each_verb() {
    let held = |key| report(3, &[(9, key, true)]);
    let clear = Change::Release {
        action: ReleaseAction::Clear,
        kind: None,
        key: OURS,
    };
    let release = Change::Release {
        action: ReleaseAction::Release,
        kind: Some(SHARED),
        key: OURS,
    };
    let unregister = Change::Register {
        action: RegisterAction::Unregister,
        ignore_existing: false,
        persist: None,
        key: OURS,
        new_key: 0,
    };
    let acquire = Change::Acquire {
        action: AcquireAction::Acquire,
        kind: SHARED,
        key: OURS,
        victim: 0,
    };
    for (change, before, after) in [
        (clear, held(OURS), report(0, &[])),
        (release, held(OURS), report(0, &[(9, OURS, false)])),
        (unregister, held(OURS), report(0, &[])),
        (acquire, report(0, &[(9, OURS, false)]), held(OURS)),
        (
            preempt(AcquireAction::Preempt),
            report(3, &[(2, THEIRS, true), (9, OURS, false)]),
            held(OURS),
        ),
    ] {
        let (result, sent) = reserve(before.clone(), vec![Do::CarryOutAndLose(after)], &change);
        assert!(result.is_ok() && sent == 1, "{change:?}: {result:?}");
        let (result, sent) = reserve(before, vec![Do::Lose, Do::Answer(Status::SUCCESS)], &change);
        assert!(result.is_ok() && sent == 2, "{change:?}: {result:?}");
    }
}

/// That the victim is gone does not show that its writes are through.
#[test]
fn a_lost_preempt_and_abort_is_never_called_done() {
    let before = report(3, &[(2, THEIRS, true), (9, OURS, false)]);
    let after = report(3, &[(9, OURS, true)]);
    let change = preempt(AcquireAction::PreemptAndAbort);
    let (result, sent) = reserve(before.clone(), vec![Do::CarryOutAndLose(after)], &change);
    let error = result.unwrap_err();
    assert_eq!((error.kind, sent), (ErrorKind::Unknown, 1));
    assert!(error.to_string().contains("shut out"), "{error}");
    let interrupted = vec![Do::Answer(Status::INTERRUPTED.do_not_retry())];
    let (result, _) = reserve(before, interrupted, &change);
    let error = result.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Failed);
    assert!(error.to_string().contains("not drained"), "{error}");
}

#[test]
fn a_command_that_changes_the_medium_is_not_passed_through() {
    let (_fake, device, _) = start(report(0, &[]), vec![], vec![]);
    for opcode in [
        io::WRITE,
        io::WRITE_ZEROES,
        io::DATASET_MANAGEMENT,
        io::FLUSH,
        io::COPY,
        0x90,
    ] {
        let command = Command {
            admin: false,
            opcode,
            nsid: None,
            cdw: [0; 6],
            data: CommandData::None,
            timeout: LONG,
        };
        assert_eq!(
            device.command(command).unwrap_err().kind,
            ErrorKind::Usage,
            "{opcode:#x}"
        );
    }
    close(&device);
}

/// While the question is not answered reads pass, and a write waits; the answer lets it go.
#[test]
fn reads_do_not_wait_for_the_guard() {
    let ours = report(3, &[(9, OURS, true)]);
    let (fake, device, controller) = start(ours, vec![], vec![Say::Nothing]);
    let guarding = {
        let device = device.clone();
        std::thread::spawn(move || device.guard_writes(OURS, SHARED, LONG))
    };
    until("the question", || {
        fake.seen()
            .iter()
            .any(|seen| seen.sqe.opcode() == io::RESERVATION_REPORT && seen.qid == 1)
    });
    let bytes = pattern(BLOCK, 3);
    let from = Buffer::from_vec(bytes.clone());
    let write = submit_one(&*device, Op::Write { from, fua: false }, 0);
    let flush = submit_one(&*device, Op::Flush, 0);
    for _ in 0..5 {
        assert_eq!(read(&device, 0, BLOCK).unwrap(), vec![0; BLOCK]);
    }
    assert!(write.wait(Duration::from_millis(50)).is_none() && flush.wait(Duration::ZERO).is_none());
    assert_eq!(device.describe()["guard"]["state"], "asking");
    // That association is given up for its silence, and the next one answers.
    assert!(controller.reports.lock().unwrap().is_empty());
    guarding.join().unwrap().unwrap();
    write.wait(LONG).unwrap().unwrap();
    flush.wait(LONG).unwrap().unwrap();
    assert_eq!(fake.media()[..BLOCK], bytes);
    assert_eq!(device.describe()["guard"]["state"], "passed");
    close(&device);
}

/// Associations come up, and none shows the reservation: writes wait as long as they would for a lost target.
#[test]
fn a_question_that_is_never_answered_ends_the_waiting() {
    let silence = (0..1000).map(|_| Say::Nothing).collect();
    let (fake, device, controller) = start(report(3, &[(9, OURS, true)]), vec![], silence);
    close(&device);
    let mut options = fake.options();
    options.io_timeout = Duration::from_millis(100);
    options.loss_timeout = Some(Duration::from_millis(600));
    let device = NvmeTcpDevice::open(options).unwrap();
    let error = device
        .guard_writes(OURS, SHARED, Duration::from_millis(1))
        .unwrap_err();
    assert_eq!(error.kind, ErrorKind::Timeout);
    let write = || {
        let from = Buffer::from_vec(pattern(BLOCK, 1));
        submit_one(&*device, Op::Write { from, fua: false }, 0).wait(LONG)
    };
    let error = write().expect("an end").unwrap_err();
    assert_eq!(error.kind, ErrorKind::Gone);
    assert!(error.to_string().contains("Reservation Report"), "{error}");
    assert_eq!(device.describe()["guard"]["state"], "asking");
    until("reads go on", || read(&device, 0, BLOCK).is_ok());
    controller.reports.lock().unwrap().clear();
    until("writes go out again", || write().expect("an end").is_ok());
    assert_eq!(device.describe()["guard"]["state"], "passed");
    close(&device);
}

/// A path by which the namespace is not accessible is asked once it is, and until then it costs nothing.
#[test]
fn an_inaccessible_path_is_not_asked() {
    let log = |state| AnaLog {
        chgcnt: 1,
        groups: vec![AnaGroup {
            id: 7,
            chgcnt: 1,
            state,
            nsids: vec![],
        }],
    };
    let accessible = Arc::new(AtomicBool::new(false));
    let script = |state, accessible: Arc<AtomicBool>| Script {
        oaes: config::ANA,
        cmic: cmic::ANA,
        ana: log(state),
        hook: Box::new(move |qid, sqe, _| match (qid, sqe.opcode()) {
            (1.., io::RESERVATION_REPORT) if accessible.load(Ordering::SeqCst) => {
                send_report(sqe, &report(3, &[(9, OURS, true)]))
            }
            (1.., io::RESERVATION_REPORT) => Action::Status(Status::ANA_INACCESSIBLE.do_not_retry(), 0),
            _ => Action::Normal,
        }),
        ..Script::default()
    };
    let near = Fake::start(script(AnaState::Optimized, Arc::new(AtomicBool::new(true))));
    let far = Fake::start(script(AnaState::Inaccessible, accessible.clone()));
    let mut options = near.options();
    options.portals.extend(far.options().portals);
    options.reconcile = Duration::from_millis(50);
    let device = NvmeTcpDevice::open(options).unwrap();
    until("both paths", || {
        device.paths().iter().all(|path| path.state == PathState::Ready)
    });
    device.guard_writes(OURS, SHARED, LONG).unwrap();
    calls::write(&device, 0, &pattern(BLOCK, 1)).unwrap();
    // Several looks later nothing has changed.
    until("looks", || {
        let seen = far.seen();
        seen.iter()
            .filter(|seen| seen.sqe.opcode() == admin::GET_LOG_PAGE)
            .count()
            > 6
    });
    assert_eq!((device.loss_count(), far.connections()), (0, 2));
    accessible.store(true, Ordering::SeqCst);
    far.set_ana(log(AnaState::Optimized));
    until("the other path has shown it, too", || {
        device.describe()["guard"]["associations_passed"] == 2
    });
    assert_eq!(device.loss_count(), 0);
    close(&device);
}

#[test]
fn a_question_that_fails() {
    let ours = || report(3, &[(9, OURS, true)]);
    // For a reason that passes: it is asked again, on another association.
    let passing = vec![
        Say::Refuse(Status::NAMESPACE_NOT_READY),
        Say::Refuse(Status::ANA_TRANSITION),
    ];
    let (_fake, device, _) = start(ours(), vec![], passing);
    device.guard_writes(OURS, SHARED, LONG).unwrap();
    // The first was given up with its association; the second told of the namespace's state only.
    assert_eq!(device.loss_count(), 1);
    close(&device);
    // For good: nothing shows that this host may write.
    let lasting = vec![Say::Refuse(Status::INVALID_OPCODE.do_not_retry())];
    let (fake, device, _) = start(ours(), vec![], lasting);
    let error = device.guard_writes(OURS, SHARED, LONG).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Conflict);
    assert!(error.to_string().contains("Invalid Command Opcode"), "{error}");
    assert_eq!(
        calls::write(&device, 0, &pattern(BLOCK, 1)).unwrap_err().kind,
        ErrorKind::Conflict
    );
    assert_eq!(calls::flush(&device).unwrap_err().kind, ErrorKind::Conflict);
    read(&device, 0, BLOCK).unwrap();
    assert!(fake
        .seen()
        .iter()
        .all(|seen| seen.sqe.opcode() != io::WRITE || seen.qid == 0));
    close(&device);
}

//! Media that hang, fail and panic, and what the target makes of it.

use crate::common::{admin, eventually, io, Client, NQN};
use crate::subsystem::Subsystem;
use crate::{Target, TargetConfig};
use headrace_media::Media;
use headrace_wire::fabrics::{Connect, ConnectData, CATTR_NO_SQ_FLOW, CC_ENABLE, CNTLID_DYNAMIC};
use headrace_wire::log::get_log_page;
use headrace_wire::pdu::Digests;
use headrace_wire::{Sgl, Sqe, Status};
use std::io::{self, Read};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

#[derive(Default)]
struct Switch {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    hang: bool,
    /// Of `try_read`, which reactors call.
    hang_reactor: bool,
    in_reactor: usize,
    hang_read: bool,
    in_read: usize,
    fail: bool,
    panic: bool,
    /// First byte of each write that began.
    writes: Vec<u8>,
    inside: usize,
}

impl Switch {
    fn set(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock().unwrap());
        self.changed.notify_all();
    }

    fn pass(&self, write: Option<u8>) -> io::Result<()> {
        let mut state = self.state.lock().unwrap();
        state.writes.extend(write);
        state.inside += 1;
        while state.hang {
            state = self.changed.wait(state).unwrap();
        }
        state.inside -= 1;
        let (fail, panic) = (state.fail, state.panic);
        drop(state);
        assert!(!panic, "as the test wants it");
        if fail {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        Ok(())
    }
}

struct Bad(Arc<Switch>);

impl Media for Bad {
    fn size_bytes(&self) -> u64 {
        1 << 20
    }
    fn block_bytes(&self) -> u32 {
        4096
    }
    fn read_only(&self) -> bool {
        false
    }
    fn volatile_cache(&self) -> bool {
        true
    }
    fn engine(&self) -> &'static str {
        "pread"
    }
    fn read(&self, _offset: u64, into: &mut [u8]) -> io::Result<()> {
        into.fill(3);
        let mut state = self.0.state.lock().unwrap();
        state.in_read += 1;
        while state.hang_read {
            state = self.0.changed.wait(state).unwrap();
        }
        state.in_read -= 1;
        let panic = state.panic;
        drop(state);
        assert!(!panic, "as the test wants it");
        Ok(())
    }
    fn write(&self, _offset: u64, from: &[u8], _fua: bool) -> io::Result<()> {
        self.0.pass(Some(from[0]))
    }
    fn flush(&self) -> io::Result<()> {
        self.0.pass(None)
    }
    fn try_read(&self, _offset: u64, _into: &mut [u8]) -> io::Result<bool> {
        let mut state = self.0.state.lock().unwrap();
        state.in_reactor += 1;
        while state.hang_reactor {
            state = self.0.changed.wait(state).unwrap();
        }
        state.in_reactor -= 1;
        Ok(false)
    }
    fn deallocate(&self, _offset: u64, _length: u64) -> io::Result<()> {
        Ok(())
    }
}

fn start() -> (Target, Arc<Switch>) {
    start_with("{}")
}

fn start_with(config: &str) -> (Target, Arc<Switch>) {
    let switch = Arc::new(Switch::default());
    let subsystem = Subsystem::with_media(NQN, Box::new(Bad(switch.clone())));
    let config = TargetConfig::from_json(config).unwrap();
    (Target::serve(&config, vec![Arc::new(subsystem)]).unwrap(), switch)
}

fn connect(qid: u16, cntlid: u16) -> (Connect, ConnectData) {
    let connect = Connect {
        recfmt: 0,
        qid,
        sqsize: 31,
        cattr: CATTR_NO_SQ_FLOW,
        kato_ms: 0,
    };
    let data = ConnectData {
        hostid: [7; 16],
        cntlid,
        subnqn: NQN.into(),
        hostnqn: crate::common::HOST.into(),
    };
    (connect, data)
}

fn write(queue: &mut Client, byte: u8) {
    let cid = queue.cid();
    let sqe = Sqe::rw(1, cid, 1, 0, 1).with_sgl(Sgl::InCapsule {
        offset: 0,
        length: 4096,
    });
    queue.send_capsule(sqe, &[byte; 4096]);
}

/// The promise of `gate`: what waits in line when its association dies never begins, and the host is not admitted again
/// before what had begun has ended.
#[test]
fn a_dead_associations_commands_never_reach_the_medium() {
    let (target, switch) = start();
    let address = target.addresses()[0];
    let (first, cntlid) = admin(address);
    let mut queue = io(address, cntlid, Digests::default(), 0);
    switch.set(|state| state.hang = true);
    // Four workers hang in four writes, five more stand in line.
    (1..=9).for_each(|byte| write(&mut queue, byte));
    eventually("the writes do not begin", || {
        switch.state.lock().unwrap().inside == 4
    });
    drop(first);
    queue.expect_closed();
    assert_eq!(target.status()["controllers"], serde_json::json!([]));
    // The same host again: it waits.
    let mut again = Client::open(address);
    again.initialise(Digests::default(), 0);
    again
        .stream
        .set_read_timeout(Some(Duration::from_millis(150)))
        .unwrap();
    let (connect, data) = connect(0, CNTLID_DYNAMIC);
    again.send_capsule(connect.encode(77), &data.encode());
    let early = again.stream.read(&mut [0]).is_ok();
    assert!(
        !early,
        "admitted while writes of its former association are at the medium"
    );
    // Another host does not wait for it.
    let mut other = Client::open(address);
    other.initialise(Digests::default(), 0);
    assert!(other
        .connect(0, CNTLID_DYNAMIC, |_, data| data.hostid = [9; 16])
        .status
        .is_success());
    switch.set(|state| state.hang = false);
    again
        .stream
        .set_read_timeout(Some(Duration::from_secs(5)))
        .unwrap();
    assert!(again.answer(77).cqe.status.is_success());
    let mut writes = switch.state.lock().unwrap().writes.clone();
    writes.sort_unstable();
    assert_eq!(
        writes,
        [1, 2, 3, 4],
        "a write that stood in line reached the medium"
    );
}

/// A reset takes the queues as the end of an association does: RDY stays while an old write is at the medium, and a new
/// queue waits for it. The reactor of the old queue is held up meanwhile, so nothing but the reset itself can say what is
/// still to drain.
#[test]
fn a_reset_controllers_old_writes_end_before_its_new_queues_begin() {
    let (target, switch) = start_with(r#"{"reactor_threads": 2}"#);
    let address = target.addresses()[0];
    // Connections go to the reactors in turn.
    let (mut first, cntlid) = admin(address);
    let mut queue = io(address, cntlid, Digests::default(), 0);
    let _even = Client::open(address);
    let mut second = Client::open(address);
    second.initialise(Digests::default(), 0);
    assert!(second.connect(2, cntlid, |_, _| {}).status.is_success());
    switch.set(|state| state.hang = true);
    // Four workers hang in four writes, two more stand in line.
    (1..=6).for_each(|byte| write(&mut queue, byte));
    eventually("the writes do not begin", || {
        switch.state.lock().unwrap().inside == 4
    });
    switch.set(|state| state.hang_reactor = true);
    let cid = second.cid();
    second.send_capsule(
        Sqe::rw(2, cid, 1, 0, 1).with_sgl(Sgl::Transport { length: 4096 }),
        &[],
    );
    eventually("the reactor does not read", || {
        switch.state.lock().unwrap().in_reactor == 1
    });
    assert!(first.set_property(0x14, 0).is_success());
    assert_eq!(
        first.property(0x1C, false).cqe.dw0,
        1,
        "RDY with a write at the medium"
    );
    // A host that does not wait for RDY.
    assert!(first.set_property(0x14, u64::from(CC_ENABLE)).is_success());
    let mut again = Client::open(address);
    again.initialise(Digests::default(), 0);
    again
        .stream
        .set_read_timeout(Some(Duration::from_millis(150)))
        .unwrap();
    let (connect, data) = connect(1, cntlid);
    again.send_capsule(connect.encode(77), &data.encode());
    assert!(
        again.stream.read(&mut [0]).is_err(),
        "admitted while writes of the queue that was reset are at the medium"
    );
    switch.set(|state| (state.hang, state.hang_reactor) = (false, false));
    queue.expect_closed();
    again
        .stream
        .set_read_timeout(Some(Duration::from_secs(5)))
        .unwrap();
    assert!(again.answer(77).cqe.status.is_success());
    write(&mut again, 9);
    eventually("the new queue's write does not begin", || {
        switch.state.lock().unwrap().writes.len() == 5
    });
    let writes = switch.state.lock().unwrap().writes.clone();
    assert_eq!(writes[4], 9, "an old write after the new queue's: {writes:?}");
    // Nothing is at the medium: the next reset is complete at once.
    eventually("the write does not end", || {
        switch.state.lock().unwrap().inside == 0
    });
    assert!(first.set_property(0x14, 0).is_success());
    eventually("RDY stays", || first.property(0x1C, false).cqe.dw0 == 0);
}

/// The wait for a medium that does not come back is bounded, and its end says "try again", not "never".
#[test]
fn a_medium_that_hangs_makes_the_host_wait_and_then_say_busy() {
    let (target, switch) = start();
    let address = target.addresses()[0];
    let (first, cntlid) = admin(address);
    let mut queue = io(address, cntlid, Digests::default(), 0);
    switch.set(|state| state.hang = true);
    write(&mut queue, 1);
    eventually("the write does not begin", || {
        switch.state.lock().unwrap().inside == 1
    });
    drop((first, queue));
    eventually("the controller stays", || {
        target.status()["controllers"] == serde_json::json!([])
    });
    let mut again = Client::open(address);
    again.initialise(Digests::default(), 0);
    // Under another name it is the same host still: reservations know it by its identifier.
    let cqe = again.connect(0, CNTLID_DYNAMIC, |_, data| data.hostnqn.push('x'));
    assert_eq!(cqe.status, Status::CONNECT_CONTROLLER_BUSY);
    switch.set(|state| state.hang = false);
    eventually("the write does not end", || {
        switch.state.lock().unwrap().inside == 0
    });
    assert!(again.connect(0, CNTLID_DYNAMIC, |_, _| {}).status.is_success());
}

/// After CC.SHN nothing reaches the medium before a reset, whatever CC says in between.
#[test]
fn a_controller_that_was_shut_down_takes_no_io() {
    let (target, switch) = start();
    let address = target.addresses()[0];
    let (mut first, cntlid) = admin(address);
    let mut queue = io(address, cntlid, Digests::default(), 0);
    let shut = u64::from(CC_ENABLE) | 1 << 14;
    assert!(first.set_property(0x14, shut).is_success());
    eventually("the shutdown is not done", || {
        first.property(0x1C, false).cqe.dw0 == 1 | 2 << 2
    });
    let refused = Status::SEQUENCE_ERROR.do_not_retry();
    assert_eq!(queue.write_in_capsule(0, &[1; 4096], 4096).status, refused);
    assert!(first.set_property(0x14, u64::from(CC_ENABLE)).is_success());
    assert_eq!(queue.write_in_capsule(0, &[2; 4096], 4096).status, refused);
    let mut second = Client::open(address);
    second.initialise(Digests::default(), 0);
    assert_eq!(second.connect(2, cntlid, |_, _| {}).status, refused);
    assert!(switch.state.lock().unwrap().writes.is_empty());
    assert!(first.set_property(0x14, 0).is_success());
    queue.expect_closed();
    assert!(first.set_property(0x14, u64::from(CC_ENABLE)).is_success());
    let mut queue = io(address, cntlid, Digests::default(), 0);
    assert!(queue.write_in_capsule(0, &[3; 4096], 4096).status.is_success());
    assert_eq!(switch.state.lock().unwrap().writes, [3]);
}

/// What stands in line is aborted and never begins; what is at the medium is not, and says so.
#[test]
fn abort_takes_a_command_out_of_the_line() {
    let (target, switch) = start();
    let address = target.addresses()[0];
    let (mut first, cntlid) = admin(address);
    let mut queue = io(address, cntlid, Digests::default(), 0);
    switch.set(|state| state.hang = true);
    let mut cids = Vec::new();
    for byte in 1..=6 {
        write(&mut queue, byte);
        cids.push(queue.last_cid());
    }
    queue.send_capsule(Sqe::new(0, 900, 1), &[]);
    eventually("the writes do not begin", || {
        switch.state.lock().unwrap().inside == 4
    });
    // The flush may be one of the four; the fifth and sixth write have not begun if it is not.
    let begun = switch.state.lock().unwrap().writes.clone();
    for (byte, &cid) in (1..=6).zip(&cids) {
        let aborted = first.abort(1, cid);
        assert_eq!(aborted, !begun.contains(&byte), "write {byte} of {begun:?}");
        if aborted {
            assert_eq!(queue.answer(cid).cqe.status, Status::ABORT_REQUESTED);
        }
    }
    assert!(!first.abort(1, 4000) && !first.abort(7, 1), "what does not exist");
    switch.set(|state| state.hang = false);
    for _ in 0..=begun.len() {
        match queue.receive().unwrap().pdu {
            headrace_wire::Pdu::CapsuleResp(cqe) => assert!(cqe.status.is_success(), "{}", cqe.status),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(switch.state.lock().unwrap().writes, begun);
}

/// Between the compare and the write of a pair no other write comes to the medium.
#[test]
fn nothing_comes_between_compare_and_write() {
    let (target, switch) = start();
    let address = target.addresses()[0];
    let (_first, cntlid) = admin(address);
    let mut queue = io(address, cntlid, Digests::default(), 0);
    let mut second = Client::open(address);
    second.initialise(Digests::default(), 0);
    assert!(second.connect(2, cntlid, |_, _| {}).status.is_success());
    switch.set(|state| state.hang_read = true);
    let sgl = Sgl::InCapsule {
        offset: 0,
        length: 4096,
    };
    for (opcode, cid, fuse, byte) in [(5, 800, 1, 3), (1, 801, 2, 4)] {
        let mut sqe = Sqe::rw(opcode, cid, 1, 0, 1).with_sgl(sgl);
        sqe.0[1] |= fuse;
        queue.send_capsule(sqe, &[byte; 4096]);
    }
    eventually("the compare does not begin", || {
        switch.state.lock().unwrap().in_read == 1
    });
    write(&mut second, 9);
    let zeroes = Sqe::rw(8, 700, 1, 0, 1);
    second.send_capsule(zeroes, &[]);
    std::thread::sleep(Duration::from_millis(50));
    assert!(switch.state.lock().unwrap().writes.is_empty());
    // A read is not a write, and need not wait for one.
    let cid = second.cid();
    let read = Sqe::rw(2, cid, 1, 0, 1).with_sgl(Sgl::Transport { length: 4096 });
    second.send_capsule(read, &[]);
    eventually("a read waits for the pair", || {
        switch.state.lock().unwrap().in_read == 2
    });
    switch.set(|state| state.hang_read = false);
    for _ in 0..2 {
        match queue.receive().unwrap().pdu {
            headrace_wire::Pdu::CapsuleResp(cqe) => assert!(cqe.status.is_success(), "{}", cqe.status),
            other => panic!("{other:?}"),
        }
    }
    eventually("the others do not come", || {
        switch.state.lock().unwrap().writes.len() == 3
    });
    assert_eq!(
        switch.state.lock().unwrap().writes[0],
        4,
        "the pair's write is the first"
    );
}

/// Abort commands wait for the queue's connection, and only so many at a time.
#[test]
fn abort_has_a_limit() {
    let (target, switch) = start_with(r#"{"reactor_threads": 2}"#);
    let address = target.addresses()[0];
    let (mut first, cntlid) = admin(address);
    let mut queue = io(address, cntlid, Digests::default(), 0);
    switch.set(|state| state.hang_reactor = true);
    let cid = queue.cid();
    queue.send_capsule(
        Sqe::rw(2, cid, 1, 0, 1).with_sgl(Sgl::Transport { length: 4096 }),
        &[],
    );
    eventually("the reactor does not read", || {
        switch.state.lock().unwrap().in_reactor == 1
    });
    for n in 0..5 {
        first.send_capsule(Sqe::new(8, 600 + n, 0).with_cdw(10, 7 << 16 | 1), &[]);
    }
    assert_eq!(
        first.answer(604).cqe.status,
        Status::ABORT_LIMIT_EXCEEDED.do_not_retry()
    );
    switch.set(|state| state.hang_reactor = false);
    for n in 0..4 {
        let cqe = first.answer(600 + n).cqe;
        assert_eq!((cqe.status, cqe.dw0), (Status::SUCCESS, 1));
    }
    assert!(queue.answer(cid).cqe.status.is_success());
}

#[test]
fn a_slow_sync_does_not_stall_other_commands() {
    let (target, switch) = start();
    let address = target.addresses()[0];
    let (_first, cntlid) = admin(address);
    let mut queue = io(address, cntlid, Digests::default(), 0);
    switch.set(|state| state.hang = true);
    for cid in 100..108 {
        queue.send_capsule(Sqe::new(0, cid, 1), &[]);
    }
    for _ in 0..20 {
        assert!(queue.read(0, 4, 4096).data.iter().all(|&byte| byte == 3));
    }
    switch.set(|state| state.hang = false);
    let mut answered: Vec<u16> = (100..108)
        .map(|_| match queue.receive().unwrap().pdu {
            headrace_wire::Pdu::CapsuleResp(cqe) => cqe.cid,
            other => panic!("{other:?}"),
        })
        .collect();
    answered.sort_unstable();
    assert_eq!(answered, (100..108).collect::<Vec<u16>>());
}

#[test]
fn a_failed_flush_is_said_everywhere() {
    let (target, switch) = start();
    let address = target.addresses()[0];
    let (mut first, cntlid) = admin(address);
    let cid = first.cid();
    assert!(first
        .command(Sqe::new(9, cid, 0).with_cdw(10, 0x0B).with_cdw(11, 0xFF), &[])
        .cqe
        .status
        .is_success());
    first.send_capsule(Sqe::new(0x0C, 700, 0), &[]);
    let mut queue = io(address, cntlid, Digests::default(), 0);
    switch.set(|state| state.fail = true);
    for _ in 0..2 {
        let cid = queue.cid();
        assert_eq!(
            queue.command(Sqe::new(0, cid, 1), &[]).cqe.status,
            Status::WRITE_FAULT
        );
    }
    let event = first.answer(700).cqe;
    assert_eq!(
        (event.status, event.dw0),
        (Status::SUCCESS, 1 | 2 << 16),
        "SMART, reliability, log 02h"
    );
    // Masked until the page is read.
    first.send_capsule(Sqe::new(0x0C, 701, 0), &[]);
    let cid = first.cid();
    let smart = first.command(get_log_page(cid, 0xFFFF_FFFF, 2, 0, 512), &[]).data;
    assert_eq!((smart[0], smart[160]), (4, 2), "critical warning, media errors");
    let cid = queue.cid();
    queue.command(Sqe::new(0, cid, 1), &[]);
    assert_eq!(first.answer(701).cqe.dw0, 1 | 2 << 16);
    assert_eq!(
        target.status()["subsystems"][0]["namespaces"][0]["degraded"],
        true
    );
    let error = target.stop(Duration::from_secs(5)).unwrap_err();
    assert!(error.contains("flush at the end"), "{error}");
}

#[test]
fn a_panic_at_the_medium_is_one_commands_error() {
    let (target, switch) = start();
    let address = target.addresses()[0];
    let (_first, cntlid) = admin(address);
    let mut queue = io(address, cntlid, Digests::default(), 0);
    switch.set(|state| state.panic = true);
    for _ in 0..8 {
        assert_eq!(queue.read(0, 1, 4096).cqe.status, Status::INTERNAL_ERROR);
    }
    switch.set(|state| state.panic = false);
    assert!(
        queue.read(0, 1, 4096).cqe.status.is_success(),
        "the workers are gone"
    );
}

/// A preempt and abort answers "success" only when nothing of the preempted host can land any more. While its writes hang at
/// the medium the answer says so; and what stood in line behind them never begins.
#[test]
fn a_preempt_and_abort_does_not_promise_too_much() {
    use headrace_wire::reservation::{AcquireAction, Change, RegisterAction, ReservationType};
    let (target, switch) = start();
    let address = target.addresses()[0];
    let host = |number: u8| {
        let mut first = Client::open(address);
        first.initialise(Digests::default(), 0);
        let cqe = first.connect(0, CNTLID_DYNAMIC, |_, data| data.hostid = [number; 16]);
        first.enable();
        let mut queue = Client::open(address);
        queue.initialise(Digests::default(), 0);
        let status = queue
            .connect(1, cqe.dw0 as u16, |_, data| data.hostid = [number; 16])
            .status;
        assert!(status.is_success());
        (first, queue)
    };
    let change = |queue: &mut Client, change: Change| {
        let (sqe, data) = change.command(queue.cid(), 1);
        let length = data.len() as u32;
        let sqe = sqe.with_sgl(Sgl::InCapsule { offset: 0, length });
        queue.command(sqe, &data).cqe.status
    };
    let register = |new_key| Change::Register {
        action: RegisterAction::Register,
        ignore_existing: false,
        persist: None,
        key: 0,
        new_key,
    };
    let acquire = |action, key, victim| Change::Acquire {
        action,
        kind: ReservationType::WriteExclusiveRegistrants,
        key,
        victim,
    };
    let (_admin, mut old) = host(1);
    let (_other_admin, mut taker) = host(2);
    assert!(change(&mut old, register(1)).is_success());
    assert!(change(&mut old, acquire(AcquireAction::Acquire, 1, 0)).is_success());
    assert!(change(&mut taker, register(2)).is_success());
    switch.set(|state| state.hang = true);
    // Four workers hang in four writes, three more stand in line.
    (1..=7).for_each(|byte| write(&mut old, byte));
    eventually("the writes do not begin", || {
        switch.state.lock().unwrap().inside == 4
    });
    let preempt = acquire(AcquireAction::PreemptAndAbort, 2, 1);
    assert_eq!(
        change(&mut taker, preempt),
        Status::INTERRUPTED.do_not_retry(),
        "with four writes at the medium"
    );
    // Shut out it is all the same.
    let report = headrace_wire::reservation::report_command(taker.cid(), 1, true, 256);
    let report = taker.command(report, &[]).data;
    assert_eq!((report[5], report[64 + 2], report[64 + 8]), (1, 1, 2));
    switch.set(|state| state.hang = false);
    let mut answers = [0; 2];
    for _ in 0..7 {
        match old.receive().unwrap().pdu {
            headrace_wire::Pdu::CapsuleResp(cqe) if cqe.status.is_success() => answers[0] += 1,
            headrace_wire::Pdu::CapsuleResp(cqe) => {
                assert_eq!(cqe.status, Status::PREEMPT_ABORT.do_not_retry());
                answers[1] += 1;
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(answers, [4, 3]);
    let mut writes = switch.state.lock().unwrap().writes.clone();
    writes.sort_unstable();
    assert_eq!(
        writes,
        [1, 2, 3, 4],
        "a write that stood in line reached the medium"
    );
    // Registered again, and idle: now it can be promised, whatever the taker itself has under way.
    assert!(change(&mut old, register(1)).is_success());
    write(&mut old, 9);
    eventually("the write does not end", || {
        let state = switch.state.lock().unwrap();
        state.writes.contains(&9) && state.inside == 0
    });
    switch.set(|state| state.hang = true);
    let own = taker.write_sqe(0, 1, 4096).with_sgl(Sgl::InCapsule {
        offset: 0,
        length: 4096,
    });
    taker.send_capsule(own, &[10; 4096]);
    eventually("the taker's write does not begin", || {
        switch.state.lock().unwrap().inside == 1
    });
    assert!(change(&mut taker, preempt).is_success());
    switch.set(|state| state.hang = false);
    assert!(taker.answer(own.cid()).cqe.status.is_success());
}

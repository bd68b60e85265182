//! Abort: what has not come to the media is aborted, and nothing of it is left.

mod common;

use common::{admin, io, pattern, start, Client};
use headrace_wire::pdu::{DataHeader, Digests, Pdu};
use headrace_wire::{Sgl, Sqe, Status};

const DIGESTS: Digests = Digests {
    header: false,
    data: true,
};

fn untouched(queue: &mut Client) {
    assert!(queue.read(0, 8, 4096).data.iter().all(|&byte| byte == 0));
}

/// Without data digests the data would go straight to memory, with them to a buffer.
#[test]
fn a_write_whose_data_have_not_come() {
    for digests in [Digests::default(), DIGESTS] {
        let target = start("");
        let address = target.addresses()[0];
        let (mut first, cntlid) = admin(address);
        let mut queue = io(address, cntlid, digests, 0);
        let sqe = queue.write_sqe(0, 8, 4096);
        queue.send_capsule(sqe, &[]);
        let r2t = queue.r2t();
        assert!(first.abort(1, sqe.cid()));
        assert_eq!(queue.answer(sqe.cid()).cqe.status, Status::ABORT_REQUESTED);
        assert!(!first.abort(1, sqe.cid()), "it is gone");
        // Its identifier is free at once, and its data, which may be on their way, go nowhere.
        let again = Sqe::rw(1, sqe.cid(), 1, 8, 8).with_sgl(Sgl::Transport { length: 32768 });
        queue.send_capsule(again, &[]);
        let second = queue.r2t();
        assert_ne!(second.ttag, r2t.ttag);
        queue.send_data(&r2t, &pattern(32768, 1), 5000);
        queue.send_data(&second, &pattern(32768, 2), 32768);
        assert!(queue.answer(sqe.cid()).cqe.status.is_success());
        untouched(&mut queue);
        assert!(queue.read(8, 8, 4096).data == pattern(32768, 2));
        assert_eq!(target.status()["totals"]["digest_errors"], 0);
        common::eventually("buffers stay taken", || target.status()["buffer_bytes"] == 0);
    }
}

/// Data that go straight to the medium are at the medium with their first byte; those in a buffer are not before the last.
#[test]
fn a_write_whose_data_come_right_now() {
    for digests in [Digests::default(), DIGESTS] {
        let target = start("");
        let address = target.addresses()[0];
        let (mut first, cntlid) = admin(address);
        let mut queue = io(address, cntlid, digests, 0);
        let sqe = queue.write_sqe(0, 8, 4096);
        queue.send_capsule(sqe, &[]);
        let r2t = queue.r2t();
        let data = pattern(32768, 1);
        let header = DataHeader {
            cccid: r2t.cccid,
            ttag: r2t.ttag,
            datao: 0,
            datal: 32768,
            last: true,
            success: false,
        };
        let bytes = queue.encode(&Pdu::H2cData(header), &data);
        queue.send(&bytes[..10_000]);
        if !digests.data {
            // That the target has begun to receive them is seen at the medium.
            let mut other = Client::open(address);
            other.initialise(digests, 0);
            assert!(other.connect(2, cntlid, |_, _| {}).status.is_success());
            common::eventually("nothing comes to the medium", || {
                other.read(0, 1, 4096).data == data[..4096]
            });
        }
        let aborted = first.abort(1, sqe.cid());
        assert_eq!(aborted, digests.data);
        queue.send(&bytes[10_000..]);
        let status = queue.answer(sqe.cid()).cqe.status;
        if aborted {
            assert_eq!(status, Status::ABORT_REQUESTED);
            untouched(&mut queue);
        } else {
            assert!(status.is_success());
            assert!(queue.read(0, 8, 4096).data == data);
        }
    }
}

#[test]
fn a_write_that_waits_for_memory() {
    let extra = r#""connection_memory_bytes": 2097152, "memory_bytes": 2097152"#;
    let target = start(extra);
    let address = target.addresses()[0];
    let (mut first, cntlid) = admin(address);
    let mut queue = io(address, cntlid, DIGESTS, 0);
    let sqes: Vec<Sqe> = (0..3).map(|n| queue.write_sqe(n * 256, 256, 4096)).collect();
    for sqe in &sqes {
        queue.send_capsule(*sqe, &[]);
    }
    let r2t = queue.r2t();
    assert_eq!(r2t.cccid, sqes[0].cid());
    assert!(first.abort(1, sqes[1].cid()));
    assert_eq!(queue.answer(sqes[1].cid()).cqe.status, Status::ABORT_REQUESTED);
    let data = pattern(1 << 20, 3);
    queue.send_data(&r2t, &data, 1 << 20);
    assert!(queue.answer(sqes[0].cid()).cqe.status.is_success());
    // The third has its turn.
    let r2t = queue.r2t();
    assert_eq!(r2t.cccid, sqes[2].cid());
    queue.send_data(&r2t, &data, 1 << 20);
    assert!(queue.answer(sqes[2].cid()).cqe.status.is_success());
    assert!(queue.read(256, 8, 4096).data.iter().all(|&byte| byte == 0));
    common::eventually("buffers stay taken", || target.status()["buffer_bytes"] == 0);
}

#[test]
fn an_event_request() {
    let target = start("");
    let (mut first, _) = admin(target.addresses()[0]);
    first.send_capsule(Sqe::new(0x0C, 500, 0), &[]);
    first.send_capsule(Sqe::new(8, 501, 0).with_cdw(10, 500 << 16), &[]);
    assert_eq!(first.answer(500).cqe.status, Status::ABORT_REQUESTED);
    let cqe = first.answer(501).cqe;
    assert_eq!((cqe.status, cqe.dw0), (Status::SUCCESS, 0));
    assert!(!first.abort(0, 500));
}

/// A host that aborts again and again and never sends what it was asked for: the target keeps as many slots as the queue
/// has entries, and then aborts no more.
#[test]
fn aborted_writes_that_owe_data_are_bounded() {
    let target = start("");
    let address = target.addresses()[0];
    let (mut first, cntlid) = admin(address);
    let mut queue = io(address, cntlid, Digests::default(), 0);
    for n in 0..32 {
        let sqe = queue.write_sqe(0, 1, 4096);
        queue.send_capsule(sqe, &[]);
        queue.r2t();
        assert!(first.abort(1, sqe.cid()), "write {n}");
        assert_eq!(queue.answer(sqe.cid()).cqe.status, Status::ABORT_REQUESTED);
    }
    let data = pattern(4096, 4);
    let sqe = queue.write_sqe(0, 1, 4096);
    queue.send_capsule(sqe, &[]);
    let r2t = queue.r2t();
    assert!(!first.abort(1, sqe.cid()));
    queue.send_data(&r2t, &data, 4096);
    assert!(queue.answer(sqe.cid()).cqe.status.is_success());
    assert!(queue.read(0, 1, 4096).data == data);
}

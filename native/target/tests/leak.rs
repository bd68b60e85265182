//! Alone in its process, so that every descriptor and thread counts.

mod common;

use common::{admin, io, start};
use headrace_wire::pdu::Digests;
use std::time::Duration;

fn entries(of: &str) -> usize {
    std::fs::read_dir(of).unwrap().count()
}

#[test]
fn nothing_is_left_after_stop() {
    let round = || {
        let target = start("");
        let address = target.addresses()[0];
        let (_first, cntlid) = admin(address);
        let mut queue = io(address, cntlid, Digests::default(), 0);
        assert!(queue.read(0, 1, 4096).cqe.status.is_success());
        target.stop(Duration::from_secs(5)).unwrap();
        target.stop(Duration::from_secs(5)).unwrap();
    };
    round();
    let before = (entries("/proc/self/fd"), entries("/proc/self/task"));
    (0..10).for_each(|_| round());
    assert_eq!(
        (entries("/proc/self/fd"), entries("/proc/self/task")),
        before,
        "descriptors, threads"
    );
}

//! A queue pair of the host against a connection of the target, without anything between them but bytes.

use crate::random::Random;
use headrace_host::testing::{Broken, Ended, Payload, Queue};
use headrace_target::testing::Bench;
use headrace_transfer::Buffer;
use headrace_wire::fabrics::{
    property_set, Connect, ConnectData, CATTR_NO_SQ_FLOW, CC_ENABLE, CNTLID_DYNAMIC,
};
use headrace_wire::pdu::Digests;
use headrace_wire::{Cqe, Sqe};
use std::time::{Duration, Instant};

/// Longer than any test.
pub fn later() -> Instant {
    Instant::now() + Duration::from_secs(3600)
}

pub struct Pair {
    pub queue: Queue,
    pub peer: u64,
}

impl Pair {
    /// Connected as queue `qid`; gives the controller's identifier too.
    pub fn connect(
        bench: &mut Bench,
        (nqn, host): (&str, &str),
        (qid, cntlid): (u16, u16),
        (digests, hpda): (Digests, u8),
        in_capsule: usize,
    ) -> (Pair, u16) {
        let mut pair = Pair {
            queue: Queue::new(31, digests, (hpda, 0), in_capsule.max(1024)),
            peer: bench.accept(),
        };
        pair.exchange(bench, None).expect("ICReq");
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
            subnqn: nqn.into(),
            hostnqn: host.into(),
        };
        let data = Payload::Write(Buffer::from_vec(data.encode().to_vec()));
        let cqe = pair.command(bench, connect.encode(0), data);
        pair.queue.set_in_capsule(in_capsule);
        (pair, cqe.dw0 as u16)
    }

    /// An admin queue whose controller is enabled, and I/O queue 1 of it.
    pub fn bring_up(
        bench: &mut Bench,
        nqn: &str,
        host: &str,
        asked: (Digests, u8),
        in_capsule: usize,
    ) -> (Pair, Pair) {
        let names = (nqn, host);
        let (mut admin, cntlid) = Pair::connect(bench, names, (0, CNTLID_DYNAMIC), asked, 8192);
        let enable = property_set(0, 0x14, u64::from(CC_ENABLE), false);
        admin.command(bench, enable, Payload::None);
        let (io, _) = Pair::connect(bench, names, (1, cntlid), asked, in_capsule);
        (admin, io)
    }

    /// One command that must succeed.
    pub fn command(&mut self, bench: &mut Bench, sqe: Sqe, payload: Payload) -> Cqe {
        assert!(self.queue.submit(sqe, payload, u64::MAX, later()), "no room");
        self.exchange(bench, None).expect("an answer");
        match self.queue.completion() {
            Some((u64::MAX, Ended::Answer(cqe))) if cqe.status.is_success() => cqe,
            other => panic!("{sqe:?}: {other:?}"),
        }
    }

    /// Move bytes until neither side has more to say and all work at the media is done: in pieces and in an order that
    /// `random` gives, or all at once.
    pub fn exchange(&mut self, bench: &mut Bench, mut random: Option<&mut Random>) -> Result<(), Broken> {
        loop {
            let piece = |random: &mut Option<&mut Random>| match random {
                Some(random) => {
                    let most = if random.one_in(3) { 100 } else { 20_000 };
                    random.range(1..=most)
                }
                None => usize::MAX,
            };
            let mut moved = false;
            if self.queue.has_output() && bench.wants_input(self.peer) {
                let bytes = self.queue.output(piece(&mut random));
                bench.feed(self.peer, &bytes);
                moved = true;
            }
            let busy = bench.work() != (0, 0);
            if busy && random.as_mut().is_none_or(|random| random.one_in(2)) {
                bench.work_all();
            }
            if bench.has_output(self.peer) {
                let bytes = bench.output(self.peer, piece(&mut random));
                self.queue.deliver(&bytes)?;
                moved = true;
            }
            if !moved && !busy {
                return Ok(());
            }
        }
    }
}

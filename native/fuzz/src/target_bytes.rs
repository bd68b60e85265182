//! Invariant: whatever bytes a connection is fed, in whatever pieces and at whatever point of its life, the target does not
//! panic, stays within its memory, gives all of it back when the connection ends, says nothing that a controller may not
//! say, and goes on serving another host, whose data are untouched.

use headrace_media::MemoryMedia;
use headrace_sim::client::{bring_up, drain, queue};
use headrace_sim::{Client, HOST, NQN};
use headrace_target::testing::{Bench, MEMORY_BYTES};
use headrace_wire::pdu::{Digests, Pdu};
use headrace_wire::{io, Sgl, Sqe};

const BLOCKS: u64 = 256;
const BLOCK: usize = 4096;
const OTHER: &str = "nqn.2014-08.org.nvmexpress:uuid:99999999-2222-3333-4444-555555555555";

pub fn run(data: &[u8]) {
    let [life, pieces, data @ ..] = data else {
        return;
    };
    let media = MemoryMedia::new(BLOCKS * BLOCK as u64, BLOCK as u32).expect("memory");
    let mut bench = Bench::new(NQN, Box::new(media));
    let (_witness_admin, witness_id) = bring_up(&mut bench, NQN, OTHER, 0);
    let mut witness = Client::new(Digests::default(), 0);
    let witness_queue = queue(&mut bench, &mut witness, NQN, OTHER, witness_id, 1);

    let digests = Digests {
        header: life & 8 != 0,
        data: life & 16 != 0,
    };
    let mut client = Client::new(digests, 0);
    let mut admin = None;
    let peer = match life & 7 {
        0 => bench.accept(),
        1 => {
            let peer = bench.accept();
            bench.feed(peer, &client.hello());
            peer
        }
        2 | 3 => {
            let (peer, _) = bring_up(&mut bench, NQN, HOST, 0);
            // Its ICResp was taken by `bring_up`.
            client = Client::new(Digests::default(), 0).resumed();
            peer
        }
        _ => {
            let (peer, cntlid) = bring_up(&mut bench, NQN, HOST, 0);
            admin = Some(peer);
            queue(&mut bench, &mut client, NQN, HOST, cntlid, 1)
        }
    };
    let piece = match pieces {
        0 => 1,
        255 => usize::MAX,
        other => usize::from(*other) * 3,
    };
    for bytes in data.chunks(piece) {
        bench.feed(peer, bytes);
        assert!(bench.memory_bytes() <= MEMORY_BYTES);
        if pieces & 1 == 0 {
            drain(&mut bench, peer, &mut client);
        }
        if !bench.is_open(peer) {
            break;
        }
    }
    drain(&mut bench, peer, &mut client);
    assert!(client.pending.is_empty(), "a PDU was sent in part");
    bench.hang_up(peer);
    admin.into_iter().for_each(|admin| bench.hang_up(admin));
    bench.work_all();
    assert_eq!(bench.memory_bytes(), 0, "memory stays taken");

    // The other host.
    let read = Sqe::rw(io::READ, 5, 1, BLOCKS - 1, 1).with_sgl(Sgl::Transport { length: BLOCK as u32 });
    bench.feed(witness_queue, &witness.command(read, &[]));
    let answer = drain(&mut bench, witness_queue, &mut witness);
    let [only] = &answer[..] else {
        panic!("the other host got {answer:?}");
    };
    assert!(matches!(&only.pdu, Pdu::C2hData(header) if header.success && header.cccid == 5));
    assert_eq!(only.data.len(), BLOCK);
}

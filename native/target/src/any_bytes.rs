//! Invariant: whatever bytes a connection is fed, in whatever pieces, it neither panics nor takes memory beyond its share,
//! and what it answers depends on the bytes only, not on the pieces.

use crate::common::{pattern, HOST, NQN};
use crate::connection::Connection;
use crate::mailbox::Mailbox;
use crate::shared::Shared;
use headrace_media::MemoryMedia;
use headrace_wire::fabrics::{
    property_set, Connect, ConnectData, CATTR_NO_SQ_FLOW, CC_ENABLE, CNTLID_DYNAMIC,
};
use headrace_wire::pdu::{DataHeader, Digests, IcReq, Pdu};
use headrace_wire::{crc32c, Sgl, Sqe};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

const MEMORY: usize = 4 << 20;

/// Memory media are served in the connection itself.
fn shared() -> Arc<Shared> {
    crate::testing::shared(NQN, Box::new(MemoryMedia::new(8 << 20, 4096).unwrap()), MEMORY)
}

fn connection(shared: &Arc<Shared>, token: u64) -> Connection {
    let address: SocketAddr = ([127, 0, 0, 1], 4420).into();
    let mailbox = Arc::new(Mailbox::new().unwrap());
    let arrival = shared.hosts.arrive(address.ip(), 10).unwrap();
    Connection::new(
        shared.clone(),
        mailbox,
        token,
        (address, address),
        arrival,
        Instant::now(),
    )
}

/// Feed `bytes` in pieces of the lengths that `next` gives; returns all that was answered.
fn feed(connection: &mut Connection, bytes: &[u8], mut next: impl FnMut() -> usize) -> Vec<u8> {
    let mut answer = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        let end = (at + next().max(1)).min(bytes.len());
        let mut taken = connection.feed(&bytes[at..end]);
        drain(connection, &mut answer);
        while at + taken < end {
            // Stalled for memory, which draining gave back.
            connection.serve_waiting();
            connection.resume();
            taken += connection.feed(&bytes[at + taken..end]);
            drain(connection, &mut answer);
        }
        connection.serve_waiting();
        drain(connection, &mut answer);
        at = end;
    }
    answer
}

fn drain(connection: &mut Connection, answer: &mut Vec<u8>) {
    while !connection.output.is_empty() {
        let taken = connection.output.copy_for_tests(&connection.allowance, answer);
        connection.output.sent(taken);
    }
}

fn append(out: &mut Vec<u8>, pdu: &Pdu, data: &[u8], digests: Digests) {
    let layout = pdu.encode(data.len(), digests, 0, out);
    out.extend_from_slice(data);
    if layout.data_digest_bytes > 0 {
        out.extend_from_slice(&crc32c(data).to_le_bytes());
    }
}

fn connect(out: &mut Vec<u8>, qid: u16, cntlid: u16, digests: Digests) {
    append(
        out,
        &Pdu::IcReq(IcReq {
            pfv: 0,
            hpda: 0,
            digests,
            maxr2t: 0,
        }),
        &[],
        Digests::default(),
    );
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
        hostnqn: HOST.into(),
    };
    append(out, &Pdu::CapsuleCmd(connect.encode(1)), &data.encode(), digests);
}

/// A whole I/O conversation; TTAGs are known, since slots are given in order.
fn conversation(cntlid: u16, digests: Digests) -> Vec<u8> {
    let mut out = Vec::new();
    connect(&mut out, 1, cntlid, digests);
    for round in 0..6u64 {
        let slba = round * 40;
        let data = pattern(8192, round);
        let sqe = Sqe::rw(1, 10, 1, slba, 2).with_sgl(Sgl::InCapsule {
            offset: 0,
            length: 8192,
        });
        append(&mut out, &Pdu::CapsuleCmd(sqe), &data, digests);
        let sqe = Sqe::rw(1, 11, 1, slba + 2, 32).with_sgl(Sgl::Transport { length: 131_072 });
        append(&mut out, &Pdu::CapsuleCmd(sqe), &[], digests);
        let data = pattern(131_072, round + 50);
        for (n, piece) in data.chunks(50_000).enumerate() {
            let at = n * 50_000;
            let header = DataHeader {
                cccid: 11,
                ttag: 0,
                datao: at as u32,
                datal: piece.len() as u32,
                last: at + piece.len() == data.len(),
                success: false,
            };
            append(&mut out, &Pdu::H2cData(header), piece, digests);
        }
        let sqe = Sqe::rw(2, 12, 1, slba, 34).with_sgl(Sgl::Transport { length: 34 * 4096 });
        append(&mut out, &Pdu::CapsuleCmd(sqe), &[], digests);
        append(&mut out, &Pdu::CapsuleCmd(Sqe::new(0, 13, 1)), &[], digests);
        // Not over what is read: the two are under way together, so either order would be right.
        let zero = Sqe::rw(8, 14, 1, slba + 36, 1);
        append(&mut out, &Pdu::CapsuleCmd(zero), &[], digests);
        append(&mut out, &Pdu::CapsuleCmd(Sqe::new(0x55, 15, 1)), &[], digests);
    }
    out
}

/// An enabled controller, whose admin connection must be kept.
fn admin(shared: &Arc<Shared>) -> (Connection, u16) {
    let mut out = Vec::new();
    connect(&mut out, 0, CNTLID_DYNAMIC, Digests::default());
    append(
        &mut out,
        &Pdu::CapsuleCmd(property_set(2, 0x14, u64::from(CC_ENABLE), false)),
        &[],
        Digests::default(),
    );
    let mut first = connection(shared, 1);
    let whole = out.len();
    let answer = feed(&mut first, &out, || whole);
    // ICResp, then the answer to Connect with the CNTLID in DW0.
    (first, u16::from_le_bytes([answer[136], answer[137]]))
}

#[test]
fn pieces_do_not_matter() {
    let both = Digests {
        header: true,
        data: true,
    };
    for digests in [Digests::default(), both] {
        let mut answers: Vec<Vec<u8>> = Vec::new();
        for cut in [usize::MAX, 1, 7, 71, 4096, 10_007, 0] {
            let shared = shared();
            let (_first, cntlid) = admin(&shared);
            let bytes = conversation(cntlid, digests);
            let mut queue = connection(&shared, 2);
            let mut state = 12345u64;
            let answer = feed(&mut queue, &bytes, || {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                if cut > 0 {
                    cut.min(1 << 30)
                } else {
                    (state >> 50) as usize % 9000
                }
            });
            assert!(!queue.is_ending(), "the conversation is in order");
            assert_eq!(queue.commands.len(), 0);
            answers.push(answer);
        }
        // All that was read, and six answers a round.
        assert!(answers[0].len() > 6 * 34 * 4096);
        for (n, answer) in answers.iter().enumerate() {
            let differs = answer.iter().zip(&answers[0]).position(|(a, b)| a != b);
            assert!(
                *answer == answers[0],
                "cut {n}: {} bytes, {}; first at {differs:?}",
                answer.len(),
                answers[0].len()
            );
        }
    }
}

/// Every conversation with one to four bytes changed, cut short, or with a piece doubled. Seed printed.
#[test]
fn damaged_conversations_hurt_nobody() {
    let seed = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap()
        .subsec_nanos();
    println!("seed {seed}");
    let mut state = u64::from(seed) << 1 | 1;
    let mut random = move |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as usize % below
    };
    let shared = shared();
    let (first, cntlid) = admin(&shared);
    let whole = conversation(cntlid, Digests::default());
    // Damage belongs where headers are; most of the bytes are data.
    let heads: Vec<usize> = {
        let mut at = 0;
        let mut heads = Vec::new();
        while at + 8 <= whole.len() {
            heads.push(at);
            at += u32::from_le_bytes([whole[at + 4], whole[at + 5], whole[at + 6], whole[at + 7]]) as usize;
        }
        heads
    };
    let mut ended = 0;
    for round in 0..3000u64 {
        let head = random(heads.len());
        let mut bytes = whole[..heads.get(head + 3).copied().unwrap_or(whole.len())].to_vec();
        for _ in 0..=random(4) {
            let at = heads[head] + random(96);
            if let Some(byte) = bytes.get_mut(at) {
                *byte = [0, 1, 0xFF, 0x80, random(256) as u8, *byte ^ 1 << random(8)][random(6)];
            }
        }
        match random(8) {
            0 => bytes.truncate(bytes.len() - random(200).min(bytes.len())),
            1 => {
                let again = bytes[heads[head].min(bytes.len())..].to_vec();
                bytes.extend(again);
            }
            _ => {}
        }
        let mut queue = connection(&shared, 100 + round);
        let step = 1 + random(20_000);
        feed(&mut queue, &bytes, || step);
        ended += u32::from(queue.is_ending());
        queue.closed();
        drop(queue);
        assert_eq!(
            shared.memory.used_bytes(),
            0,
            "seed {seed}, round {round}: memory stays taken"
        );
    }
    assert!(ended > 500, "the damage does nothing: {ended}");
    assert!(
        !first.is_ending() && shared.registry.get(cntlid).is_some(),
        "seed {seed}: another connection was hurt"
    );
}

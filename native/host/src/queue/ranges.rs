//! Properties of every R2T, H2CData and C2HData range, at every alignment, with every digest and number of R2Ts.
//!
//! Writes: whatever partition a controller asks for, it gets exactly these bytes, once, in order, in PDUs that it can take.
//! Reads: whatever partition it sends, the buffer is exactly the data. Anything else that it may ask or send is refused, by
//! a rule that is written down here a second time, and no byte outside of the command's buffer changes.

use super::*;
use headrace_wire::pdu::{CommonHeader, DataHeader, IcResp, R2t};
use headrace_wire::Status;
use proptest::prelude::*;

#[derive(Clone, Copy, Debug)]
struct Terms {
    asked: Asked,
    cpda: u8,
    maxh2cdata: u32,
}

fn terms() -> impl Strategy<Value = Terms> {
    let digests = (any::<bool>(), any::<bool>()).prop_map(|(header, data)| Digests { header, data });
    (digests, 0u8..32, 0u8..32, 0u8..6, 0u32..20).prop_map(|(digests, hpda, cpda, maxr2t, more)| Terms {
        asked: Asked {
            digests,
            hpda,
            maxr2t,
        },
        cpda,
        maxh2cdata: 4096 + 4 * more * more * 37,
    })
}

/// `total` cut at random places.
fn partition(total: usize) -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(1..=total, 0..12).prop_map(move |mut cuts| {
        cuts.push(total);
        cuts.sort_unstable();
        cuts.dedup();
        let mut at = 0;
        cuts.into_iter()
            .map(|cut| cut - std::mem::replace(&mut at, cut))
            .collect()
    })
}

fn lengths() -> impl Strategy<Value = usize> {
    prop_oneof![1usize..64, 1usize..9000, 4090usize..4102, 60_000usize..70_000]
}

fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|i| (i * 31 + i / 251) as u8).collect()
}

impl Arrivals for u8 {}

fn ready(terms: Terms) -> QueuePair<u8> {
    let mut queue = QueuePair::new(4, terms.asked, 0);
    sent(&mut queue);
    let response = Pdu::IcResp(IcResp {
        pfv: 0,
        cpda: terms.cpda,
        digests: terms.asked.digests,
        maxh2cdata: terms.maxh2cdata,
    });
    let mut bytes = Vec::new();
    response.encode(0, Digests::default(), 0, &mut bytes);
    queue.received(0, &bytes).unwrap();
    queue
}

fn sent(queue: &mut QueuePair<u8>) -> Vec<u8> {
    let mut out = Vec::new();
    while queue.has_output() {
        let mut pieces = [IoSlice::new(&[]); PIECES_MAX];
        let count = queue.gather(&mut pieces);
        let before = out.len();
        pieces[..count]
            .iter()
            .for_each(|piece| out.extend_from_slice(piece));
        queue.sent(out.len() - before);
    }
    out
}

/// A PDU of the controller, its data aligned to `xpda`.
fn encoded(pdu: Pdu, data: &[u8], digests: Digests, xpda: u8) -> Vec<u8> {
    let mut bytes = Vec::new();
    let layout = pdu.encode(data.len(), digests, xpda, &mut bytes);
    bytes.extend_from_slice(data);
    if layout.data_digest_bytes > 0 {
        bytes.extend_from_slice(&headrace_wire::crc32c(data).to_le_bytes());
    }
    bytes
}

fn deliver(queue: &mut QueuePair<u8>, mut bytes: &[u8], step: usize) -> Result<(), Fault> {
    while !bytes.is_empty() {
        let (now, rest) = bytes.split_at(step.min(bytes.len()));
        bytes = rest;
        let destination = queue.destination();
        let direct = destination.len().min(now.len());
        destination[..direct].copy_from_slice(&now[..direct]);
        queue.received(direct, &now[direct..])?;
    }
    Ok(())
}

fn later() -> Instant {
    Instant::now() + std::time::Duration::from_secs(60)
}

fn write(queue: &mut QueuePair<u8>, content: Vec<u8>) {
    let data = Data::Write(Buffer::from_vec(content));
    assert!(queue.submit(Sqe::rw(1, 0, 1, 0, 1), data, 7, later()).is_ok());
    sent(queue);
}

fn r2t(ttag: u16, at: usize, length: usize) -> Pdu {
    Pdu::R2t(R2t {
        cccid: 0,
        ttag,
        r2to: at as u32,
        r2tl: length as u32,
    })
}

fn c2h(at: u32, length: u32, last: bool, success: bool) -> Pdu {
    Pdu::C2hData(DataHeader {
        cccid: 0,
        ttag: 0,
        datao: at,
        datal: length,
        last,
        success,
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    /// R2Ts in any sizes, as many outstanding as we asked for.
    #[test]
    fn a_write_is_served_exactly((total, parts) in lengths().prop_flat_map(|n| (Just(n), partition(n))),
                                 terms in terms(), step in 1usize..9000) {
        let digests = terms.asked.digests;
        let mut queue = ready(terms);
        let content = pattern(total);
        write(&mut queue, content.clone());
        let outstanding = usize::from(terms.asked.maxr2t) + 1;
        let (mut at, mut got, mut ttag) = (0, Vec::new(), 0u16);
        for group in parts.chunks(outstanding) {
            // All R2Ts of the group come before a byte of theirs is sent.
            let (begin, first) = (at, ttag);
            for &length in group {
                deliver(&mut queue, &encoded(r2t(ttag, at, length), &[], digests, 0), step).unwrap();
                at += length;
                ttag += 1;
            }
            prop_assert!(queue.completion().is_none());
            let bytes = sent(&mut queue);
            let mut rest = &bytes[..];
            let (mut end, mut tag) = (begin, first);
            for &length in group {
                end += length;
                while got.len() < end {
                    let mut head = [0; 8];
                    head.copy_from_slice(&rest[..8]);
                    let common = CommonHeader::decode(&head, digests, terms.cpda).unwrap();
                    let layout = common.layout(digests).unwrap();
                    let Pdu::H2cData(header) = Pdu::decode(&common, &rest[..24]).unwrap() else {
                        panic!("not H2CData");
                    };
                    prop_assert_eq!((header.cccid, header.ttag), (0, tag));
                    prop_assert_eq!(header.datao as usize, got.len());
                    prop_assert_eq!(header.datal as usize, layout.data_bytes);
                    prop_assert!(header.datal <= terms.maxh2cdata);
                    let unit = (usize::from(terms.cpda) + 1) * 4;
                    prop_assert_eq!(layout.pdo() % unit, 0);
                    // No more pad than it takes.
                    prop_assert!(layout.pad_bytes < unit);
                    let data = &rest[layout.pdo()..layout.pdo() + layout.data_bytes];
                    if digests.data {
                        let digest = headrace_wire::crc32c(data).to_le_bytes();
                        prop_assert_eq!(&rest[layout.plen() - 4..layout.plen()], &digest[..]);
                    }
                    got.extend_from_slice(data);
                    prop_assert_eq!(header.last, got.len() == end);
                    rest = &rest[layout.plen()..];
                }
                tag += 1;
            }
            prop_assert!(rest.is_empty());
        }
        prop_assert!(got == content);
        let answer = Pdu::CapsuleResp(Cqe::new(0, Status::SUCCESS));
        deliver(&mut queue, &encoded(answer, &[], digests, 0), step).unwrap();
        let completion = queue.completion().unwrap();
        prop_assert!(matches!(completion.end, End::Answer(cqe) if cqe.status.is_success()));
        prop_assert_eq!(queue.room(), 4);
    }

    /// Any R2T at any point of a write: taken exactly when it goes on where the last ended, within the command, while
    /// there is room for it. Offsets and lengths reach to the end of 32 bits.
    #[test]
    fn other_r2ts_are_refused(total in 1usize..9000, done in 0usize..9000, unsent in 0u16..8,
                              at in prop_oneof![0u32..9000, u32::MAX - 9000..=u32::MAX],
                              length in prop_oneof![0u32..9000, u32::MAX - 9000..=u32::MAX],
                              exact in any::<bool>(), terms in terms()) {
        let digests = terms.asked.digests;
        let done = done.min(total);
        let mut queue = ready(terms);
        write(&mut queue, pattern(total));
        let most = u16::from(terms.asked.maxr2t) + 2;
        // Some R2Ts are served already, some wait to be.
        let unsent = unsent.min(most).min(done as u16);
        let mut moved = 0;
        if done > usize::from(unsent) {
            moved = done - usize::from(unsent);
            deliver(&mut queue, &encoded(r2t(1, 0, moved), &[], digests, 0), usize::MAX).unwrap();
            sent(&mut queue);
        }
        for _ in 0..unsent {
            deliver(&mut queue, &encoded(r2t(2, moved, 1), &[], digests, 0), usize::MAX).unwrap();
            moved += 1;
        }
        let at = if exact { moved as u32 } else { at };
        let pdu = Pdu::R2t(R2t { cccid: 0, ttag: 3, r2to: at, r2tl: length });
        let result = deliver(&mut queue, &encoded(pdu, &[], digests, 0), usize::MAX);
        let sound = at as usize == moved && length > 0 && u64::from(at) + u64::from(length) <= total as u64
            && unsent < most;
        prop_assert_eq!(result.is_ok(), sound, "{:?} at {} of {}, {} unsent", result, moved, total, unsent);
    }

    /// C2HData in any sizes, at our alignment or a multiple of it, however the socket cuts the stream.
    #[test]
    fn a_read_lands_exactly((total, parts) in lengths().prop_flat_map(|n| (Just(n), partition(n))),
                            terms in terms(), success in any::<bool>(), step in 1usize..9000) {
        let digests = terms.asked.digests;
        let mut queue = ready(terms);
        let content = pattern(total);
        let memory = Buffer::from_vec(vec![0xEE; total + 128]);
        let inside = memory.slice(64, total).unwrap();
        prop_assert!(queue.submit(Sqe::rw(2, 0, 1, 0, 1), Data::Read(inside), 7, later()).is_ok());
        sent(&mut queue);
        let mut at = 0;
        for &length in &parts {
            let last = at + length == total;
            let pdu = c2h(at as u32, length as u32, last, last && success);
            let bytes = encoded(pdu, &content[at..at + length], digests, terms.asked.hpda);
            prop_assert!(queue.completion().is_none());
            deliver(&mut queue, &bytes, step).unwrap();
            at += length;
        }
        if !success {
            prop_assert!(queue.completion().is_none());
            let answer = Pdu::CapsuleResp(Cqe::new(0, Status::SUCCESS));
            deliver(&mut queue, &encoded(answer, &[], digests, 0), step).unwrap();
        }
        let completion = queue.completion().unwrap();
        prop_assert!(matches!(completion.end, End::Answer(cqe) if cqe.status.is_success()));
        let mut bytes = vec![0; total + 128];
        memory.copy_to(0, &mut bytes);
        prop_assert!(bytes[64..64 + total] == content[..]);
        prop_assert!(bytes[..64].iter().chain(&bytes[64 + total..]).all(|&b| b == 0xEE));
    }

    /// Any C2HData at any point of a read: taken exactly when it goes on where the last ended, within the buffer, says
    /// the length that it carries, and does not follow the last.
    #[test]
    fn other_data_are_refused(total in 1usize..6000, done in 0usize..6000, ended in any::<bool>(),
                              at in prop_oneof![0u32..6000, u32::MAX - 6000..=u32::MAX],
                              carried in 1usize..6000, lie in prop_oneof![3 => Just(0u32), 1 => 1u32..99],
                              exact in any::<bool>(), terms in terms()) {
        let digests = terms.asked.digests;
        let done = done.min(total);
        let mut queue = ready(terms);
        let memory = Buffer::from_vec(vec![0xEE; total + 256]);
        let inside = memory.slice(128, total).unwrap();
        prop_assert!(queue.submit(Sqe::rw(2, 0, 1, 0, 1), Data::Read(inside), 7, later()).is_ok());
        sent(&mut queue);
        if done > 0 {
            let first = c2h(0, done as u32, ended, false);
            deliver(&mut queue, &encoded(first, &vec![1; done], digests, terms.asked.hpda), usize::MAX).unwrap();
        }
        let at = if exact { done as u32 } else { at };
        let datal = (carried as u32).wrapping_add(lie);
        let pdu = c2h(at, datal, false, false);
        let result = deliver(&mut queue, &encoded(pdu, &vec![2; carried], digests, terms.asked.hpda), usize::MAX);
        let sound = at as usize == done && lie == 0 && done + carried <= total && !(ended && done > 0);
        prop_assert_eq!(result.is_ok(), sound, "{:?}: {} + {} at {} of {}", result, at, datal, done, total);
        let mut bytes = vec![0; total + 256];
        memory.copy_to(0, &mut bytes);
        let filled = if sound { done + carried } else { done };
        prop_assert!(bytes[..128].iter().chain(&bytes[128 + filled..]).all(|&b| b == 0xEE));
    }

    /// Success that comes before all data did is the end of that command only.
    #[test]
    fn short_data_fail_the_command_alone(total in 2usize..6000, done in 0usize..6000, success in any::<bool>(),
                                         terms in terms()) {
        let digests = terms.asked.digests;
        let done = done.min(total - 1);
        let mut queue = ready(terms);
        prop_assert!(queue.submit(Sqe::rw(2, 0, 1, 0, 1), Data::Read(Buffer::zeroed(total)), 7, later()).is_ok());
        sent(&mut queue);
        if done > 0 {
            let pdu = c2h(0, done as u32, success, success);
            deliver(&mut queue, &encoded(pdu, &vec![1; done], digests, terms.asked.hpda), usize::MAX).unwrap();
        }
        if done == 0 || !success {
            let answer = Pdu::CapsuleResp(Cqe::new(0, Status::SUCCESS));
            deliver(&mut queue, &encoded(answer, &[], digests, 0), usize::MAX).unwrap();
        }
        prop_assert_eq!(queue.completion().map(|c| c.end), Some(End::Short { came: done, wanted: total }));
        prop_assert_eq!(queue.room(), 4);
    }

    /// Data that begin elsewhere than at a multiple of what we asked for.
    #[test]
    fn misaligned_data_are_refused(terms in terms(), sent_with in 0u8..32) {
        let digests = terms.asked.digests;
        let mut queue = ready(terms);
        prop_assert!(queue.submit(Sqe::rw(2, 0, 1, 0, 1), Data::Read(Buffer::zeroed(512)), 7, later()).is_ok());
        sent(&mut queue);
        let bytes = encoded(c2h(0, 512, true, false), &[1; 512], digests, sent_with);
        let unit = (usize::from(terms.asked.hpda) + 1) * 4;
        let result = deliver(&mut queue, &bytes, usize::MAX);
        prop_assert_eq!(result.is_ok(), usize::from(bytes[3]) % unit == 0, "{:?}", result);
    }
}

//! Invariant: whatever a controller sends, the host's queue pair does not panic, writes nowhere but into reads that are
//! under way, ends every command exactly once, calls no read a success that is short of data, and sends exactly the data
//! that R2Ts asked for.

use arbitrary::{Result, Unstructured};
use headrace_host::testing::{Ended, Payload, Queue};
use headrace_sim::client::encode;
use headrace_transfer::Buffer;
use headrace_wire::command::{Cqe, Sqe};
use headrace_wire::pdu::{CommonHeader, DataHeader, Digests, IcResp, Pdu, R2t, TermReq};
use headrace_wire::{crc32c, io, Status};
use std::collections::HashMap;
use std::time::{Duration, Instant};

const DEPTH: u16 = 8;
const GUARD: usize = 512;
const UNTOUCHED: u8 = 0xEE;
const MAX_H2C: usize = 4096;

enum Kind {
    Simple,
    Read(usize),
    Write(Vec<u8>),
}

struct Issued {
    kind: Kind,
    memory: Buffer,
    ended: bool,
    /// The memory when it ended: what comes late must not touch it.
    at_end: Option<Vec<u8>>,
    /// Data of it that were sent, in the capsule or by R2T.
    sent: usize,
}

struct World {
    queue: Queue,
    digests: Digests,
    cpda: u8,
    hpda: u8,
    issued: Vec<Issued>,
    /// CID to the command that has it, as seen in the capsules.
    cids: HashMap<u16, usize>,
    /// The CID that each slot of the queue had last; the last one is none.
    latest: Vec<u16>,
    /// Served by the host: ttag, and from where to where.
    r2ts: Vec<(u16, u16, usize, usize)>,
    out: Vec<u8>,
    fill: u8,
}

pub fn run(data: &[u8]) {
    let mut input = Unstructured::new(data);
    let Ok(mode) = input.arbitrary::<u8>() else { return };
    let digests = Digests {
        header: mode & 1 != 0,
        data: mode & 2 != 0,
    };
    let cpda = if mode & 4 != 0 { mode >> 3 } else { 0 };
    let hpda = if mode & 32 != 0 { 3 } else { 0 };
    let mut queue = Queue::new(DEPTH, digests, (hpda, mode >> 6), 1024);
    queue.output(usize::MAX);
    if mode == 0xFF {
        // From the very first byte.
        let _ = queue.deliver(input.take_rest());
        return;
    }
    let response = Pdu::IcResp(IcResp {
        pfv: 0,
        cpda,
        digests,
        maxh2cdata: MAX_H2C as u32,
    });
    let hello = encode(&response, &[], Digests::default(), 0);
    queue.deliver(&hello).expect("what we asked for");
    let mut world = World {
        queue,
        digests,
        cpda,
        hpda,
        issued: Vec::new(),
        cids: HashMap::new(),
        latest: (0..=DEPTH).collect(),
        r2ts: Vec::new(),
        out: Vec::new(),
        fill: 0,
    };
    for _ in 0..200 {
        if input.is_empty() || !matches!(world.step(&mut input), Ok(true)) {
            break;
        }
    }
    world.finish();
}

fn below(input: &mut Unstructured<'_>, n: u32) -> Result<u32> {
    input.int_in_range(0..=n - 1)
}

impl World {
    /// `false`: the connection is over.
    fn step(&mut self, input: &mut Unstructured<'_>) -> Result<bool> {
        let cid = self.latest[below(input, u32::from(DEPTH) + 1)? as usize];
        let bytes = match below(input, 12)? {
            0 | 1 => {
                self.submit(input)?;
                return Ok(true);
            }
            2 => {
                let most = if below(input, 2)? == 0 {
                    usize::MAX
                } else {
                    below(input, 5000)? as usize
                };
                self.drain(most);
                return Ok(true);
            }
            3..=6 => {
                // C2HData that fits, but for what the input changes.
                let at = below(input, 8)? * 512;
                let length = below(input, 10)? * 512;
                let flags = below(input, 8)?;
                self.fill = (self.fill + 1) % 0x80;
                let header = DataHeader {
                    cccid: cid,
                    ttag: 0,
                    datao: at,
                    datal: if flags == 7 { length + 1 } else { length },
                    last: flags & 1 != 0,
                    success: flags & 3 == 3,
                };
                encode(
                    &Pdu::C2hData(header),
                    &vec![self.fill; length as usize],
                    self.digests,
                    0,
                )
            }
            7 | 8 => {
                let r2t = R2t {
                    cccid: cid,
                    ttag: input.arbitrary()?,
                    r2to: below(input, 8)? * 512,
                    r2tl: below(input, 20)? * 512,
                };
                self.r2ts
                    .push((cid, r2t.ttag, r2t.r2to as usize, r2t.r2tl as usize));
                encode(&Pdu::R2t(r2t), &[], self.digests, self.hpda)
            }
            9 => {
                let status = if below(input, 2)? == 0 {
                    0
                } else {
                    input.arbitrary()?
                };
                let cqe = Cqe::new(cid, Status::from_field(status));
                encode(&Pdu::CapsuleResp(cqe), &[], self.digests, self.hpda)
            }
            10 => {
                let term = TermReq {
                    fes: input.arbitrary()?,
                    fei: input.arbitrary()?,
                };
                encode(&Pdu::C2hTermReq(term), &[1; 24], self.digests, self.hpda)
            }
            _ => {
                let length = below(input, 64)? as usize;
                input.bytes(length)?.to_vec()
            }
        };
        let mut bytes = bytes;
        if below(input, 8)? == 0 && !bytes.is_empty() {
            let at = below(input, bytes.len().min(40) as u32)? as usize;
            bytes[at] = input.arbitrary()?;
        }
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let step = match below(input, 4)? {
                0 => 1 + below(input, 100)? as usize,
                _ => rest.len(),
            };
            let (piece, behind) = rest.split_at(step.min(rest.len()));
            rest = behind;
            let result = self.queue.deliver(piece);
            self.complete();
            if result.is_err() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn submit(&mut self, input: &mut Unstructured<'_>) -> Result<()> {
        let length = (1 + below(input, 16)? as usize) * 512;
        let memory = Buffer::from_vec(vec![UNTOUCHED; length + 2 * GUARD]);
        let inside = memory.slice(GUARD, length).expect("it fits");
        let tag = self.issued.len();
        let (kind, payload, opcode) = match below(input, 3)? {
            0 => (Kind::Simple, Payload::None, io::FLUSH),
            1 => (Kind::Read(length), Payload::Read(inside), io::READ),
            _ => {
                let bytes: Vec<u8> = (0..length).map(|at| (at * 7 + tag) as u8).collect();
                inside.copy_from(0, &bytes);
                (Kind::Write(bytes), Payload::Write(inside), io::WRITE)
            }
        };
        let room = self.queue.room() > 0;
        let deadline = Instant::now() + Duration::from_secs(60);
        let sqe = Sqe::new(opcode, 0, tag as u32);
        assert_eq!(self.queue.submit(sqe, payload, tag as u64, deadline), room);
        if room {
            self.issued.push(Issued {
                kind,
                memory,
                ended: false,
                at_end: None,
                sent: 0,
            });
        }
        Ok(())
    }

    /// Look at what the host sends.
    fn drain(&mut self, most: usize) {
        self.out.extend(self.queue.output(most));
        self.complete();
        let mut at = 0;
        while self.out.len() - at >= 8 {
            let rest = &self.out[at..];
            let mut first = [0; 8];
            first.copy_from_slice(&rest[..8]);
            let common = CommonHeader::decode(&first, self.digests, self.cpda)
                .unwrap_or_else(|error| panic!("the host sent a bad header: {error}"));
            let layout = common.layout(self.digests).expect("it was accepted");
            if rest.len() < layout.plen() {
                break;
            }
            let pdu = Pdu::decode(&common, &rest[..layout.header_bytes]).expect("a header");
            let data = rest[layout.prefix_bytes()..layout.prefix_bytes() + layout.data_bytes].to_vec();
            if layout.data_digest_bytes > 0 {
                let found = &rest[layout.plen() - 4..layout.plen()];
                assert_eq!(found, crc32c(&data).to_le_bytes(), "the host's data digest");
            }
            at += layout.plen();
            match pdu {
                Pdu::CapsuleCmd(sqe) => {
                    let tag = sqe.nsid() as usize;
                    self.cids.insert(sqe.cid(), tag);
                    // A slot is the lower ten bits; the others count its commands.
                    self.latest[usize::from(sqe.cid() & 1023)] = sqe.cid();
                    self.sent(tag, 0, &data);
                }
                Pdu::H2cData(header) => {
                    let tag = self.cids.get(&header.cccid).copied();
                    let tag = tag.expect("data of a command that was sent");
                    assert!(data.len() <= MAX_H2C && data.len() == header.datal as usize);
                    let (from, end) = (header.datao as usize, header.datao as usize + data.len());
                    let asked = self.r2ts.iter().any(|&(cid, ttag, start, length)| {
                        (cid, ttag) == (header.cccid, header.ttag)
                            && start <= from
                            && end <= start + length
                            && header.last == (end == start + length)
                    });
                    assert!(asked, "data that no R2T asked for: {header:?}");
                    self.sent(tag, from, &data);
                }
                other => panic!("the host sent {other:?}"),
            }
        }
        self.out.drain(..at);
    }

    fn sent(&mut self, tag: usize, from: usize, data: &[u8]) {
        let issued = &mut self.issued[tag];
        if let Kind::Write(bytes) = &issued.kind {
            assert_eq!(
                &bytes[from..from + data.len()],
                data,
                "other bytes than the caller's"
            );
            issued.sent += data.len();
        } else {
            assert!(data.is_empty());
        }
    }

    fn complete(&mut self) {
        while let Some((tag, ended)) = self.queue.completion() {
            let issued = &mut self.issued[tag as usize];
            assert!(!issued.ended, "command {tag} ends twice");
            issued.ended = true;
            let mut memory = vec![0; issued.memory.len()];
            issued.memory.copy_to(0, &mut memory);
            if matches!(ended, Ended::Answer(cqe) if cqe.status.is_success()) {
                match &issued.kind {
                    Kind::Read(length) => assert!(
                        memory[GUARD..GUARD + length]
                            .iter()
                            .all(|&byte| byte != UNTOUCHED),
                        "a successful read without all of its data"
                    ),
                    Kind::Write(_) | Kind::Simple => {}
                }
            }
            issued.at_end = Some(memory);
        }
    }

    fn finish(mut self) {
        self.complete();
        let mut open: Vec<u64> = self.queue.abandon();
        open.sort_unstable();
        let expected: Vec<u64> = (0..)
            .zip(&self.issued)
            .filter(|(_, issued)| !issued.ended)
            .map(|(tag, _)| tag)
            .collect();
        assert_eq!(open, expected, "commands that neither ended nor were handed back");
        for issued in &self.issued {
            let mut memory = vec![0; issued.memory.len()];
            issued.memory.copy_to(0, &mut memory);
            assert!(
                issued.at_end.as_ref().is_none_or(|at_end| *at_end == memory),
                "a buffer was written to after its command had ended"
            );
            let guards = memory[..GUARD].iter().chain(&memory[memory.len() - GUARD..]);
            assert!(
                guards.clone().all(|&byte| byte == UNTOUCHED),
                "a byte outside of a buffer"
            );
        }
    }
}

//! One connection of the scripted controller.

use super::{Action, Held, Seen, State, BLOCK, NQN};
use headrace_wire::command::{feature, CDW12_FUA};
use headrace_wire::event::encode_nsids;
use headrace_wire::fabrics::{property, Cap, Connect, ConnectResponse, Csts, PropertyAccess};
use headrace_wire::identify::{
    cns, encode_descriptors, IdentifyController, IdentifyNamespace, LbaFormat, NamespaceId, SGLS_TCP,
};
use headrace_wire::log::{lid, DiscoveryHeader, LogRequest};
use headrace_wire::pdu::{CommonHeader, DataHeader, Digests, IcResp, Pdu, R2t};
use headrace_wire::{admin, io, Cqe, Sgl, Sqe, Status};
use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::Duration;

pub struct Peer {
    state: Arc<State>,
    pub stream: TcpStream,
    digests: Digests,
    qid: u16,
    backlog: VecDeque<(Pdu, Vec<u8>)>,
}

type Broken = std::io::Result<()>;

fn over<T>() -> std::io::Result<T> {
    Err(std::io::ErrorKind::ConnectionAborted.into())
}

impl Peer {
    pub fn new(state: Arc<State>, stream: TcpStream) -> Self {
        let _ = stream.set_nodelay(true);
        Peer {
            state,
            stream,
            digests: Digests::default(),
            qid: 0,
            backlog: VecDeque::new(),
        }
    }

    fn pdu(&mut self) -> std::io::Result<(Pdu, Vec<u8>)> {
        let mut first = [0; 8];
        self.stream.read_exact(&mut first)?;
        let common = CommonHeader::decode(&first, self.digests, self.state.script.cpda).expect("a sound PDU");
        let layout = common.layout(self.digests).expect("a sound layout");
        let mut bytes = vec![0; layout.plen()];
        bytes[..8].copy_from_slice(&first);
        self.stream.read_exact(&mut bytes[8..])?;
        let header = &bytes[..layout.header_bytes];
        if layout.header_digest_bytes > 0 {
            let digest = &bytes[layout.header_bytes..layout.header_bytes + 4];
            assert_eq!(
                digest,
                headrace_wire::crc32c(header).to_le_bytes(),
                "the host's header digest"
            );
        }
        let data = bytes[layout.prefix_bytes()..layout.prefix_bytes() + layout.data_bytes].to_vec();
        if layout.data_digest_bytes > 0 {
            let digest = &bytes[layout.plen() - 4..];
            assert_eq!(
                digest,
                headrace_wire::crc32c(&data).to_le_bytes(),
                "the host's data digest"
            );
        }
        let pdu = Pdu::decode(&common, header).expect("a sound header");
        if let Pdu::H2cTermReq(term) = &pdu {
            self.state.terms.lock().unwrap().push(*term);
            return over();
        }
        Ok((pdu, data))
    }

    pub fn serve(&mut self) -> Broken {
        let (pdu, _) = self.pdu()?;
        let Pdu::IcReq(request) = pdu else {
            panic!("first came {pdu:?}");
        };
        let script = &self.state.script;
        let digests = if script.refuse_digests {
            Digests::default()
        } else {
            request.digests
        };
        let response = IcResp {
            pfv: 0,
            cpda: script.cpda,
            digests,
            maxh2cdata: script.maxh2cdata,
        };
        self.put(Pdu::IcResp(response))?;
        self.digests = digests;
        loop {
            let (pdu, data) = match self.backlog.pop_front() {
                Some(entry) => entry,
                None => self.pdu()?,
            };
            let Pdu::CapsuleCmd(sqe) = pdu else {
                panic!("unexpected {pdu:?}");
            };
            self.command(sqe, data)?;
        }
    }

    fn encode(&self, pdu: &Pdu, data: &[u8], bad_header: bool, bad_data: bool) -> Vec<u8> {
        let mut bytes = Vec::new();
        let layout = pdu.encode(data.len(), self.digests, 0, &mut bytes);
        if bad_header {
            bytes[layout.header_bytes] ^= 1;
        }
        bytes.extend_from_slice(data);
        if layout.data_digest_bytes > 0 {
            let digest = headrace_wire::crc32c(data) ^ u32::from(bad_data);
            bytes.extend_from_slice(&digest.to_le_bytes());
        }
        bytes
    }

    fn put(&mut self, pdu: Pdu) -> Broken {
        let bytes = self.encode(&pdu, &[], false, false);
        self.stream.write_all(&bytes)
    }

    fn complete(&mut self, cid: u16, status: Status, dw0: u32) -> Broken {
        self.put(Pdu::CapsuleResp(Cqe {
            dw0,
            ..Cqe::new(cid, status)
        }))
    }

    fn command(&mut self, sqe: Sqe, mut data: Vec<u8>) -> Broken {
        let number = self.state.count.fetch_add(1, Ordering::SeqCst);
        if sqe.opcode() == admin::FABRICS && sqe.fctype() == 1 {
            self.qid = Connect::decode(&sqe).qid;
        }
        let state = self.state.clone();
        let action = (state.script.hook)(self.qid, &sqe, number);
        let mut pieces = Vec::new();
        let cid = sqe.cid();
        let from_host = match (self.qid, sqe.opcode(), sqe.sgl()) {
            (0, _, _) => None,
            (_, io::WRITE | io::DATASET_MANAGEMENT, Sgl::Transport { length }) => Some(length as usize),
            _ => None,
        };
        match &action {
            Action::Vanish(_) if sqe.opcode() != io::READ => return over(),
            Action::RefuseEarly(status) => {
                // One R2T, whose data the host has not sent when the answer comes.
                let length = from_host.unwrap_or(0) as u32;
                self.put(Pdu::R2t(R2t {
                    cccid: cid,
                    ttag: 1,
                    r2to: 0,
                    r2tl: length,
                }))?;
                self.complete(cid, *status, 0)?;
                let mut left = length as usize;
                while left > 0 {
                    let (pdu, piece) = self.pdu()?;
                    match pdu {
                        Pdu::H2cData(_) => left -= piece.len(),
                        other => self.backlog.push_back((other, piece)),
                    }
                }
                return Ok(());
            }
            _ => {}
        }
        let limit = match action {
            Action::VanishInWrite(limit) => limit,
            _ => usize::MAX,
        };
        if let (Some(total), Action::Normal | Action::VanishInWrite(_) | Action::Status(..)) =
            (from_host, &action)
        {
            self.pull(cid, total, limit, &mut data, &mut pieces)?;
        }
        if limit != usize::MAX {
            return over();
        }
        state.seen.lock().unwrap().push(Seen {
            qid: self.qid,
            sqe,
            data: data.clone(),
            pieces,
        });
        match action {
            Action::Status(status, dw0) => self.complete(cid, status, dw0),
            Action::Raw(bytes) => self.stream.write_all(&bytes),
            Action::Silent => Ok(()),
            Action::Late(time) => {
                std::thread::sleep(time);
                self.answer(&sqe, data, Action::Normal)
            }
            Action::RawThenNormal(bytes) => {
                self.stream.write_all(&bytes)?;
                self.answer(&sqe, data, Action::Normal)
            }
            action => self.answer(&sqe, data, action),
        }
    }

    fn pull(
        &mut self,
        cid: u16,
        total: usize,
        limit: usize,
        data: &mut Vec<u8>,
        pieces: &mut Vec<usize>,
    ) -> Broken {
        let mut ttag = 100;
        while data.len() < total.min(limit) {
            let at = data.len();
            let length = (total - at).min(self.state.script.r2t_bytes);
            self.put(Pdu::R2t(R2t {
                cccid: cid,
                ttag,
                r2to: at as u32,
                r2tl: length as u32,
            }))?;
            while data.len() < at + length {
                let (pdu, piece) = self.pdu()?;
                match pdu {
                    Pdu::H2cData(header) => {
                        assert_eq!(
                            (header.cccid, header.ttag, header.datao as usize),
                            (cid, ttag, data.len())
                        );
                        assert_eq!(header.datal as usize, piece.len());
                        assert!(piece.len() <= self.state.script.maxh2cdata as usize);
                        assert_eq!(header.last, data.len() + piece.len() == at + length);
                        pieces.push(piece.len());
                        data.extend_from_slice(&piece);
                        if data.len() >= limit {
                            return Ok(());
                        }
                    }
                    other => self.backlog.push_back((other, piece)),
                }
            }
            ttag += 1;
        }
        Ok(())
    }

    fn answer(&mut self, sqe: &Sqe, data: Vec<u8>, action: Action) -> Broken {
        let cid = sqe.cid();
        if self.qid == 0 || sqe.opcode() == admin::FABRICS {
            return self.admin(sqe, &data, action);
        }
        let at = sqe.slba() as usize * BLOCK;
        let length = sqe.nlb() as usize * BLOCK;
        match sqe.opcode() {
            io::READ => {
                let bytes = self.state.media.bytes.lock().unwrap()[at..at + length].to_vec();
                self.give(cid, &bytes, action)
            }
            io::WRITE => {
                assert_eq!(data.len(), length);
                let media = self.state.media.clone();
                media.bytes.lock().unwrap()[at..at + length].copy_from_slice(&data);
                if sqe.cdw(12) & CDW12_FUA != 0 {
                    media.durable.lock().unwrap()[at..at + length].copy_from_slice(&data);
                } else {
                    self.state.cached.lock().unwrap().push((at, data));
                }
                self.complete(cid, Status::SUCCESS, 0)
            }
            io::FLUSH => {
                let mut durable = self.state.media.durable.lock().unwrap();
                for (at, data) in self.state.cached.lock().unwrap().drain(..) {
                    durable[at..at + data.len()].copy_from_slice(&data);
                }
                drop(durable);
                self.complete(cid, Status::SUCCESS, 0)
            }
            io::DATASET_MANAGEMENT | io::WRITE_ZEROES => self.complete(cid, Status::SUCCESS, 0),
            _ => self.complete(cid, Status::INVALID_OPCODE.do_not_retry(), 0),
        }
    }

    fn give(&mut self, cid: u16, bytes: &[u8], action: Action) -> Broken {
        let (end, vanish) = match action {
            Action::Short(end) => (end, false),
            Action::Vanish(end) => (end, true),
            _ => (bytes.len(), false),
        };
        let bad = matches!(action, Action::BadDataDigest);
        let bad_header = matches!(action, Action::BadHeaderDigest);
        let mut at = 0;
        while at < end {
            let step = (end - at).min(self.state.script.c2h_bytes);
            let last = at + step == end;
            let success = last && self.state.script.success && !vanish;
            let header = DataHeader {
                cccid: cid,
                ttag: 0,
                datao: at as u32,
                datal: step as u32,
                last,
                success,
            };
            let sent = self.encode(&Pdu::C2hData(header), &bytes[at..at + step], bad_header, bad);
            self.stream.write_all(&sent)?;
            at += step;
        }
        if vanish {
            // Let the host take what was sent before the end comes.
            std::thread::sleep(Duration::from_millis(30));
            return over();
        }
        if self.state.script.success && end > 0 {
            return Ok(());
        }
        self.complete(cid, Status::SUCCESS, 0)
    }

    fn admin(&mut self, sqe: &Sqe, data: &[u8], action: Action) -> Broken {
        let cid = sqe.cid();
        let script = &self.state.script;
        match sqe.opcode() {
            admin::FABRICS => match sqe.fctype() {
                1 => {
                    if self.qid == 0 {
                        self.state.down.store(false, Ordering::SeqCst);
                    }
                    assert_eq!(data.len(), 1024);
                    self.complete(cid, Status::SUCCESS, ConnectResponse(0x55).0)
                }
                0 => {
                    let access = PropertyAccess::decode(sqe);
                    if access.offset == property::CC && access.value >> 14 & 3 == 1 {
                        self.state.shutdowns.fetch_add(1, Ordering::SeqCst);
                        self.state.down.store(true, Ordering::SeqCst);
                    }
                    self.complete(cid, Status::SUCCESS, 0)
                }
                _ => {
                    let access = PropertyAccess::decode(sqe);
                    let value = match access.offset {
                        property::CAP => Cap::new(script.mqes, 10).0,
                        property::VS => 0x20000,
                        _ if self.state.down.load(Ordering::SeqCst) => Csts::SHUTDOWN_DONE.into(),
                        _ => u64::from(self.state.polls.fetch_add(1, Ordering::SeqCst) >= script.ready_after),
                    };
                    let cqe = Cqe {
                        dw0: value as u32,
                        dw1: (value >> 32) as u32,
                        ..Cqe::new(cid, Status::SUCCESS)
                    };
                    self.put(Pdu::CapsuleResp(cqe))
                }
            },
            admin::IDENTIFY => {
                let bytes = match sqe.cdw(10) as u8 {
                    cns::CONTROLLER => IdentifyController {
                        serial: "S1".into(),
                        model: "fake".into(),
                        mdts: script.mdts,
                        cntlid: 0x55,
                        cntrltype: 1,
                        oncs: 4,
                        vwc: script.vwc,
                        oaes: script.oaes,
                        aerl: script.aerl,
                        cmic: script.cmic,
                        ctratt: script.ctratt,
                        nanagrpid: script.ana.groups.len() as u32,
                        sgls: SGLS_TCP,
                        ioccsz: script.ioccsz,
                        iorcsz: 1,
                        nn: 1,
                        subnqn: NQN.into(),
                        ..Default::default()
                    }
                    .encode(),
                    cns::NAMESPACE if sqe.nsid() == 1 || script.others.iter().any(|o| o.0 == sqe.nsid()) => {
                        IdentifyNamespace {
                            nsze: (self.state.blocks.load(Ordering::SeqCst) * BLOCK as u64) >> script.lbads,
                            anagrpid: script.ana.groups.first().map_or(0, |group| group.id),
                            noiob: script.noiob,
                            formats: vec![LbaFormat {
                                ms: 0,
                                lbads: script.lbads,
                            }],
                            ..Default::default()
                        }
                        .encode()
                    }
                    cns::NAMESPACE_DESCRIPTORS => {
                        let other = script.others.iter().find(|o| o.0 == sqe.nsid());
                        let uuid = other.map_or(script.uuid, |o| o.1);
                        encode_descriptors(&[NamespaceId::Uuid(uuid), NamespaceId::Nguid(uuid)])
                    }
                    cns::ACTIVE_NAMESPACES => {
                        let all = std::iter::once(1).chain(script.others.iter().map(|o| o.0));
                        let behind: Vec<u32> = all.filter(|&nsid| nsid > sqe.nsid()).collect();
                        encode_nsids(&behind)
                    }
                    _ => vec![0; 4096],
                };
                self.give(cid, &bytes, action)
            }
            admin::SET_FEATURES if sqe.cdw(10) as u8 == feature::ASYNC_EVENT_CONFIG => {
                self.complete(cid, Status::SUCCESS, 0)
            }
            admin::ASYNC_EVENT_REQUEST => {
                let stream = self.stream.try_clone()?;
                self.state.held.lock().unwrap().push(Held { stream, cid });
                Ok(())
            }
            admin::SET_FEATURES => {
                let granted = script.queues - 1;
                self.complete(cid, Status::SUCCESS, granted | granted << 16)
            }
            admin::GET_LOG_PAGE => {
                let request = LogRequest::decode(sqe);
                let length = request.length as usize;
                let fixed = match request.lid {
                    lid::CHANGED_NAMESPACES => Some(self.state.changed.lock().unwrap().encode()),
                    lid::ANA => Some(self.state.ana.lock().unwrap().encode()),
                    lid::SMART => Some(vec![4; 512]),
                    _ => None,
                };
                if let Some(mut bytes) = fixed {
                    bytes.resize(length, 0);
                    return self.give(cid, &bytes, action);
                }
                let mut log = DiscoveryHeader {
                    genctr: 3,
                    numrec: script.entries.len() as u64,
                }
                .encode()
                .to_vec();
                script
                    .entries
                    .iter()
                    .for_each(|entry| log.extend_from_slice(&entry.encode()));
                let (at, length) = (request.offset as usize, request.length as usize);
                let bytes = log[at..at + length].to_vec();
                self.give(cid, &bytes, action)
            }
            _ => self.complete(cid, Status::SUCCESS, 0),
        }
    }
}

//! A raw NVMe/TCP client for tests: one socket, blocking, nothing hidden. It shares only `headrace-wire` with the target.
#![allow(dead_code)]

use headrace_target::{Target, TargetConfig};
use headrace_wire::fabrics::{
    property_get, property_set, Connect, ConnectData, CATTR_NO_SQ_FLOW, CC_ENABLE, CNTLID_DYNAMIC,
};
use headrace_wire::pdu::{
    CommonHeader, DataHeader, Digests, IcReq, IcResp, Pdu, PduType, R2t, TermReq, COMMON_HEADER_BYTES,
};
use headrace_wire::{crc32c, Cqe, Sgl, Sqe, Status};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

pub const NQN: &str = "nqn.2026-01.io.headrace:test";
pub const HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-3333-4444-555555555555";

/// One memory namespace of 64 MiB, 4096-byte blocks; `extra` are further members of the top object.
pub fn config(extra: &str) -> TargetConfig {
    let comma = if extra.is_empty() { "" } else { "," };
    let text = format!(
        r#"{{"subsystems": [{{"nqn": "{NQN}", "namespaces": [
            {{"nsid": 1, "media": {{"kind": "memory", "size_bytes": 67108864}}}}]}}]{comma}{extra}}}"#
    );
    TargetConfig::from_json(&text).unwrap()
}

pub fn start(extra: &str) -> Target {
    Target::start(config(extra)).unwrap()
}

pub struct Answer {
    pub cqe: Cqe,
    pub data: Vec<u8>,
    /// The completion came as the SUCCESS flag.
    pub by_flag: bool,
}

pub struct Client {
    pub stream: TcpStream,
    pub digests: Digests,
    pub hpda: u8,
    pub maxh2cdata: usize,
    next_cid: u16,
}

/// A PDU as it came, with its data.
pub struct Received {
    pub pdu: Pdu,
    pub data: Vec<u8>,
    pub pdo: u8,
}

impl Client {
    pub fn open(address: SocketAddr) -> Client {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        Client {
            stream,
            digests: Digests::default(),
            hpda: 0,
            maxh2cdata: 4096,
            next_cid: 1,
        }
    }

    pub fn initialise(&mut self, digests: Digests, hpda: u8) -> IcResp {
        let request = Pdu::IcReq(IcReq {
            pfv: 0,
            hpda,
            digests,
            maxr2t: 0,
        });
        let mut out = Vec::new();
        request.encode(0, Digests::default(), 0, &mut out);
        self.send(&out);
        let Pdu::IcResp(answer) = self.receive().unwrap().pdu else {
            panic!("no ICResp")
        };
        self.digests = digests;
        self.hpda = hpda;
        self.maxh2cdata = answer.maxh2cdata as usize;
        answer
    }

    pub fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    pub fn cid(&mut self) -> u16 {
        self.next_cid = self.next_cid.wrapping_add(1).max(1);
        self.next_cid
    }

    pub fn last_cid(&self) -> u16 {
        self.next_cid
    }

    /// An Abort command of this admin queue; whether the target says that it aborted.
    pub fn abort(&mut self, sqid: u16, cid: u16) -> bool {
        let own = self.cid();
        let sqe = Sqe::new(8, own, 0).with_cdw(10, u32::from(cid) << 16 | u32::from(sqid));
        let cqe = self.command(sqe, &[]).cqe;
        assert!(cqe.status.is_success(), "{}", cqe.status);
        cqe.dw0 == 0
    }

    pub fn encode(&self, pdu: &Pdu, data: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        let layout = pdu.encode(data.len(), self.digests, 0, &mut out);
        out.extend_from_slice(data);
        if layout.data_digest_bytes > 0 {
            out.extend_from_slice(&crc32c(data).to_le_bytes());
        }
        out
    }

    pub fn send_pdu(&mut self, pdu: &Pdu, data: &[u8]) {
        let bytes = self.encode(pdu, data);
        self.send(&bytes);
    }

    pub fn send_capsule(&mut self, sqe: Sqe, data: &[u8]) {
        self.send_pdu(&Pdu::CapsuleCmd(sqe), data);
    }

    /// `None`: the target closed the connection.
    pub fn receive(&mut self) -> Option<Received> {
        let mut first = [0; COMMON_HEADER_BYTES];
        let mut have = 0;
        while have < first.len() {
            match self.stream.read(&mut first[have..]) {
                Ok(0) => return None,
                Ok(n) => have += n,
                Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => return None,
                Err(e) => panic!("receive: {e}"),
            }
        }
        let common = CommonHeader::decode(&first, self.digests, self.hpda).expect("a well-formed PDU");
        let layout = common.layout(self.digests).unwrap();
        let mut bytes = first.to_vec();
        bytes.resize(common.plen as usize, 0);
        self.stream.read_exact(&mut bytes[COMMON_HEADER_BYTES..]).unwrap();
        let header = &bytes[..layout.header_bytes];
        if layout.header_digest_bytes > 0 {
            assert_eq!(
                bytes[layout.header_bytes..][..4],
                crc32c(header).to_le_bytes(),
                "header digest"
            );
        }
        let data = bytes[layout.prefix_bytes()..][..layout.data_bytes].to_vec();
        if layout.data_digest_bytes > 0 {
            assert_eq!(
                bytes[bytes.len() - 4..],
                crc32c(&data).to_le_bytes(),
                "data digest"
            );
        }
        Some(Received {
            pdu: Pdu::decode(&common, header).unwrap(),
            data,
            pdo: common.pdo,
        })
    }

    /// The answer to command `cid`, whose read data are collected.
    pub fn answer(&mut self, cid: u16) -> Answer {
        let mut data = Vec::new();
        loop {
            let received = self.receive().expect("the target closed the connection");
            match received.pdu {
                Pdu::C2hData(header) => {
                    assert_eq!(header.cccid, cid);
                    assert_eq!(header.datao as usize, data.len());
                    assert_eq!(header.datal as usize, received.data.len());
                    data.extend(received.data);
                    if header.success {
                        return Answer {
                            cqe: Cqe::new(cid, Status::SUCCESS),
                            data,
                            by_flag: true,
                        };
                    }
                }
                Pdu::CapsuleResp(cqe) => {
                    assert_eq!(cqe.cid, cid);
                    return Answer {
                        cqe,
                        data,
                        by_flag: false,
                    };
                }
                other => panic!("unexpected {other:?}"),
            }
        }
    }

    pub fn command(&mut self, sqe: Sqe, data: &[u8]) -> Answer {
        self.send_capsule(sqe, data);
        self.answer(sqe.cid())
    }

    pub fn connect(
        &mut self,
        qid: u16,
        cntlid: u16,
        change: impl FnOnce(&mut Connect, &mut ConnectData),
    ) -> Cqe {
        let mut connect = Connect {
            recfmt: 0,
            qid,
            sqsize: 31,
            cattr: CATTR_NO_SQ_FLOW,
            kato_ms: 0,
        };
        let mut data = ConnectData {
            hostid: [7; 16],
            cntlid,
            subnqn: NQN.into(),
            hostnqn: HOST.into(),
        };
        change(&mut connect, &mut data);
        let cid = self.cid();
        self.command(connect.encode(cid), &data.encode()).cqe
    }

    pub fn property(&mut self, offset: u32, wide: bool) -> Answer {
        let cid = self.cid();
        self.command(property_get(cid, offset, wide), &[])
    }

    pub fn set_property(&mut self, offset: u32, value: u64) -> Status {
        let cid = self.cid();
        self.command(property_set(cid, offset, value, false), &[])
            .cqe
            .status
    }

    pub fn enable(&mut self) {
        assert!(self.set_property(0x14, u64::from(CC_ENABLE)).is_success());
        assert_eq!(self.property(0x1C, false).cqe.dw0, 1);
    }

    pub fn read(&mut self, slba: u64, blocks: u32, block: u32) -> Answer {
        let cid = self.cid();
        let sqe = Sqe::rw(2, cid, 1, slba, blocks).with_sgl(Sgl::Transport {
            length: blocks * block,
        });
        self.command(sqe, &[])
    }

    pub fn write_sqe(&mut self, slba: u64, blocks: u32, block: u32) -> Sqe {
        let cid = self.cid();
        Sqe::rw(1, cid, 1, slba, blocks).with_sgl(Sgl::Transport {
            length: blocks * block,
        })
    }

    pub fn write_in_capsule(&mut self, slba: u64, data: &[u8], block: u32) -> Cqe {
        let blocks = data.len() as u32 / block;
        let sqe = self.write_sqe(slba, blocks, block).with_sgl(Sgl::InCapsule {
            offset: 0,
            length: data.len() as u32,
        });
        self.command(sqe, data).cqe
    }

    pub fn r2t(&mut self) -> R2t {
        match self.receive().expect("closed").pdu {
            Pdu::R2t(r2t) => r2t,
            other => panic!("no R2T but {other:?}"),
        }
    }

    /// Answer an R2T with PDUs of at most `piece` bytes.
    pub fn send_data(&mut self, r2t: &R2t, data: &[u8], piece: usize) {
        let mut at = 0;
        for part in data.chunks(piece.min(self.maxh2cdata)) {
            let last = at + part.len() == data.len();
            let header = DataHeader {
                cccid: r2t.cccid,
                ttag: r2t.ttag,
                datao: at as u32,
                datal: part.len() as u32,
                last,
                success: false,
            };
            self.send_pdu(&Pdu::H2cData(header), part);
            at += part.len();
        }
    }

    pub fn write(&mut self, slba: u64, data: &[u8], block: u32, piece: usize) -> Cqe {
        let sqe = self.write_sqe(slba, data.len() as u32 / block, block);
        self.send_capsule(sqe, &[]);
        let r2t = self.r2t();
        assert_eq!(
            (r2t.cccid, r2t.r2to, r2t.r2tl as usize),
            (sqe.cid(), 0, data.len())
        );
        self.send_data(&r2t, data, piece);
        self.answer(sqe.cid()).cqe
    }

    /// The TermReq that must come next, and then the end of the stream.
    pub fn term(&mut self) -> TermReq {
        loop {
            let received = self.receive().expect("closed without a TermReq");
            match received.pdu {
                Pdu::C2hTermReq(term) => {
                    assert!(received.data.len() <= 128);
                    assert!(self.receive().is_none(), "the target goes on after its TermReq");
                    return term;
                }
                Pdu::CapsuleResp(_) | Pdu::C2hData(_) | Pdu::R2t(_) => {}
                other => panic!("unexpected {other:?}"),
            }
        }
    }

    pub fn expect_closed(&mut self) {
        while self.receive().is_some() {}
    }
}

/// ICReq and admin Connect, enabled.
pub fn admin(address: SocketAddr) -> (Client, u16) {
    let mut client = Client::open(address);
    client.initialise(Digests::default(), 0);
    let cqe = client.connect(0, CNTLID_DYNAMIC, |_, _| {});
    assert!(cqe.status.is_success(), "{}", cqe.status);
    client.enable();
    (client, cqe.dw0 as u16)
}

pub fn io(address: SocketAddr, cntlid: u16, digests: Digests, hpda: u8) -> Client {
    let mut client = Client::open(address);
    client.initialise(digests, hpda);
    let cqe = client.connect(1, cntlid, |_, _| {});
    assert!(cqe.status.is_success(), "{}", cqe.status);
    client
}

pub fn pattern(length: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..length)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state as u8
        })
        .collect()
}

/// Wait until `condition` holds; panics with `what` after twenty seconds.
pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !condition() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

pub fn pdu_type(received: &Received) -> PduType {
    received.pdu.pdu_type()
}

//! The other end of a target's connection, that believes nothing: every byte that the target sends is checked against what
//! the transport specification lets a controller send.

use headrace_target::testing::Bench;
use headrace_wire::fabrics::{
    property_set, Connect, ConnectData, CATTR_NO_SQ_FLOW, CC_ENABLE, CNTLID_DYNAMIC,
};
use headrace_wire::pdu::{CommonHeader, Digests, IcReq, Pdu, PduType};
use headrace_wire::{crc32c, Sqe};

/// A PDU and its data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    pub pdu: Pdu,
    pub data: Vec<u8>,
}

/// Encodes what a host sends, and takes apart what a controller sends.
#[derive(Clone, Debug)]
pub struct Client {
    pub digests: Digests,
    /// The alignment that this host asks for.
    pub hpda: u8,
    pub pending: Vec<u8>,
    initialised: bool,
}

impl Client {
    pub fn new(digests: Digests, hpda: u8) -> Self {
        Client {
            digests,
            hpda,
            pending: Vec::new(),
            initialised: false,
        }
    }

    /// The ICResp was seen by somebody else.
    pub fn resumed(mut self) -> Self {
        self.initialised = true;
        self
    }

    /// ICReq, which is sent without digests.
    pub fn hello(&self) -> Vec<u8> {
        let request = Pdu::IcReq(IcReq {
            pfv: 0,
            hpda: self.hpda,
            digests: self.digests,
            maxr2t: 0,
        });
        let mut out = Vec::new();
        request.encode(0, Digests::default(), 0, &mut out);
        out
    }

    /// A PDU with its data and digests, for a controller whose CPDA is 0.
    pub fn encode(&self, pdu: &Pdu, data: &[u8]) -> Vec<u8> {
        encode(pdu, data, self.digests, 0)
    }

    pub fn command(&self, sqe: Sqe, data: &[u8]) -> Vec<u8> {
        self.encode(&Pdu::CapsuleCmd(sqe), data)
    }

    /// Take what the controller sent; panics with a sentence where it broke a rule.
    pub fn receive(&mut self, bytes: &[u8]) -> Vec<Received> {
        self.pending.extend_from_slice(bytes);
        let mut received = Vec::new();
        let mut at = 0;
        while self.pending.len() - at >= 8 {
            let rest = &self.pending[at..];
            let mut first = [0; 8];
            first.copy_from_slice(&rest[..8]);
            let digests = if self.initialised {
                self.digests
            } else {
                Digests::default()
            };
            let common = CommonHeader::decode(&first, digests, self.hpda)
                .unwrap_or_else(|error| panic!("the controller sent a bad header: {error}"));
            assert!(
                !common.pdu_type.from_host(),
                "the controller sent {:?}",
                common.pdu_type
            );
            let layout = common
                .layout(digests)
                .unwrap_or_else(|error| panic!("the controller sent a bad header: {error}"));
            if rest.len() < layout.plen() {
                break;
            }
            let header = &rest[..layout.header_bytes];
            if layout.header_digest_bytes > 0 {
                let found = &rest[layout.header_bytes..layout.header_bytes + 4];
                assert_eq!(found, crc32c(header).to_le_bytes(), "header digest");
            }
            let pdu = Pdu::decode(&common, header)
                .unwrap_or_else(|error| panic!("the controller sent a bad header: {error}"));
            let data_at = layout.prefix_bytes();
            let data = rest[data_at..data_at + layout.data_bytes].to_vec();
            if layout.data_digest_bytes > 0 {
                let found = &rest[data_at + layout.data_bytes..layout.plen()];
                assert_eq!(found, crc32c(&data).to_le_bytes(), "data digest");
            }
            if common.pdu_type == PduType::IcResp {
                assert!(!self.initialised, "a second ICResp");
                self.initialised = true;
            }
            at += layout.plen();
            received.push(Received { pdu, data });
        }
        self.pending.drain(..at);
        received
    }

    /// Connect as queue `qid` of `nqn`.
    pub fn connect(
        &self,
        nqn: &str,
        host: &str,
        qid: u16,
        cntlid: u16,
        sqsize: u16,
        kato_ms: u32,
    ) -> Vec<u8> {
        let connect = Connect {
            recfmt: 0,
            qid,
            sqsize,
            cattr: CATTR_NO_SQ_FLOW,
            kato_ms,
        };
        let data = ConnectData {
            hostid: [7; 16],
            cntlid,
            subnqn: nqn.into(),
            hostnqn: host.into(),
        };
        self.command(connect.encode(0), &data.encode())
    }
}

pub fn encode(pdu: &Pdu, data: &[u8], digests: Digests, xpda: u8) -> Vec<u8> {
    let mut out = Vec::new();
    let layout = pdu.encode(data.len(), digests, xpda, &mut out);
    out.extend_from_slice(data);
    if layout.data_digest_bytes > 0 {
        out.extend_from_slice(&crc32c(data).to_le_bytes());
    }
    out
}

/// Everything that waits to be sent to `peer`, taken apart.
pub fn drain(bench: &mut Bench, peer: u64, client: &mut Client) -> Vec<Received> {
    let mut received = Vec::new();
    while bench.has_output(peer) {
        let bytes = bench.output(peer, usize::MAX);
        received.extend(client.receive(&bytes));
    }
    received
}

fn answered(received: &[Received], what: &str) -> u32 {
    match received.last().map(|last| &last.pdu) {
        Some(Pdu::CapsuleResp(cqe)) if cqe.status.is_success() => cqe.dw0,
        other => panic!("{what}: {other:?}"),
    }
}

/// An enabled controller: its admin connection and its identifier.
pub fn bring_up(bench: &mut Bench, nqn: &str, host: &str, kato_ms: u32) -> (u64, u16) {
    let admin = bench.accept();
    let mut client = Client::new(Digests::default(), 0);
    bench.feed(admin, &client.hello());
    bench.feed(admin, &client.connect(nqn, host, 0, CNTLID_DYNAMIC, 31, kato_ms));
    let cntlid = answered(&drain(bench, admin, &mut client), "Connect") as u16;
    let enable = property_set(1, 0x14, u64::from(CC_ENABLE), false);
    bench.feed(admin, &client.command(enable, &[]));
    answered(&drain(bench, admin, &mut client), "CC.EN");
    (admin, cntlid)
}

/// I/O queue `qid` of an enabled controller.
pub fn queue(bench: &mut Bench, client: &mut Client, nqn: &str, host: &str, cntlid: u16, qid: u16) -> u64 {
    let peer = bench.accept();
    bench.feed(peer, &client.hello());
    bench.feed(peer, &client.connect(nqn, host, qid, cntlid, 31, 0));
    answered(&drain(bench, peer, client), "Connect of an I/O queue");
    peer
}

//! Where the next received bytes go.
//!
//! ```text
//!            8 bytes           the rest of the header,
//!            are here          digest and pad are here            all data are here        digest is here
//!   Common ----------> Header ------------------------> Data ------------------> DataDigest ------> Common
//!                        |  no data                       |  no data digest                           ^
//!                        +--------------------------------+-------------------------------------------+
//! ```
//!
//! This part knows positions, not meaning: [`crate::queue`] decides what a header or the end of data implies. Any split of
//! the stream, byte by byte too, makes the same steps.

use headrace_wire::digest::Digester;
use headrace_wire::pdu::Fes;
use headrace_wire::pdu::{CommonHeader, Digests, Layout, Pdu, PduError, COMMON_HEADER_BYTES, DIGEST_BYTES};

/// PDO is one byte, so header, digest and pad fit.
const HEAD_BYTES: usize = 256;

/// A data PDU under way.
#[derive(Clone, Copy)]
pub(crate) struct Incoming {
    pub cid: u16,
    /// Where in the command's data the next byte belongs.
    pub at: usize,
    pub left: usize,
    /// Whether DDGST follows.
    pub digest: bool,
    pub sum: Digester,
    pub success: bool,
}

pub(crate) enum State {
    /// Collecting the head; the common header is known once it is there.
    Head(Option<(CommonHeader, Layout)>),
    Data(Incoming),
    DataDigest(Incoming),
    /// A TermReq's copy of the offending header.
    Skip {
        left: usize,
        pdu: Pdu,
    },
}

pub(crate) struct Receive {
    pub state: State,
    head: [u8; HEAD_BYTES],
    have: usize,
    need: usize,
    /// What we asked for: data begin at a multiple of it.
    hpda: u8,
}

impl Receive {
    pub fn new(hpda: u8) -> Self {
        Receive {
            hpda,
            state: State::Head(None),
            head: [0; HEAD_BYTES],
            have: 0,
            need: COMMON_HEADER_BYTES,
        }
    }

    /// Take what is still needed of the head (or of the data digest) from `bytes`; `true` when it is complete.
    pub fn collect(&mut self, bytes: &mut &[u8]) -> bool {
        let step = bytes.len().min(self.need - self.have);
        let (taken, rest) = bytes.split_at(step);
        self.head[self.have..self.have + step].copy_from_slice(taken);
        self.have += step;
        *bytes = rest;
        self.have == self.need
    }

    /// The first eight bytes are here.
    pub fn common(&mut self, digests: Digests) -> Result<(), PduError> {
        let mut first = [0; COMMON_HEADER_BYTES];
        first.copy_from_slice(&self.head[..COMMON_HEADER_BYTES]);
        let common = CommonHeader::decode(&first, digests, self.hpda)?;
        if common.pdu_type.from_host() {
            return Err(PduError::field(
                0,
                format!("{:?} is not the controller's to send", common.pdu_type),
            ));
        }
        let layout = common.layout(digests)?;
        self.need = layout.prefix_bytes();
        self.state = State::Head(Some((common, layout)));
        Ok(())
    }

    /// The whole head is here: check its digest, decode it, and be ready for the next.
    pub fn decode(&mut self, common: &CommonHeader, layout: &Layout) -> Result<Pdu, PduError> {
        let header = &self.head[..layout.header_bytes];
        if layout.header_digest_bytes > 0 {
            let computed = headrace_wire::crc32c(header);
            let sent = u32_at(&self.head, layout.header_bytes);
            if computed != sent {
                return Err(PduError::new(
                    Fes::HeaderDigest,
                    0,
                    format!("header digest is 0x{sent:08x}, the header gives 0x{computed:08x}"),
                ));
            }
        }
        Pdu::decode(common, header)
    }

    pub fn expect_head(&mut self) {
        self.state = State::Head(None);
        self.have = 0;
        self.need = COMMON_HEADER_BYTES;
    }

    pub fn expect_data_digest(&mut self, incoming: Incoming) {
        self.state = State::DataDigest(incoming);
        self.have = 0;
        self.need = DIGEST_BYTES;
    }

    pub fn data_digest(&self) -> u32 {
        u32_at(&self.head, 0)
    }

    /// What a TermReq shows the peer: the head as far as it came.
    pub fn offending(&self) -> &[u8] {
        &self.head[..self.have]
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

//! What all PDUs share: types, the common header, where the parts of a PDU lie, and why one is refused.
//!
//! The picture is in [`crate::pdu`].

use crate::field::u32_at;

pub const COMMON_HEADER_BYTES: usize = 8;
pub const DIGEST_BYTES: usize = 4;
/// ICReq and ICResp, the longest headers.
pub const MAX_HEADER_BYTES: usize = 128;
/// A TermReq carries at most this much of the offending header.
pub const TERM_DATA_MAX: usize = 128;

pub const FLAG_HDGST: u8 = 1 << 0;
pub const FLAG_DDGST: u8 = 1 << 1;
pub const FLAG_LAST_PDU: u8 = 1 << 2;
pub const FLAG_SUCCESS: u8 = 1 << 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum PduType {
    IcReq = 0x00,
    IcResp = 0x01,
    H2cTermReq = 0x02,
    C2hTermReq = 0x03,
    CapsuleCmd = 0x04,
    CapsuleResp = 0x05,
    H2cData = 0x06,
    C2hData = 0x07,
    R2t = 0x09,
}

impl PduType {
    pub const ALL: [PduType; 9] = [
        PduType::IcReq,
        PduType::IcResp,
        PduType::H2cTermReq,
        PduType::C2hTermReq,
        PduType::CapsuleCmd,
        PduType::CapsuleResp,
        PduType::H2cData,
        PduType::C2hData,
        PduType::R2t,
    ];

    pub fn from_byte(byte: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|t| *t as u8 == byte)
    }

    /// HLEN that this type must have.
    pub fn header_bytes(self) -> usize {
        match self {
            PduType::IcReq | PduType::IcResp => 128,
            PduType::CapsuleCmd => 72,
            _ => 24,
        }
    }

    /// May carry a header digest.
    pub fn takes_hdgst(self) -> bool {
        !matches!(
            self,
            PduType::IcReq | PduType::IcResp | PduType::H2cTermReq | PduType::C2hTermReq
        )
    }

    /// May carry data (TermReq: part of the offending header).
    pub fn takes_data(self) -> bool {
        matches!(
            self,
            PduType::CapsuleCmd
                | PduType::H2cData
                | PduType::C2hData
                | PduType::H2cTermReq
                | PduType::C2hTermReq
        )
    }

    pub fn from_host(self) -> bool {
        matches!(
            self,
            PduType::IcReq | PduType::H2cTermReq | PduType::CapsuleCmd | PduType::H2cData
        )
    }
}

/// Fatal error status of a TermReq (NVMe/TCP 3.6.2.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Fes {
    InvalidHeaderField = 1,
    SequenceError = 2,
    HeaderDigest = 3,
    DataOutOfRange = 4,
    /// R2T limit (sent by a host) or data transfer limit (sent by a controller).
    LimitExceeded = 5,
    UnsupportedParameter = 6,
}

pub fn fes_name(fes: u16) -> &'static str {
    match fes {
        1 => "invalid PDU header field",
        2 => "PDU sequence error",
        3 => "header digest error",
        4 => "data transfer out of range",
        5 => "R2T or data transfer limit exceeded",
        6 => "unsupported parameter",
        _ => "unknown fatal error status",
    }
}

/// Why a PDU is refused: what a TermReq tells the peer, and a sentence for the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PduError {
    pub fes: Fes,
    /// Byte offset of the offending field within the PDU; meaningful for `InvalidHeaderField` and `UnsupportedParameter`.
    pub fei: u32,
    pub what: String,
}

impl PduError {
    pub fn new(fes: Fes, fei: u32, what: impl Into<String>) -> Self {
        PduError {
            fes,
            fei,
            what: what.into(),
        }
    }
    pub fn field(fei: u32, what: impl Into<String>) -> Self {
        Self::new(Fes::InvalidHeaderField, fei, what)
    }
    pub fn sequence(what: impl Into<String>) -> Self {
        Self::new(Fes::SequenceError, 0, what)
    }
    pub fn range(what: impl Into<String>) -> Self {
        Self::new(Fes::DataOutOfRange, 0, what)
    }
}

impl std::fmt::Display for PduError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({}", self.what, fes_name(self.fes as u16))?;
        if matches!(self.fes, Fes::InvalidHeaderField | Fes::UnsupportedParameter) {
            write!(f, " at byte {}", self.fei)?;
        }
        write!(f, ")")
    }
}

impl std::error::Error for PduError {}

/// The first eight bytes of every PDU, checked against what its type allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommonHeader {
    pub pdu_type: PduType,
    pub flags: u8,
    pub hlen: u8,
    pub pdo: u8,
    pub plen: u32,
}

/// Digests in force on a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Digests {
    pub header: bool,
    pub data: bool,
}

/// Where the parts of one PDU lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    pub header_bytes: usize,
    /// 0 or 4, directly behind the header.
    pub header_digest_bytes: usize,
    /// Pad between header (and its digest) and data.
    pub pad_bytes: usize,
    pub data_bytes: usize,
    /// 0 or 4, behind the data.
    pub data_digest_bytes: usize,
}

impl Layout {
    /// Of a PDU that carries `data_bytes`, for a receiver whose alignment field (HPDA or CPDA) is `xpda`.
    pub fn of(pdu_type: PduType, data_bytes: usize, digests: Digests, xpda: u8) -> Self {
        let header_bytes = pdu_type.header_bytes();
        let header_digest_bytes = if digests.header && pdu_type.takes_hdgst() {
            DIGEST_BYTES
        } else {
            0
        };
        let has_data = data_bytes > 0;
        let unit = (usize::from(xpda) + 1) * 4;
        let unaligned = header_bytes + header_digest_bytes;
        // The data of a TermReq follow its header directly.
        let pad_bytes = if has_data && pdu_type.takes_hdgst() {
            unaligned.next_multiple_of(unit) - unaligned
        } else {
            0
        };
        let data_digest_bytes = if digests.data && has_data && pdu_type.takes_hdgst() {
            DIGEST_BYTES
        } else {
            0
        };
        Layout {
            header_bytes,
            header_digest_bytes,
            pad_bytes,
            data_bytes,
            data_digest_bytes,
        }
    }

    pub fn pdo(&self) -> usize {
        if self.data_bytes == 0 {
            0
        } else {
            self.header_bytes + self.header_digest_bytes + self.pad_bytes
        }
    }

    /// Bytes before the data: header, digest, pad.
    pub fn prefix_bytes(&self) -> usize {
        self.header_bytes + self.header_digest_bytes + self.pad_bytes
    }

    pub fn plen(&self) -> usize {
        self.prefix_bytes() + self.data_bytes + self.data_digest_bytes
    }

    pub(crate) fn flags(&self) -> u8 {
        let mut flags = 0;
        if self.header_digest_bytes > 0 {
            flags |= FLAG_HDGST;
        }
        if self.data_digest_bytes > 0 {
            flags |= FLAG_DDGST;
        }
        flags
    }
}

impl CommonHeader {
    /// Refuses unknown types, wrong HLEN, impossible PLEN and PDO. `digests` are those in force on this connection; a
    /// type that carries a digest must flag it exactly when it is in force. `xpda` is the alignment that we asked for.
    pub fn decode(b: &[u8; COMMON_HEADER_BYTES], digests: Digests, xpda: u8) -> Result<Self, PduError> {
        let pdu_type = PduType::from_byte(b[0])
            .ok_or_else(|| PduError::field(0, format!("PDU type 0x{:02x} does not exist", b[0])))?;
        let header = CommonHeader {
            pdu_type,
            flags: b[1],
            hlen: b[2],
            pdo: b[3],
            plen: u32_at(b, 4),
        };
        if usize::from(header.hlen) != pdu_type.header_bytes() {
            let want = pdu_type.header_bytes();
            return Err(PduError::field(
                2,
                format!("{pdu_type:?} has HLEN {}, not {want}", header.hlen),
            ));
        }
        let takes = pdu_type.takes_hdgst();
        if (header.flags & FLAG_HDGST != 0) != (digests.header && takes) {
            return Err(PduError::field(
                1,
                format!("{pdu_type:?} has the wrong header digest flag"),
            ));
        }
        let layout = header.layout(digests)?;
        if layout.data_bytes > 0 {
            let unit = (usize::from(xpda) + 1) * 4;
            if takes && usize::from(header.pdo) % unit != 0 {
                return Err(PduError::field(
                    3,
                    format!("{pdu_type:?} has PDO {}, not a multiple of {unit}", header.pdo),
                ));
            }
            if (header.flags & FLAG_DDGST != 0) != (digests.data && takes) {
                return Err(PduError::field(
                    1,
                    format!("{pdu_type:?} has the wrong data digest flag"),
                ));
            }
        }
        if header.flags & FLAG_SUCCESS != 0 && header.flags & FLAG_LAST_PDU == 0 {
            return Err(PduError::field(1, "SUCCESS without LAST_PDU"));
        }
        Ok(header)
    }

    /// Where the parts lie, by this header's own fields.
    pub fn layout(&self, digests: Digests) -> Result<Layout, PduError> {
        let header_bytes = usize::from(self.hlen);
        let header_digest_bytes = if digests.header && self.pdu_type.takes_hdgst() {
            DIGEST_BYTES
        } else {
            0
        };
        let plen = self.plen as usize;
        let unpadded = header_bytes + header_digest_bytes;
        if plen < unpadded {
            return Err(PduError::field(
                4,
                format!("{:?} has PLEN {plen}, below its header", self.pdu_type),
            ));
        }
        if plen == unpadded {
            return Ok(Layout {
                header_bytes,
                header_digest_bytes,
                pad_bytes: 0,
                data_bytes: 0,
                data_digest_bytes: 0,
            });
        }
        if !self.pdu_type.takes_data() {
            return Err(PduError::field(
                4,
                format!("{:?} has PLEN {plen}, it takes no data", self.pdu_type),
            ));
        }
        let term = matches!(self.pdu_type, PduType::H2cTermReq | PduType::C2hTermReq);
        // A TermReq's data follow its header directly; its PDO is reserved.
        let pdo = if term { header_bytes } else { usize::from(self.pdo) };
        let data_digest_bytes = if digests.data && !term { DIGEST_BYTES } else { 0 };
        if pdo < unpadded || pdo + data_digest_bytes >= plen {
            return Err(PduError::field(
                3,
                format!(
                    "{:?} has PDO {pdo} with PLEN {plen}: no room for data",
                    self.pdu_type
                ),
            ));
        }
        if term && plen > header_bytes + TERM_DATA_MAX {
            return Err(PduError::field(
                4,
                format!("TermReq has PLEN {plen}, more than 152"),
            ));
        }
        let pad_bytes = pdo - unpadded;
        let data_bytes = plen - pdo - data_digest_bytes;
        Ok(Layout {
            header_bytes,
            header_digest_bytes,
            pad_bytes,
            data_bytes,
            data_digest_bytes,
        })
    }

    pub fn last(&self) -> bool {
        self.flags & FLAG_LAST_PDU != 0
    }
    pub fn success(&self) -> bool {
        self.flags & FLAG_SUCCESS != 0
    }
}

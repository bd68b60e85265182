//! The PDUs of NVMe/TCP.
//!
//! ```text
//!  0        1        2        3        4                 8                        HLEN
//! +--------+--------+--------+--------+-----------------+------------------------+
//! |  type  | flags  |  HLEN  |  PDO   |      PLEN       |  PDU-specific header   |
//! +--------+--------+--------+--------+-----------------+------------------------+
//!                                                       HLEN     [+4]      PDO
//!  ... header ... | HDGST, if on and the type takes it | pad ... | data ... | DDGST, if on and there is data |
//! ```
//!
//! PLEN counts everything. Data begin at PDO, a multiple of the receiver's alignment. See [`Layout`] for the arithmetic;
//! both sides use the same, so it exists once.

use crate::command::{Cqe, Sqe, CQE_BYTES, SQE_BYTES};
use crate::field::{put, u16_at, u32_at};
pub use crate::header::*;

/// Initialize connection request (3.6.2.2). `maxr2t` is zero-based.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IcReq {
    pub pfv: u16,
    pub hpda: u8,
    pub digests: Digests,
    pub maxr2t: u32,
}

/// Initialize connection response (3.6.2.3). `maxh2cdata` in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IcResp {
    pub pfv: u16,
    pub cpda: u8,
    pub digests: Digests,
    pub maxh2cdata: u32,
}

/// A piece of data, in either direction (3.6.2.9, 3.6.2.10).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataHeader {
    pub cccid: u16,
    /// From R2T, echoed by the host; reserved (0) in C2HData.
    pub ttag: u16,
    pub datao: u32,
    pub datal: u32,
    pub last: bool,
    /// C2HData only.
    pub success: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct R2t {
    pub cccid: u16,
    pub ttag: u16,
    pub r2to: u32,
    pub r2tl: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TermReq {
    pub fes: u16,
    pub fei: u32,
}

/// A decoded header. Data, pad and digests are the caller's to move.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Pdu {
    IcReq(IcReq),
    IcResp(IcResp),
    H2cTermReq(TermReq),
    C2hTermReq(TermReq),
    CapsuleCmd(Sqe),
    CapsuleResp(Cqe),
    H2cData(DataHeader),
    C2hData(DataHeader),
    R2t(R2t),
}

const IC_RESERVED: std::ops::Range<usize> = 16..128;

impl Pdu {
    pub fn pdu_type(&self) -> PduType {
        match self {
            Pdu::IcReq(_) => PduType::IcReq,
            Pdu::IcResp(_) => PduType::IcResp,
            Pdu::H2cTermReq(_) => PduType::H2cTermReq,
            Pdu::C2hTermReq(_) => PduType::C2hTermReq,
            Pdu::CapsuleCmd(_) => PduType::CapsuleCmd,
            Pdu::CapsuleResp(_) => PduType::CapsuleResp,
            Pdu::H2cData(_) => PduType::H2cData,
            Pdu::C2hData(_) => PduType::C2hData,
            Pdu::R2t(_) => PduType::R2t,
        }
    }

    /// `header`: exactly HLEN bytes, whose first eight gave `common`.
    pub fn decode(common: &CommonHeader, header: &[u8]) -> Result<Pdu, PduError> {
        if header.len() != common.pdu_type.header_bytes() {
            return Err(PduError::field(2, "header bytes do not match HLEN"));
        }
        let digests = |byte: u8| Digests {
            header: byte & 1 != 0,
            data: byte & 2 != 0,
        };
        let pdu = match common.pdu_type {
            PduType::IcReq => {
                let ic = IcReq {
                    pfv: u16_at(header, 8),
                    hpda: header[10],
                    digests: digests(header[11]),
                    maxr2t: u32_at(header, 12),
                };
                if ic.pfv != 0 {
                    return Err(PduError::new(
                        Fes::UnsupportedParameter,
                        8,
                        format!("ICReq has PDU format version {}", ic.pfv),
                    ));
                }
                if ic.hpda > 31 {
                    return Err(PduError::field(
                        10,
                        format!("ICReq has HPDA {}, above 31", ic.hpda),
                    ));
                }
                Pdu::IcReq(ic)
            }
            PduType::IcResp => {
                let ic = IcResp {
                    pfv: u16_at(header, 8),
                    cpda: header[10],
                    digests: digests(header[11]),
                    maxh2cdata: u32_at(header, 12),
                };
                if ic.pfv != 0 {
                    return Err(PduError::new(
                        Fes::UnsupportedParameter,
                        8,
                        format!("ICResp has PDU format version {}", ic.pfv),
                    ));
                }
                if ic.cpda > 31 {
                    return Err(PduError::field(
                        10,
                        format!("ICResp has CPDA {}, above 31", ic.cpda),
                    ));
                }
                if ic.maxh2cdata < 4096 || ic.maxh2cdata % 4 != 0 {
                    return Err(PduError::field(
                        12,
                        format!(
                            "ICResp has MAXH2CDATA {}, not a multiple of 4 from 4096",
                            ic.maxh2cdata
                        ),
                    ));
                }
                Pdu::IcResp(ic)
            }
            PduType::H2cTermReq | PduType::C2hTermReq => {
                // FEI is not aligned: bytes 10 to 13.
                let term = TermReq {
                    fes: u16_at(header, 8),
                    fei: u32_at(header, 10),
                };
                if common.pdu_type == PduType::H2cTermReq {
                    Pdu::H2cTermReq(term)
                } else {
                    Pdu::C2hTermReq(term)
                }
            }
            PduType::CapsuleCmd => {
                let mut sqe = [0; SQE_BYTES];
                sqe.copy_from_slice(&header[8..8 + SQE_BYTES]);
                Pdu::CapsuleCmd(Sqe(sqe))
            }
            PduType::CapsuleResp => {
                let mut cqe = [0; CQE_BYTES];
                cqe.copy_from_slice(&header[8..8 + CQE_BYTES]);
                Pdu::CapsuleResp(Cqe::decode(&cqe))
            }
            PduType::H2cData | PduType::C2hData => {
                let data = DataHeader {
                    cccid: u16_at(header, 8),
                    ttag: u16_at(header, 10),
                    datao: u32_at(header, 12),
                    datal: u32_at(header, 16),
                    last: common.last(),
                    success: common.success(),
                };
                if common.pdu_type == PduType::H2cData {
                    Pdu::H2cData(DataHeader {
                        success: false,
                        ..data
                    })
                } else {
                    Pdu::C2hData(data)
                }
            }
            PduType::R2t => Pdu::R2t(R2t {
                cccid: u16_at(header, 8),
                ttag: u16_at(header, 10),
                r2to: u32_at(header, 12),
                r2tl: u32_at(header, 16),
            }),
        };
        Ok(pdu)
    }

    /// Append header, header digest and pad: everything before the data, ready for `writev` with the data behind it.
    /// Returns the layout, by which the caller appends data and data digest.
    pub fn encode(&self, data_bytes: usize, digests: Digests, xpda: u8, out: &mut Vec<u8>) -> Layout {
        let pdu_type = self.pdu_type();
        let layout = Layout::of(pdu_type, data_bytes, digests, xpda);
        let mut header = [0u8; MAX_HEADER_BYTES];
        let h = &mut header[..layout.header_bytes];
        h[0] = pdu_type as u8;
        h[1] = layout.flags();
        h[2] = layout.header_bytes as u8;
        let term = matches!(pdu_type, PduType::H2cTermReq | PduType::C2hTermReq);
        h[3] = if term { 0 } else { layout.pdo() as u8 };
        put(h, 4, &(layout.plen() as u32).to_le_bytes());
        match self {
            Pdu::IcReq(ic) => {
                put(h, 8, &ic.pfv.to_le_bytes());
                h[10] = ic.hpda;
                h[11] = u8::from(ic.digests.header) | u8::from(ic.digests.data) << 1;
                put(h, 12, &ic.maxr2t.to_le_bytes());
                h[IC_RESERVED].fill(0);
            }
            Pdu::IcResp(ic) => {
                put(h, 8, &ic.pfv.to_le_bytes());
                h[10] = ic.cpda;
                h[11] = u8::from(ic.digests.header) | u8::from(ic.digests.data) << 1;
                put(h, 12, &ic.maxh2cdata.to_le_bytes());
                h[IC_RESERVED].fill(0);
            }
            Pdu::H2cTermReq(term) | Pdu::C2hTermReq(term) => {
                put(h, 8, &term.fes.to_le_bytes());
                put(h, 10, &term.fei.to_le_bytes());
            }
            Pdu::CapsuleCmd(sqe) => put(h, 8, &sqe.0),
            Pdu::CapsuleResp(cqe) => put(h, 8, &cqe.encode()),
            Pdu::H2cData(data) | Pdu::C2hData(data) => {
                if data.last {
                    h[1] |= FLAG_LAST_PDU;
                }
                if data.success {
                    h[1] |= FLAG_SUCCESS;
                }
                put(h, 8, &data.cccid.to_le_bytes());
                put(h, 10, &data.ttag.to_le_bytes());
                put(h, 12, &data.datao.to_le_bytes());
                put(h, 16, &data.datal.to_le_bytes());
            }
            Pdu::R2t(r2t) => {
                put(h, 8, &r2t.cccid.to_le_bytes());
                put(h, 10, &r2t.ttag.to_le_bytes());
                put(h, 12, &r2t.r2to.to_le_bytes());
                put(h, 16, &r2t.r2tl.to_le_bytes());
            }
        }
        out.extend_from_slice(h);
        if layout.header_digest_bytes > 0 {
            let digest = crate::crc32c(h);
            out.extend_from_slice(&digest.to_le_bytes());
        }
        out.resize(out.len() + layout.pad_bytes, 0);
        layout
    }
}

const _: () = assert!(COMMON_HEADER_BYTES + SQE_BYTES == 72);
const _: () = assert!(COMMON_HEADER_BYTES + CQE_BYTES == 24);

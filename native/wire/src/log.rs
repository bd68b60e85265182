//! Log pages: discovery (0x70), and the numbers of the others.
//!
//! ```text
//! discovery header, 1024 bytes    0 GENCTR (8)   8 NUMREC (8)   16 RECFMT (2)
//! discovery entry, 1024 bytes     0 TRTYPE   1 ADRFAM   2 SUBTYPE   3 TREQ   4 PORTID (2)   6 CNTLID (2)   8 ASQSZ (2)
//!                                 10 EFLAGS (2)   32 TRSVCID (32)   256 SUBNQN (256)   512 TRADDR (256)   768 TSAS (256)
//! ```

use crate::command::{admin, Sgl, Sqe};
use crate::field::{put, put_text, text, u16_at, u64_at};

pub mod lid {
    pub const ERROR: u8 = 0x01;
    pub const SMART: u8 = 0x02;
    pub const FIRMWARE: u8 = 0x03;
    pub const CHANGED_NAMESPACES: u8 = 0x04;
    pub const EFFECTS: u8 = 0x05;
    pub const ANA: u8 = 0x0C;
    pub const DISCOVERY: u8 = 0x70;
    pub const RESERVATION: u8 = 0x80;
}

/// A Get Log Page of `length` bytes (a multiple of 4, at least 4) from `offset`.
pub fn get_log_page(cid: u16, nsid: u32, lid: u8, offset: u64, length: u32) -> Sqe {
    debug_assert!(length >= 4 && length % 4 == 0);
    let numd = length / 4 - 1;
    Sqe::new(admin::GET_LOG_PAGE, cid, nsid)
        .with_cdw(10, u32::from(lid) | numd << 16)
        .with_cdw(11, numd >> 16)
        .with_cdw(12, offset as u32)
        .with_cdw(13, (offset >> 32) as u32)
        .with_sgl(Sgl::Transport { length })
}

/// The same with a log specific parameter, such as [`crate::ana::GROUPS_ONLY`].
pub fn with_lsp(sqe: Sqe, lsp: u8) -> Sqe {
    sqe.with_cdw(10, sqe.cdw(10) & !(0x7F << 8) | u32::from(lsp & 0x7F) << 8)
}

/// What a Get Log Page asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogRequest {
    pub lid: u8,
    /// Log specific parameter.
    pub lsp: u8,
    /// Retain asynchronous event.
    pub rae: bool,
    pub offset: u64,
    /// In bytes; up to 2^34.
    pub length: u64,
}

impl LogRequest {
    pub fn decode(sqe: &Sqe) -> Self {
        let numd = u64::from(sqe.cdw(10) >> 16) | u64::from(sqe.cdw(11) & 0xFFFF) << 16;
        LogRequest {
            lid: sqe.cdw(10) as u8,
            lsp: (sqe.cdw(10) >> 8) as u8 & 0x7F,
            rae: sqe.cdw(10) & 1 << 15 != 0,
            offset: u64::from(sqe.cdw(12)) | u64::from(sqe.cdw(13)) << 32,
            length: (numd + 1) * 4,
        }
    }
}

pub const DISCOVERY_ENTRY_BYTES: usize = 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiscoveryHeader {
    pub genctr: u64,
    pub numrec: u64,
}

impl DiscoveryHeader {
    pub const BYTES: usize = 1024;
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut b = [0; Self::BYTES];
        put(&mut b, 0, &self.genctr.to_le_bytes());
        put(&mut b, 8, &self.numrec.to_le_bytes());
        b
    }
    /// `None` when `b` is shorter than 16 bytes.
    pub fn decode(b: &[u8]) -> Option<Self> {
        (b.len() >= 16).then(|| DiscoveryHeader {
            genctr: u64_at(b, 0),
            numrec: u64_at(b, 8),
        })
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DiscoveryEntry {
    /// 1 RDMA, 2 FC, 3 TCP, 254 loop.
    pub trtype: u8,
    /// 1 IPv4, 2 IPv6, 3 InfiniBand, 4 FC.
    pub adrfam: u8,
    /// 1 referral, 2 NVM subsystem, 3 this discovery subsystem.
    pub subtype: u8,
    pub treq: u8,
    pub portid: u16,
    pub cntlid: u16,
    pub asqsz: u16,
    pub eflags: u16,
    pub trsvcid: String,
    pub subnqn: String,
    pub traddr: String,
    /// TCP: 0 no TLS, 1 TLS up to 1.2, 2 TLS 1.3.
    pub sectype: u8,
}

impl DiscoveryEntry {
    pub fn encode(&self) -> [u8; DISCOVERY_ENTRY_BYTES] {
        let mut b = [0; DISCOVERY_ENTRY_BYTES];
        b[0] = self.trtype;
        b[1] = self.adrfam;
        b[2] = self.subtype;
        b[3] = self.treq;
        put(&mut b, 4, &self.portid.to_le_bytes());
        put(&mut b, 6, &self.cntlid.to_le_bytes());
        put(&mut b, 8, &self.asqsz.to_le_bytes());
        put(&mut b, 10, &self.eflags.to_le_bytes());
        put_text(&mut b, 32, 32, &self.trsvcid, b' ');
        put_text(&mut b, 256, 256, &self.subnqn, 0);
        put_text(&mut b, 512, 256, &self.traddr, b' ');
        b[768] = self.sectype;
        b
    }

    /// `None` unless `b` is 1024 bytes.
    pub fn decode(b: &[u8]) -> Option<Self> {
        (b.len() == DISCOVERY_ENTRY_BYTES).then(|| DiscoveryEntry {
            trtype: b[0],
            adrfam: b[1],
            subtype: b[2],
            treq: b[3],
            portid: u16_at(b, 4),
            cntlid: u16_at(b, 6),
            asqsz: u16_at(b, 8),
            eflags: u16_at(b, 10),
            trsvcid: text(&b[32..64]),
            subnqn: text(&b[256..512]),
            traddr: text(&b[512..768]),
            sectype: b[768],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_request_round_trip() {
        let sqe = get_log_page(5, 0, lid::DISCOVERY, 1 << 33, 1 << 20);
        let request = LogRequest::decode(&sqe);
        assert_eq!(
            request,
            LogRequest {
                lid: 0x70,
                lsp: 0,
                rae: false,
                offset: 1 << 33,
                length: 1 << 20
            }
        );
        let ana = LogRequest::decode(&with_lsp(get_log_page(1, 0, lid::ANA, 0, 16), 1));
        assert_eq!((ana.lid, ana.lsp, ana.rae, ana.length), (0x0C, 1, false, 16));
    }

    #[test]
    fn entry_round_trip() {
        let entry = DiscoveryEntry {
            trtype: 3,
            adrfam: 1,
            subtype: 2,
            portid: 1,
            cntlid: 0xFFFF,
            asqsz: 32,
            trsvcid: "4420".into(),
            subnqn: "nqn.a".into(),
            traddr: "127.0.0.1".into(),
            ..Default::default()
        };
        assert_eq!(DiscoveryEntry::decode(&entry.encode()), Some(entry.clone()));
        assert_eq!(DiscoveryEntry::decode(&entry.encode()[1..]), None);
    }
}

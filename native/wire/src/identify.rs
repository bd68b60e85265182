//! Identify data structures: 4096 bytes each; the fields that headrace gives or believes.

use crate::field::{put, put_text, text, u16_at, u32_at, u64_at};

pub const IDENTIFY_BYTES: usize = 4096;

/// CNS values.
pub mod cns {
    pub const NAMESPACE: u8 = 0x00;
    pub const CONTROLLER: u8 = 0x01;
    pub const ACTIVE_NAMESPACES: u8 = 0x02;
    pub const NAMESPACE_DESCRIPTORS: u8 = 0x03;
    pub const CSI_NAMESPACE: u8 = 0x05;
    pub const CSI_CONTROLLER: u8 = 0x06;
    pub const CSI_ACTIVE_NAMESPACES: u8 = 0x07;
    pub const INDEPENDENT_NAMESPACE: u8 = 0x08;
    pub const COMMAND_SETS: u8 = 0x1C;
}

/// Bits of CMIC.
pub mod cmic {
    pub const ANA: u8 = 1 << 3;
}

/// Bits of CTRATT.
pub mod ctratt {
    /// Traffic Based Keep Alive: any command restarts the timer.
    pub const TBKAS: u32 = 1 << 6;
}

/// Bits of ONCS.
pub mod oncs {
    pub const COMPARE: u16 = 1 << 0;
    pub const DATASET_MANAGEMENT: u16 = 1 << 2;
    pub const WRITE_ZEROES: u16 = 1 << 3;
    pub const RESERVATIONS: u16 = 1 << 5;
    pub const VERIFY: u16 = 1 << 7;
}

/// SGLS: SGLs supported without alignment, transport data blocks, offsets in capsules.
pub const SGLS_TCP: u32 = 1 | 1 << 20 | 1 << 21;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IdentifyController {
    pub vid: u16,
    pub serial: String,
    pub model: String,
    pub firmware: String,
    /// Bit 0 several ports, 1 several controllers, 3 ANA.
    pub cmic: u8,
    /// Largest transfer is 2^MDTS pages of CAP.MPSMIN; 0: no limit.
    pub mdts: u8,
    pub cntlid: u16,
    /// Version, e.g. 0x00010400.
    pub ver: u32,
    pub oaes: u32,
    pub ctratt: u32,
    /// 1 I/O, 2 discovery, 3 administrative.
    pub cntrltype: u8,
    /// Command retry delays 1 to 3, in 100 ms; a status's CRD names one of them.
    pub crdt: [u16; 3],
    pub oacs: u16,
    /// Abort and async event limits, zero-based.
    pub acl: u8,
    pub aerl: u8,
    pub frmw: u8,
    pub lpa: u8,
    /// Keep-alive granularity in 100 ms.
    pub kas: u16,
    /// Longest time in ANA transition, in seconds.
    pub anatt: u8,
    /// Bits 0 to 4: which ANA states are reported; 6: groups do not change.
    pub anacap: u8,
    /// Largest ANA group identifier, and how many groups there are.
    pub anagrpmax: u32,
    pub nanagrpid: u32,
    pub maxcmd: u16,
    pub nn: u32,
    pub oncs: u16,
    pub fuses: u16,
    /// Bit 0 volatile cache present; 2:1 Flush with all namespaces (2 no, 3 yes).
    pub vwc: u8,
    pub awun: u16,
    pub awupf: u16,
    /// Largest fused Compare and Write in blocks, zero-based.
    pub acwu: u16,
    pub sgls: u32,
    pub mnan: u32,
    pub subnqn: String,
    /// Capsule sizes in 16 bytes.
    pub ioccsz: u32,
    pub iorcsz: u32,
    pub icdoff: u16,
    pub fcatt: u8,
    pub msdbd: u8,
    pub ofcs: u16,
}

impl IdentifyController {
    pub fn encode(&self) -> Vec<u8> {
        let mut b = vec![0; IDENTIFY_BYTES];
        put(&mut b, 0, &self.vid.to_le_bytes());
        put(&mut b, 2, &self.vid.to_le_bytes());
        put_text(&mut b, 4, 20, &self.serial, b' ');
        put_text(&mut b, 24, 40, &self.model, b' ');
        put_text(&mut b, 64, 8, &self.firmware, b' ');
        b[76] = self.cmic;
        b[77] = self.mdts;
        put(&mut b, 78, &self.cntlid.to_le_bytes());
        put(&mut b, 80, &self.ver.to_le_bytes());
        put(&mut b, 92, &self.oaes.to_le_bytes());
        put(&mut b, 96, &self.ctratt.to_le_bytes());
        b[111] = self.cntrltype;
        for (i, delay) in self.crdt.iter().enumerate() {
            put(&mut b, 128 + 2 * i, &delay.to_le_bytes());
        }
        put(&mut b, 256, &self.oacs.to_le_bytes());
        b[258] = self.acl;
        b[259] = self.aerl;
        b[260] = self.frmw;
        b[261] = self.lpa;
        put(&mut b, 320, &self.kas.to_le_bytes());
        b[342] = self.anatt;
        b[343] = self.anacap;
        put(&mut b, 344, &self.anagrpmax.to_le_bytes());
        put(&mut b, 348, &self.nanagrpid.to_le_bytes());
        b[512] = 0x66;
        b[513] = 0x44;
        put(&mut b, 514, &self.maxcmd.to_le_bytes());
        put(&mut b, 516, &self.nn.to_le_bytes());
        put(&mut b, 520, &self.oncs.to_le_bytes());
        put(&mut b, 522, &self.fuses.to_le_bytes());
        b[525] = self.vwc;
        put(&mut b, 526, &self.awun.to_le_bytes());
        put(&mut b, 528, &self.awupf.to_le_bytes());
        put(&mut b, 532, &self.acwu.to_le_bytes());
        put(&mut b, 536, &self.sgls.to_le_bytes());
        put(&mut b, 540, &self.mnan.to_le_bytes());
        put_text(&mut b, 768, 256, &self.subnqn, 0);
        put(&mut b, 1792, &self.ioccsz.to_le_bytes());
        put(&mut b, 1796, &self.iorcsz.to_le_bytes());
        put(&mut b, 1800, &self.icdoff.to_le_bytes());
        b[1802] = self.fcatt;
        b[1803] = self.msdbd;
        put(&mut b, 1804, &self.ofcs.to_le_bytes());
        b
    }

    /// `None` unless `b` is 4096 bytes.
    pub fn decode(b: &[u8]) -> Option<Self> {
        if b.len() != IDENTIFY_BYTES {
            return None;
        }
        Some(IdentifyController {
            vid: u16_at(b, 0),
            serial: text(&b[4..24]),
            model: text(&b[24..64]),
            firmware: text(&b[64..72]),
            cmic: b[76],
            mdts: b[77],
            cntlid: u16_at(b, 78),
            ver: u32_at(b, 80),
            oaes: u32_at(b, 92),
            ctratt: u32_at(b, 96),
            cntrltype: b[111],
            crdt: [u16_at(b, 128), u16_at(b, 130), u16_at(b, 132)],
            oacs: u16_at(b, 256),
            acl: b[258],
            aerl: b[259],
            frmw: b[260],
            lpa: b[261],
            kas: u16_at(b, 320),
            anatt: b[342],
            anacap: b[343],
            anagrpmax: u32_at(b, 344),
            nanagrpid: u32_at(b, 348),
            maxcmd: u16_at(b, 514),
            nn: u32_at(b, 516),
            oncs: u16_at(b, 520),
            fuses: u16_at(b, 522),
            vwc: b[525],
            awun: u16_at(b, 526),
            awupf: u16_at(b, 528),
            acwu: u16_at(b, 532),
            sgls: u32_at(b, 536),
            mnan: u32_at(b, 540),
            subnqn: text(&b[768..1024]),
            ioccsz: u32_at(b, 1792),
            iorcsz: u32_at(b, 1796),
            icdoff: u16_at(b, 1800),
            fcatt: b[1802],
            msdbd: b[1803],
            ofcs: u16_at(b, 1804),
        })
    }
}

/// One LBA format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LbaFormat {
    /// Metadata bytes a block.
    pub ms: u16,
    /// Block size as a power of two.
    pub lbads: u8,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IdentifyNamespace {
    /// Sizes in blocks.
    pub nsze: u64,
    pub ncap: u64,
    pub nuse: u64,
    pub nsfeat: u8,
    /// Zero-based index of the format in use (3:0; 6:5 are the upper bits).
    pub flbas: u8,
    /// Bit 0: may be attached to several controllers.
    pub nmic: u8,
    pub rescap: u8,
    /// 2:0 what a deallocated block reads as: 1 zeros.
    pub dlfeat: u8,
    /// Optimal I/O boundary in blocks; 0: none.
    pub noiob: u16,
    /// The ANA group that the namespace is in; 0: none.
    pub anagrpid: u32,
    pub nguid: [u8; 16],
    pub eui64: [u8; 8],
    pub formats: Vec<LbaFormat>,
    /// Bit 0: write protected.
    pub nsattr: u8,
}

impl IdentifyNamespace {
    pub fn encode(&self) -> Vec<u8> {
        let mut b = vec![0; IDENTIFY_BYTES];
        put(&mut b, 0, &self.nsze.to_le_bytes());
        put(&mut b, 8, &self.ncap.to_le_bytes());
        put(&mut b, 16, &self.nuse.to_le_bytes());
        b[24] = self.nsfeat;
        b[25] = self.formats.len().saturating_sub(1) as u8;
        b[26] = self.flbas;
        b[30] = self.nmic;
        b[31] = self.rescap;
        b[33] = self.dlfeat;
        put(&mut b, 46, &self.noiob.to_le_bytes());
        put(&mut b, 92, &self.anagrpid.to_le_bytes());
        b[99] = self.nsattr;
        put(&mut b, 104, &self.nguid);
        put(&mut b, 120, &self.eui64);
        for (i, format) in self.formats.iter().take(64).enumerate() {
            put(&mut b, 128 + 4 * i, &format.ms.to_le_bytes());
            b[128 + 4 * i + 2] = format.lbads;
        }
        b
    }

    /// `None` unless `b` is 4096 bytes.
    pub fn decode(b: &[u8]) -> Option<Self> {
        if b.len() != IDENTIFY_BYTES {
            return None;
        }
        let count = (usize::from(b[25]) + 1).min(64);
        let formats = (0..count)
            .map(|i| LbaFormat {
                ms: u16_at(b, 128 + 4 * i),
                lbads: b[128 + 4 * i + 2],
            })
            .collect();
        let mut nguid = [0; 16];
        nguid.copy_from_slice(&b[104..120]);
        let mut eui64 = [0; 8];
        eui64.copy_from_slice(&b[120..128]);
        Some(IdentifyNamespace {
            nsze: u64_at(b, 0),
            ncap: u64_at(b, 8),
            nuse: u64_at(b, 16),
            nsfeat: b[24],
            flbas: b[26],
            nmic: b[30],
            rescap: b[31],
            dlfeat: b[33],
            noiob: u16_at(b, 46),
            anagrpid: u32_at(b, 92),
            nguid,
            eui64,
            formats,
            nsattr: b[99],
        })
    }

    /// The format in use; `None` where FLBAS names one that is not there.
    pub fn format(&self) -> Option<LbaFormat> {
        let index = usize::from(self.flbas & 15) | usize::from(self.flbas >> 5 & 3) << 4;
        self.formats.get(index).copied()
    }
}

/// What every namespace has, whatever its command set (CNS 08h).
///
/// ```text
/// 0 NSFEAT   1 NMIC   2 RESCAP   3 FPI   4 ANAGRPID (4)   8 NSATTR   10 NVMSETID (2)   12 ENDGID (2)   14 NSTAT
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IndependentNamespace {
    pub nmic: u8,
    pub rescap: u8,
    pub anagrpid: u32,
    /// Bit 0: write protected.
    pub nsattr: u8,
    /// NSTAT.NRDY.
    pub ready: bool,
}

impl IndependentNamespace {
    pub fn encode(&self) -> Vec<u8> {
        let mut b = vec![0; IDENTIFY_BYTES];
        b[1] = self.nmic;
        b[2] = self.rescap;
        put(&mut b, 4, &self.anagrpid.to_le_bytes());
        b[8] = self.nsattr;
        b[14] = u8::from(self.ready);
        b
    }

    /// `None` unless `b` is 4096 bytes.
    pub fn decode(b: &[u8]) -> Option<Self> {
        (b.len() == IDENTIFY_BYTES).then(|| IndependentNamespace {
            nmic: b[1],
            rescap: b[2],
            anagrpid: u32_at(b, 4),
            nsattr: b[8],
            ready: b[14] & 1 != 0,
        })
    }
}

/// Namespace identification descriptors (CNS 03): type, length, two reserved bytes, identifier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NamespaceId {
    Eui64([u8; 8]),
    Nguid([u8; 16]),
    Uuid([u8; 16]),
    Csi(u8),
}

pub fn encode_descriptors(ids: &[NamespaceId]) -> Vec<u8> {
    let mut b = Vec::with_capacity(IDENTIFY_BYTES);
    for id in ids {
        let (kind, bytes): (u8, &[u8]) = match id {
            NamespaceId::Eui64(v) => (1, v),
            NamespaceId::Nguid(v) => (2, v),
            NamespaceId::Uuid(v) => (3, v),
            NamespaceId::Csi(v) => (4, std::slice::from_ref(v)),
        };
        b.extend_from_slice(&[kind, bytes.len() as u8, 0, 0]);
        b.extend_from_slice(bytes);
    }
    b.resize(IDENTIFY_BYTES, 0);
    b
}

/// Unknown types are passed over; the list ends at length 0 or at the end of `b`.
pub fn decode_descriptors(b: &[u8]) -> Vec<NamespaceId> {
    let (mut ids, mut at) = (Vec::new(), 0);
    while at + 4 <= b.len() && b[at + 1] != 0 {
        let (kind, length) = (b[at], usize::from(b[at + 1]));
        let Some(bytes) = b.get(at + 4..at + 4 + length) else {
            break;
        };
        match (kind, length) {
            (1, 8) => ids.extend(bytes.try_into().map(NamespaceId::Eui64)),
            (2, 16) => ids.extend(bytes.try_into().map(NamespaceId::Nguid)),
            (3, 16) => ids.extend(bytes.try_into().map(NamespaceId::Uuid)),
            (4, 1) => ids.push(NamespaceId::Csi(bytes[0])),
            _ => {}
        }
        at += 4 + length;
    }
    ids
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn controller_round_trip() {
        let c = IdentifyController {
            vid: 1,
            serial: "S1".into(),
            model: "headrace".into(),
            firmware: "0.1".into(),
            mdts: 8,
            cntlid: 0x1234,
            ver: 0x10400,
            cntrltype: 1,
            crdt: [1, 20, 0x300],
            kas: 10,
            anatt: 20,
            anacap: 0x1F,
            anagrpmax: 0x0304,
            nanagrpid: 2,
            maxcmd: 128,
            nn: 3,
            oncs: oncs::WRITE_ZEROES,
            vwc: 7,
            sgls: SGLS_TCP,
            subnqn: "nqn.x".into(),
            ioccsz: 1028,
            iorcsz: 1,
            msdbd: 1,
            ..Default::default()
        };
        let b = c.encode();
        assert_eq!(
            (b.len(), &b[4..24], &b[512..514]),
            (4096, b"S1                  ".as_slice(), &[0x66, 0x44][..])
        );
        assert_eq!(u32_at(&b, 1792), 1028);
        assert_eq!(&b[128..134], &[1, 0, 20, 0, 0, 3]);
        assert_eq!(&b[342..352], &[20, 0x1F, 4, 3, 0, 0, 2, 0, 0, 0]);
        assert_eq!(IdentifyController::decode(&b), Some(c));
        assert_eq!(IdentifyController::decode(&b[..4095]), None);
    }

    #[test]
    fn namespace_round_trip() {
        let n = IdentifyNamespace {
            nsze: 1 << 40,
            ncap: 1 << 40,
            nuse: 5,
            flbas: 1,
            nmic: 1,
            dlfeat: 1,
            anagrpid: 0x0201,
            nguid: [3; 16],
            formats: vec![LbaFormat { ms: 0, lbads: 9 }, LbaFormat { ms: 0, lbads: 12 }],
            ..Default::default()
        };
        let b = n.encode();
        assert_eq!((b[25], &b[128..136]), (1, &[0, 0, 9, 0, 0, 0, 12, 0][..]));
        assert_eq!(&b[92..96], &[1, 2, 0, 0]);
        let back = IdentifyNamespace::decode(&b).unwrap();
        assert_eq!((back.format().unwrap().lbads, &back), (12, &n));
    }

    #[test]
    fn independent_namespace() {
        let n = IndependentNamespace {
            nmic: 1,
            rescap: 0xFF,
            anagrpid: 0x0102_0304,
            nsattr: 1,
            ready: true,
        };
        let b = n.encode();
        assert_eq!(
            (b.len(), &b[..16]),
            (4096, &[0, 1, 0xFF, 0, 4, 3, 2, 1, 1, 0, 0, 0, 0, 0, 1, 0][..])
        );
        assert_eq!(IndependentNamespace::decode(&b), Some(n));
        assert_eq!(IndependentNamespace::decode(&b[..4095]), None);
    }

    #[test]
    fn descriptors() {
        let ids = vec![
            NamespaceId::Nguid([1; 16]),
            NamespaceId::Uuid([2; 16]),
            NamespaceId::Csi(0),
        ];
        let b = encode_descriptors(&ids);
        assert_eq!(decode_descriptors(&b), ids);
        for cut in 0..60 {
            assert!(decode_descriptors(&b[..cut]).len() <= 3);
        }
    }
}

//! Submission and completion queue entries.
//!
//! ```text
//! SQE, 64 bytes
//!   0 OPC   1 FUSE 1:0, PSDT 7:6   2 CID (2)   4 NSID (4)   8 CDW2, CDW3   16 MPTR (8)   24 SGL1 (16)   40 CDW10 ... 60 CDW15
//! SGL1: address (8), length (4), reserved (3), type << 4 | subtype
//! CQE, 16 bytes
//!   0 DW0 (4)   4 DW1 (4)   8 SQHD (2)   10 SQID (2)   12 CID (2)   14 STATUS (2)
//! ```

use crate::field::{put, u16_at, u32_at, u64_at};
use crate::Status;

pub const SQE_BYTES: usize = 64;
pub const CQE_BYTES: usize = 16;

/// Admin command opcodes.
pub mod admin {
    pub const GET_LOG_PAGE: u8 = 0x02;
    pub const IDENTIFY: u8 = 0x06;
    pub const ABORT: u8 = 0x08;
    pub const SET_FEATURES: u8 = 0x09;
    pub const GET_FEATURES: u8 = 0x0A;
    pub const ASYNC_EVENT_REQUEST: u8 = 0x0C;
    pub const KEEP_ALIVE: u8 = 0x18;
    pub const FABRICS: u8 = 0x7F;
}

/// NVM command set opcodes.
pub mod io {
    pub const FLUSH: u8 = 0x00;
    pub const WRITE: u8 = 0x01;
    pub const READ: u8 = 0x02;
    pub const WRITE_UNCORRECTABLE: u8 = 0x04;
    pub const COMPARE: u8 = 0x05;
    pub const WRITE_ZEROES: u8 = 0x08;
    pub const DATASET_MANAGEMENT: u8 = 0x09;
    pub const VERIFY: u8 = 0x0C;
    pub const RESERVATION_REGISTER: u8 = 0x0D;
    pub const RESERVATION_REPORT: u8 = 0x0E;
    pub const RESERVATION_ACQUIRE: u8 = 0x11;
    pub const RESERVATION_RELEASE: u8 = 0x15;
    pub const COPY: u8 = 0x19;

    pub fn name(opcode: u8) -> &'static str {
        match opcode {
            FLUSH => "Flush",
            WRITE => "Write",
            READ => "Read",
            WRITE_UNCORRECTABLE => "Write Uncorrectable",
            COMPARE => "Compare",
            WRITE_ZEROES => "Write Zeroes",
            DATASET_MANAGEMENT => "Dataset Management",
            VERIFY => "Verify",
            RESERVATION_REGISTER => "Reservation Register",
            RESERVATION_REPORT => "Reservation Report",
            RESERVATION_ACQUIRE => "Reservation Acquire",
            RESERVATION_RELEASE => "Reservation Release",
            COPY => "Copy",
            _ => "unknown command",
        }
    }
}

pub const NSID_ALL: u32 = 0xFFFF_FFFF;
/// FUA in CDW12 of Write.
pub const CDW12_FUA: u32 = 1 << 30;
/// Deallocate in CDW12 of Write Zeroes.
pub const CDW12_DEAC: u32 = 1 << 25;
/// Attribute Deallocate in CDW11 of Dataset Management.
pub const CDW11_DEALLOCATE: u32 = 1 << 2;

/// Feature identifiers.
pub mod feature {
    pub const ARBITRATION: u8 = 0x01;
    pub const POWER_MANAGEMENT: u8 = 0x02;
    pub const TEMPERATURE: u8 = 0x04;
    pub const ERROR_RECOVERY: u8 = 0x05;
    pub const VOLATILE_WRITE_CACHE: u8 = 0x06;
    pub const NUMBER_OF_QUEUES: u8 = 0x07;
    pub const WRITE_ATOMICITY: u8 = 0x0A;
    pub const ASYNC_EVENT_CONFIG: u8 = 0x0B;
    pub const KEEP_ALIVE_TIMER: u8 = 0x0F;
    pub const HOST_BEHAVIOUR: u8 = 0x16;
    pub const HOST_IDENTIFIER: u8 = 0x81;
    pub const RESERVATION_NOTIFICATION_MASK: u8 = 0x82;
    pub const RESERVATION_PERSISTENCE: u8 = 0x83;
}

/// How a command's data travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sgl {
    /// No data: transport descriptor of length 0.
    None,
    /// Behind the command, in the capsule, at `offset`.
    InCapsule { offset: u64, length: u32 },
    /// By C2HData or R2T and H2CData.
    Transport { length: u32 },
    /// Anything else; a TCP target refuses it.
    Other(u8),
}

impl Sgl {
    pub fn length(self) -> u32 {
        match self {
            Sgl::InCapsule { length, .. } | Sgl::Transport { length } => length,
            Sgl::None | Sgl::Other(_) => 0,
        }
    }
}

const SGL_IN_CAPSULE: u8 = 0x01;
const SGL_TRANSPORT: u8 = 0x5A;

/// A submission queue entry, kept as its bytes; accessors read and write the fields.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Sqe(pub [u8; SQE_BYTES]);

impl Sqe {
    /// All zero but opcode, CID, NSID, and PSDT = 01b, as fabrics require.
    pub fn new(opcode: u8, cid: u16, nsid: u32) -> Self {
        let mut sqe = Sqe([0; SQE_BYTES]);
        sqe.0[0] = opcode;
        sqe.0[1] = 0x40;
        put(&mut sqe.0, 2, &cid.to_le_bytes());
        put(&mut sqe.0, 4, &nsid.to_le_bytes());
        sqe.with_sgl(Sgl::None)
    }

    /// Read, Write, Compare or Write Zeroes over `nlb` blocks (one-based here, zero-based on the wire).
    pub fn rw(opcode: u8, cid: u16, nsid: u32, slba: u64, nlb: u32) -> Self {
        debug_assert!((1..=65536).contains(&nlb));
        Self::new(opcode, cid, nsid)
            .with_cdw(10, slba as u32)
            .with_cdw(11, (slba >> 32) as u32)
            .with_cdw(12, nlb.wrapping_sub(1) & 0xFFFF)
    }

    pub fn with_cdw(mut self, number: usize, value: u32) -> Self {
        put(&mut self.0, number * 4, &value.to_le_bytes());
        self
    }

    pub fn with_cid(mut self, cid: u16) -> Self {
        put(&mut self.0, 2, &cid.to_le_bytes());
        self
    }

    pub fn with_nsid(mut self, nsid: u32) -> Self {
        put(&mut self.0, 4, &nsid.to_le_bytes());
        self
    }

    pub fn with_sgl(mut self, sgl: Sgl) -> Self {
        let (address, length, kind) = match sgl {
            Sgl::None => (0, 0, SGL_TRANSPORT),
            Sgl::InCapsule { offset, length } => (offset, length, SGL_IN_CAPSULE),
            Sgl::Transport { length } => (0, length, SGL_TRANSPORT),
            Sgl::Other(kind) => (0, 0, kind),
        };
        put(&mut self.0, 24, &address.to_le_bytes());
        put(&mut self.0, 32, &length.to_le_bytes());
        self.0[36..39].fill(0);
        self.0[39] = kind;
        self
    }

    pub fn opcode(&self) -> u8 {
        self.0[0]
    }
    /// FUSE, bits 1:0 of byte 1.
    pub fn fuse(&self) -> u8 {
        self.0[1] & 3
    }
    /// PSDT, bits 7:6 of byte 1; fabrics use 01b.
    pub fn psdt(&self) -> u8 {
        self.0[1] >> 6
    }
    pub fn cid(&self) -> u16 {
        u16_at(&self.0, 2)
    }
    pub fn nsid(&self) -> u32 {
        u32_at(&self.0, 4)
    }
    /// Fabrics commands: FCTYPE takes the place of NSID.
    pub fn fctype(&self) -> u8 {
        self.0[4]
    }
    pub fn cdw(&self, number: usize) -> u32 {
        u32_at(&self.0, number * 4)
    }
    pub fn sgl(&self) -> Sgl {
        let (address, length) = (u64_at(&self.0, 24), u32_at(&self.0, 32));
        match self.0[39] {
            SGL_TRANSPORT if length == 0 => Sgl::None,
            SGL_TRANSPORT => Sgl::Transport { length },
            SGL_IN_CAPSULE => Sgl::InCapsule {
                offset: address,
                length,
            },
            other => Sgl::Other(other),
        }
    }
    /// Starting LBA of Read, Write and their like.
    pub fn slba(&self) -> u64 {
        u64_at(&self.0, 40)
    }
    /// Blocks, one-based.
    pub fn nlb(&self) -> u32 {
        (self.cdw(12) & 0xFFFF) + 1
    }
    pub fn fua(&self) -> bool {
        self.cdw(12) & CDW12_FUA != 0
    }
}

impl std::fmt::Debug for Sqe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "Sqe {{ opcode: 0x{:02x}, cid: {}, nsid: {}, sgl: {:?}, cdw10: 0x{:x}, cdw11: 0x{:x}, cdw12: 0x{:x} }}",
            self.opcode(),
            self.cid(),
            self.nsid(),
            self.sgl(),
            self.cdw(10),
            self.cdw(11),
            self.cdw(12)
        )
    }
}

/// A completion queue entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cqe {
    pub dw0: u32,
    pub dw1: u32,
    pub sqhd: u16,
    pub sqid: u16,
    pub cid: u16,
    pub status: Status,
}

impl Cqe {
    pub fn new(cid: u16, status: Status) -> Self {
        Cqe {
            dw0: 0,
            dw1: 0,
            sqhd: 0,
            sqid: 0,
            cid,
            status,
        }
    }
    pub fn decode(b: &[u8; CQE_BYTES]) -> Self {
        Cqe {
            dw0: u32_at(b, 0),
            dw1: u32_at(b, 4),
            sqhd: u16_at(b, 8),
            sqid: u16_at(b, 10),
            cid: u16_at(b, 12),
            status: Status::from_field(u16_at(b, 14)),
        }
    }
    pub fn encode(&self) -> [u8; CQE_BYTES] {
        let mut b = [0; CQE_BYTES];
        put(&mut b, 0, &self.dw0.to_le_bytes());
        put(&mut b, 4, &self.dw1.to_le_bytes());
        put(&mut b, 8, &self.sqhd.to_le_bytes());
        put(&mut b, 10, &self.sqid.to_le_bytes());
        put(&mut b, 12, &self.cid.to_le_bytes());
        put(&mut b, 14, &self.status.to_field().to_le_bytes());
        b
    }
}

/// One range of Dataset Management: context attributes (4), length in blocks (4), SLBA (8).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DsmRange {
    pub blocks: u32,
    pub slba: u64,
}

impl DsmRange {
    pub const BYTES: usize = 16;
    pub fn decode(b: &[u8; Self::BYTES]) -> Self {
        DsmRange {
            blocks: u32_at(b, 4),
            slba: u64_at(b, 8),
        }
    }
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut b = [0; Self::BYTES];
        put(&mut b, 4, &self.blocks.to_le_bytes());
        put(&mut b, 8, &self.slba.to_le_bytes());
        b
    }
}

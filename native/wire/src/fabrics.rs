//! Fabrics commands and controller properties.
//!
//! ```text
//! Connect SQE    24 SGL1 (in capsule, 1024)   40 RECFMT (2)   42 QID (2)   44 SQSIZE (2, zero-based)   46 CATTR   48 KATO (4, ms)
//! Connect data   0 HOSTID (16)   16 CNTLID (2)   256 SUBNQN (256)   512 HOSTNQN (256)   to 1024
//! Property       40 ATTRIB (0: 4 bytes, 1: 8 bytes)   44 OFST (4)   48 VALUE (8, Set)
//! ```

use crate::command::{admin, Sgl, Sqe};
use crate::field::{put, put_text, text, u16_at, u32_at, u64_at};

pub mod fctype {
    pub const PROPERTY_SET: u8 = 0x00;
    pub const CONNECT: u8 = 0x01;
    pub const PROPERTY_GET: u8 = 0x04;
    pub const AUTH_SEND: u8 = 0x05;
    pub const AUTH_RECEIVE: u8 = 0x06;
    pub const DISCONNECT: u8 = 0x08;
}

/// Property offsets.
pub mod property {
    pub const CAP: u32 = 0x00;
    pub const VS: u32 = 0x08;
    pub const CC: u32 = 0x14;
    pub const CSTS: u32 = 0x1C;
    pub const NSSR: u32 = 0x20;
    pub const CRTO: u32 = 0x68;
}

pub const CONNECT_DATA_BYTES: usize = 1024;
/// CNTLID in an admin Connect: let the controller choose.
pub const CNTLID_DYNAMIC: u16 = 0xFFFF;
/// CATTR: no submission queue flow control, so SQHD is not used and SUCCESS is allowed.
pub const CATTR_NO_SQ_FLOW: u8 = 1 << 2;
/// Enable with NVM command set, 64-byte SQEs, 16-byte CQEs.
pub const CC_ENABLE: u32 = 0x0046_0001;

/// Where in the Connect command a refused field lies (IPO), for messages.
pub const IPO_DATA_HOSTID: u16 = 0;
pub const IPO_DATA_CNTLID: u16 = 16;
pub const IPO_DATA_SUBNQN: u16 = 256;
pub const IPO_DATA_HOSTNQN: u16 = 512;
pub const IPO_SQE_QID: u16 = 42;
pub const IPO_SQE_SQSIZE: u16 = 44;

/// The command part of Connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connect {
    pub recfmt: u16,
    pub qid: u16,
    /// Zero-based.
    pub sqsize: u16,
    pub cattr: u8,
    pub kato_ms: u32,
}

impl Connect {
    pub fn encode(&self, cid: u16) -> Sqe {
        let length = CONNECT_DATA_BYTES as u32;
        let mut sqe = Sqe::new(admin::FABRICS, cid, 0).with_sgl(Sgl::InCapsule { offset: 0, length });
        sqe.0[4] = fctype::CONNECT;
        put(&mut sqe.0, 40, &self.recfmt.to_le_bytes());
        put(&mut sqe.0, 42, &self.qid.to_le_bytes());
        put(&mut sqe.0, 44, &self.sqsize.to_le_bytes());
        sqe.0[46] = self.cattr;
        put(&mut sqe.0, 48, &self.kato_ms.to_le_bytes());
        sqe
    }
    pub fn decode(sqe: &Sqe) -> Self {
        Connect {
            recfmt: u16_at(&sqe.0, 40),
            qid: u16_at(&sqe.0, 42),
            sqsize: u16_at(&sqe.0, 44),
            cattr: sqe.0[46],
            kato_ms: u32_at(&sqe.0, 48),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectData {
    pub hostid: [u8; 16],
    pub cntlid: u16,
    pub subnqn: String,
    pub hostnqn: String,
}

impl ConnectData {
    pub fn encode(&self) -> [u8; CONNECT_DATA_BYTES] {
        let mut b = [0; CONNECT_DATA_BYTES];
        put(&mut b, 0, &self.hostid);
        put(&mut b, 16, &self.cntlid.to_le_bytes());
        put_text(&mut b, 256, 256, &self.subnqn, 0);
        put_text(&mut b, 512, 256, &self.hostnqn, 0);
        b
    }
    pub fn decode(b: &[u8; CONNECT_DATA_BYTES]) -> Self {
        let mut hostid = [0; 16];
        hostid.copy_from_slice(&b[..16]);
        ConnectData {
            hostid,
            cntlid: u16_at(b, 16),
            subnqn: text(&b[256..512]),
            hostnqn: text(&b[512..768]),
        }
    }
}

/// DW0 of a Connect completion: CNTLID and authentication on success, IPO and IATTR with Invalid Parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectResponse(pub u32);

impl ConnectResponse {
    pub fn cntlid(self) -> u16 {
        self.0 as u16
    }
    /// ATR or ASCR: the controller wants authentication.
    pub fn authentication_required(self) -> bool {
        self.0 & 3 << 17 != 0
    }
    /// Invalid parameter offset.
    pub fn ipo(self) -> u16 {
        self.0 as u16
    }
    /// The offset is into the Connect data (else into the SQE).
    pub fn in_data(self) -> bool {
        (self.0 >> 16) & 1 != 0
    }
    pub fn invalid(ipo: u16, in_data: bool) -> Self {
        ConnectResponse(u32::from(ipo) | u32::from(in_data) << 16)
    }
    /// The refused field by name.
    pub fn field_name(self) -> String {
        match (self.in_data(), self.ipo()) {
            (true, IPO_DATA_HOSTID) => "HOSTID (host identifier)".into(),
            (true, IPO_DATA_CNTLID) => "CNTLID (controller identifier)".into(),
            (true, IPO_DATA_SUBNQN) => "SUBNQN (subsystem name)".into(),
            (true, IPO_DATA_HOSTNQN) => "HOSTNQN (host name)".into(),
            (false, IPO_SQE_QID) => "QID (queue number)".into(),
            (false, IPO_SQE_SQSIZE) => "SQSIZE (queue size)".into(),
            (true, at) => format!("byte {at} of the Connect data"),
            (false, at) => format!("byte {at} of the Connect command"),
        }
    }
}

pub fn property_get(cid: u16, offset: u32, eight_bytes: bool) -> Sqe {
    let mut sqe = Sqe::new(admin::FABRICS, cid, 0);
    sqe.0[4] = fctype::PROPERTY_GET;
    sqe.0[40] = u8::from(eight_bytes);
    put(&mut sqe.0, 44, &offset.to_le_bytes());
    sqe
}

pub fn property_set(cid: u16, offset: u32, value: u64, eight_bytes: bool) -> Sqe {
    let mut sqe = Sqe::new(admin::FABRICS, cid, 0);
    sqe.0[4] = fctype::PROPERTY_SET;
    sqe.0[40] = u8::from(eight_bytes);
    put(&mut sqe.0, 44, &offset.to_le_bytes());
    put(&mut sqe.0, 48, &value.to_le_bytes());
    sqe
}

/// What a Property Get or Set names; `value` is meaningful for Set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PropertyAccess {
    pub offset: u32,
    pub eight_bytes: bool,
    pub value: u64,
}

impl PropertyAccess {
    pub fn decode(sqe: &Sqe) -> Self {
        PropertyAccess {
            offset: u32_at(&sqe.0, 44),
            eight_bytes: sqe.0[40] & 7 == 1,
            value: u64_at(&sqe.0, 48),
        }
    }
}

/// Controller capabilities (Base Specification 3.1.4.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cap(pub u64);

impl Cap {
    /// `mqes` zero-based, `timeout_500ms` in half seconds; contiguous queues, NVM command set, 4 KiB pages.
    pub fn new(mqes: u16, timeout_500ms: u8) -> Self {
        Cap(u64::from(mqes) | 1 << 16 | u64::from(timeout_500ms) << 24 | 1 << 37)
    }
    /// Largest queue, zero-based.
    pub fn mqes(self) -> u16 {
        self.0 as u16
    }
    pub fn timeout_500ms(self) -> u8 {
        (self.0 >> 24) as u8
    }
    /// Smallest memory page as a power of two above 4 KiB.
    pub fn mpsmin(self) -> u8 {
        (self.0 >> 48) as u8 & 15
    }
}

/// Controller configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cc(pub u32);

impl Cc {
    pub fn enabled(self) -> bool {
        self.0 & 1 != 0
    }
    /// Shutdown notification: 0 none, 1 normal, 2 abrupt.
    pub fn shn(self) -> u8 {
        (self.0 >> 14) as u8 & 3
    }
    pub fn with_shutdown(self) -> Self {
        Cc(self.0 & !(3 << 14) | 1 << 14)
    }
    pub fn iosqes(self) -> u8 {
        (self.0 >> 16) as u8 & 15
    }
    pub fn iocqes(self) -> u8 {
        (self.0 >> 20) as u8 & 15
    }
}

/// Controller status.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Csts(pub u32);

impl Csts {
    pub const READY: u32 = 1;
    pub const FATAL: u32 = 2;
    pub const SHUTDOWN_DONE: u32 = 2 << 2;
    pub fn ready(self) -> bool {
        self.0 & Self::READY != 0
    }
    pub fn fatal(self) -> bool {
        self.0 & Self::FATAL != 0
    }
    /// 0 none, 1 under way, 2 done.
    pub fn shst(self) -> u8 {
        (self.0 >> 2) as u8 & 3
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connect_round_trip() {
        let connect = Connect {
            recfmt: 0,
            qid: 3,
            sqsize: 127,
            cattr: CATTR_NO_SQ_FLOW,
            kato_ms: 5000,
        };
        let sqe = connect.encode(9);
        assert_eq!(
            (sqe.opcode(), sqe.fctype(), sqe.cid(), sqe.psdt()),
            (0x7F, 1, 9, 1)
        );
        assert_eq!(
            sqe.sgl(),
            Sgl::InCapsule {
                offset: 0,
                length: 1024
            }
        );
        assert_eq!(Connect::decode(&sqe), connect);
        assert_eq!(&sqe.0[42..52], &[3, 0, 127, 0, 4, 0, 0x88, 0x13, 0, 0]);
        let data = ConnectData {
            hostid: [7; 16],
            cntlid: CNTLID_DYNAMIC,
            subnqn: "nqn.2014-08.org.nvmexpress:uuid:a".into(),
            hostnqn: "nqn.b".into(),
        };
        let bytes = data.encode();
        assert_eq!(&bytes[512..518], b"nqn.b\0");
        assert_eq!(ConnectData::decode(&bytes), data);
    }

    #[test]
    fn properties() {
        let sqe = property_set(1, property::CC, u64::from(CC_ENABLE), false);
        let access = PropertyAccess::decode(&sqe);
        assert_eq!(
            access,
            PropertyAccess {
                offset: 0x14,
                eight_bytes: false,
                value: 0x0046_0001
            }
        );
        let cc = Cc(CC_ENABLE);
        assert!(cc.enabled() && cc.iosqes() == 6 && cc.iocqes() == 4 && cc.with_shutdown().shn() == 1);
        let cap = Cap::new(127, 15);
        assert_eq!((cap.mqes(), cap.timeout_500ms(), cap.0 >> 37 & 1), (127, 15, 1));
        assert_eq!(
            ConnectResponse::invalid(256, true).field_name(),
            "SUBNQN (subsystem name)"
        );
    }
}

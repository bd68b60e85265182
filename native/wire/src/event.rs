//! Asynchronous events (Base Specification 5.1.2): DW0 of an Asynchronous Event Request's completion, the feature that
//! lets events out, and the Changed Namespace List that one of them leads to.

use crate::command::{admin, Sqe};
use crate::field::{put, u32_at};

/// Event types, DW0 2:0.
pub mod kind {
    pub const ERROR: u8 = 0;
    pub const SMART: u8 = 1;
    pub const NOTICE: u8 = 2;
    pub const IO: u8 = 6;
    pub const VENDOR: u8 = 7;
}

/// Information of a notice, DW0 15:8.
pub mod notice {
    pub const NAMESPACE_ATTRIBUTE: u8 = 0x00;
    pub const FIRMWARE: u8 = 0x01;
    pub const TELEMETRY: u8 = 0x02;
    pub const ANA: u8 = 0x03;
    pub const DISCOVERY: u8 = 0xF0;
}

/// Bits of the Asynchronous Event Configuration feature; the notices among them are the bits of OAES, too.
pub mod config {
    /// Critical warnings of the SMART log: spare, temperature, reliability, read-only, memory backup.
    pub const SMART: u32 = 0x1F;
    pub const NAMESPACE_ATTRIBUTE: u32 = 1 << 8;
    pub const FIRMWARE: u32 = 1 << 9;
    pub const ANA: u32 = 1 << 11;
    pub const DISCOVERY: u32 = 1 << 31;
}

/// What happened, and the log page that says more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AsyncEvent {
    pub kind: u8,
    pub info: u8,
    pub lid: u8,
}

impl AsyncEvent {
    pub fn from_dw0(dw0: u32) -> Self {
        AsyncEvent {
            kind: dw0 as u8 & 7,
            info: (dw0 >> 8) as u8,
            lid: (dw0 >> 16) as u8,
        }
    }

    pub fn dw0(self) -> u32 {
        u32::from(self.kind & 7) | u32::from(self.info) << 8 | u32::from(self.lid) << 16
    }
}

pub fn async_event_request(cid: u16) -> Sqe {
    Sqe::new(admin::ASYNC_EVENT_REQUEST, cid, 0)
}

/// The Changed Namespace List (LID 04h): up to 1024 namespaces, ascending, zeros behind them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChangedNamespaces {
    /// More than 1024: look at all.
    TooMany,
    List(Vec<u32>),
}

impl ChangedNamespaces {
    pub const BYTES: usize = 4096;

    pub fn encode(&self) -> Vec<u8> {
        match self {
            ChangedNamespaces::TooMany => encode_nsids(&[u32::MAX]),
            ChangedNamespaces::List(nsids) => encode_nsids(nsids),
        }
    }

    pub fn decode(b: &[u8]) -> Self {
        let nsids = decode_nsids(b);
        match nsids.first() {
            Some(&u32::MAX) => ChangedNamespaces::TooMany,
            _ => ChangedNamespaces::List(nsids),
        }
    }

    pub fn contains(&self, nsid: u32) -> bool {
        match self {
            ChangedNamespaces::TooMany => true,
            ChangedNamespaces::List(nsids) => nsids.contains(&nsid),
        }
    }
}

/// A page of namespace identifiers: this list, and the answer to Identify CNS 02h. More than 1024 are cut.
pub fn encode_nsids(nsids: &[u32]) -> Vec<u8> {
    let mut b = vec![0; ChangedNamespaces::BYTES];
    for (i, nsid) in nsids.iter().take(ChangedNamespaces::BYTES / 4).enumerate() {
        put(&mut b, 4 * i, &nsid.to_le_bytes());
    }
    b
}

/// Up to the first zero.
pub fn decode_nsids(b: &[u8]) -> Vec<u32> {
    b.chunks_exact(4)
        .map(|nsid| u32_at(nsid, 0))
        .take_while(|&nsid| nsid != 0)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_events() {
        // The kernel's udev event for a discovery change says NVME_AEN=0x70f002.
        let discovery = AsyncEvent {
            kind: kind::NOTICE,
            info: notice::DISCOVERY,
            lid: 0x70,
        };
        assert_eq!(discovery.dw0(), 0x70_f002);
        assert_eq!(AsyncEvent::from_dw0(0x70_f002), discovery);
        let ana = AsyncEvent::from_dw0(0x0C_0302);
        assert_eq!((ana.kind, ana.info, ana.lid), (2, notice::ANA, 0x0C));
        // Reserved bits are not believed.
        assert_eq!(AsyncEvent::from_dw0(0xFF0C_03FA), ana);
        assert_eq!(async_event_request(7).0[..4], [0x0C, 0x40, 7, 0]);
    }

    #[test]
    fn changed_namespaces() {
        let list = ChangedNamespaces::List(vec![1, 7, 0x0102_0304]);
        let b = list.encode();
        assert_eq!(
            (b.len(), &b[..13]),
            (4096, &[1, 0, 0, 0, 7, 0, 0, 0, 4, 3, 2, 1, 0][..])
        );
        assert_eq!(ChangedNamespaces::decode(&b), list);
        assert!(list.contains(7) && !list.contains(2));
        let all = ChangedNamespaces::TooMany;
        assert_eq!(all.encode()[..8], [0xFF, 0xFF, 0xFF, 0xFF, 0, 0, 0, 0]);
        assert_eq!(ChangedNamespaces::decode(&all.encode()), all);
        assert!(all.contains(2));
        // A full page, a page that is cut, an empty one.
        let full: Vec<u32> = (1..=1024).collect();
        assert_eq!(decode_nsids(&encode_nsids(&full)), full);
        assert_eq!(decode_nsids(&b[..6]), [1]);
        assert_eq!(ChangedNamespaces::decode(&[]), ChangedNamespaces::List(vec![]));
    }
}

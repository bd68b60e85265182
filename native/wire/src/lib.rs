//! NVMe over TCP on the wire: bytes <-> structs, for both sides. No I/O, no allocation larger than its input, no unsafe.
//!
//! * [`pdu`]: the transport's PDUs (NVMe/TCP Transport Specification 3.6)
//! * [`command`]: submission and completion queue entries (NVM Express Base Specification 4.1, 4.2)
//! * [`fabrics`]: Connect, Property Get/Set, the properties CAP, CC, CSTS (Base Specification 6)
//! * [`identify`]: controller and namespace structures (Base Specification 5.1.13)
//! * [`log`], [`ana`]: discovery log page and its neighbours (Base Specification 5.1.12)
//! * [`event`]: asynchronous events (Base Specification 5.1.2)
//! * [`reservation`]: reservation commands, Report, notifications
//! * [`status`]: status codes by name
//!
//! Decoders refuse what the specification forbids and say which byte was wrong; they never trust a length. Field names
//! are the specification's mnemonics, zero-based values stay zero-based here and only here.

#![forbid(unsafe_code)]

pub mod ana;
pub mod command;
pub mod digest;
pub mod event;
pub mod fabrics;
mod field;
mod header;
pub mod identify;
pub mod log;
pub mod pdu;
pub mod reservation;
pub mod status;

pub use command::{admin, io, Cqe, Sgl, Sqe};
pub use digest::{crc32c, Digester};
pub use pdu::{CommonHeader, Pdu, PduError, PduType};
pub use status::Status;

/// The well-known discovery subsystem.
pub const DISCOVERY_NQN: &str = "nqn.2014-08.org.nvmexpress.discovery";
/// Longest NQN in bytes; on the wire it is padded with NULs to 256.
pub const NQN_MAX: usize = 223;

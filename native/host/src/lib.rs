//! The NVMe/TCP host (initiator): [`NvmeTcpDevice`] is a namespace as a block device, [`discover`] reads what a target
//! offers.
//!
//! # Theory of operation
//!
//! ```text
//!  caller's threads                     the I/O thread (one per process)
//!  NvmeTcpDevice --- inbox ---> Reactor: poll, timers
//!       ^                          |
//!       |                          v
//!     Sink <--- completion --- Core: one device's life: its paths, lost and found again
//!                                  |   Work: requests, cut into commands
//!                                  |   Path: one portal, its life, its share of the commands
//!                                  v
//!                              Association: admin + I/O connections, bring-up, Keep Alive, events
//!                                  |
//!                                  v
//!                              Connection: one socket, non-blocking
//!                                  |
//!                                  v
//!                              QueuePair: PDUs and commands, no I/O (receive: where bytes go; transmit: what waits)
//! ```
//!
//! Rules that hold throughout:
//!
//! * The I/O thread never blocks, never takes a lock that a caller holds for long, and sleeps when nothing is to be done.
//! * Data go from the socket into the caller's buffer, and from there to the socket, without a copy.
//! * Every request is completed exactly once: by an answer, by its deadline, by `loss_timeout`, or by `close`.
//! * Once a request is reported, nothing here points into its buffer: connections are closed before what was under way on
//!   them is reported.
//! * What a peer sends is checked before it is used (see [`queue`]); what it breaks ends the association and is named.
//! * [`life`] says why the loss counter can be trusted for durability.

#![deny(unsafe_code)]
// A command that finds no room goes back whole to whoever sent it; a box for it would be the costlier copy.
#![allow(clippy::result_large_err)]
// `describe` is one large JSON object.
#![recursion_limit = "256"]

mod association;
mod connection;
mod device;
mod discovery;
mod errors;
mod facts;
mod flow;
mod ghosts;
mod guard;
mod histogram;
mod lane;
mod life;
#[allow(unsafe_code)]
mod memory;
mod options;
mod passthrough;
mod paths;
mod queue;
mod reactor;
mod receive;
mod referrals;
mod refusal;
mod reservation;
mod resolve;
mod shared;
mod socket;
#[cfg(feature = "testing")]
pub mod testing;
mod transmit;
mod under_way;
mod work;

pub use device::NvmeTcpDevice;
pub use discovery::discover;
pub use flow::Inflight;
pub use ghosts::Unsettled;
pub use headrace_wire::ana::AnaState;
pub use headrace_wire::reservation::{
    AcquireAction, Change, RegisterAction, ReleaseAction, Report, ReservationType,
};
pub use histogram::Latency;
pub use lane::{NvmeTcpLane, TrafficClass};
pub use options::{
    DiscoverOptions, HostOptions, NamespaceKey, Policy, Portal, Route, DEPTH_MAX, PORTALS_MAX, QUEUES_MAX,
};
pub use passthrough::{Command, CommandAnswer, CommandData, COMMAND_BYTES_MAX};
pub use paths::{PathInfo, PathState};
pub use referrals::{survey, SurveyOptions};
pub use under_way::UnderWay;

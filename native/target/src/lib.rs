//! An NVMe/TCP target in user space: `headrace serve`, and the peer of every test.
//!
//! ```text
//!   sockets -- reactor (epoll) -- connection (bytes <-> commands, no I/O) -- nvm / admin / fabrics -- work -- media
//!                                                                              |                    ^
//!                                                                              +-- gate -- worker --+
//! ```
//!
//! * [`reactor`]: threads that move bytes; memory media are served right there, from where they lie
//! * [`connection`], [`receive`], [`direct`], [`commands`], [`fused`], [`abort`], [`answer`], [`output`]: one queue, without I/O
//! * [`config`], [`identity`], [`subsystem`], [`view`], [`control`]: what is served, and how that changes while it is
//! * [`fabrics`], [`admin`], [`identify`], [`pages`], [`nvm`]: what commands mean; [`work`]: what they do at the media
//! * [`controller`], [`registry`], [`gate`], [`hosts`]: associations, what their end guarantees, what each host may have
//! * [`reservation`]: who may write
//! * [`worker`]: threads that wait for files
//! * [`memory`], [`system`]: bounded buffers; the unsafe part
//!
//! Nothing that a peer sends may hurt: lengths are checked before memory is taken, memory is bounded for each connection
//! and for all, silent peers are dropped, and a panic in one connection ends that connection only.

mod abort;
mod admin;
mod answer;
mod commands;
mod config;
mod connection;
mod control;
mod controller;
mod direct;
mod fabrics;
mod fused;
mod gate;
mod hosts;
mod identify;
mod identity;
mod mailbox;
mod memory;
mod nvm;
mod output;
mod pages;
mod progress;
mod reactor;
mod receive;
mod registry;
mod reservation;
mod shared;
mod subsystem;
mod system;
mod target;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod view;
mod work;
mod worker;

#[cfg(test)]
mod any_bytes;
#[cfg(test)]
mod bad_media;
#[cfg(test)]
mod pdu_cases;

// The tests' raw client names this crate as its users do.
#[cfg(test)]
extern crate self as headrace_target;
#[cfg(test)]
#[path = "../tests/common/mod.rs"]
mod common;

pub use config::{
    AnaGroupConfig, Direct, HostConfig, IoEngine, ListenConfig, MediaConfig, NamespaceConfig,
    SubsystemConfig, TargetConfig,
};
pub use control::ControlError;

pub use target::Target;
pub use view::HostAccess;

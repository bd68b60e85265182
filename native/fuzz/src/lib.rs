//! What may never happen, whatever a peer sends: one module a receive path, each with one function from bytes to a verdict
//! (a panic is a defect). `scripts/fuzz.py` explores them with libFuzzer; `tests/corpus.rs` replays what it found worth
//! keeping, so a defect that was mended stays mended.

#![forbid(unsafe_code)]

pub mod host_bringup;
pub mod host_facts;
pub mod host_queue;
pub mod target_bytes;
pub mod target_commands;
pub mod wire;

/// Name, and what it runs.
pub type Target = (&'static str, fn(&[u8]));

pub const TARGETS: [Target; 6] = [
    ("wire", wire::run),
    ("target_bytes", target_bytes::run),
    ("target_commands", target_commands::run),
    ("host_queue", host_queue::run),
    ("host_facts", host_facts::run),
    ("host_bringup", host_bringup::run),
];

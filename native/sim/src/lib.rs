//! Host and target in one thread, without sockets: what simulations, property tests and fuzzers are made of.

#![forbid(unsafe_code)]

pub mod client;
pub mod media;
pub mod network;
pub mod pair;
pub mod random;
pub mod world;

pub use client::{bring_up, Client, Received};
pub use pair::Pair;
pub use random::Random;

pub const NQN: &str = "nqn.2026-01.test:sim";
pub const HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-3333-4444-555555555555";

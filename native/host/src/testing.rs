//! Parts of the host without threads, sockets or a clock, for fuzzers and simulations: bytes go in and come out when the
//! caller says.

use crate::facts::Facts;
use crate::options::{HostOptions, Portal};
use crate::queue::{Arrivals, Asked, Data, End, Fault, QueuePair};
use crate::transmit::PIECES_MAX;
use headrace_transfer::{Buffer, IoError};
use headrace_wire::pdu::Digests;
use headrace_wire::{Cqe, Sqe};
use std::io::IoSlice;
use std::time::Instant;

/// The data of a command.
pub enum Payload {
    None,
    Read(Buffer),
    Write(Buffer),
}

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The controller's answer; its status may be an error.
    Answer(Cqe),
    /// Success claimed, but bytes are missing.
    Short,
    DataDigest,
}

/// Why the connection must end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Broken {
    /// The peer broke the protocol.
    Violation(String),
    /// The peer says that we did.
    Terminated { fes: u16, fei: u32 },
}

impl Arrivals for u64 {}

/// One queue pair.
pub struct Queue(QueuePair<u64>);

impl Queue {
    /// `hpda` and `maxr2t` as they stand in ICReq, zero-based.
    pub fn new(depth: u16, digests: Digests, (hpda, maxr2t): (u8, u8), in_capsule: usize) -> Self {
        let asked = Asked {
            digests,
            hpda,
            maxr2t,
        };
        Queue(QueuePair::new(depth, asked, in_capsule))
    }

    /// ICResp came.
    pub fn is_agreed(&self) -> bool {
        self.0.agreed().is_some()
    }

    pub fn set_in_capsule(&mut self, bytes: usize) {
        self.0.set_in_capsule(bytes);
    }

    pub fn room(&self) -> usize {
        self.0.room()
    }

    /// `false`: there is no room.
    pub fn submit(&mut self, sqe: Sqe, payload: Payload, tag: u64, deadline: Instant) -> bool {
        let data = match payload {
            Payload::None => Data::None,
            Payload::Read(buffer) => Data::Read(buffer),
            Payload::Write(buffer) => Data::Write(buffer),
        };
        self.0.submit(sqe, data, tag, deadline).is_ok()
    }

    pub fn has_output(&self) -> bool {
        self.0.has_output()
    }

    /// Up to `limit` of the bytes that wait to be sent, which now are.
    pub fn output(&mut self, limit: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        while bytes.len() < limit && self.0.has_output() {
            let mut pieces = [IoSlice::new(&[]); PIECES_MAX];
            let count = self.0.gather(&mut pieces);
            let before = bytes.len();
            for piece in &pieces[..count] {
                bytes.extend_from_slice(piece);
            }
            bytes.truncate(limit);
            self.0.sent(bytes.len() - before);
        }
        bytes
    }

    /// Received bytes, in one read: they fill the destination first, then the scratch behind it.
    pub fn deliver(&mut self, bytes: &[u8]) -> Result<(), Broken> {
        let destination = self.0.destination();
        let direct = destination.len().min(bytes.len());
        destination[..direct].copy_from_slice(&bytes[..direct]);
        self.0
            .received(direct, &bytes[direct..])
            .map_err(|fault| match fault {
                Fault::Violation(error) => {
                    self.0.terminate(&error);
                    Broken::Violation(error.to_string())
                }
                Fault::Terminated(term) => Broken::Terminated {
                    fes: term.fes,
                    fei: term.fei,
                },
            })
    }

    /// The tag of a command that ended.
    pub fn completion(&mut self) -> Option<(u64, Ended)> {
        let completion = self.0.completion()?;
        let ended = match completion.end {
            End::Answer(cqe) => Ended::Answer(cqe),
            End::Short { .. } => Ended::Short,
            End::DataDigest => Ended::DataDigest,
        };
        Some((completion.tag, ended))
    }

    /// The connection is over: the tags of all commands that did not end.
    pub fn abandon(&mut self) -> Vec<u64> {
        let commands = self.0.abandon(Instant::now());
        commands.into_iter().map(|(tag, _, _)| tag).collect()
    }
}

/// Options with which a test opens a namespace.
pub fn options(subsysnqn: &str, hostnqn: &str) -> HostOptions {
    HostOptions {
        portals: vec![Portal {
            host: "127.0.0.1".into(),
            port: 4420,
        }],
        subsysnqn: subsysnqn.into(),
        hostnqn: hostnqn.into(),
        hostid: [7; 16],
        ..HostOptions::default()
    }
}

/// What the host makes of a controller's own words: capabilities, Identify Controller, Identify Namespace, descriptors.
/// Returns (block size, largest transfer, data in a capsule).
pub fn believe(
    cap: u64,
    controller: &[u8],
    namespace: &[u8],
    descriptors: &[u8],
    options: &HostOptions,
) -> Result<(u64, u64, u64), IoError> {
    let mut facts = Facts::default();
    facts.capabilities(headrace_wire::fabrics::Cap(cap));
    facts.controller(controller, options)?;
    facts.namespace(namespace, options)?;
    facts.descriptors(descriptors);
    let info = facts.info();
    Ok((
        info.block_bytes.into(),
        info.max_transfer_bytes,
        facts.in_capsule as u64,
    ))
}

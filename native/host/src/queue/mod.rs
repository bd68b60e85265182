//! A queue pair of the host, without I/O: commands go in, bytes come out, bytes go in, completions come out.
//!
//! # Life of a command
//!
//! ```text
//!   submit --> CapsuleCmd [+ data in the capsule]
//!                 |                read: C2HData, ascending, straight into the caller's buffer
//!                 |                write: R2T --> H2CData chunks of at most MAXH2CDATA
//!                 v
//!              CapsuleResp, or SUCCESS on the last C2HData
//!                 |
//!                 v   held back while data of the command still wait to be sent (a controller may refuse early)
//!              completion: tag and data go back to the owner
//! ```
//!
//! # What is never believed
//!
//! * A CID that is not under way, which it is not again for the next 62 commands of its slot; data for a command that does not read; data that do not continue exactly where the last
//!   ended, or go beyond the command's length, or follow LAST_PDU; an R2T for a command that does not write, that does not
//!   continue where the last ended, is empty, goes beyond, or comes while two are unserved. Each of these is a
//!   [`PduError`]: the stream cannot be trusted any more and the connection ends.
//! * Success of a read that is short of data: the command fails, the connection lives (framing is intact).
//! * Data whose digest is wrong: the same (NVMe/TCP 3.3.2: not fatal to the connection).
//!
//! # Zero copy
//!
//! [`QueuePair::destination`] is the memory where the next received bytes belong, when they are data. A `readv` into it with
//! a scratch behind it, reported by [`QueuePair::received`], is the whole receive path: what lands in the destination is
//! at rest, what lands in the scratch is parsed.

mod incoming;
mod look;
mod recall;

use crate::memory;
use crate::receive::Receive;
use crate::transmit::{Transmit, PIECES_MAX};
use headrace_transfer::Buffer;
use headrace_wire::pdu::{fes_name, Digests, Fes, IcReq, Layout, Pdu, PduError, TermReq};
use headrace_wire::{Cqe, Sgl, Sqe};
use std::collections::VecDeque;
use std::io::IoSlice;
use std::time::Instant;

/// Admin and Fabrics commands may carry this much in the capsule on every controller.
pub(crate) const ADMIN_IN_CAPSULE: usize = 8192;
/// Where transfers are small or absent, answers are parsed from a scratch: at a time no more than this part of what is under way,
/// so that the controller works on the others while these are handed on and followed by new commands. Whoever takes all
/// that has come has nothing under way when the next commands go out, and the two ends wait for each other in turns.
const TAIL_PARTS: usize = 4;
const TAIL_MIN: usize = 16 * 1024;
const TAIL_MAX: usize = 64 * 1024;
/// Where transfers are large: what may follow the data, but little of the next PDU's data, which would be copied.
const TAIL_LARGE_IO: usize = 64;
const LARGE_IO: usize = 32 * 1024;
/// Whoever works on data as they come gets them in pieces of this size, which are still in the cache then.
pub(crate) const WATCHED: usize = 256 * 1024;

/// The data of a command.
pub(crate) enum Data {
    None,
    Read(Buffer),
    Write(Buffer),
}

impl Data {
    fn length(&self) -> usize {
        match self {
            Data::None => 0,
            Data::Read(buffer) | Data::Write(buffer) => buffer.len(),
        }
    }
}

/// How one command ended, with what its owner gave for it.
pub(crate) struct Completion<T> {
    pub tag: T,
    pub data: Data,
    pub end: End,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// The controller's answer; its status may be an error.
    Answer(Cqe),
    /// Success claimed, but only so many bytes came.
    Short { came: usize, wanted: usize },
    /// DDGST did not match.
    DataDigest,
}

/// Why the connection ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The peer broke the protocol.
    Violation(PduError),
    /// The peer says that we did.
    Terminated(TermReq),
}

impl From<PduError> for Fault {
    fn from(error: PduError) -> Self {
        Fault::Violation(error)
    }
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Fault::Violation(error) => write!(f, "the controller broke the protocol: {error}"),
            Fault::Terminated(term) => write!(
                f,
                "the controller ended the connection with a termination request: {} (FES {}, FEI {})",
                fes_name(term.fes),
                term.fes,
                term.fei
            ),
        }
    }
}

struct Command<T> {
    cid: u16,
    tag: T,
    data: Data,
    /// `None`: answered when something happens, as an Asynchronous Event Request is.
    deadline: Option<Instant>,
    /// Bytes received (read) or asked for by R2T or sent in the capsule (write).
    moved: usize,
    /// Data segments that wait to be sent.
    unsent: u16,
    last_seen: bool,
    digest_wrong: bool,
    /// The answer, while `unsent > 0`.
    held: Option<End>,
}

/// What the connection agreed upon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Agreed {
    pub digests: Digests,
    pub cpda: u8,
    pub maxh2cdata: usize,
}

/// What a connection asks for in its ICReq.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Asked {
    pub digests: Digests,
    pub hpda: u8,
    /// Zero-based.
    pub maxr2t: u8,
}

/// What the owner gives with a command.
pub(crate) trait Arrivals {
    /// It wants to know of data as they come: they are then taken in pieces that stay in the cache.
    fn watches(&self) -> bool {
        false
    }

    /// `count` bytes from `at` of the command's data are in place; again from the first byte if it is sent again.
    fn arrived(&self, at: usize, count: usize) {
        let _ = (at, count);
    }

    /// `count` bytes from `at` of the command's data were sent; the same.
    fn departed(&self, at: usize, count: usize) {
        let _ = (at, count);
    }
}

impl Arrivals for () {}

pub(crate) struct QueuePair<T> {
    asked: Asked,
    agreed: Option<Agreed>,
    in_capsule: usize,
    commands: Vec<Option<Command<T>>>,
    /// The CID of the next command of each slot that is free.
    free: Vec<u16>,
    reading: usize,
    read_bytes: usize,
    transmit: Transmit,
    receive: Receive,
    completions: VecDeque<Completion<T>>,
}

impl<T: Arrivals> QueuePair<T> {
    /// A fresh connection; ICReq waits to be sent. `depth`: commands under way at most.
    pub fn new(depth: u16, asked: Asked, in_capsule: usize) -> Self {
        let mut transmit = Transmit::default();
        let request = Pdu::IcReq(IcReq {
            pfv: 0,
            hpda: asked.hpda,
            digests: asked.digests,
            maxr2t: asked.maxr2t.into(),
        });
        transmit.head(|out| request.encode(0, Digests::default(), 0, out));
        QueuePair {
            asked,
            agreed: None,
            in_capsule,
            commands: (0..depth).map(|_| None).collect(),
            free: (0..depth).rev().collect(),
            reading: 0,
            read_bytes: 0,
            transmit,
            receive: Receive::new(asked.hpda),
            completions: VecDeque::new(),
        }
    }

    /// ICResp came; commands may be submitted.
    pub fn agreed(&self) -> Option<&Agreed> {
        self.agreed.as_ref()
    }

    /// Largest write whose data travel in its capsule.
    pub fn set_in_capsule(&mut self, bytes: usize) {
        self.in_capsule = bytes;
    }

    /// Slots for commands; 0 before ICResp.
    pub fn room(&self) -> usize {
        if self.agreed.is_some() {
            self.free.len()
        } else {
            0
        }
    }

    /// Commands are under way.
    pub fn is_busy(&self) -> bool {
        self.free.len() < self.commands.len()
    }

    /// Queue a command; its CID and SGL are filled in here. Hands everything back where there is no room.
    pub fn submit(
        &mut self,
        sqe: Sqe,
        data: Data,
        tag: T,
        deadline: impl Into<Option<Instant>>,
    ) -> Result<(), (T, Data)> {
        let Some(agreed) = self.agreed else {
            return Err((tag, data));
        };
        let Some(cid) = self.free.pop() else {
            return Err((tag, data));
        };
        let length = data.length();
        let in_capsule = matches!(data, Data::Write(_)) && length <= self.in_capsule;
        let sgl = match length {
            0 => Sgl::None,
            _ if in_capsule => Sgl::InCapsule {
                offset: 0,
                length: length as u32,
            },
            _ => Sgl::Transport {
                length: length as u32,
            },
        };
        let sqe = Pdu::CapsuleCmd(sqe.with_cid(cid).with_sgl(sgl));
        let mut command = Command {
            cid,
            tag,
            data,
            deadline: deadline.into(),
            moved: 0,
            unsent: 0,
            last_seen: false,
            digest_wrong: false,
            held: None,
        };
        match &command.data {
            Data::Write(buffer) if in_capsule && length > 0 => {
                let layout = self
                    .transmit
                    .head(|out| sqe.encode(length, agreed.digests, agreed.cpda, out));
                command.moved = length;
                command.unsent = 1;
                send_data(&mut self.transmit, buffer, 0, &layout, cid, true);
            }
            other => {
                if let Data::Read(buffer) = other {
                    self.reading += 1;
                    self.read_bytes += buffer.len();
                }
                self.transmit
                    .head(|out| sqe.encode(0, agreed.digests, agreed.cpda, out));
            }
        }
        self.commands[slot_of(cid)] = Some(command);
        Ok(())
    }

    /// The earliest deadline among commands under way.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.commands
            .iter()
            .flatten()
            .filter_map(|command| command.deadline)
            .min()
    }

    /// Every command, finished or not, with whether it met its deadline at `now`. The connection is over: nothing of it
    /// may touch the data from here on.
    pub fn abandon(&mut self, now: Instant) -> Vec<(T, Data, bool)> {
        self.transmit.clear();
        self.receive = Receive::new(self.asked.hpda);
        self.free.clear();
        self.agreed = None;
        let commands = self.commands.drain(..).flatten();
        commands
            .map(|command| {
                let overdue = command.deadline.is_some_and(|deadline| deadline <= now);
                (command.tag, command.data, overdue)
            })
            .collect()
    }

    pub fn completion(&mut self) -> Option<Completion<T>> {
        self.completions.pop_front()
    }

    // Sending.

    pub fn has_output(&self) -> bool {
        !self.transmit.is_empty()
    }

    pub fn gather<'a>(&'a self, pieces: &mut [IoSlice<'a>; PIECES_MAX]) -> usize {
        self.transmit.gather(pieces, WATCHED)
    }

    pub fn sent(&mut self, count: usize) {
        let QueuePair {
            transmit,
            commands,
            free,
            reading,
            read_bytes,
            completions,
            ..
        } = self;
        transmit.advance(count, |cid, at, count, ended| {
            let Some(slot) = commands.get_mut(slot_of(cid)) else {
                return;
            };
            let Some(command) = slot.as_mut().filter(|command| command.cid == cid) else {
                return;
            };
            command.tag.departed(at, count);
            if !ended {
                return;
            }
            command.unsent -= 1;
            if command.unsent > 0 {
                return;
            }
            if let Some(end) = command.held {
                complete(slot, free, reading, read_bytes, completions, end);
            }
        });
    }

    /// Tell the peer why the connection ends, if that is possible in the middle of what is being sent.
    pub fn terminate(&mut self, error: &PduError) {
        if !self.transmit.is_empty() {
            return;
        }
        let fei = match error.fes {
            Fes::InvalidHeaderField | Fes::UnsupportedParameter => error.fei,
            _ => 0,
        };
        let pdu = Pdu::H2cTermReq(TermReq {
            fes: error.fes as u16,
            fei,
        });
        let offending = &self.receive.offending()[..self.receive.offending().len().min(128)];
        self.transmit.head(|out| {
            pdu.encode(offending.len(), Digests::default(), 0, out);
            out.extend_from_slice(offending);
        });
    }
}

fn complete<T>(
    slot: &mut Option<Command<T>>,
    free: &mut Vec<u16>,
    reading: &mut usize,
    read_bytes: &mut usize,
    completions: &mut VecDeque<Completion<T>>,
    end: End,
) {
    if let Some(command) = slot.take() {
        if let Data::Read(buffer) = &command.data {
            *reading -= 1;
            *read_bytes -= buffer.len();
        }
        free.push(next_cid(command.cid));
        completions.push_back(Completion {
            tag: command.tag,
            data: command.data,
            end,
        });
    }
}

/// A depth is at most 1024: the lower ten bits of a CID are a slot, the others count the commands that the slot has had.
const SLOT_BITS: u32 = 10;
const GENERATIONS: u16 = 63;

fn slot_of(cid: u16) -> usize {
    usize::from(cid & ((1 << SLOT_BITS) - 1))
}

/// Of the slot's next command. A second answer to the one before, or data that come after its answer, then find no command
/// under way; with the same CID they would end the next one, or land in its buffer.
fn next_cid(cid: u16) -> u16 {
    let generation = ((cid >> SLOT_BITS) + 1) % GENERATIONS;
    slot_of(cid) as u16 | generation << SLOT_BITS
}

/// Data and, where it is in force, their digest, behind a head that was just encoded. `last`: of the capsule or R2T.
fn send_data(transmit: &mut Transmit, buffer: &Buffer, at: usize, layout: &Layout, cid: u16, last: bool) {
    let length = layout.data_bytes;
    transmit.data(buffer.clone(), at, length, cid, last);
    if layout.data_digest_bytes > 0 {
        let digest = headrace_wire::crc32c(memory::source(buffer, at, length));
        transmit.head(|out| out.extend_from_slice(&digest.to_le_bytes()));
    }
}

#[cfg(test)]
mod ranges;
#[cfg(test)]
mod tests;

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
//! * A CID that is not under way; data for a command that does not read; data that do not continue exactly where the last
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

use crate::memory;
use crate::receive::{Incoming, Receive, State};
use crate::transmit::{Transmit, PIECES_MAX};
use headrace_transfer::Buffer;
use headrace_wire::digest::Digester;
use headrace_wire::pdu::{
    fes_name, CommonHeader, DataHeader, Digests, Fes, IcReq, IcResp, Layout, Pdu, PduError, PduType, R2t,
    TermReq,
};
use headrace_wire::{Cqe, Sgl, Sqe, Status};
use std::collections::VecDeque;
use std::io::IoSlice;
use std::time::Instant;

/// Admin and Fabrics commands may carry this much in the capsule on every controller.
pub(crate) const ADMIN_IN_CAPSULE: usize = 8192;
/// R2Ts of one command whose data are not sent yet. We ask for one (MAXR2T 0); the next may overtake our own sending.
const R2T_UNSERVED_MAX: u8 = 2;
/// Answers are parsed from a scratch this large, where transfers are small or absent.
const TAIL_SMALL_IO: usize = 64 * 1024;
/// Where transfers are large: what may follow the data, but little of the next PDU's data, which would be copied.
const TAIL_LARGE_IO: usize = 64;
const LARGE_IO: usize = 32 * 1024;

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
    tag: T,
    data: Data,
    deadline: Instant,
    /// Bytes received (read) or asked for by R2T or sent in the capsule (write).
    moved: usize,
    /// Data segments that wait to be sent.
    unsent: u8,
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

pub(crate) struct QueuePair<T> {
    asked: Digests,
    agreed: Option<Agreed>,
    in_capsule: usize,
    commands: Vec<Option<Command<T>>>,
    free: Vec<u16>,
    reading: usize,
    read_bytes: usize,
    transmit: Transmit,
    receive: Receive,
    completions: VecDeque<Completion<T>>,
}

impl<T> QueuePair<T> {
    /// A fresh connection; ICReq waits to be sent. `depth`: commands under way at most.
    pub fn new(depth: u16, asked: Digests, in_capsule: usize) -> Self {
        let mut transmit = Transmit::default();
        let request = Pdu::IcReq(IcReq {
            pfv: 0,
            hpda: 0,
            digests: asked,
            maxr2t: 0,
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
            receive: Receive::new(),
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

    /// Queue a command; its CID and SGL are filled in here. Hands everything back where there is no room.
    pub fn submit(&mut self, sqe: Sqe, data: Data, tag: T, deadline: Instant) -> Result<(), (T, Data)> {
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
            tag,
            data,
            deadline,
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
                send_data(&mut self.transmit, buffer, 0, &layout, cid);
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
        self.commands[usize::from(cid)] = Some(command);
        Ok(())
    }

    /// The earliest deadline among commands under way.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.commands
            .iter()
            .flatten()
            .map(|command| command.deadline)
            .min()
    }

    /// Every command, finished or not, with whether it met its deadline at `now`. The connection is over: nothing of it
    /// may touch the data from here on.
    pub fn abandon(&mut self, now: Instant) -> Vec<(T, Data, bool)> {
        self.transmit.clear();
        self.receive = Receive::new();
        self.free.clear();
        self.agreed = None;
        let commands = self.commands.drain(..).flatten();
        commands
            .map(|command| (command.tag, command.data, command.deadline <= now))
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
        self.transmit.gather(pieces)
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
        transmit.advance(count, |cid| {
            let Some(slot) = commands.get_mut(usize::from(cid)) else {
                return;
            };
            let Some(command) = slot else {
                return;
            };
            command.unsent -= 1;
            if command.unsent > 0 {
                return;
            }
            if let Some(end) = command.held {
                complete(slot, free, reading, read_bytes, completions, cid, end);
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

    // Receiving.

    /// Where the next bytes belong, when they are data; else empty.
    pub fn destination(&mut self) -> &mut [u8] {
        let State::Data(incoming) = &self.receive.state else {
            return &mut [];
        };
        match self.commands[usize::from(incoming.cid)]
            .as_ref()
            .map(|command| &command.data)
        {
            Some(Data::Read(buffer)) => memory::destination(buffer, incoming.at, incoming.left),
            _ => &mut [],
        }
    }

    /// How much to receive behind the destination.
    pub fn tail(&self) -> usize {
        if self.reading > 0 && self.read_bytes / self.reading > LARGE_IO {
            TAIL_LARGE_IO
        } else {
            TAIL_SMALL_IO
        }
    }

    /// `direct` bytes were put at [`destination`](Self::destination); `rest` came behind them.
    pub fn received(&mut self, direct: usize, mut rest: &[u8]) -> Result<(), Fault> {
        if direct > 0 {
            self.arrived(direct)?;
        }
        while !rest.is_empty() {
            match &mut self.receive.state {
                State::Head(None) => {
                    if self.receive.collect(&mut rest) {
                        let digests = self.digests();
                        self.receive.common(digests)?;
                    }
                }
                State::Head(Some((common, layout))) => {
                    let (common, layout) = (*common, *layout);
                    if self.receive.collect(&mut rest) {
                        let pdu = self.receive.decode(&common, &layout)?;
                        self.pdu(pdu, &common, &layout)?;
                    }
                }
                State::Data(incoming) => {
                    let step = incoming.left.min(rest.len());
                    let (data, behind) = rest.split_at(step);
                    self.destination()[..step].copy_from_slice(data);
                    rest = behind;
                    self.arrived(step)?;
                }
                State::DataDigest(incoming) => {
                    let incoming = *incoming;
                    if self.receive.collect(&mut rest) {
                        if self.receive.data_digest() != incoming.sum.value() {
                            if let Some(command) = &mut self.commands[usize::from(incoming.cid)] {
                                command.digest_wrong = true;
                            }
                        }
                        self.receive.expect_head();
                        self.data_ended(&incoming);
                    }
                }
                State::Skip { left, pdu } => {
                    let step = rest.len().min(*left);
                    *left -= step;
                    rest = &rest[step..];
                    if *left == 0 {
                        if let Pdu::C2hTermReq(term) = pdu {
                            return Err(Fault::Terminated(*term));
                        }
                        self.receive.expect_head();
                    }
                }
            }
        }
        Ok(())
    }

    fn digests(&self) -> Digests {
        self.agreed.map(|agreed| agreed.digests).unwrap_or_default()
    }

    /// `count` data bytes are in place.
    fn arrived(&mut self, count: usize) -> Result<(), Fault> {
        let State::Data(incoming) = &mut self.receive.state else {
            return Err(PduError::sequence("data where none was expected").into());
        };
        if incoming.digest {
            if let Some(Data::Read(buffer)) = self.commands[usize::from(incoming.cid)]
                .as_ref()
                .map(|command| &command.data)
            {
                incoming.sum.update(memory::source(buffer, incoming.at, count));
            }
        }
        incoming.at += count;
        incoming.left -= count;
        if incoming.left == 0 {
            let incoming = *incoming;
            if let Some(command) = &mut self.commands[usize::from(incoming.cid)] {
                command.moved = incoming.at;
            }
            if incoming.digest {
                self.receive.expect_data_digest(incoming);
            } else {
                self.receive.expect_head();
                self.data_ended(&incoming);
            }
        }
        Ok(())
    }

    /// One C2HData is complete.
    fn data_ended(&mut self, incoming: &Incoming) {
        if incoming.success {
            self.answered(Cqe::new(incoming.cid, Status::SUCCESS));
        }
    }

    fn pdu(&mut self, pdu: Pdu, common: &CommonHeader, layout: &Layout) -> Result<(), Fault> {
        if self.agreed.is_none() && !matches!(pdu, Pdu::IcResp(_) | Pdu::C2hTermReq(_)) {
            return Err(PduError::sequence(format!("{:?} before ICResp", common.pdu_type)).into());
        }
        match pdu {
            Pdu::IcResp(response) => self.initialized(&response)?,
            Pdu::C2hTermReq(term) if layout.data_bytes == 0 => return Err(Fault::Terminated(term)),
            Pdu::C2hTermReq(_) => {
                self.receive.state = State::Skip {
                    left: layout.data_bytes,
                    pdu,
                };
                return Ok(());
            }
            Pdu::CapsuleResp(cqe) => {
                if self.command(cqe.cid, PduType::CapsuleResp)?.held.is_some() {
                    return Err(PduError::sequence(format!("a second answer to CID {}", cqe.cid)).into());
                }
                self.answered(cqe);
            }
            Pdu::C2hData(header) => {
                self.data_begins(&header, layout)?;
                return Ok(());
            }
            Pdu::R2t(r2t) => self.ready_to_transfer(&r2t)?,
            // `Receive::common` let through only what a controller sends.
            Pdu::IcReq(_) | Pdu::H2cTermReq(_) | Pdu::CapsuleCmd(_) | Pdu::H2cData(_) => {
                return Err(PduError::field(0, "a PDU that only hosts send").into())
            }
        }
        self.receive.expect_head();
        Ok(())
    }

    fn initialized(&mut self, response: &IcResp) -> Result<(), PduError> {
        if self.agreed.is_some() {
            return Err(PduError::sequence("a second ICResp"));
        }
        for (asked, given, name) in [
            (self.asked.header, response.digests.header, "header digest"),
            (self.asked.data, response.digests.data, "data digest"),
        ] {
            if asked != given {
                let what = if asked { "refuses the" } else { "insists on a" };
                return Err(PduError::field(11, format!("ICResp {what} {name}")));
            }
        }
        self.agreed = Some(Agreed {
            digests: response.digests,
            cpda: response.cpda,
            maxh2cdata: response.maxh2cdata as usize,
        });
        Ok(())
    }

    fn command(&mut self, cid: u16, what: PduType) -> Result<&mut Command<T>, PduError> {
        let at = if what == PduType::CapsuleResp { 20 } else { 8 };
        self.commands
            .get_mut(usize::from(cid))
            .and_then(Option::as_mut)
            .ok_or_else(|| PduError::field(at, format!("{what:?} for CID {cid}, which is not under way")))
    }

    fn data_begins(&mut self, header: &DataHeader, layout: &Layout) -> Result<(), PduError> {
        let ddgst = self.digests().data;
        let command = self.command(header.cccid, PduType::C2hData)?;
        let Data::Read(buffer) = &command.data else {
            return Err(PduError::field(
                8,
                format!("C2HData for CID {}, which does not read", header.cccid),
            ));
        };
        let (at, length) = (header.datao as usize, header.datal as usize);
        if length == 0 || length != layout.data_bytes {
            let carried = layout.data_bytes;
            return Err(PduError::field(
                16,
                format!("C2HData has DATAL {length} and carries {carried} bytes"),
            ));
        }
        if command.last_seen {
            return Err(PduError::range(format!(
                "C2HData after the last of CID {}",
                header.cccid
            )));
        }
        if at != command.moved {
            let moved = command.moved;
            return Err(PduError::range(format!(
                "C2HData at DATAO {at}, the last ended at {moved}"
            )));
        }
        if length > buffer.len() - at {
            let total = buffer.len();
            return Err(PduError::range(format!(
                "C2HData to {} of a read of {total} bytes",
                at + length
            )));
        }
        command.last_seen = header.last;
        self.receive.state = State::Data(Incoming {
            cid: header.cccid,
            at,
            left: length,
            digest: ddgst,
            sum: Digester::new(),
            success: header.success,
        });
        Ok(())
    }

    fn ready_to_transfer(&mut self, r2t: &R2t) -> Result<(), PduError> {
        let Some(agreed) = self.agreed else {
            return Err(PduError::sequence("R2T before ICResp"));
        };
        let cid = r2t.cccid;
        let command = self.command(cid, PduType::R2t)?;
        let Data::Write(buffer) = &command.data else {
            return Err(PduError::field(
                8,
                format!("R2T for CID {cid}, which does not write"),
            ));
        };
        let (at, length) = (r2t.r2to as usize, r2t.r2tl as usize);
        if command.held.is_some() {
            return Err(PduError::sequence(format!("R2T for CID {cid} after its answer")));
        }
        if length == 0 {
            return Err(PduError::field(16, "R2T of no bytes"));
        }
        if at != command.moved {
            let moved = command.moved;
            return Err(PduError::range(format!(
                "R2T at R2TO {at}, the last ended at {moved}"
            )));
        }
        if length > buffer.len() - at {
            let total = buffer.len();
            return Err(PduError::range(format!(
                "R2T to {} of a write of {total} bytes",
                at + length
            )));
        }
        if command.unsent >= R2T_UNSERVED_MAX {
            return Err(PduError::new(
                Fes::LimitExceeded,
                0,
                format!("a third R2T for CID {cid} unserved"),
            ));
        }
        command.moved = at + length;
        command.unsent += 1;
        let buffer = buffer.clone();
        let mut done = 0;
        while done < length {
            let step = (length - done).min(agreed.maxh2cdata);
            let last = done + step == length;
            let header = Pdu::H2cData(DataHeader {
                cccid: cid,
                ttag: r2t.ttag,
                datao: (at + done) as u32,
                datal: step as u32,
                last,
                success: false,
            });
            let layout = self
                .transmit
                .head(|out| header.encode(step, agreed.digests, agreed.cpda, out));
            if !last {
                // Only the last segment of an R2T counts as its end.
                send_part(&mut self.transmit, &buffer, at + done, &layout);
            } else {
                send_data(&mut self.transmit, &buffer, at + done, &layout, cid);
            }
            done += step;
        }
        Ok(())
    }

    /// The controller is done with a command.
    fn answered(&mut self, cqe: Cqe) {
        let QueuePair {
            commands,
            free,
            reading,
            read_bytes,
            completions,
            ..
        } = self;
        let slot = &mut commands[usize::from(cqe.cid)];
        let Some(command) = slot else {
            return;
        };
        let end = match &command.data {
            _ if !cqe.status.is_success() => End::Answer(cqe),
            Data::Read(_) if command.digest_wrong => End::DataDigest,
            Data::Read(buffer) | Data::Write(buffer) if command.moved < buffer.len() => End::Short {
                came: command.moved,
                wanted: buffer.len(),
            },
            _ => End::Answer(cqe),
        };
        if command.unsent > 0 {
            command.held = Some(end);
        } else {
            complete(slot, free, reading, read_bytes, completions, cqe.cid, end);
        }
    }
}

fn complete<T>(
    slot: &mut Option<Command<T>>,
    free: &mut Vec<u16>,
    reading: &mut usize,
    read_bytes: &mut usize,
    completions: &mut VecDeque<Completion<T>>,
    cid: u16,
    end: End,
) {
    if let Some(command) = slot.take() {
        if let Data::Read(buffer) = &command.data {
            *reading -= 1;
            *read_bytes -= buffer.len();
        }
        free.push(cid);
        completions.push_back(Completion {
            tag: command.tag,
            data: command.data,
            end,
        });
    }
}

/// Marks segments that end nothing: no command has this CID, since a depth is at most 1024.
const NO_CID: u16 = u16::MAX;

fn send_part(transmit: &mut Transmit, buffer: &Buffer, at: usize, layout: &Layout) {
    send_data(transmit, buffer, at, layout, NO_CID);
}

/// Data and, where it is in force, their digest, behind a head that was just encoded.
fn send_data(transmit: &mut Transmit, buffer: &Buffer, at: usize, layout: &Layout, cid: u16) {
    let length = layout.data_bytes;
    transmit.data(buffer.clone(), at, length, cid);
    if layout.data_digest_bytes > 0 {
        let digest = headrace_wire::crc32c(memory::source(buffer, at, length));
        transmit.head(|out| out.extend_from_slice(&digest.to_le_bytes()));
    }
}

#[cfg(test)]
#[path = "queue_tests.rs"]
mod tests;

//! The receiving half of a queue pair: what each byte, and each PDU, means.

use super::{complete, send_data, slot_of, Agreed, Command, Data, End, Fault, QueuePair};
use super::{Arrivals, LARGE_IO, TAIL_LARGE_IO, TAIL_MAX, TAIL_MIN, TAIL_PARTS, WATCHED};
use crate::memory;
use crate::receive::{Incoming, State};
use headrace_wire::digest::Digester;
use headrace_wire::pdu::{
    CommonHeader, DataHeader, Digests, Fes, IcResp, Layout, Pdu, PduError, PduType, R2t,
};
use headrace_wire::{Cqe, Status};

/// How many of the `left` bytes of a PDU are received at a time.
fn room(tag: &impl Arrivals, left: usize) -> usize {
    if tag.watches() {
        left.min(WATCHED)
    } else {
        left
    }
}

impl<T: Arrivals> QueuePair<T> {
    /// Where the next bytes belong, when they are data; else empty.
    pub fn destination(&mut self) -> &mut [u8] {
        let State::Data(incoming) = &self.receive.state else {
            return &mut [];
        };
        match &self.commands[slot_of(incoming.cid)] {
            Some(Command {
                data: Data::Read(buffer),
                tag,
                ..
            }) => memory::destination(buffer, incoming.at, room(tag, incoming.left)),
            _ => &mut [],
        }
    }

    /// Reads under way are small, or there are none.
    pub fn reads_small(&self) -> bool {
        self.reading == 0 || self.read_bytes / self.reading <= LARGE_IO
    }

    /// How much to receive behind the destination.
    pub fn tail(&self) -> usize {
        let cut_short = |incoming: &Incoming| {
            let command = self.commands[slot_of(incoming.cid)].as_ref();
            command.is_some_and(|command| room(&command.tag, incoming.left) < incoming.left)
        };
        if matches!(&self.receive.state, State::Data(incoming) if cut_short(incoming)) {
            0
        } else if self.reads_small() {
            (self.read_bytes / TAIL_PARTS).clamp(TAIL_MIN, TAIL_MAX)
        } else {
            TAIL_LARGE_IO
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
                    let step = incoming.left.min(rest.len()).min(WATCHED);
                    let (data, behind) = rest.split_at(step);
                    self.destination()[..step].copy_from_slice(data);
                    rest = behind;
                    self.arrived(step)?;
                }
                State::DataDigest(incoming) => {
                    let incoming = *incoming;
                    if self.receive.collect(&mut rest) {
                        if self.receive.data_digest() != incoming.sum.value() {
                            if let Some(command) = &mut self.commands[slot_of(incoming.cid)] {
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
        if let Some(command) = &self.commands[slot_of(incoming.cid)] {
            if let (Data::Read(buffer), true) = (&command.data, incoming.digest) {
                incoming.sum.update(memory::source(buffer, incoming.at, count));
            }
            command.tag.arrived(incoming.at, count);
        }
        incoming.at += count;
        incoming.left -= count;
        if incoming.left == 0 {
            let incoming = *incoming;
            if let Some(command) = &mut self.commands[slot_of(incoming.cid)] {
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
            (
                self.asked.digests.header,
                response.digests.header,
                "header digest",
            ),
            (self.asked.digests.data, response.digests.data, "data digest"),
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
            .get_mut(slot_of(cid))
            .and_then(Option::as_mut)
            .filter(|command| command.cid == cid)
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
        // One more than we asked for: the next may overtake our own sending.
        let most = u16::from(self.asked.maxr2t) + 2;
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
        if command.unsent >= most {
            return Err(PduError::new(
                Fes::LimitExceeded,
                0,
                format!("R2T for CID {cid} while {most} are unserved"),
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
            send_data(&mut self.transmit, &buffer, at + done, &layout, cid, last);
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
        let slot = &mut commands[slot_of(cqe.cid)];
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
            complete(slot, free, reading, read_bytes, completions, end);
        }
    }
}

//! The receiving half of a connection: bytes to PDUs, every length checked before it is believed.

use crate::commands::{State, Task};
use crate::connection::{Connection, Phase};
use crate::direct::Direct;
use crate::memory::Buffer;
use crate::subsystem::{count, Namespace};
use crate::system::PartMut;
use headrace_wire::pdu::{
    CommonHeader, DataHeader, Fes, Layout, Pdu, PduError, PduType, COMMON_HEADER_BYTES, TERM_DATA_MAX,
};
use headrace_wire::{crc32c, Digester, Sqe, Status};
use std::sync::Arc;

/// Data that may come with an admin or Connect command.
const ADMIN_CAPSULE_BYTES: usize = 8192;
/// More data than this in a PDU are long.
const LONG_BYTES: usize = 32 << 10;
/// Room behind long data: for the part of a block that has no place yet, and for some dozen headers.
const TAIL_LONG: usize = (4 << 10) + 128;

enum Stage {
    Prefix,
    /// `at`: where in the sink's buffer the next byte belongs.
    Data {
        sink: Sink,
        at: usize,
        left: usize,
        crc: Digester,
    },
    /// `end`: where in the sink's buffer the data ended.
    Digest {
        sink: Sink,
        end: usize,
        crc: u32,
        got: [u8; 4],
        have: usize,
    },
}

/// Where a PDU's data go.
enum Sink {
    Capsule {
        sqe: Sqe,
        buffer: Buffer,
    },
    /// Of the command in this slot.
    Command(u16),
    /// The peer's TermReq: its copy of our header is of no use.
    Discard,
}

pub(crate) struct Receiver {
    prefix: [u8; 256],
    have: usize,
    need: usize,
    stage: Stage,
    common: Option<(CommonHeader, Layout)>,
    /// A complete prefix waits for memory for its data.
    stalled: bool,
    /// The last PDU with data had much of it; the next is likely to.
    long: bool,
}

impl Default for Receiver {
    fn default() -> Self {
        Receiver {
            prefix: [0; 256],
            have: 0,
            need: COMMON_HEADER_BYTES,
            stage: Stage::Prefix,
            common: None,
            stalled: false,
            long: false,
        }
    }
}

impl Receiver {
    pub(crate) fn is_stalled(&self) -> bool {
        self.stalled
    }

    /// The data that come now are of the command in this slot.
    pub(crate) fn is_for(&self, slot: u16) -> bool {
        match &self.stage {
            Stage::Data { sink, .. } | Stage::Digest { sink, .. } => {
                matches!(sink, Sink::Command(s) if *s == slot)
            }
            Stage::Prefix => false,
        }
    }

    /// How much to receive behind the data that have a place of their own. What comes there is copied once more: cheap for
    /// headers and short data, and saves calls; dear where more long data follow.
    pub(crate) fn tail_bytes(&self) -> usize {
        if self.long {
            TAIL_LONG
        } else {
            usize::MAX
        }
    }

    /// Part of a PDU is there, and the rest has to come.
    pub(crate) fn is_inside_pdu(&self) -> bool {
        self.have > 0 || !matches!(self.stage, Stage::Prefix)
    }

    /// What is there of the current PDU's header, for a TermReq.
    pub(crate) fn header(&self) -> &[u8] {
        let header = self
            .common
            .map_or(COMMON_HEADER_BYTES, |(common, _)| usize::from(common.hlen));
        &self.prefix[..self.have.min(header).min(TERM_DATA_MAX)]
    }

    fn next_pdu(&mut self) {
        self.have = 0;
        self.need = COMMON_HEADER_BYTES;
        self.common = None;
    }
}

impl Connection {
    /// Take received bytes; returns how many. Fewer than all only while it is stalled for memory.
    pub(crate) fn feed(&mut self, bytes: &[u8]) -> usize {
        let mut at = 0;
        while at < bytes.len() && !self.receiver.stalled {
            if self.is_ending() {
                return bytes.len();
            }
            match self.step(&bytes[at..]) {
                Ok(taken) => at += taken,
                Err(error) => {
                    self.fatal(&error);
                    return bytes.len();
                }
            }
        }
        at
    }

    fn step(&mut self, bytes: &[u8]) -> Result<usize, PduError> {
        let passage = self.is_direct().then(|| self.gate.enter()).flatten();
        let namespace = self.direct_namespace();
        let receiver = &mut self.receiver;
        match &mut receiver.stage {
            Stage::Prefix => {
                let taken = bytes.len().min(receiver.need - receiver.have);
                receiver.prefix[receiver.have..receiver.have + taken].copy_from_slice(&bytes[..taken]);
                receiver.have += taken;
                if receiver.have == receiver.need {
                    match receiver.common {
                        None => self.begin_prefix()?,
                        Some((common, layout)) => self.begin_data(common, layout)?,
                    }
                }
                Ok(taken)
            }
            Stage::Data { left, .. } => {
                let taken = bytes.len().min(*left);
                if passage.is_some() {
                    self.recheck_direct();
                }
                if let Some((direct, at)) = self.direct() {
                    // A closed gate: the connection is about to end, and its data go nowhere.
                    if let (Some(passage), Some(namespace)) = (passage, namespace) {
                        let _shared = namespace.beside_others();
                        direct.place(at, &bytes[..taken]);
                        drop(passage);
                    }
                } else if let Some(target) = self.data_slice() {
                    target[..taken].copy_from_slice(&bytes[..taken]);
                }
                self.data_received(taken)?;
                Ok(taken)
            }
            Stage::Digest { got, have, .. } => {
                let taken = bytes.len().min(4 - *have);
                got[*have..*have + taken].copy_from_slice(&bytes[..taken]);
                *have += taken;
                if *have == 4 {
                    let stage = std::mem::replace(&mut receiver.stage, Stage::Prefix);
                    if let Stage::Digest {
                        sink, end, crc, got, ..
                    } = stage
                    {
                        self.finish(sink, end, u32::from_le_bytes(got) == crc)?;
                    }
                }
                Ok(taken)
            }
        }
    }

    /// Eight bytes are there: what PDU is it, and may it be that long here?
    fn begin_prefix(&mut self) -> Result<(), PduError> {
        let mut bytes = [0; COMMON_HEADER_BYTES];
        bytes.copy_from_slice(&self.receiver.prefix[..COMMON_HEADER_BYTES]);
        let common = CommonHeader::decode(&bytes, self.digests, 0)?;
        let layout = common.layout(self.digests)?;
        let fresh = self.phase == Phase::Fresh;
        let longest = match common.pdu_type {
            PduType::IcReq if fresh => 0,
            PduType::IcReq => return Err(PduError::sequence("a second ICReq")),
            PduType::H2cTermReq => TERM_DATA_MAX,
            other if !other.from_host() => return Err(PduError::field(0, format!("{other:?} from a host"))),
            other if fresh => return Err(PduError::sequence(format!("{other:?} before ICReq"))),
            PduType::CapsuleCmd => match &self.queue {
                Some(queue) if queue.qid > 0 => queue.controller.subsystem.limits.in_capsule_bytes as usize,
                _ => ADMIN_CAPSULE_BYTES,
            },
            // H2CData; how much of it the command wants is checked with the rest of the header.
            _ => self.shared.limits.max_h2c_data_bytes as usize,
        };
        if layout.data_bytes > longest {
            let what = format!(
                "{:?} with {} bytes of data, at most {longest}",
                common.pdu_type, layout.data_bytes
            );
            return Err(match common.pdu_type {
                PduType::H2cData => PduError::new(Fes::LimitExceeded, 0, what),
                _ => PduError::field(4, what),
            });
        }
        self.receiver.need = layout.prefix_bytes();
        self.receiver.common = Some((common, layout));
        Ok(())
    }

    /// The whole prefix is there: decode it and prepare for its data, or be done with it.
    fn begin_data(&mut self, common: CommonHeader, layout: Layout) -> Result<(), PduError> {
        let header = &self.receiver.prefix[..layout.header_bytes];
        if layout.header_digest_bytes > 0 {
            let found = &self.receiver.prefix[layout.header_bytes..layout.header_bytes + 4];
            if found != crc32c(header).to_le_bytes() {
                count(&self.shared.totals.digest_errors, 1);
                return Err(PduError::new(
                    Fes::HeaderDigest,
                    0,
                    format!("{:?} header digest", common.pdu_type),
                ));
            }
        }
        let (sink, at) = match Pdu::decode(&common, header)? {
            Pdu::IcReq(request) => {
                self.receiver.next_pdu();
                self.initialise(&request);
                return Ok(());
            }
            Pdu::CapsuleCmd(sqe) if layout.data_bytes == 0 => {
                self.capsule(sqe, None, true)?;
                self.receiver.next_pdu();
                return Ok(());
            }
            Pdu::CapsuleCmd(sqe) => match self.allowance.take(layout.data_bytes) {
                Some(buffer) => (Sink::Capsule { sqe, buffer }, 0),
                None => {
                    // The prefix stays complete; `resume` comes here again.
                    self.receiver.stalled = true;
                    return Ok(());
                }
            },
            Pdu::H2cData(data) => {
                let slot = self.check_data(&data, layout.data_bytes)?;
                (Sink::Command(slot), data.datao as usize)
            }
            Pdu::H2cTermReq(term) => {
                self.peer_ends(&term);
                (Sink::Discard, 0)
            }
            other => return Err(PduError::field(0, format!("{:?} from a host", other.pdu_type()))),
        };
        self.receiver.next_pdu();
        if layout.data_bytes > 0 {
            self.receiver.long = layout.data_bytes > LONG_BYTES;
            self.receiver.stage = Stage::Data {
                sink,
                at,
                left: layout.data_bytes,
                crc: Digester::new(),
            };
        }
        Ok(())
    }

    /// Try again for the memory that the current PDU waits for.
    pub(crate) fn resume(&mut self) {
        if !std::mem::take(&mut self.receiver.stalled) || self.is_ending() {
            return;
        }
        if let Some((common, layout)) = self.receiver.common {
            if let Err(error) = self.begin_data(common, layout) {
                self.fatal(&error);
            }
        }
    }

    /// Every rule that an H2CData must keep; returns the command's slot.
    fn check_data(&self, data: &DataHeader, data_bytes: usize) -> Result<u16, PduError> {
        let Some(command) = self
            .commands
            .get(data.ttag)
            .filter(|c| matches!(c.state, State::Receiving | State::Ghost))
        else {
            return Err(PduError::field(
                10,
                format!("H2CData with TTAG {}, which no R2T has", data.ttag),
            ));
        };
        if command.sqe.cid() != data.cccid {
            return Err(PduError::field(
                8,
                format!("H2CData for command {}, its R2T was another's", data.cccid),
            ));
        }
        if data.datal == 0 || data.datal as usize != data_bytes {
            return Err(PduError::field(
                16,
                format!("H2CData has DATAL {}, PLEN says {data_bytes}", data.datal),
            ));
        }
        let total = command.from_host;
        let end = match data.datao.checked_add(data.datal) {
            Some(end) if end <= total => end,
            _ => {
                let what = format!(
                    "H2CData of {} bytes at {}, the R2T was for {total}",
                    data.datal, data.datao
                );
                return Err(PduError::range(what));
            }
        };
        if data.datao != command.received {
            let expected = command.received;
            return Err(PduError::field(
                12,
                format!("H2CData has DATAO {}, expected {expected}", data.datao),
            ));
        }
        if data.last && end < total {
            return Err(PduError::field(
                1,
                format!("H2CData with LAST_PDU at byte {end} of {total}"),
            ));
        }
        Ok(data.ttag)
    }

    fn data_slice(&mut self) -> Option<&mut [u8]> {
        let Stage::Data { sink, at, left, .. } = &mut self.receiver.stage else {
            return None;
        };
        let buffer = match sink {
            Sink::Capsule { buffer, .. } => buffer,
            Sink::Command(slot) => self.commands.get_mut(*slot)?.buffer.as_mut()?,
            Sink::Discard => return None,
        };
        buffer.get_mut(*at..*at + *left)
    }

    /// The command whose data go straight to the medium, if such data come now, and where in them the next byte belongs.
    fn direct(&mut self) -> Option<(&mut Direct, usize)> {
        let Stage::Data {
            sink: Sink::Command(slot),
            at,
            ..
        } = &self.receiver.stage
        else {
            return None;
        };
        let direct = self.commands.get_mut(*slot)?.direct.as_mut()?;
        Some((direct, *at))
    }

    /// The next bytes go straight to the medium: who receives them must hold a passage of the gate.
    pub(crate) fn is_direct(&self) -> bool {
        let Stage::Data {
            sink: Sink::Command(slot),
            ..
        } = &self.receiver.stage
        else {
            return false;
        };
        self.commands
            .get(*slot)
            .is_some_and(|command| command.direct.is_some())
    }

    /// Whose medium that is; who receives shares it with other writers ([`Namespace::beside_others`]).
    pub(crate) fn direct_namespace(&self) -> Option<Arc<Namespace>> {
        let Stage::Data {
            sink: Sink::Command(slot),
            ..
        } = &self.receiver.stage
        else {
            return None;
        };
        let command = self
            .commands
            .get(*slot)
            .filter(|command| command.direct.is_some())?;
        match &command.task {
            Task::Io(plan) => plan.written(),
            _ => None,
        }
    }

    /// Data come that go straight to the medium, and the gate is entered: a reservation may have shut their host out since
    /// the R2T. Then they go nowhere, and the command is answered so when all have come.
    fn recheck_direct(&mut self) {
        let Stage::Data {
            sink: Sink::Command(slot),
            ..
        } = &self.receiver.stage
        else {
            return;
        };
        let Some(command) = self.commands.get_mut(*slot) else {
            return;
        };
        let (Task::Io(plan), Some(_)) = (&command.task, &command.direct) else {
            return;
        };
        if let Err(status) = plan.check_direct() {
            command.direct = None;
            command.failed = Some(status);
        }
    }

    fn data_left(&self) -> usize {
        match &self.receiver.stage {
            Stage::Data { left, .. } => *left,
            _ => 0,
        }
    }

    /// Where the next bytes of the stream belong, if that is the data of a PDU, and how many that is: receive into it, then
    /// say how much. `available`: bytes that can be received now; matters only where [`Connection::is_direct`].
    pub(crate) fn data_space(&mut self, available: usize) -> (Vec<PartMut<'_>>, usize) {
        if self.is_ending() {
            return (Vec::new(), 0);
        }
        let count = self.data_left().min(available);
        self.recheck_direct();
        if self.is_direct() {
            return match self.direct() {
                Some((direct, at)) => direct.space(at, count),
                None => (Vec::new(), 0),
            };
        }
        match self.data_slice() {
            Some(slice) => {
                let length = slice.len();
                let mut parts = Vec::with_capacity(2);
                parts.push(PartMut::slice(slice));
                (parts, length)
            }
            None => (Vec::new(), 0),
        }
    }

    /// The next `count` bytes of the PDU's data are in the space that was given for `available`.
    pub(crate) fn received(&mut self, available: usize, count: usize) {
        let announced = self.data_left().min(available);
        if let Some((direct, at)) = self.direct() {
            if !direct.received(at, announced, count) {
                let peer = self.peer;
                self.shared.note(format!(
                    "{peer}: {count} bytes came of {announced} that the kernel announced: one block is in part until its rest comes"
                ));
            }
        }
        if let Err(error) = self.data_received(count) {
            self.fatal(&error);
        }
    }

    fn data_received(&mut self, count: usize) -> Result<(), PduError> {
        let digest = self.digests.data;
        if digest {
            // Computed piece by piece, while the bytes are still in the cache.
            let Stage::Data { crc, .. } = &self.receiver.stage else {
                return Ok(());
            };
            let mut digester = *crc;
            if let Some(bytes) = self.data_slice() {
                digester.update(&bytes[..count]);
            }
            if let Stage::Data { crc, .. } = &mut self.receiver.stage {
                *crc = digester;
            }
        }
        let Stage::Data { at, left, .. } = &mut self.receiver.stage else {
            return Ok(());
        };
        *at += count;
        *left -= count;
        if *left > 0 {
            return Ok(());
        }
        let stage = std::mem::replace(&mut self.receiver.stage, Stage::Prefix);
        let Stage::Data {
            sink, at: end, crc, ..
        } = stage
        else {
            return Ok(());
        };
        if digest && !matches!(sink, Sink::Discard) {
            self.receiver.stage = Stage::Digest {
                sink,
                end,
                crc: crc.value(),
                got: [0; 4],
                have: 0,
            };
            return Ok(());
        }
        self.finish(sink, end, true)
    }

    /// A PDU with data is complete.
    fn finish(&mut self, sink: Sink, end: usize, digest_right: bool) -> Result<(), PduError> {
        if let Sink::Command(slot) = &sink {
            if let Some(ghost) = self.commands.get_mut(*slot).filter(|c| c.state == State::Ghost) {
                // Nobody has looked at the data of a command that was aborted.
                ghost.received = end as u32;
                if ghost.received == ghost.from_host {
                    self.commands.remove(*slot);
                }
                return Ok(());
            }
        }
        if !digest_right {
            count(&self.shared.totals.digest_errors, 1);
        }
        match sink {
            Sink::Capsule { sqe, buffer } => self.capsule(sqe, Some(buffer), digest_right)?,
            Sink::Command(slot) => {
                let Some(command) = self.commands.get_mut(slot) else {
                    return Ok(());
                };
                command.received = end as u32;
                if !digest_right {
                    command.failed = Some(Status::TRANSIENT_TRANSPORT);
                }
                if command.received == command.from_host {
                    self.pulled(slot);
                }
            }
            Sink::Discard => {}
        }
        Ok(())
    }
}

//! What a connection says: answers to commands, with data or without.

use crate::commands::Task;
use crate::connection::Connection;
use crate::mailbox::Done;
use crate::memory::Buffer;
use crate::output::Output;
use crate::worker::Reply;
use headrace_wire::pdu::{DataHeader, Pdu};
use headrace_wire::{crc32c, Cqe, Sqe, Status};

impl Connection {
    /// Where the answer to the command in this slot goes.
    pub(crate) fn reply(&self, slot: u16) -> Reply {
        Reply {
            mailbox: self.mailbox.clone(),
            token: self.token,
            slot,
            generation: self.commands.generation(slot),
        }
    }

    /// A worker's answer. It may be for a command that is gone; its slot's generation tells.
    pub(crate) fn done(&mut self, done: Done) {
        if self.is_ending() || self.commands.generation(done.slot) != done.generation {
            return;
        }
        match self.commands.get(done.slot) {
            Some(command) if matches!(command.task, Task::Abort) => {
                let sqe = command.sqe;
                self.commands.remove(done.slot);
                self.respond(&sqe, done.status, done.value);
            }
            _ => self.complete(done.slot, done.status, done.buffer),
        }
    }

    pub(crate) fn complete(&mut self, slot: u16, status: Status, data: Option<Buffer>) {
        if let Some(pair) = self.commands.get(slot).and_then(|command| command.pair) {
            return self.complete_pair(pair, status);
        }
        let Some(command) = self.commands.remove(slot) else {
            return;
        };
        match data {
            Some(buffer) if status.is_success() => {
                let digest = self.digests.data.then(|| crc32c(&buffer));
                self.send_data(&command.sqe, buffer.len(), |output| output.buffer(buffer), digest);
            }
            _ => self.respond(&command.sqe, status, 0),
        }
    }

    /// One C2HData with all of a command's data, and its completion: in the SUCCESS flag where that is allowed. `data` brings
    /// the data digest with it where there is one to be and `digest` is `None`.
    pub(crate) fn send_data(
        &mut self,
        sqe: &Sqe,
        length: usize,
        data: impl FnOnce(&mut Output),
        digest: Option<u32>,
    ) {
        let success = self.queue.as_ref().is_some_and(|queue| !queue.flow_control);
        let header = Pdu::C2hData(DataHeader {
            cccid: sqe.cid(),
            ttag: 0,
            datao: 0,
            datal: length as u32,
            last: true,
            success,
        });
        let (digests, hpda) = (self.digests, self.hpda);
        let layout = self.output.small(|out| header.encode(length, digests, hpda, out));
        data(&mut self.output);
        if let (Some(digest), 1..) = (digest, layout.data_digest_bytes) {
            self.output
                .small(|out| out.extend_from_slice(&digest.to_le_bytes()));
        }
        if !success {
            self.respond(sqe, Status::SUCCESS, 0);
        }
    }

    pub(crate) fn respond(&mut self, sqe: &Sqe, status: Status, dw0: u32) {
        self.respond_wide(sqe, status, u64::from(dw0));
    }

    /// `value`: DW0 and DW1.
    pub(crate) fn respond_wide(&mut self, sqe: &Sqe, status: Status, value: u64) {
        let mut cqe = Cqe {
            dw0: value as u32,
            dw1: (value >> 32) as u32,
            ..Cqe::new(sqe.cid(), status)
        };
        if let Some(queue) = &self.queue {
            cqe.sqid = queue.qid;
            // Without flow control FFFFh says so in the answer to Connect, and means nothing after.
            cqe.sqhd = if queue.flow_control { queue.sqhd } else { 0xFFFF };
            if !status.is_success() {
                queue
                    .controller
                    .note_error(queue.qid, sqe.cid(), status, sqe.slba(), sqe.nsid());
            }
        }
        let digests = self.digests;
        self.output
            .small(|out| Pdu::CapsuleResp(cqe).encode(0, digests, 0, out));
    }
}

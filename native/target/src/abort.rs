//! Abort (Base Specification 5.1.1): what has not come to the media is taken back, and what has is not.

use crate::commands::{Command, State, Task};
use crate::connection::Connection;
use crate::fused::First;
use crate::mailbox::Message;
use headrace_wire::{Sqe, Status};

/// Abort commands under way at a time (ACL + 1).
pub(crate) const ABORT_LIMIT: usize = 4;
/// DW0 of the answer to Abort.
pub(crate) const NOT_ABORTED: u32 = 1;
impl Connection {
    /// Ask the queue of the command that is named. Its connection may be another reactor's.
    pub(crate) fn abort(&mut self, sqe: Sqe) -> Result<(), Status> {
        let Some(queue) = &self.queue else {
            return Err(Status::SEQUENCE_ERROR.do_not_retry());
        };
        let (sqid, cid) = (sqe.cdw(10) as u16, (sqe.cdw(10) >> 16) as u16);
        if sqid == 0 {
            let aborted = self.abort_command(cid);
            self.respond(&sqe, Status::SUCCESS, u32::from(!aborted));
            return Ok(());
        }
        let asked = self.commands.iter();
        if asked.filter(|(_, c)| matches!(c.task, Task::Abort)).count() >= ABORT_LIMIT {
            return Err(Status::ABORT_LIMIT_EXCEEDED.do_not_retry());
        }
        let link = {
            let state = queue.controller.state();
            let link = state.queues.get(&sqid);
            link.map(|link| (link.mailbox.clone(), link.token))
        };
        let Some((mailbox, token)) = link else {
            self.respond(&sqe, Status::SUCCESS, NOT_ABORTED);
            return Ok(());
        };
        let slot = self
            .commands
            .insert(Command::new(sqe, Task::Abort, State::Working));
        let reply = self.reply(slot);
        mailbox.post(Message::Abort { token, cid, reply });
        Ok(())
    }

    /// Abort a command of this queue, if it has not come to the media. It is answered before this returns.
    pub(crate) fn abort_command(&mut self, cid: u16) -> bool {
        let Some(slot) = self.commands.find(cid) else {
            return false;
        };
        let entries = self.entries();
        let Some(command) = self.commands.get(slot) else {
            return false;
        };
        let sqe = command.sqe;
        if let Some(pair) = command.pair {
            return self.abort_pair(slot, pair);
        }
        let gone = match command.state {
            // The first of a pair whose second has not come.
            State::Fused => {
                self.first = Some(First::Failed);
                self.commands.remove(slot).is_some()
            }
            State::Waiting => {
                self.waiting.retain(|&waiting| waiting != slot);
                self.commands.remove(slot).is_some()
            }
            State::Held => !matches!(command.task, Task::Connect) && self.commands.remove(slot).is_some(),
            // What is received in place is at the medium from the first byte on.
            State::Receiving
                if command.direct.is_some() && (command.received > 0 || self.receiver.is_for(slot)) =>
            {
                false
            }
            State::Receiving => self.commands.make_ghost(slot, entries),
            State::Working => {
                self.shared.workers.revoke(&self.reply(slot)) && self.commands.remove(slot).is_some()
            }
            State::Ghost => false,
        };
        if gone {
            self.respond(&sqe, Status::ABORT_REQUESTED, 0);
        }
        gone
    }
}

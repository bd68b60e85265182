//! Fused Compare and Write (NVM Command Set 3.2.1): two commands that are one.
//!
//! # A pair
//!
//! The write comes right behind its compare on the same connection; over TCP that order is the order of their capsules. A
//! compare waits for its write; any other command, or the clock, ends the wait with Missing Fused Command. When both are there
//! they get their buffers together or not at all, so that no compare sits on memory that its own write needs. When both have
//! all their data they go to the media as one piece of work.
//!
//! # Atomic against whom
//!
//! The namespace has a lock ([`crate::subsystem::Namespace::alone`]). The pair's work has it alone; every other write shares it for as
//! long as it touches the media: a call of a file's, or the receiving of one stretch of data where they go straight to
//! memory. So between compare and write no block of the range changes. Sharing it costs two uncontended atomic
//! operations; nobody waits where no pair is under way. A pair is bounded to [`BLOCKS_MAX`] blocks (ACWU), since others wait for
//! it.

use crate::commands::{check_transfer, Command, State, Task};
use crate::connection::Connection;
use crate::memory::Buffer;
use crate::nvm::{self, Plan};
use crate::work::Work;
use headrace_wire::{io, Sqe, Status};
use std::time::Instant;

/// ACWU + 1. With blocks of 4096 bytes: 64 KiB.
pub(crate) const BLOCKS_MAX: u32 = 16;

/// What became of the first command of a pair whose second has not come.
pub(crate) enum First {
    Waits {
        slot: u16,
        since: Instant,
    },
    /// It was answered with an error: its second, if it comes next, fails with it.
    Failed,
}

impl Connection {
    /// A command that is no second has come, or none for too long: what waits for a second waits in vain.
    pub(crate) fn give_up_first(&mut self) {
        let Some(First::Waits { slot, .. }) = self.first.take() else {
            return;
        };
        if let Some(command) = self.commands.remove(slot) {
            self.respond(&command.sqe, Status::MISSING_FUSED.do_not_retry(), 0);
        }
    }

    /// By the clock; `true` where something was said.
    pub(crate) fn give_up_old_first(&mut self) -> bool {
        let late = matches!(self.first, Some(First::Waits { since, .. })
            if self.now.saturating_duration_since(since) > self.shared.limits.progress_timeout);
        if late {
            self.give_up_first();
        }
        late
    }

    pub(crate) fn fused(&mut self, sqe: Sqe, data: Option<Buffer>) -> Result<(), Status> {
        match sqe.fuse() {
            1 => {
                let (plan, from_host) = self.plan_half(&sqe, io::COMPARE, data.as_deref())?;
                let slot = self.insert_half(sqe, plan, from_host, data);
                self.first = Some(First::Waits {
                    slot,
                    since: self.now,
                });
                Ok(())
            }
            2 => {
                let first = match self.first {
                    None => return Err(Status::MISSING_FUSED.do_not_retry()),
                    Some(First::Failed) => return Err(Status::FAILED_FUSED),
                    Some(First::Waits { slot, .. }) => slot,
                };
                let (plan, from_host) = self.plan_half(&sqe, io::WRITE, data.as_deref())?;
                self.first = None;
                let same = |other: &Sqe| {
                    (other.nsid(), other.slba(), other.nlb()) == (sqe.nsid(), sqe.slba(), sqe.nlb())
                };
                if !self.commands.get(first).is_some_and(|c| same(&c.sqe)) {
                    let invalid = Status::INVALID_FIELD.do_not_retry();
                    self.fail_half(first, invalid);
                    return Err(invalid);
                }
                let second = self.insert_half(sqe, plan, from_host, data);
                for slot in [first, second] {
                    if let Some(command) = self.commands.get_mut(slot) {
                        command.pair = Some((first, second));
                    }
                }
                self.wait_in_line(first);
                Ok(())
            }
            _ => Err(Status::INVALID_FIELD.do_not_retry()),
        }
    }

    /// A command was refused, for whatever reason: what is the other half of its pair, if it is one, fails with it.
    pub(crate) fn refused_half(&mut self, sqe: &Sqe) {
        match (sqe.fuse(), self.first.take()) {
            (1, _) => self.first = Some(First::Failed),
            (2, Some(First::Waits { slot, .. })) => self.fail_half(slot, Status::FAILED_FUSED),
            _ => {}
        }
    }

    /// Its plan, and how many bytes must be pulled.
    fn plan_half(&mut self, sqe: &Sqe, opcode: u8, data: Option<&[u8]>) -> Result<(Plan, u32), Status> {
        let Some(queue) = &mut self.queue else {
            return Err(Status::SEQUENCE_ERROR.do_not_retry());
        };
        if sqe.opcode() != opcode {
            return Err(Status::INVALID_FIELD.do_not_retry());
        }
        if sqe.nlb() > BLOCKS_MAX {
            return Err(Status::ATOMIC_WRITE_UNIT.do_not_retry());
        }
        queue.reach.renew(&queue.controller);
        let plan = nvm::plan(sqe, &queue.controller, &queue.reach)?;
        let bytes = plan.bytes_from_host();
        let pull = check_transfer(sqe, bytes, 0, data)?;
        Ok((plan, if pull { bytes } else { 0 }))
    }

    fn insert_half(&mut self, sqe: Sqe, plan: Plan, from_host: u32, data: Option<Buffer>) -> u16 {
        self.commands.insert(Command {
            from_host,
            buffer: data,
            ..Command::new(sqe, Task::Io(plan), State::Fused)
        })
    }

    fn fail_half(&mut self, slot: u16, status: Status) {
        if let Some(command) = self.commands.remove(slot) {
            self.respond(&command.sqe, status, 0);
        }
    }

    /// Give a pair its buffers, both or none, and ask for the data. `false`: no memory now.
    pub(crate) fn serve_pair(&mut self, (first, second): (u16, u16)) -> bool {
        let mut buffers = Vec::with_capacity(2);
        for slot in [first, second] {
            let wanted = self.commands.get(slot).map_or(0, |command| command.from_host);
            if wanted > 0 {
                let Some(buffer) = self.allowance.take_pulled(wanted as usize) else {
                    return false;
                };
                buffers.push((slot, buffer));
            }
        }
        let here = buffers.is_empty();
        for (slot, buffer) in buffers {
            if let Some(command) = self.commands.get_mut(slot) {
                command.buffer = Some(buffer);
            }
            self.pull(slot);
        }
        if here {
            self.join_pair((first, second));
        }
        true
    }

    /// One half has all its data, or never will: go on when both have.
    pub(crate) fn join_pair(&mut self, (first, second): (u16, u16)) {
        let of = |slot: u16| self.commands.get(slot);
        let (Some(a), Some(b)) = (of(first), of(second)) else {
            return;
        };
        if a.state != State::Fused || b.state != State::Fused {
            return;
        }
        match (a.failed, b.failed) {
            (None, None) => {}
            (a, b) => {
                self.fail_half(first, a.unwrap_or(Status::FAILED_FUSED));
                self.fail_half(second, b.unwrap_or(Status::FAILED_FUSED));
                return;
            }
        }
        let mut take = |slot: u16| {
            let command = self.commands.get_mut(slot)?;
            command.state = State::Working;
            let task = std::mem::replace(&mut command.task, Task::Admin);
            Some((task, command.buffer.take()?))
        };
        let (
            Some((_, compare)),
            Some((
                Task::Io(Plan::Write {
                    namespace,
                    offset,
                    fua,
                    ..
                }),
                write,
            )),
        ) = (take(first), take(second))
        else {
            return;
        };
        self.launch(
            first,
            Work::CompareAndWrite {
                namespace,
                offset,
                compare,
                write,
                fua,
            },
        );
    }

    /// Both halves' answers.
    pub(crate) fn complete_pair(&mut self, (first, second): (u16, u16), status: Status) {
        let by_compare = matches!(status, Status::COMPARE_FAILURE | Status::UNRECOVERED_READ);
        let (a, b) = match status {
            Status::SUCCESS => (status, status),
            _ if by_compare => (status, Status::FAILED_FUSED),
            _ => (Status::FAILED_FUSED, status),
        };
        self.fail_half(first, a);
        self.fail_half(second, b);
    }

    /// Abort one half, and the other with it. `false`: they are at the media.
    pub(crate) fn abort_pair(&mut self, slot: u16, pair: (u16, u16)) -> bool {
        let entries = self.entries();
        let state = self.commands.get(slot).map(|command| command.state);
        if state == Some(State::Working) {
            if !self.shared.workers.revoke(&self.reply(pair.0)) {
                return false;
            }
        } else if self.commands.ghosts() + 2 > entries {
            return false;
        }
        self.waiting.retain(|&waiting| waiting != pair.0);
        for half in [pair.0, pair.1] {
            let Some(command) = self.commands.get(half) else {
                continue;
            };
            let (sqe, state) = (command.sqe, command.state);
            if state == State::Receiving {
                self.commands.make_ghost(half, entries);
            } else {
                self.commands.remove(half);
            }
            let asked = half == slot;
            let status = if asked {
                Status::ABORT_REQUESTED
            } else {
                Status::FAILED_FUSED
            };
            self.respond(&sqe, status, 0);
        }
        true
    }
}

//! The commands of one queue that are not answered yet.

use crate::direct::Direct;
use crate::memory::Buffer;
use crate::nvm::Plan;
use headrace_wire::{Sgl, Sqe, Status};
use std::collections::HashSet;

pub(crate) enum Task {
    Io(Plan),
    Admin,
    /// Checked in the capsule; here only to hold its CID while its controller is awaited.
    Connect,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum State {
    /// Waits for a buffer.
    Waiting,
    /// R2T is out, data come in.
    Receiving,
    /// With a worker.
    Working,
    /// An async event request, or a Connect that waits for an old association.
    Held,
}

pub(crate) struct Command {
    pub(crate) sqe: Sqe,
    pub(crate) task: Task,
    pub(crate) state: State,
    /// Bytes that the host sends.
    pub(crate) from_host: u32,
    /// Of the host's data.
    pub(crate) received: u32,
    pub(crate) buffer: Option<Buffer>,
    /// Its data go straight to the medium, not to a buffer.
    pub(crate) direct: Option<Direct>,
    /// Its data came damaged: what it will be answered with when all have come.
    pub(crate) failed: Option<Status>,
}

impl Command {
    pub(crate) fn new(sqe: Sqe, task: Task, state: State) -> Self {
        Command {
            sqe,
            task,
            state,
            from_host: 0,
            received: 0,
            buffer: None,
            direct: None,
            failed: None,
        }
    }
}

#[derive(Default)]
struct Slot {
    /// Counts the commands that were here, so that a late answer is not taken for a newer one's.
    generation: u32,
    command: Option<Command>,
}

/// A slot's number is its command's TTAG.
#[derive(Default)]
pub(crate) struct Commands {
    slots: Vec<Slot>,
    free: Vec<u16>,
    cids: HashSet<u16>,
}

impl Commands {
    pub(crate) fn len(&self) -> usize {
        self.cids.len()
    }

    pub(crate) fn contains(&self, cid: u16) -> bool {
        self.cids.contains(&cid)
    }

    /// The caller keeps the count below the queue's entries, at most 1024.
    pub(crate) fn insert(&mut self, command: Command) -> u16 {
        self.cids.insert(command.sqe.cid());
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot::default());
            (self.slots.len() - 1) as u16
        });
        let slot = &mut self.slots[usize::from(index)];
        slot.generation = slot.generation.wrapping_add(1);
        slot.command = Some(command);
        index
    }

    pub(crate) fn get(&self, slot: u16) -> Option<&Command> {
        self.slots.get(usize::from(slot))?.command.as_ref()
    }

    pub(crate) fn get_mut(&mut self, slot: u16) -> Option<&mut Command> {
        self.slots.get_mut(usize::from(slot))?.command.as_mut()
    }

    pub(crate) fn generation(&self, slot: u16) -> u32 {
        self.slots
            .get(usize::from(slot))
            .map_or(0, |slot| slot.generation)
    }

    pub(crate) fn remove(&mut self, slot: u16) -> Option<Command> {
        let command = self.slots.get_mut(usize::from(slot))?.command.take()?;
        self.cids.remove(&command.sqe.cid());
        self.free.push(slot);
        Some(command)
    }

    pub(crate) fn count(&self, state: State) -> usize {
        self.iter().filter(|(_, command)| command.state == state).count()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u16, &Command)> {
        (0..)
            .zip(&self.slots)
            .filter_map(|(index, slot)| Some((index, slot.command.as_ref()?)))
    }

    /// Buffers of all unanswered commands are given back.
    pub(crate) fn clear(&mut self) {
        *self = Commands::default();
    }
}

/// Do the data descriptor, the command and what came in the capsule agree? `Ok(true)`: the data must be pulled.
pub(crate) fn check_transfer(
    sqe: &Sqe,
    from_host: u32,
    to_host: u32,
    capsule: Option<&[u8]>,
) -> Result<bool, Status> {
    let refuse = |status: Status| Err(status.do_not_retry());
    // Fabrics know SGLs only.
    if sqe.psdt() != 1 {
        return refuse(Status::INVALID_FIELD);
    }
    let in_capsule = capsule.map_or(0, <[u8]>::len);
    match sqe.sgl() {
        Sgl::Other(_) => refuse(Status::SGL_TYPE),
        Sgl::InCapsule { offset, .. } if offset != 0 => refuse(Status::SGL_OFFSET),
        Sgl::InCapsule { length, .. } if to_host == 0 => {
            if length != from_host || in_capsule != from_host as usize {
                return refuse(Status::SGL_DATA_LENGTH);
            }
            Ok(false)
        }
        Sgl::InCapsule { .. } => refuse(Status::SGL_TYPE),
        // Data that no descriptor speaks of.
        Sgl::Transport { .. } | Sgl::None if in_capsule > 0 => refuse(Status::SGL_DATA_LENGTH),
        Sgl::Transport { length } if from_host > 0 => {
            if length != from_host {
                return refuse(Status::SGL_DATA_LENGTH);
            }
            Ok(true)
        }
        Sgl::Transport { length } if to_host > 0 && length != to_host => refuse(Status::SGL_DATA_LENGTH),
        Sgl::None if from_host > 0 || to_host > 0 => refuse(Status::SGL_DATA_LENGTH),
        Sgl::Transport { .. } | Sgl::None => Ok(false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reused_slot_has_a_new_generation() {
        let mut commands = Commands::default();
        let command = |cid| Command::new(Sqe::new(2, cid, 1), Task::Admin, State::Held);
        let first = commands.insert(command(7));
        let generation = commands.generation(first);
        assert!(commands.contains(7) && commands.len() == 1);
        assert_eq!(commands.remove(first).map(|c| c.sqe.cid()), Some(7));
        assert!(!commands.contains(7) && commands.get(first).is_none() && commands.remove(first).is_none());
        assert_eq!(commands.insert(command(8)), first);
        assert_ne!(commands.generation(first), generation);
        assert!(commands.get(900).is_none());
    }
}

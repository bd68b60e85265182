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
    /// The queue of the command that it names is asked.
    Abort,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum State {
    /// Waits for a buffer.
    Waiting,
    /// R2T is out, data come in.
    Receiving,
    /// With a worker, or with another connection.
    Working,
    /// An async event request, or a Connect that waits for an old association.
    Held,
    /// Of a fused pair: its own data are here or not asked for yet, and it waits for the other.
    Fused,
    /// Aborted and answered, and its R2T is still out: takes in the rest of its data, which go nowhere, so that its TTAG means no
    /// other command.
    Ghost,
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
    /// The slots of the fused pair that it is of, the first's and the second's.
    pub(crate) pair: Option<(u16, u16)>,
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
            pair: None,
        }
    }
}

#[derive(Default)]
struct Slot {
    /// No two commands of a connection have the same, so that a late answer is not taken for a newer one's.
    generation: u32,
    command: Option<Command>,
}

/// A slot's number is its command's TTAG.
#[derive(Default)]
pub(crate) struct Commands {
    slots: Vec<Slot>,
    free: Vec<u16>,
    cids: HashSet<u16>,
    generation: u32,
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
        self.generation = self.generation.wrapping_add(1);
        let slot = &mut self.slots[usize::from(index)];
        slot.generation = self.generation;
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
        if command.state != State::Ghost {
            self.cids.remove(&command.sqe.cid());
        }
        self.free.push(slot);
        Some(command)
    }

    /// The slot of a command that is not answered.
    pub(crate) fn find(&self, cid: u16) -> Option<u16> {
        self.iter()
            .find(|(_, command)| command.sqe.cid() == cid && command.state != State::Ghost)
            .map(|(slot, _)| slot)
    }

    pub(crate) fn ghosts(&self) -> usize {
        self.slots.len() - self.free.len() - self.cids.len()
    }

    /// The command gives its CID and its buffers back; the slot waits for the rest of the data. `false`: `limit` slots do so.
    pub(crate) fn make_ghost(&mut self, slot: u16, limit: usize) -> bool {
        if self.ghosts() >= limit {
            return false;
        }
        let Some(command) = self.get_mut(slot) else {
            return false;
        };
        command.state = State::Ghost;
        command.buffer = None;
        command.direct = None;
        let cid = command.sqe.cid();
        self.cids.remove(&cid);
        true
    }

    /// Give back what an idle queue does not need.
    pub(crate) fn rest(&mut self) {
        if self.slots.len() == self.free.len() && self.slots.len() > 8 {
            let generation = self.generation;
            *self = Commands {
                generation,
                ..Commands::default()
            };
        }
    }

    /// Commands in such a state are not answered.
    pub(crate) fn forget(&mut self, which: impl Fn(State) -> bool) {
        let found = self.iter().filter(|(_, command)| which(command.state));
        let slots: Vec<u16> = found.map(|(slot, _)| slot).collect();
        slots.into_iter().for_each(|slot| drop(self.remove(slot)));
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
        let generation = self.generation;
        *self = Commands {
            generation,
            ..Commands::default()
        };
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
        // Also after the table was given back.
        for cid in 20..30 {
            commands.insert(command(cid));
        }
        let last = commands.generation(9);
        let slots: Vec<u16> = commands.iter().map(|(slot, _)| slot).collect();
        slots.into_iter().for_each(|slot| drop(commands.remove(slot)));
        commands.rest();
        assert!(commands.slots.is_empty());
        let again = commands.insert(command(7));
        assert!(commands.generation(again) > last);
    }

    #[test]
    fn a_ghost_keeps_its_slot_and_not_its_cid() {
        let mut commands = Commands::default();
        let command = |cid| Command::new(Sqe::new(1, cid, 1), Task::Admin, State::Receiving);
        let slot = commands.insert(command(7));
        assert!(commands.make_ghost(slot, 1));
        assert!(commands.find(7).is_none() && !commands.contains(7) && commands.len() == 0);
        let second = commands.insert(command(7));
        assert!(second != slot && commands.find(7) == Some(second));
        assert!(!commands.make_ghost(second, 1), "one at a time");
        commands.remove(slot);
        assert!(commands.contains(7), "the second's CID");
        assert!(commands.make_ghost(second, 1));
    }
}

//! What reservation commands do and whom a reservation shuts out (Base Specification 8.1.22), as a function of the state
//! alone: no lock, no clock, no file.

use crate::controller::HostKey;
use headrace_wire::reservation::{
    AcquireAction, Change, NotificationKind, RegisterAction, Registrant, ReleaseAction, Report,
    ReservationType,
};
use headrace_wire::{io, Status};

/// Registrants that one namespace remembers: a job is one, whatever its number of ranks.
pub(crate) const REGISTRANTS_MAX: usize = 1024;

/// What a command does to a namespace, as reservations see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    /// Flush too: the specification counts it here.
    Write,
}

impl Access {
    /// `None`: not a command that a reservation can refuse by its type; reservation commands have their own rules.
    pub(crate) fn of(opcode: u8) -> Option<Access> {
        match opcode {
            io::READ | io::COMPARE | io::VERIFY => Some(Access::Read),
            io::WRITE | io::WRITE_ZEROES | io::WRITE_UNCORRECTABLE => Some(Access::Write),
            io::DATASET_MANAGEMENT | io::FLUSH | io::COPY => Some(Access::Write),
            _ => None,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Registered {
    pub(crate) host: HostKey,
    pub(crate) key: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Held {
    pub(crate) kind: ReservationType,
    /// Who acquired it. Of the types that all registrants hold it means nothing.
    pub(crate) holder: HostKey,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct State {
    /// GEN: counts changes of who is registered; starts at 0 with the process.
    pub(crate) generation: u32,
    /// PTPLS.
    pub(crate) persist: bool,
    pub(crate) registrants: Vec<Registered>,
    pub(crate) held: Option<Held>,
}

/// What a change leaves to do.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Effects {
    pub(crate) notices: Vec<(HostKey, NotificationKind)>,
    /// Hosts whose commands must be out of the media before the answer: preempt and abort.
    pub(crate) abort: Vec<HostKey>,
}

fn conflict<T>() -> Result<T, Status> {
    Err(Status::RESERVATION_CONFLICT.do_not_retry())
}

fn invalid<T>() -> Result<T, Status> {
    Err(Status::INVALID_FIELD.do_not_retry())
}

impl State {
    fn key_of(&self, host: &HostKey) -> Option<u64> {
        self.registrants
            .iter()
            .find(|registered| registered.host == *host)
            .map(|registered| registered.key)
    }

    pub(crate) fn holds(&self, host: &HostKey) -> bool {
        self.held.as_ref().is_some_and(|held| {
            if held.kind.held_by_all() {
                self.key_of(host).is_some()
            } else {
                held.holder == *host
            }
        })
    }

    /// Whether the reservation lets this host's reads or writes pass.
    pub(crate) fn permits(&self, host: &HostKey, access: Access) -> bool {
        let Some(held) = &self.held else { return true };
        if access == Access::Read && !held.kind.excludes_reads() {
            return true;
        }
        self.holds(host) || (held.kind.admits_registrants() && self.key_of(host).is_some())
    }

    pub(crate) fn report(&self) -> Report {
        Report {
            generation: self.generation,
            rtype: self.held.as_ref().map_or(0, |held| held.kind as u8),
            persistent: self.persist,
            registered: self.registrants.len() as u16,
            registrants: self
                .registrants
                .iter()
                .map(|registered| Registrant {
                    // Controllers are dynamic here.
                    cntlid: 0xFFFF,
                    holds: self.holds(&registered.host),
                    hostid: registered.host.hostid,
                    key: registered.key,
                })
                .collect(),
        }
    }

    /// Carry out `host`'s command. On an error nothing has changed.
    pub(crate) fn apply(
        &mut self,
        host: &HostKey,
        change: &Change,
        can_persist: bool,
    ) -> Result<Effects, Status> {
        let mut effects = Effects::default();
        match *change {
            Change::Register {
                action,
                ignore_existing,
                persist,
                key,
                new_key,
            } => {
                if persist == Some(true) && !can_persist {
                    return invalid();
                }
                let existing = self.key_of(host);
                match action {
                    RegisterAction::Register => self.register(host, existing, new_key)?,
                    RegisterAction::Unregister | RegisterAction::Replace => {
                        let Some(existing) = existing else {
                            return conflict();
                        };
                        if !ignore_existing && existing != key {
                            return conflict();
                        }
                        if action == RegisterAction::Unregister {
                            self.unregister(host, &mut effects);
                        } else {
                            self.replace(host, new_key)?;
                        }
                    }
                }
                self.persist = persist.unwrap_or(self.persist);
                self.generation = self.generation.wrapping_add(1);
            }
            Change::Acquire {
                action,
                kind,
                key,
                victim,
            } => {
                if self.key_of(host) != Some(key) {
                    return conflict();
                }
                if action == AcquireAction::Acquire {
                    self.acquire(host, kind)?;
                } else {
                    self.preempt(host, kind, victim, &mut effects)?;
                    if action == AcquireAction::PreemptAndAbort {
                        effects.abort = effects.preempted();
                    }
                    self.generation = self.generation.wrapping_add(1);
                }
            }
            Change::Release { action, kind, key } => {
                if self.key_of(host) != Some(key) {
                    return conflict();
                }
                match action {
                    ReleaseAction::Release => self.release(host, kind, &mut effects)?,
                    ReleaseAction::Clear => {
                        self.notify_others(host, NotificationKind::ReservationPreempted, &mut effects);
                        self.registrants.clear();
                        self.held = None;
                        self.generation = self.generation.wrapping_add(1);
                    }
                }
            }
        }
        Ok(effects)
    }

    fn register(&mut self, host: &HostKey, existing: Option<u64>, new_key: u64) -> Result<(), Status> {
        if new_key == 0 {
            return invalid();
        }
        match existing {
            Some(existing) if existing == new_key => Ok(()),
            Some(_) => conflict(),
            None if self.registrants.len() >= REGISTRANTS_MAX => Err(Status::INTERNAL_ERROR.do_not_retry()),
            None => {
                self.registrants.push(Registered {
                    host: host.clone(),
                    key: new_key,
                });
                Ok(())
            }
        }
    }

    fn replace(&mut self, host: &HostKey, new_key: u64) -> Result<(), Status> {
        if new_key == 0 {
            return invalid();
        }
        if let Some(own) = self.registrants.iter_mut().find(|r| r.host == *host) {
            own.key = new_key;
        }
        Ok(())
    }

    fn unregister(&mut self, host: &HostKey, effects: &mut Effects) {
        let held = self.holds(host);
        self.registrants.retain(|registered| registered.host != *host);
        let Some(kind) = self.held.as_ref().map(|held| held.kind) else {
            return;
        };
        let ends = if kind.held_by_all() {
            self.registrants.is_empty()
        } else {
            held
        };
        if ends {
            self.held = None;
            if kind.admits_registrants() {
                self.notify_others(host, NotificationKind::ReservationReleased, effects);
            }
        }
    }

    fn acquire(&mut self, host: &HostKey, kind: ReservationType) -> Result<(), Status> {
        match &self.held {
            None => {
                self.held = Some(Held {
                    kind,
                    holder: host.clone(),
                });
                Ok(())
            }
            Some(held) if held.kind == kind && self.holds(host) => Ok(()),
            Some(_) => conflict(),
        }
    }

    fn preempt(
        &mut self,
        host: &HostKey,
        kind: ReservationType,
        victim: u64,
        effects: &mut Effects,
    ) -> Result<(), Status> {
        // Does the reservation itself change hands?
        let takes = match &self.held {
            Some(held) if held.kind.held_by_all() => victim == 0,
            Some(held) => self.key_of(&held.holder) == Some(victim),
            None => false,
        };
        let all = takes && victim == 0;
        if !takes && victim == 0 {
            return invalid();
        }
        if !takes && !self.registrants.iter().any(|r| r.key == victim) {
            return conflict();
        }
        // Who takes the reservation stays registered to hold it, whoever's key it named.
        let goes = |r: &Registered| (all || r.key == victim) && !(takes && r.host == *host);
        let gone: Vec<HostKey> = self
            .registrants
            .iter()
            .filter(|r| goes(r))
            .map(|r| r.host.clone())
            .collect();
        self.registrants.retain(|r| !goes(r));
        let others = gone.into_iter().filter(|gone| gone != host);
        effects
            .notices
            .extend(others.map(|gone| (gone, NotificationKind::RegistrationPreempted)));
        if takes {
            let before = self.held.replace(Held {
                kind,
                holder: host.clone(),
            });
            // What the survivors rely on is another reservation now.
            if before.is_some_and(|before| before.kind != kind) {
                self.notify_others(host, NotificationKind::ReservationReleased, effects);
            }
        } else if self.registrants.is_empty() {
            self.held = None;
        }
        Ok(())
    }

    fn release(
        &mut self,
        host: &HostKey,
        kind: Option<ReservationType>,
        effects: &mut Effects,
    ) -> Result<(), Status> {
        // Who does not hold has nothing to release, which is no error.
        if !self.holds(host) {
            return Ok(());
        }
        let held = self.held.as_ref().map(|held| held.kind);
        if kind.is_none() || kind != held {
            return invalid();
        }
        self.held = None;
        if held.is_some_and(ReservationType::admits_registrants) {
            self.notify_others(host, NotificationKind::ReservationReleased, effects);
        }
        Ok(())
    }

    fn notify_others(&self, host: &HostKey, kind: NotificationKind, effects: &mut Effects) {
        let others = self.registrants.iter().filter(|r| r.host != *host);
        effects.notices.extend(others.map(|r| (r.host.clone(), kind)));
    }
}

impl Effects {
    /// Hosts that lost their registration.
    fn preempted(&self) -> Vec<HostKey> {
        self.notices
            .iter()
            .filter(|(_, kind)| *kind == NotificationKind::RegistrationPreempted)
            .map(|(host, _)| host.clone())
            .collect()
    }
}

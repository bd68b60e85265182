//! What a controller has to tell its host about reservations: log page 80h, one page an event, and the mask of feature 82h.

use crate::controller::{Controller, Event};
use crate::subsystem::Namespace;
use headrace_wire::command::NSID_ALL;
use headrace_wire::log::lid;
use headrace_wire::reservation::{Notification, NotificationKind};
use headrace_wire::{Sqe, Status};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Pages that wait; of more the oldest are lost, which their counts tell.
const PAGES_MAX: usize = 255;
/// The mask's bits: 1 registration preempted, 2 reservation released, 3 reservation preempted.
const MASK: u32 = 0xE;

#[derive(Default)]
pub(crate) struct Notices {
    count: u64,
    pages: VecDeque<Notification>,
    masks: BTreeMap<u32, u32>,
}

impl Event {
    /// "Reservation Log Page Available".
    pub(crate) const RESERVATION: Event = Event {
        kind: headrace_wire::event::kind::IO,
        info: 0,
        lid: lid::RESERVATION,
    };
}

impl Controller {
    pub(crate) fn notice(&self, nsid: u32, kind: NotificationKind) {
        {
            let mut notices = self.notices();
            if notices
                .masks
                .get(&nsid)
                .is_some_and(|mask| mask & 1 << kind as u8 != 0)
            {
                return;
            }
            notices.count += 1;
            let count = notices.count;
            if notices.pages.len() == PAGES_MAX {
                notices.pages.pop_front();
            }
            notices.pages.push_back(Notification {
                count,
                kind: kind as u8,
                further: 0,
                nsid,
            });
        }
        self.raise(Event::RESERVATION);
    }

    /// The oldest page; `take`: it was read, and the next one is the oldest. All zero where there is none.
    pub(crate) fn notice_page(&self, take: bool) -> Vec<u8> {
        let mut notices = self.notices();
        let page = if take {
            notices.pages.pop_front()
        } else {
            notices.pages.front().copied()
        };
        let further = notices.pages.len() - usize::from(!take && page.is_some());
        let page = page.map_or(Notification::default(), |page| Notification {
            further: further.min(255) as u8,
            ..page
        });
        page.encode().to_vec()
    }

    pub(crate) fn has_notices(&self) -> bool {
        !self.notices().pages.is_empty()
    }

    /// The namespace that a feature of reservations is asked of. One that offers none has no such feature.
    fn reservable(&self, nsid: u32) -> Result<Arc<Namespace>, Status> {
        match self.subsystem.view().namespace(nsid) {
            None => Err(Status::INVALID_NAMESPACE.do_not_retry()),
            Some(namespace) if namespace.reservations.are_off() => Err(Status::INVALID_FIELD.do_not_retry()),
            Some(namespace) => Ok(namespace.clone()),
        }
    }

    /// Feature 83h.
    pub(crate) fn persists(&self, sqe: &Sqe) -> Result<bool, Status> {
        Ok(self.reservable(sqe.nsid())?.reservations.report().persistent)
    }

    /// Feature 82h.
    pub(crate) fn notice_mask(&self, sqe: &Sqe) -> Result<u32, Status> {
        let nsid = self.reservable(sqe.nsid())?.nsid;
        Ok(self.notices().masks.get(&nsid).copied().unwrap_or(0))
    }

    pub(crate) fn set_notice_mask(&self, sqe: &Sqe) -> Result<(), Status> {
        let mask = sqe.cdw(11);
        if mask & !MASK != 0 {
            return Err(Status::INVALID_FIELD.do_not_retry());
        }
        let nsids: Vec<u32> = if sqe.nsid() == NSID_ALL {
            let view = self.subsystem.view();
            let all = view.namespaces().filter(|n| !n.reservations.are_off());
            all.map(|n| n.nsid).collect()
        } else {
            vec![self.reservable(sqe.nsid())?.nsid]
        };
        let mut notices = self.notices();
        for nsid in nsids {
            notices.masks.insert(nsid, mask);
        }
        Ok(())
    }
}

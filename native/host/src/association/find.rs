//! The namespace by its UUID or NGUID: the active namespaces (Identify CNS 02h), then the identification descriptors of
//! each (CNS 03h), until one matches.

use super::{Association, Failure, Step};
use crate::errors::{bad_answer, refused};
use crate::options::NamespaceKey;
use headrace_wire::event::decode_nsids;
use headrace_wire::identify::{cns, decode_descriptors, NamespaceId};
use std::collections::VecDeque;
use std::time::Instant;

/// Namespaces that we are willing to ask for their names; the bring-up's deadline holds besides.
const CANDIDATES_MAX: usize = 4096;
/// What one page of CNS 02h holds.
const PAGE: usize = 1024;

#[derive(Default)]
pub(super) struct Search {
    left: VecDeque<u32>,
    asked: u32,
    seen: usize,
    /// The last page was full: there may be more behind this.
    more_after: Option<u32>,
}

impl Association {
    /// The queues are there: on to the namespace.
    pub(super) fn find(&mut self, now: Instant) -> Result<(), Failure> {
        match self.options.namespace {
            NamespaceKey::Nsid(nsid) => self.found(nsid, now),
            _ => self.identify(Step::ActiveNamespaces, cns::ACTIVE_NAMESPACES, 0, now),
        }
    }

    fn found(&mut self, nsid: u32, now: Instant) -> Result<(), Failure> {
        self.facts.nsid = nsid;
        self.search = Search::default();
        self.identify(Step::IdentifyNamespace, cns::NAMESPACE, nsid, now)
    }

    pub(super) fn active(&mut self, bytes: &[u8], now: Instant) -> Result<(), Failure> {
        let page = decode_nsids(bytes);
        let before = self.search.more_after.unwrap_or(0);
        if page.windows(2).any(|pair| pair[0] >= pair[1]) || page.first().is_some_and(|&nsid| nsid <= before)
        {
            return Err(bad_answer(&self.options, "the list of active namespaces does not ascend").into());
        }
        self.search.seen += page.len();
        self.search.more_after = (page.len() == PAGE).then(|| page[PAGE - 1]);
        self.search.left.extend(page);
        if self.search.seen > CANDIDATES_MAX {
            return Err(refused(&self.options, "too many namespaces to search by name")
                .expected(format!("at most {CANDIDATES_MAX}"))
                .found(format!("{} and more", self.search.seen))
                .next("give nsid in place of uuid or nguid")
                .into());
        }
        self.next_candidate(now)
    }

    fn next_candidate(&mut self, now: Instant) -> Result<(), Failure> {
        if let Some(nsid) = self.search.left.pop_front() {
            self.search.asked = nsid;
            return self.identify(Step::Candidate, cns::NAMESPACE_DESCRIPTORS, nsid, now);
        }
        if let Some(after) = self.search.more_after {
            return self.identify(Step::ActiveNamespaces, cns::ACTIVE_NAMESPACES, after, now);
        }
        Err(
            refused(&self.options, "no namespace of the subsystem has this identifier")
                .expected(self.options.namespace.to_string())
                .found(format!(
                    "{} namespaces that this host may use, none of them with it",
                    self.search.seen
                ))
                .next(
                    "check the identifier; on the target, check that the namespace is attached for this host",
                )
                .into(),
        )
    }

    pub(super) fn candidate(&mut self, bytes: &[u8], now: Instant) -> Result<(), Failure> {
        let wanted = match self.options.namespace {
            NamespaceKey::Uuid(id) => NamespaceId::Uuid(id),
            NamespaceKey::Nguid(id) => NamespaceId::Nguid(id),
            NamespaceKey::Nsid(nsid) => return self.found(nsid, now),
        };
        if decode_descriptors(bytes).contains(&wanted) {
            return self.found(self.search.asked, now);
        }
        self.next_candidate(now)
    }

    /// A candidate has gone since it was listed, or has no descriptors: it is not the one.
    pub(super) fn no_candidate(&mut self, now: Instant) -> Result<(), Failure> {
        self.next_candidate(now)
    }
}

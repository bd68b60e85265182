//! What each host has of a target: connections and memory. And what has come but has not said yet whose it is.
//!
//! A connection counts for the address that it comes from until its Connect, for its host after that; both have the same limit,
//! which is below that for all, so that neither a flood of silent connections from one machine nor one host with too
//! many queues keeps the others out.

use crate::controller::HostKey;
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

#[derive(Default)]
pub(crate) struct Hosts {
    known: Mutex<HashMap<HostKey, Weak<HostShare>>>,
    arriving: Arc<Mutex<HashMap<IpAddr, usize>>>,
}

/// Shared by all connections of one host.
#[derive(Default)]
pub(crate) struct HostShare {
    pub(crate) used_bytes: AtomicUsize,
    connections: AtomicUsize,
}

/// One connection of a host, from its Connect to its end.
pub(crate) struct Membership(Arc<HostShare>);

/// One connection of an address, until its Connect.
pub(crate) struct Arrival {
    arriving: Arc<Mutex<HashMap<IpAddr, usize>>>,
    from: IpAddr,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

impl Hosts {
    pub(crate) fn share(&self, host: &HostKey) -> Arc<HostShare> {
        let mut known = lock(&self.known);
        if let Some(share) = known.get(host).and_then(Weak::upgrade) {
            return share;
        }
        // New hosts are rare: the moment to forget those that are gone.
        known.retain(|_, share| share.strong_count() > 0);
        let share = Arc::new(HostShare::default());
        known.insert(host.clone(), Arc::downgrade(&share));
        share
    }

    /// `None`: this address has as many as it may.
    pub(crate) fn arrive(&self, from: IpAddr, limit: usize) -> Option<Arrival> {
        let mut arriving = lock(&self.arriving);
        let count = arriving.entry(from).or_default();
        if *count >= limit {
            return None;
        }
        *count += 1;
        Some(Arrival {
            arriving: self.arriving.clone(),
            from,
        })
    }
}

impl HostShare {
    /// `None`: this host has as many connections as it may.
    pub(crate) fn join(self: &Arc<Self>, limit: usize) -> Option<Membership> {
        let before = self.connections.fetch_add(1, Ordering::AcqRel);
        // Drop takes it back.
        let membership = Membership(self.clone());
        (before < limit).then_some(membership)
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Drop for Arrival {
    fn drop(&mut self) {
        let mut arriving = lock(&self.arriving);
        if let Some(count) = arriving.get_mut(&self.from) {
            *count -= 1;
            if *count == 0 {
                arriving.remove(&self.from);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_go_up_and_down_and_gone_hosts_are_forgotten() {
        let hosts = Hosts::default();
        let key = |id: u8| HostKey {
            hostnqn: "host".into(),
            hostid: [id; 16],
        };
        let first = hosts.share(&key(1));
        assert!(Arc::ptr_eq(&first, &hosts.share(&key(1))) && !Arc::ptr_eq(&first, &hosts.share(&key(2))));
        let (a, b) = (first.join(2), first.join(2));
        assert!(a.is_some() && b.is_some() && first.join(2).is_none());
        drop(a);
        assert!(first.join(2).is_some());
        drop((first, b));
        (2..200).for_each(|id| drop(hosts.share(&key(id))));
        assert!(lock(&hosts.known).len() <= 2);

        let (here, there) = ([127, 0, 0, 1].into(), [127, 0, 0, 2].into());
        let kept = hosts.arrive(here, 1);
        assert!(kept.is_some() && hosts.arrive(here, 1).is_none() && hosts.arrive(there, 1).is_some());
        drop(kept);
        assert!(lock(&hosts.arriving).is_empty());
    }
}

//! Log pages (Base Specification 5.1.12): each built whole, then cut to what was asked for.

use crate::controller::{Controller, Event};
use crate::identify::VERSION;
use crate::shared::Shared;
use headrace_wire::ana::GROUPS_ONLY;
use headrace_wire::log::{lid, DiscoveryEntry, DiscoveryHeader, LogRequest};
use headrace_wire::{admin, io, Sqe, Status};
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::Ordering;

/// Longest piece of a log page in one command; hosts read longer ones by offset.
const PIECE_BYTES: u64 = 256 << 10;

/// `local`: the address that the host reached us by, for discovery.
pub(crate) fn get_log_page(
    sqe: &Sqe,
    controller: &Controller,
    shared: &Shared,
    local: SocketAddr,
) -> Result<Vec<u8>, Status> {
    let request = LogRequest::decode(sqe);
    let refuse = |status: Status| Err(status.do_not_retry());
    // Offsets are of dwords. Before anything is marked as read.
    if request.length > PIECE_BYTES || request.offset % 4 != 0 {
        return refuse(Status::INVALID_FIELD);
    }
    // First, so that what changes while the page is made has its event again.
    if !request.rae {
        controller.page_read(request.lid);
    }
    let page = match (request.lid, controller.subsystem.discovery) {
        (lid::DISCOVERY, true) => discovery(controller, shared, local),
        (lid::ERROR, _) => errors(controller),
        (lid::SMART, false) => smart(controller, shared),
        (lid::FIRMWARE, false) => firmware(),
        (lid::CHANGED_NAMESPACES, false) => controller.changed_namespaces(!request.rae).encode(),
        (lid::ANA, false) => controller
            .subsystem
            .view()
            .ana_log(controller.portal, request.lsp & GROUPS_ONLY != 0)
            .encode(),
        (lid::EFFECTS, false) => effects(),
        // Each page is handed out once, to who reads it from its beginning.
        (lid::RESERVATION, false) => {
            let page = controller.notice_page(request.offset == 0);
            if controller.has_notices() {
                controller.raise(Event::RESERVATION);
            }
            page
        }
        _ => return refuse(Status::INVALID_LOG_PAGE),
    };
    if request.offset > page.len() as u64 {
        return refuse(Status::INVALID_FIELD);
    }
    let start = request.offset as usize;
    let end = page.len().min(start + request.length as usize);
    let mut piece = page[start..end].to_vec();
    piece.resize(request.length as usize, 0);
    Ok(piece)
}

/// 64 bytes an entry: ERRCNT 0 (8), SQID 8 (2), CID 10 (2), STATUS 12 (2), LBA 16 (8), NSID 24 (4). Newest first.
fn errors(controller: &Controller) -> Vec<u8> {
    let mut page = vec![0; 64 * crate::controller::ERROR_LOG_ENTRIES];
    for (entry, bytes) in controller.state().errors.iter().zip(page.chunks_exact_mut(64)) {
        bytes[..8].copy_from_slice(&entry.count.to_le_bytes());
        bytes[8..10].copy_from_slice(&entry.sqid.to_le_bytes());
        bytes[10..12].copy_from_slice(&entry.cid.to_le_bytes());
        bytes[12..14].copy_from_slice(&entry.status.to_field().to_le_bytes());
        bytes[16..24].copy_from_slice(&entry.lba.to_le_bytes());
        bytes[24..28].copy_from_slice(&entry.nsid.to_le_bytes());
    }
    page
}

/// What a server process can know: traffic, errors, and whether answered writes were lost. It has no thermometer and no
/// wear; those fields stay at "nothing reported" and "all spare".
fn smart(controller: &Controller, shared: &Shared) -> Vec<u8> {
    let subsystem = &controller.subsystem;
    let mut page = vec![0; 512];
    // Critical warning bit 2: reliability degraded.
    page[0] = u8::from(subsystem.degraded()) << 2;
    page[3] = 100;
    page[4] = 10;
    let mut put = |at: usize, value: u64| page[at..at + 8].copy_from_slice(&value.to_le_bytes());
    // Data units are thousands of 512 bytes, rounded up.
    put(32, subsystem.total(|c| &c.read_bytes).div_ceil(512_000));
    put(48, subsystem.total(|c| &c.written_bytes).div_ceil(512_000));
    put(64, subsystem.total(|c| &c.reads));
    put(80, subsystem.total(|c| &c.writes));
    // One power cycle: this process.
    put(112, 1);
    put(128, shared.started.elapsed().as_secs() / 3600);
    put(160, subsystem.total(|c| &c.media_errors));
    put(176, controller.state().error_count);
    page
}

/// Slot 1 is active and holds this version.
fn firmware() -> Vec<u8> {
    let mut page = vec![0; 512];
    page[0] = 1;
    page[8..16].fill(b' ');
    for (byte, source) in page[8..16].iter_mut().zip(env!("CARGO_PKG_VERSION").bytes()) {
        *byte = source;
    }
    page
}

/// Four bytes a command, admin from 0, I/O from 1024: bit 0 supported, bit 1 changes data.
fn effects() -> Vec<u8> {
    let mut page = vec![0; 4096];
    let mut put = |at: usize, opcode: u8, effects: u32| {
        let at = at + usize::from(opcode) * 4;
        page[at..at + 4].copy_from_slice(&effects.to_le_bytes());
    };
    for opcode in [
        admin::GET_LOG_PAGE,
        admin::IDENTIFY,
        admin::ABORT,
        admin::SET_FEATURES,
        admin::GET_FEATURES,
        admin::ASYNC_EVENT_REQUEST,
        admin::KEEP_ALIVE,
    ] {
        put(0, opcode, 1);
    }
    for opcode in [
        io::READ,
        io::FLUSH,
        io::COMPARE,
        io::RESERVATION_REGISTER,
        io::RESERVATION_REPORT,
        io::RESERVATION_ACQUIRE,
        io::RESERVATION_RELEASE,
    ] {
        put(1024, opcode, 1);
    }
    for opcode in [io::WRITE, io::WRITE_ZEROES, io::DATASET_MANAGEMENT] {
        put(1024, opcode, 3);
    }
    page
}

/// One record a subsystem that this host may use and portal that it is served at, in addresses that it can reach.
fn discovery(controller: &Controller, shared: &Shared, local: SocketAddr) -> Vec<u8> {
    debug_assert_eq!(VERSION >> 16, 2);
    // Before the entries: a change meanwhile makes another number, and the host reads again.
    let genctr = shared.discovery_generation.load(Ordering::Acquire);
    let mut entries = Vec::new();
    let own = std::iter::once((&controller.subsystem, 3));
    let others = shared
        .subsystems
        .iter()
        .filter(|s| s.view().hosts.access(&controller.host.hostnqn).is_some())
        .map(|s| (s, 2));
    for (subsystem, subtype) in own.chain(others) {
        for (index, portal) in shared.portals.iter().enumerate() {
            let Some(ip) = reachable(portal.address.ip(), local.ip().to_canonical()) else {
                continue;
            };
            if portal.discovery && !subsystem.discovery {
                continue;
            }
            entries.push(DiscoveryEntry {
                trtype: 3,
                adrfam: if ip.is_ipv4() { 1 } else { 2 },
                subtype,
                // No secure channel; SQ flow control may be disabled.
                treq: 2 | 1 << 2,
                portid: index as u16 + 1,
                cntlid: 0xFFFF,
                asqsz: 32,
                eflags: 0,
                trsvcid: portal.address.port().to_string(),
                subnqn: subsystem.nqn.clone(),
                traddr: ip.to_string(),
                sectype: 0,
            });
        }
    }
    let header = DiscoveryHeader {
        genctr,
        numrec: entries.len() as u64,
    };
    let mut page = header.encode().to_vec();
    entries
        .iter()
        .for_each(|entry| page.extend_from_slice(&entry.encode()));
    page
}

/// What a host that reached us at `local` can connect to, to reach a listener at `listen`.
fn reachable(listen: IpAddr, local: IpAddr) -> Option<IpAddr> {
    if listen.is_unspecified() {
        // A wildcard is no address to connect to; the one that this host used is, if the listener takes its family. The
        // wildcard of IPv6 takes both.
        return (listen.is_ipv6() || local.is_ipv4()).then_some(local);
    }
    // Another machine's loopback leads to that machine itself.
    (!listen.is_loopback() || local.is_loopback()).then_some(listen)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_as_the_host_can_reach_them() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        for (listen, local, told) in [
            ("10.0.0.1", "10.0.0.1", Some("10.0.0.1")),
            ("10.0.0.1", "192.168.0.1", Some("10.0.0.1")),
            ("0.0.0.0", "10.0.0.1", Some("10.0.0.1")),
            ("0.0.0.0", "2001:db8::1", None),
            ("::", "10.0.0.1", Some("10.0.0.1")),
            ("::", "2001:db8::1", Some("2001:db8::1")),
            ("127.0.0.1", "127.0.0.1", Some("127.0.0.1")),
            ("127.0.0.1", "::1", Some("127.0.0.1")),
            ("127.0.0.1", "10.0.0.1", None),
            ("::1", "10.0.0.1", None),
        ] {
            assert_eq!(
                reachable(ip(listen), ip(local)),
                told.map(ip),
                "{listen} by {local}"
            );
        }
    }
}

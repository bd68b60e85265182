//! Identify data (Base Specification 5.1.13): what this target is, said truthfully.

use crate::abort::ABORT_LIMIT;
use crate::controller::{Controller, AER_LIMIT, ERROR_LOG_ENTRIES, KAS};
use crate::fused::BLOCKS_MAX;
use crate::subsystem::{Namespace, MAX_ANA_GROUPS, MAX_NAMESPACES, MAX_NSID};
use crate::view::HostAccess;
use headrace_wire::command::NSID_ALL;
use headrace_wire::event::{config, encode_nsids};
use headrace_wire::identify::{
    cmic, cns, ctratt, encode_descriptors, oncs, IdentifyController, IdentifyNamespace, IndependentNamespace,
    LbaFormat, NamespaceId, IDENTIFY_BYTES, SGLS_TCP,
};
use headrace_wire::{Sqe, Status};
use std::sync::Arc;

/// NVMe 2.0.
pub(crate) const VERSION: u32 = 0x0002_0000;
const SHUTDOWN_US: u32 = 60_000_000;
/// ANATT: nothing here takes that long; whoever sets the state "change" has as long to set the next.
const ANA_TRANSITION_S: u8 = 30;
/// ANACAP: all five states are reported, and ANAGRPID of a namespace stays while it is there.
const ANA_STATES: u8 = 0x1F;
const GROUPS_FIXED: u8 = 1 << 6;
/// NMIC: may be attached to several controllers.
const SHARED: u8 = 1;
const FIRMWARE: &str = env!("CARGO_PKG_VERSION");

pub(crate) fn identify(sqe: &Sqe, controller: &Controller) -> Result<Vec<u8>, Status> {
    let csi = (sqe.cdw(11) >> 24) as u8;
    let refuse = |status: Status| Err(status.do_not_retry());
    let subsystem = &controller.subsystem;
    match sqe.cdw(10) as u8 {
        cns::CONTROLLER => Ok(describe_controller(controller)),
        // Nothing else exists in a discovery controller.
        _ if subsystem.discovery => refuse(Status::INVALID_FIELD),
        // What all namespaces have in common: the formats are not the same, so nothing.
        cns::NAMESPACE if sqe.nsid() == NSID_ALL => refuse(Status::INVALID_NAMESPACE),
        cns::NAMESPACE => Ok(match find(controller, sqe.nsid())? {
            Some(namespace) => describe_namespace(&namespace, protected(controller, &namespace)),
            None => vec![0; IDENTIFY_BYTES],
        }),
        cns::ACTIVE_NAMESPACES => active_namespaces(controller, sqe.nsid()),
        cns::CSI_ACTIVE_NAMESPACES if csi == 0 => active_namespaces(controller, sqe.nsid()),
        cns::NAMESPACE_DESCRIPTORS => match find(controller, sqe.nsid())? {
            Some(n) => Ok(encode_descriptors(&[
                NamespaceId::Nguid(n.identity.nguid),
                NamespaceId::Uuid(n.identity.uuid),
                NamespaceId::Csi(0),
            ])),
            None => refuse(Status::INVALID_NAMESPACE),
        },
        // The NVM command set adds no namespace or controller properties that this target has: all fields zero.
        cns::CSI_NAMESPACE if csi == 0 => match find(controller, sqe.nsid())? {
            Some(_) => Ok(vec![0; IDENTIFY_BYTES]),
            None => refuse(Status::INVALID_NAMESPACE),
        },
        cns::CSI_CONTROLLER if csi == 0 => Ok(vec![0; IDENTIFY_BYTES]),
        cns::INDEPENDENT_NAMESPACE => match find(controller, sqe.nsid())? {
            Some(namespace) => Ok(IndependentNamespace {
                nmic: SHARED,
                rescap: namespace.reservations.capabilities(),
                anagrpid: namespace.ana_group,
                nsattr: u8::from(protected(controller, &namespace)),
                ready: true,
            }
            .encode()),
            None => refuse(Status::INVALID_NAMESPACE),
        },
        cns::COMMAND_SETS => {
            // Combination 0: the NVM command set alone.
            let mut sets = vec![0; IDENTIFY_BYTES];
            sets[0] = 1;
            Ok(sets)
        }
        _ => refuse(Status::INVALID_FIELD),
    }
}

/// `Ok(None)`: a possible nsid that is not in use.
fn find(controller: &Controller, nsid: u32) -> Result<Option<Arc<Namespace>>, Status> {
    if nsid == 0 || nsid > MAX_NSID {
        return Err(Status::INVALID_NAMESPACE.do_not_retry());
    }
    Ok(controller.subsystem.view().namespace(nsid).cloned())
}

/// Whether this host may not write it.
fn protected(controller: &Controller, namespace: &Namespace) -> bool {
    let hosts = &controller.subsystem.view().hosts;
    namespace.media.read_only() || hosts.access(&controller.host.hostnqn) != Some(HostAccess::ReadWrite)
}

fn active_namespaces(controller: &Controller, after: u32) -> Result<Vec<u8>, Status> {
    if after >= 0xFFFF_FFFE {
        return Err(Status::INVALID_NAMESPACE.do_not_retry());
    }
    let view = controller.subsystem.view();
    let nsids: Vec<u32> = view
        .namespaces
        .keys()
        .copied()
        .filter(|&nsid| nsid > after)
        .collect();
    Ok(encode_nsids(&nsids))
}

fn describe_controller(controller: &Controller) -> Vec<u8> {
    let subsystem = &controller.subsystem;
    let limits = &subsystem.limits;
    let common = IdentifyController {
        serial: subsystem.serial.clone(),
        model: subsystem.model.clone(),
        firmware: FIRMWARE.into(),
        mdts: limits.mdts_bytes.trailing_zeros().saturating_sub(12) as u8,
        cntlid: controller.cntlid,
        ver: VERSION,
        // 128-bit host identifiers; traffic keeps alive as the command does.
        ctratt: 1 | ctratt::TBKAS,
        aerl: (AER_LIMIT - 1) as u8,
        // One firmware slot, read-only.
        frmw: 1 << 1 | 1,
        // Effects log, and log pages by offset.
        lpa: 1 << 1 | 1 << 2,
        kas: KAS,
        maxcmd: limits.max_queue_entries,
        sgls: SGLS_TCP,
        subnqn: subsystem.nqn.clone(),
        iorcsz: 1,
        msdbd: 1,
        ..IdentifyController::default()
    };
    let described = if subsystem.discovery {
        IdentifyController {
            cntrltype: 2,
            oaes: config::DISCOVERY,
            ioccsz: 4,
            ..common
        }
    } else {
        IdentifyController {
            // Several ports, several controllers.
            cmic: 1 | 1 << 1 | cmic::ANA,
            oaes: config::NAMESPACE_ATTRIBUTE | config::ANA,
            anatt: ANA_TRANSITION_S,
            anacap: ANA_STATES | GROUPS_FIXED,
            anagrpmax: MAX_ANA_GROUPS,
            nanagrpid: subsystem.view().groups.len() as u32,
            cntrltype: 1,
            acl: (ABORT_LIMIT - 1) as u8,
            nn: MAX_NSID,
            mnan: MAX_NAMESPACES as u32,
            // Compare and Write.
            fuses: 1,
            acwu: (BLOCKS_MAX - 1) as u16,
            oncs: oncs::COMPARE | oncs::DATASET_MANAGEMENT | oncs::WRITE_ZEROES | oncs::RESERVATIONS,
            // Flush takes all namespaces at once; a volatile cache where any namespace has one.
            vwc: 3 << 1 | u8::from(controller.cached()),
            ioccsz: (64 + limits.in_capsule_bytes) / 16,
            ..common
        }
    };
    let mut bytes = described.encode();
    // RTD3E: how long a shutdown, which flushes, may take; in microseconds.
    bytes[88..92].copy_from_slice(&SHUTDOWN_US.to_le_bytes());
    bytes[262] = (ERROR_LOG_ENTRIES - 1) as u8;
    bytes
}

fn describe_namespace(namespace: &Namespace, protected: bool) -> Vec<u8> {
    let blocks = namespace.blocks();
    IdentifyNamespace {
        nsze: blocks,
        ncap: blocks,
        nuse: blocks,
        nmic: SHARED,
        rescap: namespace.reservations.capabilities(),
        anagrpid: namespace.ana_group,
        // Zeros after deallocation, and by Write Zeroes with DEAC, where that is certain; a file system may not have holes.
        dlfeat: if namespace.media.deallocated_reads_zeros() {
            1 | 1 << 3
        } else {
            0
        },
        nguid: namespace.identity.nguid,
        formats: vec![LbaFormat {
            ms: 0,
            lbads: namespace.media.block_bytes().trailing_zeros() as u8,
        }],
        nsattr: u8::from(protected),
        ..IdentifyNamespace::default()
    }
    .encode()
}

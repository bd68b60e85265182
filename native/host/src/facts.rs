//! What a controller and its namespace say about themselves, as far as the host believes and uses it.

use crate::errors::{bad_answer, namespace_missing, refused};
use crate::lane::LANES;
use crate::options::HostOptions;
use headrace_transfer::{DeviceInfo, ErrorKind, IoError};
use headrace_wire::ana::AnaState;
use headrace_wire::fabrics::Cap;
use headrace_wire::identify::{
    cmic, ctratt, decode_descriptors, oncs, IdentifyController, IdentifyNamespace, NamespaceId,
};
use std::time::Duration;

/// Our own limit of one command: large enough to be as fast as larger ones, small enough to share a connection.
pub(crate) const CHUNK_BYTES: u64 = 1 << 20;

/// DLFEAT bit 3: Write Zeroes takes the Deallocate bit.
const DLFEAT_DEAC: u8 = 1 << 3;
/// However long a controller says that a retry should wait.
const RETRY_DELAY_MAX: Duration = Duration::from_secs(10);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Deallocation {
    #[default]
    None,
    DatasetManagement,
    WriteZeroes,
}

impl Deallocation {
    pub fn name(self) -> &'static str {
        match self {
            Deallocation::None => "not supported",
            Deallocation::DatasetManagement => "Dataset Management",
            Deallocation::WriteZeroes => "Write Zeroes",
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Facts {
    pub cntlid: u16,
    pub version: u32,
    /// Zero-based, as in CAP.
    pub mqes: u16,
    pub mpsmin: u8,
    pub timeout_500ms: u8,
    pub serial: String,
    pub model: String,
    pub firmware: String,
    /// Largest transfer in bytes; `None`: no limit.
    pub mdts_bytes: Option<u64>,
    /// Most data in an I/O capsule.
    pub in_capsule: usize,
    pub ioccsz: u32,
    pub maxcmd: u16,
    /// Command retry delays, in 100 ms.
    pub crdt: [u16; 3],
    pub maxh2cdata: usize,
    /// OAES: the asynchronous events on offer; AERL; and the bits of the feature that we set.
    pub oaes: u32,
    pub aerl: u8,
    pub events: u32,
    /// Any command keeps the controller alive (TBKAS); KAS, the granularity of KATO.
    pub traffic_keep_alive: bool,
    pub keep_alive_unit: Duration,
    /// ANATT, NANAGRPID, and how many namespaces there may be at most.
    pub anatt: Duration,
    pub nanagrpid: u32,
    pub namespaces_max: u32,
    pub volatile_cache: bool,
    pub deallocation: Deallocation,
    /// I/O queues granted, and commands on each.
    pub queues: u16,
    /// Queues of each traffic class; 0: it shares the feed's.
    pub lanes: [u16; LANES],
    pub depth: u16,
    // Of the namespace.
    pub nsid: u32,
    /// `None`: the controller reports no asymmetric access.
    pub ana: Option<Ana>,
    pub size_bytes: u64,
    pub block_bytes: u32,
    pub read_only: bool,
    /// What reservations the namespace offers.
    pub rescap: u8,
    /// Optimal I/O boundary in blocks; 0: none.
    pub noiob: u64,
    pub ids: NamespaceIds,
}

/// How the controller reaches the namespace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ana {
    pub group: u32,
    /// `None`: the log does not say; the controller's statuses decide.
    pub state: Option<AnaState>,
    /// Moves with every change of the log.
    pub chgcnt: u64,
}

/// By which a namespace is the same one after a reconnect. All zeros where the controller gives none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct NamespaceIds {
    pub uuid: [u8; 16],
    pub nguid: [u8; 16],
    pub eui64: [u8; 8],
}

impl Facts {
    pub fn capabilities(&mut self, cap: Cap) {
        self.mqes = cap.mqes();
        self.mpsmin = cap.mpsmin();
        self.timeout_500ms = cap.timeout_500ms();
    }

    pub fn controller(&mut self, bytes: &[u8], options: &HostOptions) -> Result<(), IoError> {
        let c = IdentifyController::decode(bytes)
            .ok_or_else(|| bad_answer(options, "Identify Controller is cut short"))?;
        if c.cntrltype > 1 {
            return Err(refused(options, "the subsystem has no I/O controller here")
                .expected("controller type 1 (I/O)")
                .found(format!(
                    "controller type {} (2 is discovery, 3 administrative)",
                    c.cntrltype
                ))
                .next("ask it with `headrace discover`, and connect to a subsystem that it names"));
        }
        if c.ioccsz < 4 || c.sgls & 3 == 0 {
            let found = format!("IOCCSZ {}, SGLS 0x{:x}", c.ioccsz, c.sgls);
            return Err(
                bad_answer(options, "Identify Controller lacks what NVMe/TCP demands")
                    .expected("IOCCSZ of at least 4, SGLs supported")
                    .found(found),
            );
        }
        // 2^MDTS pages; beyond 2^20 of them it limits nothing that a command could ask for.
        self.mdts_bytes = (c.mdts != 0 && c.mdts <= 20).then(|| (4096u64 << self.mpsmin.min(15)) << c.mdts);
        // Data that begin elsewhere than right behind the command are not used by anybody: then nothing goes in the capsule.
        let room = (c.ioccsz as usize).saturating_mul(16) - 64;
        self.in_capsule = if c.icdoff == 0 { room.min(1 << 20) } else { 0 };
        self.ioccsz = c.ioccsz;
        self.maxcmd = c.maxcmd;
        self.crdt = c.crdt;
        (self.oaes, self.aerl) = (c.oaes, c.aerl);
        self.traffic_keep_alive = c.ctratt & ctratt::TBKAS != 0;
        self.keep_alive_unit = Duration::from_millis(100) * c.kas.into();
        self.ana = (c.cmic & cmic::ANA != 0).then(Ana::default);
        self.anatt = Duration::from_secs(c.anatt.into());
        (self.nanagrpid, self.namespaces_max) = (c.nanagrpid, if c.mnan > 0 { c.mnan } else { c.nn });
        self.volatile_cache = c.vwc & 1 != 0;
        self.deallocation = if c.oncs & oncs::DATASET_MANAGEMENT != 0 {
            Deallocation::DatasetManagement
        } else if c.oncs & oncs::WRITE_ZEROES != 0 {
            Deallocation::WriteZeroes
        } else {
            Deallocation::None
        };
        (self.serial, self.model, self.firmware) = (c.serial, c.model, c.firmware);
        Ok(())
    }

    pub fn namespace(&mut self, bytes: &[u8], options: &HostOptions) -> Result<(), IoError> {
        let n = IdentifyNamespace::decode(bytes)
            .ok_or_else(|| bad_answer(options, "Identify Namespace is cut short"))?;
        if n.nsze == 0 {
            return Err(namespace_missing(options, "a size of 0"));
        }
        let format = n.format().ok_or_else(|| {
            bad_answer(options, "FLBAS names a format that is not there").found(format!("FLBAS {}", n.flbas))
        })?;
        if !(9..=16).contains(&format.lbads) || format.ms != 0 {
            return Err(IoError::new(
                ErrorKind::Failed,
                "the namespace is formatted in a way that headrace does not use",
            )
            .at(options.address())
            .expected("blocks of 512 bytes to 64 KiB without metadata")
            .found(format!(
                "blocks of 2^{} bytes with {} bytes of metadata",
                format.lbads, format.ms
            ))
            .next("format the namespace with 512 or 4096 bytes and no metadata"));
        }
        self.block_bytes = 1 << format.lbads;
        self.size_bytes = n
            .nsze
            .checked_shl(format.lbads.into())
            .filter(|size| size >> format.lbads == n.nsze && *size <= i64::MAX as u64)
            .ok_or_else(|| {
                bad_answer(options, "the namespace is impossibly large").found(format!("{} blocks", n.nsze))
            })?;
        self.read_only = n.nsattr & 1 != 0;
        self.rescap = n.rescap;
        // Without DEAC, Write Zeroes would write; that is no deallocation.
        if self.deallocation == Deallocation::WriteZeroes && n.dlfeat & DLFEAT_DEAC == 0 {
            self.deallocation = Deallocation::None;
        }
        self.noiob = n.noiob.into();
        if let Some(ana) = &mut self.ana {
            ana.group = n.anagrpid;
        }
        self.ids = NamespaceIds {
            uuid: [0; 16],
            nguid: n.nguid,
            eui64: n.eui64,
        };
        Ok(())
    }

    pub fn descriptors(&mut self, bytes: &[u8]) {
        for id in decode_descriptors(bytes) {
            match id {
                NamespaceId::Uuid(uuid) => self.ids.uuid = uuid,
                NamespaceId::Nguid(nguid) => self.ids.nguid = nguid,
                NamespaceId::Eui64(eui64) => self.ids.eui64 = eui64,
                NamespaceId::Csi(_) => {}
            }
        }
    }

    pub fn max_transfer_bytes(&self) -> u64 {
        let block = u64::from(self.block_bytes);
        let limit = self
            .mdts_bytes
            .unwrap_or(u64::MAX)
            .min(CHUNK_BYTES)
            .min(65536 * block);
        (limit / block).max(1) * block
    }

    /// How many of `blocks` from `slba` one command may move.
    pub fn fit(&self, slba: u64, blocks: u64) -> u64 {
        let most = blocks.min(self.max_transfer_bytes() / u64::from(self.block_bytes));
        match self.noiob {
            0 => most,
            boundary => most.min(boundary - slba % boundary),
        }
    }

    /// What the controller asks for with a status's CRD; `None`: it leaves that to the host.
    pub fn retry_delay(&self, crd: u8) -> Option<Duration> {
        let index = usize::from(crd.checked_sub(1)?);
        let units = *self.crdt.get(index)?;
        Some((Duration::from_millis(100) * units.into()).min(RETRY_DELAY_MAX))
    }

    pub fn info(&self) -> DeviceInfo {
        DeviceInfo {
            size_bytes: self.size_bytes,
            block_bytes: self.block_bytes,
            max_transfer_bytes: self.max_transfer_bytes(),
            volatile_cache: self.volatile_cache,
            read_only: self.read_only,
        }
    }

    /// Why `now` is not the namespace that `self` was, if it is not.
    pub fn differs(&self, now: &Facts) -> Option<String> {
        // Its size may change: a request beyond the end is refused as ever, and what was within it stays where it was.
        if now.block_bytes != self.block_bytes {
            return Some(format!(
                "it had blocks of {} bytes, now of {}",
                self.block_bytes, now.block_bytes
            ));
        }
        (now.ids != self.ids).then(|| {
            format!(
                "its identifiers were uuid {}, nguid {}, now uuid {}, nguid {}",
                hex(&self.ids.uuid),
                hex(&self.ids.nguid),
                hex(&now.ids.uuid),
                hex(&now.ids.nguid)
            )
        })
    }
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transfers_obey_mdts_our_own_limit_and_the_boundary() {
        let mut facts = Facts {
            block_bytes: 512,
            size_bytes: 1 << 30,
            ..Default::default()
        };
        assert_eq!(facts.max_transfer_bytes(), CHUNK_BYTES);
        facts.mdts_bytes = Some(131072);
        assert_eq!((facts.max_transfer_bytes(), facts.fit(3, 1000)), (131072, 256));
        facts.noiob = 64;
        assert_eq!(
            (facts.fit(0, 1000), facts.fit(60, 1000), facts.fit(60, 2)),
            (64, 4, 2)
        );
        facts.mdts_bytes = Some(1);
        assert_eq!(facts.max_transfer_bytes(), 512);
    }

    #[test]
    fn retry_delays_are_the_controllers_and_bounded() {
        let facts = Facts {
            crdt: [2, 0, u16::MAX],
            ..Default::default()
        };
        let delays: Vec<_> = (0..5).map(|crd| facts.retry_delay(crd)).collect();
        assert_eq!(
            delays,
            [
                None,
                Some(Duration::from_millis(200)),
                Some(Duration::ZERO),
                Some(RETRY_DELAY_MAX),
                None
            ]
        );
    }
}

//! What an administrator changes while hosts are connected: what they are told, and what their commands are answered.

#[path = "../common/mod.rs"]
mod common;

mod namespaces;
mod paths_and_hosts;

use common::{admin, config, eventually, io, pattern, Client, HOST, NQN};
use headrace_target::{HostAccess, NamespaceConfig, Target};
use headrace_wire::ana::{AnaLog, AnaState, GROUPS_ONLY};
use headrace_wire::event::{async_event_request, config as aen, notice, AsyncEvent, ChangedNamespaces};
use headrace_wire::fabrics::CNTLID_DYNAMIC;
use headrace_wire::identify::{cmic, IdentifyController, IdentifyNamespace, IndependentNamespace};
use headrace_wire::log::{get_log_page, lid, with_lsp, DiscoveryEntry, DiscoveryHeader};
use headrace_wire::pdu::Digests;
use headrace_wire::{Sgl, Sqe, Status, DISCOVERY_NQN};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

const WAIT: Duration = Duration::from_secs(10);

fn namespace(text: &str) -> NamespaceConfig {
    serde_json::from_str(text).unwrap()
}

fn memory(nsid: u32) -> NamespaceConfig {
    namespace(&format!(
        r#"{{"nsid": {nsid}, "media": {{"kind": "memory", "size_bytes": 1048576}}}}"#
    ))
}

fn file(nsid: u32, path: &Path) -> NamespaceConfig {
    namespace(&format!(
        r#"{{"nsid": {nsid}, "media": {{"kind": "file", "path": {path:?}, "size_bytes": 1048576, "create": true}}}}"#
    ))
}

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("headrace-runtime-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).ok();
    }
}

fn identify(client: &mut Client, cns: u32, nsid: u32) -> Vec<u8> {
    let cid = client.cid();
    let sqe = Sqe::new(6, cid, nsid)
        .with_cdw(10, cns)
        .with_sgl(Sgl::Transport { length: 4096 });
    let answer = client.command(sqe, &[]);
    assert!(answer.cqe.status.is_success(), "{}", answer.cqe.status);
    answer.data
}

fn log(client: &mut Client, lid: u8, length: u32) -> Vec<u8> {
    let cid = client.cid();
    client
        .command(get_log_page(cid, 0xFFFF_FFFF, lid, 0, length), &[])
        .data
}

fn changed(client: &mut Client) -> ChangedNamespaces {
    ChangedNamespaces::decode(&log(client, lid::CHANGED_NAMESPACES, 4096))
}

fn ana(client: &mut Client) -> AnaLog {
    AnaLog::decode(&log(client, lid::ANA, 4096)).unwrap()
}

/// Let these events out, and have one request for them held.
fn listen(client: &mut Client, events: u32) -> u16 {
    let cid = client.cid();
    let sqe = Sqe::new(9, cid, 0).with_cdw(10, 0x0B).with_cdw(11, events);
    assert!(client.command(sqe, &[]).cqe.status.is_success());
    ask(client)
}

fn ask(client: &mut Client) -> u16 {
    let cid = client.cid();
    client.send_capsule(async_event_request(cid), &[]);
    cid
}

fn event(client: &mut Client, request: u16) -> (u8, u8) {
    let event = AsyncEvent::from_dw0(client.answer(request).cqe.dw0);
    assert_eq!(event.kind, 2);
    (event.info, event.lid)
}

fn read(client: &mut Client, nsid: u32) -> Status {
    let cid = client.cid();
    let sqe = Sqe::rw(2, cid, nsid, 0, 1).with_sgl(Sgl::Transport { length: 4096 });
    client.command(sqe, &[]).cqe.status
}

fn write(client: &mut Client, nsid: u32, slba: u64, byte: u8) -> Status {
    let cid = client.cid();
    let sqe = Sqe::rw(1, cid, nsid, slba, 1).with_sgl(Sgl::InCapsule {
        offset: 0,
        length: 4096,
    });
    client.command(sqe, &[byte; 4096]).cqe.status
}

/// As one host, to a discovery controller.
fn discovery(address: SocketAddr) -> Client {
    let mut client = Client::open(address);
    client.initialise(Digests::default(), 0);
    let cqe = client.connect(0, CNTLID_DYNAMIC, |_, data| data.subnqn = DISCOVERY_NQN.into());
    assert!(cqe.status.is_success(), "{}", cqe.status);
    client.enable();
    client
}

fn discovery_log(client: &mut Client) -> (u64, Vec<DiscoveryEntry>) {
    let header = DiscoveryHeader::decode(&log(client, lid::DISCOVERY, 1024)).unwrap();
    let cid = client.cid();
    let length = header.numrec as u32 * 1024;
    let data = client
        .command(get_log_page(cid, 0, lid::DISCOVERY, 1024, length), &[])
        .data;
    let entries = data.chunks(1024).map(|b| DiscoveryEntry::decode(b).unwrap());
    (header.genctr, entries.collect())
}

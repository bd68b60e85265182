//! A scripted controller: threads on real sockets, `native/wire` for the bytes, and a hook that may answer any command
//! differently. It is small and trusting; it stands for a peer, never for our target.

#![allow(dead_code)]

use headrace_host::HostOptions;
use headrace_wire::fabrics::{property, Cap, Connect, ConnectResponse, Csts, PropertyAccess};
use headrace_wire::identify::{
    cns, encode_descriptors, IdentifyController, IdentifyNamespace, LbaFormat, NamespaceId, SGLS_TCP,
};
use headrace_wire::log::{DiscoveryEntry, DiscoveryHeader, LogRequest};
use headrace_wire::pdu::{CommonHeader, DataHeader, Digests, IcResp, Pdu, R2t, TermReq};
use headrace_wire::{admin, io, Cqe, Sgl, Sqe, Status};
use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

pub const NQN: &str = "nqn.2026-01.test:subsystem";
pub const BLOCK: usize = 512;
pub const BLOCKS: usize = 16384;

/// What the hook wants done with a command.
pub enum Action {
    Normal,
    Status(Status, u32),
    /// Send these bytes instead of an answer.
    Raw(Vec<u8>),
    /// Send these bytes, then go on as usual.
    RawThenNormal(Vec<u8>),
    /// Answer a read with success after only so many bytes.
    Short(usize),
    /// Flip a bit of the data digest of the answer.
    BadDataDigest,
    BadHeaderDigest,
    /// Never answer.
    Silent,
    /// End this connection, after this many bytes of the answer's data (reads), or at once.
    Vanish(usize),
    /// Ask for this many bytes of the write, take them, and end the connection.
    VanishInWrite(usize),
    /// Answer a write before it was asked for its data.
    RefuseEarly(Status),
}

pub struct Seen {
    pub qid: u16,
    pub sqe: Sqe,
    pub data: Vec<u8>,
    /// Sizes of the H2CData PDUs that brought the data.
    pub pieces: Vec<usize>,
}

type Hook = Box<dyn Fn(u16, &Sqe, usize) -> Action + Send + Sync>;

pub struct Script {
    pub mdts: u8,
    pub ioccsz: u32,
    pub cpda: u8,
    pub maxh2cdata: u32,
    pub r2t_bytes: usize,
    pub c2h_bytes: usize,
    pub success: bool,
    pub mqes: u16,
    pub queues: u32,
    pub vwc: u8,
    pub ready_after: usize,
    pub lbads: u8,
    pub uuid: [u8; 16],
    pub noiob: u16,
    pub refuse_digests: bool,
    pub entries: Vec<DiscoveryEntry>,
    /// Given queue, command, and how many commands this controller saw before.
    pub hook: Hook,
}

impl Default for Script {
    fn default() -> Self {
        Script {
            mdts: 0,
            ioccsz: 4 + 4096 / 16,
            cpda: 0,
            maxh2cdata: 65536,
            r2t_bytes: usize::MAX,
            c2h_bytes: usize::MAX,
            success: false,
            mqes: 127,
            queues: 4,
            vwc: 1,
            ready_after: 0,
            lbads: 9,
            uuid: [7; 16],
            noiob: 0,
            refuse_digests: false,
            entries: Vec::new(),
            hook: Box::new(|_, _, _| Action::Normal),
        }
    }
}

struct State {
    script: Script,
    media: Mutex<Vec<u8>>,
    seen: Mutex<Vec<Seen>>,
    count: AtomicUsize,
    polls: AtomicUsize,
    shutdowns: AtomicUsize,
    down: AtomicBool,
    terms: Mutex<Vec<TermReq>>,
    sockets: Mutex<Vec<TcpStream>>,
    stop: AtomicBool,
    connections: AtomicUsize,
}

pub struct Fake {
    pub port: u16,
    state: Arc<State>,
    acceptor: Option<JoinHandle<()>>,
}

impl Fake {
    pub fn start(script: Script) -> Fake {
        Self::start_at(0, script, vec![0; BLOCKS * BLOCK])
    }

    pub fn start_at(port: u16, script: Script, media: Vec<u8>) -> Fake {
        let listener = TcpListener::bind(("127.0.0.1", port)).expect("bind");
        let port = listener.local_addr().expect("address").port();
        let state = Arc::new(State {
            script,
            media: Mutex::new(media),
            seen: Mutex::default(),
            count: AtomicUsize::new(0),
            polls: AtomicUsize::new(0),
            shutdowns: AtomicUsize::new(0),
            down: AtomicBool::new(false),
            terms: Mutex::default(),
            sockets: Mutex::default(),
            stop: AtomicBool::new(false),
            connections: AtomicUsize::new(0),
        });
        let shared = state.clone();
        let acceptor = std::thread::spawn(move || {
            let mut threads = Vec::new();
            for stream in listener.incoming() {
                if shared.stop.load(Ordering::SeqCst) {
                    break;
                }
                let stream = stream.expect("accept");
                shared.connections.fetch_add(1, Ordering::SeqCst);
                stream
                    .set_read_timeout(Some(Duration::from_secs(20)))
                    .expect("timeout");
                shared
                    .sockets
                    .lock()
                    .unwrap()
                    .push(stream.try_clone().expect("clone"));
                let state = shared.clone();
                threads.push(std::thread::spawn(move || {
                    let mut peer = Peer::new(state, stream);
                    let _ = peer.serve();
                    let _ = peer.stream.shutdown(Shutdown::Both);
                }));
            }
            drop(listener);
            for thread in threads {
                let _ = thread.join();
            }
        });
        Fake {
            port,
            state,
            acceptor: Some(acceptor),
        }
    }

    /// Die: every socket and the listener go.
    pub fn stop(&mut self) {
        self.state.stop.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(("127.0.0.1", self.port));
        for socket in self.state.sockets.lock().unwrap().iter() {
            let _ = socket.shutdown(Shutdown::Both);
        }
        if let Some(acceptor) = self.acceptor.take() {
            acceptor.join().expect("acceptor");
        }
    }

    pub fn options(&self) -> HostOptions {
        HostOptions {
            host: "127.0.0.1".into(),
            port: self.port,
            subsysnqn: NQN.into(),
            nsid: 1,
            hostnqn: "nqn.2026-01.test:host".into(),
            hostid: [9; 16],
            header_digest: false,
            data_digest: false,
            queues: 1,
            depth: 16,
            keep_alive: Duration::from_secs(5),
            connect_timeout: Duration::from_secs(5),
            io_timeout: Duration::from_secs(5),
            loss_timeout: Duration::from_secs(10),
        }
    }

    pub fn seen(&self) -> std::sync::MutexGuard<'_, Vec<Seen>> {
        self.state.seen.lock().unwrap()
    }
    pub fn media(&self) -> Vec<u8> {
        self.state.media.lock().unwrap().clone()
    }
    pub fn set_media(&self, at: usize, bytes: &[u8]) {
        self.state.media.lock().unwrap()[at..at + bytes.len()].copy_from_slice(bytes);
    }
    pub fn shutdowns(&self) -> usize {
        self.state.shutdowns.load(Ordering::SeqCst)
    }
    pub fn connections(&self) -> usize {
        self.state.connections.load(Ordering::SeqCst)
    }
    pub fn terms(&self) -> Vec<TermReq> {
        self.state.terms.lock().unwrap().clone()
    }
    /// Opcodes seen on I/O queues, Connect left out.
    pub fn io_commands(&self) -> Vec<u8> {
        self.seen()
            .iter()
            .filter(|s| s.qid > 0 && s.sqe.opcode() != admin::FABRICS)
            .map(|s| s.sqe.opcode())
            .collect()
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.stop();
    }
}

struct Peer {
    state: Arc<State>,
    stream: TcpStream,
    digests: Digests,
    qid: u16,
    backlog: VecDeque<(Pdu, Vec<u8>)>,
}

type Broken = std::io::Result<()>;

fn over<T>() -> std::io::Result<T> {
    Err(std::io::ErrorKind::ConnectionAborted.into())
}

impl Peer {
    fn new(state: Arc<State>, stream: TcpStream) -> Self {
        let _ = stream.set_nodelay(true);
        Peer {
            state,
            stream,
            digests: Digests::default(),
            qid: 0,
            backlog: VecDeque::new(),
        }
    }

    fn pdu(&mut self) -> std::io::Result<(Pdu, Vec<u8>)> {
        let mut first = [0; 8];
        self.stream.read_exact(&mut first)?;
        let common = CommonHeader::decode(&first, self.digests, self.state.script.cpda).expect("a sound PDU");
        let layout = common.layout(self.digests).expect("a sound layout");
        let mut bytes = vec![0; layout.plen()];
        bytes[..8].copy_from_slice(&first);
        self.stream.read_exact(&mut bytes[8..])?;
        let header = &bytes[..layout.header_bytes];
        if layout.header_digest_bytes > 0 {
            let digest = &bytes[layout.header_bytes..layout.header_bytes + 4];
            assert_eq!(
                digest,
                headrace_wire::crc32c(header).to_le_bytes(),
                "the host's header digest"
            );
        }
        let data = bytes[layout.prefix_bytes()..layout.prefix_bytes() + layout.data_bytes].to_vec();
        if layout.data_digest_bytes > 0 {
            let digest = &bytes[layout.plen() - 4..];
            assert_eq!(
                digest,
                headrace_wire::crc32c(&data).to_le_bytes(),
                "the host's data digest"
            );
        }
        let pdu = Pdu::decode(&common, header).expect("a sound header");
        if let Pdu::H2cTermReq(term) = &pdu {
            self.state.terms.lock().unwrap().push(*term);
            return over();
        }
        Ok((pdu, data))
    }

    fn serve(&mut self) -> Broken {
        let (pdu, _) = self.pdu()?;
        let Pdu::IcReq(request) = pdu else {
            panic!("first came {pdu:?}");
        };
        let script = &self.state.script;
        let digests = if script.refuse_digests {
            Digests::default()
        } else {
            request.digests
        };
        let response = IcResp {
            pfv: 0,
            cpda: script.cpda,
            digests,
            maxh2cdata: script.maxh2cdata,
        };
        self.put(Pdu::IcResp(response))?;
        self.digests = digests;
        loop {
            let (pdu, data) = match self.backlog.pop_front() {
                Some(entry) => entry,
                None => self.pdu()?,
            };
            let Pdu::CapsuleCmd(sqe) = pdu else {
                panic!("unexpected {pdu:?}");
            };
            self.command(sqe, data)?;
        }
    }

    fn encode(&self, pdu: &Pdu, data: &[u8], bad_header: bool, bad_data: bool) -> Vec<u8> {
        let mut bytes = Vec::new();
        let layout = pdu.encode(data.len(), self.digests, 0, &mut bytes);
        if bad_header {
            bytes[layout.header_bytes] ^= 1;
        }
        bytes.extend_from_slice(data);
        if layout.data_digest_bytes > 0 {
            let digest = headrace_wire::crc32c(data) ^ u32::from(bad_data);
            bytes.extend_from_slice(&digest.to_le_bytes());
        }
        bytes
    }

    fn put(&mut self, pdu: Pdu) -> Broken {
        let bytes = self.encode(&pdu, &[], false, false);
        self.stream.write_all(&bytes)
    }

    fn complete(&mut self, cid: u16, status: Status, dw0: u32) -> Broken {
        self.put(Pdu::CapsuleResp(Cqe {
            dw0,
            ..Cqe::new(cid, status)
        }))
    }

    fn command(&mut self, sqe: Sqe, mut data: Vec<u8>) -> Broken {
        let number = self.state.count.fetch_add(1, Ordering::SeqCst);
        if sqe.opcode() == admin::FABRICS && sqe.fctype() == 1 {
            self.qid = Connect::decode(&sqe).qid;
        }
        let state = self.state.clone();
        let action = (state.script.hook)(self.qid, &sqe, number);
        let mut pieces = Vec::new();
        let cid = sqe.cid();
        let from_host = match (self.qid, sqe.opcode(), sqe.sgl()) {
            (0, _, _) => None,
            (_, io::WRITE | io::DATASET_MANAGEMENT, Sgl::Transport { length }) => Some(length as usize),
            _ => None,
        };
        match &action {
            Action::Vanish(_) if sqe.opcode() != io::READ => return over(),
            Action::RefuseEarly(status) => {
                // One R2T, whose data the host has not sent when the answer comes.
                let length = from_host.unwrap_or(0) as u32;
                self.put(Pdu::R2t(R2t {
                    cccid: cid,
                    ttag: 1,
                    r2to: 0,
                    r2tl: length,
                }))?;
                self.complete(cid, *status, 0)?;
                let mut left = length as usize;
                while left > 0 {
                    let (pdu, piece) = self.pdu()?;
                    match pdu {
                        Pdu::H2cData(_) => left -= piece.len(),
                        other => self.backlog.push_back((other, piece)),
                    }
                }
                return Ok(());
            }
            _ => {}
        }
        let limit = match action {
            Action::VanishInWrite(limit) => limit,
            _ => usize::MAX,
        };
        if let (Some(total), Action::Normal | Action::VanishInWrite(_) | Action::Status(..)) =
            (from_host, &action)
        {
            self.pull(cid, total, limit, &mut data, &mut pieces)?;
        }
        if limit != usize::MAX {
            return over();
        }
        state.seen.lock().unwrap().push(Seen {
            qid: self.qid,
            sqe,
            data: data.clone(),
            pieces,
        });
        match action {
            Action::Status(status, dw0) => self.complete(cid, status, dw0),
            Action::Raw(bytes) => self.stream.write_all(&bytes),
            Action::Silent => Ok(()),
            Action::RawThenNormal(bytes) => {
                self.stream.write_all(&bytes)?;
                self.answer(&sqe, data, Action::Normal)
            }
            action => self.answer(&sqe, data, action),
        }
    }

    fn pull(
        &mut self,
        cid: u16,
        total: usize,
        limit: usize,
        data: &mut Vec<u8>,
        pieces: &mut Vec<usize>,
    ) -> Broken {
        let mut ttag = 100;
        while data.len() < total.min(limit) {
            let at = data.len();
            let length = (total - at).min(self.state.script.r2t_bytes);
            self.put(Pdu::R2t(R2t {
                cccid: cid,
                ttag,
                r2to: at as u32,
                r2tl: length as u32,
            }))?;
            while data.len() < at + length {
                let (pdu, piece) = self.pdu()?;
                match pdu {
                    Pdu::H2cData(header) => {
                        assert_eq!(
                            (header.cccid, header.ttag, header.datao as usize),
                            (cid, ttag, data.len())
                        );
                        assert_eq!(header.datal as usize, piece.len());
                        assert!(piece.len() <= self.state.script.maxh2cdata as usize);
                        assert_eq!(header.last, data.len() + piece.len() == at + length);
                        pieces.push(piece.len());
                        data.extend_from_slice(&piece);
                        if data.len() >= limit {
                            return Ok(());
                        }
                    }
                    other => self.backlog.push_back((other, piece)),
                }
            }
            ttag += 1;
        }
        Ok(())
    }

    fn answer(&mut self, sqe: &Sqe, data: Vec<u8>, action: Action) -> Broken {
        let cid = sqe.cid();
        if self.qid == 0 || sqe.opcode() == admin::FABRICS {
            return self.admin(sqe, &data, action);
        }
        let at = sqe.slba() as usize * BLOCK;
        let length = sqe.nlb() as usize * BLOCK;
        match sqe.opcode() {
            io::READ => {
                let bytes = self.state.media.lock().unwrap()[at..at + length].to_vec();
                self.give(cid, &bytes, action)
            }
            io::WRITE => {
                assert_eq!(data.len(), length);
                self.state.media.lock().unwrap()[at..at + length].copy_from_slice(&data);
                self.complete(cid, Status::SUCCESS, 0)
            }
            io::FLUSH | io::DATASET_MANAGEMENT | io::WRITE_ZEROES => self.complete(cid, Status::SUCCESS, 0),
            _ => self.complete(cid, Status::INVALID_OPCODE.do_not_retry(), 0),
        }
    }

    fn give(&mut self, cid: u16, bytes: &[u8], action: Action) -> Broken {
        let (end, vanish) = match action {
            Action::Short(end) => (end, false),
            Action::Vanish(end) => (end, true),
            _ => (bytes.len(), false),
        };
        let bad = matches!(action, Action::BadDataDigest);
        let bad_header = matches!(action, Action::BadHeaderDigest);
        let mut at = 0;
        while at < end {
            let step = (end - at).min(self.state.script.c2h_bytes);
            let last = at + step == end;
            let success = last && self.state.script.success && !vanish;
            let header = DataHeader {
                cccid: cid,
                ttag: 0,
                datao: at as u32,
                datal: step as u32,
                last,
                success,
            };
            let sent = self.encode(&Pdu::C2hData(header), &bytes[at..at + step], bad_header, bad);
            self.stream.write_all(&sent)?;
            at += step;
        }
        if vanish {
            // Let the host take what was sent before the end comes.
            std::thread::sleep(Duration::from_millis(30));
            return over();
        }
        if self.state.script.success && end > 0 {
            return Ok(());
        }
        self.complete(cid, Status::SUCCESS, 0)
    }

    fn admin(&mut self, sqe: &Sqe, data: &[u8], action: Action) -> Broken {
        let cid = sqe.cid();
        let script = &self.state.script;
        match sqe.opcode() {
            admin::FABRICS => match sqe.fctype() {
                1 => {
                    if self.qid == 0 {
                        self.state.down.store(false, Ordering::SeqCst);
                    }
                    assert_eq!(data.len(), 1024);
                    self.complete(cid, Status::SUCCESS, ConnectResponse(0x55).0)
                }
                0 => {
                    let access = PropertyAccess::decode(sqe);
                    if access.offset == property::CC && access.value >> 14 & 3 == 1 {
                        self.state.shutdowns.fetch_add(1, Ordering::SeqCst);
                        self.state.down.store(true, Ordering::SeqCst);
                    }
                    self.complete(cid, Status::SUCCESS, 0)
                }
                _ => {
                    let access = PropertyAccess::decode(sqe);
                    let value = match access.offset {
                        property::CAP => Cap::new(script.mqes, 10).0,
                        property::VS => 0x20000,
                        _ if self.state.down.load(Ordering::SeqCst) => Csts::SHUTDOWN_DONE.into(),
                        _ => u64::from(self.state.polls.fetch_add(1, Ordering::SeqCst) >= script.ready_after),
                    };
                    let cqe = Cqe {
                        dw0: value as u32,
                        dw1: (value >> 32) as u32,
                        ..Cqe::new(cid, Status::SUCCESS)
                    };
                    self.put(Pdu::CapsuleResp(cqe))
                }
            },
            admin::IDENTIFY => {
                let bytes = match sqe.cdw(10) as u8 {
                    cns::CONTROLLER => IdentifyController {
                        serial: "S1".into(),
                        model: "fake".into(),
                        mdts: script.mdts,
                        cntlid: 0x55,
                        cntrltype: 1,
                        oncs: 4,
                        vwc: script.vwc,
                        sgls: SGLS_TCP,
                        ioccsz: script.ioccsz,
                        iorcsz: 1,
                        nn: 1,
                        subnqn: NQN.into(),
                        ..Default::default()
                    }
                    .encode(),
                    cns::NAMESPACE if sqe.nsid() == 1 => IdentifyNamespace {
                        nsze: ((BLOCKS * BLOCK) >> script.lbads) as u64,
                        noiob: script.noiob,
                        formats: vec![LbaFormat {
                            ms: 0,
                            lbads: script.lbads,
                        }],
                        ..Default::default()
                    }
                    .encode(),
                    cns::NAMESPACE_DESCRIPTORS => encode_descriptors(&[NamespaceId::Uuid(script.uuid)]),
                    _ => vec![0; 4096],
                };
                self.give(cid, &bytes, action)
            }
            admin::SET_FEATURES => {
                let granted = script.queues - 1;
                self.complete(cid, Status::SUCCESS, granted | granted << 16)
            }
            admin::GET_LOG_PAGE => {
                let request = LogRequest::decode(sqe);
                let mut log = DiscoveryHeader {
                    genctr: 3,
                    numrec: script.entries.len() as u64,
                }
                .encode()
                .to_vec();
                script
                    .entries
                    .iter()
                    .for_each(|entry| log.extend_from_slice(&entry.encode()));
                let (at, length) = (request.offset as usize, request.length as usize);
                let bytes = log[at..at + length].to_vec();
                self.give(cid, &bytes, action)
            }
            _ => self.complete(cid, Status::SUCCESS, 0),
        }
    }
}

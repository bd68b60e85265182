//! A scripted controller: threads on real sockets, `native/wire` for the bytes, and a hook that may answer any command
//! differently. It is small and trusting; it stands for a peer, never for our target.

#![allow(dead_code)]

mod peer;

use headrace_host::{HostOptions, NamespaceKey, Portal};
use headrace_wire::ana::AnaLog;
use headrace_wire::event::{AsyncEvent, ChangedNamespaces};
use headrace_wire::log::DiscoveryEntry;
use headrace_wire::pdu::{Digests, TermReq};
use headrace_wire::{admin, Cqe, Pdu, Sqe, Status};
use peer::Peer;
use socket2::{Domain, Socket, Type};
use std::io::Write;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
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
    /// Answer as usual, so much later.
    Late(Duration),
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
    /// Of namespace 1; others by number.
    pub uuid: [u8; 16],
    pub others: Vec<(u32, [u8; 16])>,
    pub oaes: u32,
    pub aerl: u8,
    pub cmic: u8,
    pub ctratt: u32,
    pub ana: AnaLog,
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
            others: Vec::new(),
            oaes: 0,
            aerl: 3,
            cmic: 0,
            ctratt: 0,
            ana: AnaLog::default(),
            noiob: 0,
            refuse_digests: false,
            entries: Vec::new(),
            hook: Box::new(|_, _, _| Action::Normal),
        }
    }
}

/// What rests behind one or several controllers, like the ports of one subsystem.
pub struct Media {
    /// What everybody reads.
    pub bytes: Mutex<Vec<u8>>,
    /// What a power loss would leave: each controller brings its own writes here, when it is told to flush.
    pub durable: Mutex<Vec<u8>>,
}

impl Media {
    pub fn new(bytes: Vec<u8>) -> Arc<Media> {
        Arc::new(Media {
            durable: Mutex::new(bytes.clone()),
            bytes: Mutex::new(bytes),
        })
    }
}

struct State {
    script: Script,
    media: Arc<Media>,
    /// Writes of this controller that no flush has brought to rest.
    cached: Mutex<Vec<(usize, Vec<u8>)>>,
    seen: Mutex<Vec<Seen>>,
    count: AtomicUsize,
    polls: AtomicUsize,
    shutdowns: AtomicUsize,
    down: AtomicBool,
    terms: Mutex<Vec<TermReq>>,
    sockets: Mutex<Vec<TcpStream>>,
    stop: AtomicBool,
    connections: AtomicUsize,
    ana: Mutex<AnaLog>,
    blocks: AtomicU64,
    changed: Mutex<ChangedNamespaces>,
    held: Mutex<Vec<Held>>,
}

/// An Asynchronous Event Request that waits.
struct Held {
    stream: TcpStream,
    cid: u16,
}

/// A port of 127.0.0.1 that is nobody else's until this is dropped: bound, and never listening. Whoever names it may listen
/// there; the kernel gives it to nobody, and a connection is refused while nobody listens.
pub struct Port(Socket);

impl Port {
    pub fn new() -> Port {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("socket");
        socket.set_reuse_address(true).expect("option");
        let any = std::net::SocketAddr::from(([127, 0, 0, 1], 0));
        socket.bind(&any.into()).expect("bind");
        Port(socket)
    }

    pub fn number(&self) -> u16 {
        self.0.local_addr().unwrap().as_socket().unwrap().port()
    }
}

/// As `Port`, until this process ends.
pub fn free_port() -> u16 {
    let port = Port::new();
    let number = port.number();
    std::mem::forget(port);
    number
}

pub struct Fake {
    pub port: u16,
    /// Where it chose the port itself: that of the next one, too, when it has died.
    _held: Option<Port>,
    state: Arc<State>,
    acceptor: Option<JoinHandle<()>>,
}

impl Fake {
    pub fn start(script: Script) -> Fake {
        Self::start_at(0, script, vec![0; BLOCKS * BLOCK])
    }

    pub fn start_at(port: u16, script: Script, media: Vec<u8>) -> Fake {
        Self::start_over(port, script, Media::new(media))
    }

    pub fn start_over(port: u16, script: Script, media: Arc<Media>) -> Fake {
        let held = (port == 0).then(Port::new);
        let port = held.as_ref().map_or(port, Port::number);
        let listener = TcpListener::bind(("127.0.0.1", port)).expect("bind");
        let state = Arc::new(State {
            ana: Mutex::new(script.ana.clone()),
            blocks: AtomicU64::new(BLOCKS as u64),
            changed: Mutex::new(ChangedNamespaces::List(vec![])),
            held: Mutex::default(),
            script,
            media,
            cached: Mutex::default(),
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
            _held: held,
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
            portals: vec![Portal::new("127.0.0.1", self.port)],
            subsysnqn: NQN.into(),
            namespace: NamespaceKey::Nsid(1),
            hostnqn: "nqn.2026-01.test:host".into(),
            hostid: [9; 16],
            depth: 16,
            keep_alive: Duration::from_secs(5),
            connect_timeout: Duration::from_secs(5),
            io_timeout: Duration::from_secs(5),
            loss_timeout: Some(Duration::from_secs(10)),
            ..Default::default()
        }
    }

    pub fn seen(&self) -> std::sync::MutexGuard<'_, Vec<Seen>> {
        self.state.seen.lock().unwrap()
    }
    pub fn media(&self) -> Vec<u8> {
        self.state.media.bytes.lock().unwrap().clone()
    }
    pub fn set_media(&self, at: usize, bytes: &[u8]) {
        self.state.media.bytes.lock().unwrap()[at..at + bytes.len()].copy_from_slice(bytes);
    }
    /// Answer a request of each controller's host that waits. `false`: none does.
    pub fn raise(&self, event: AsyncEvent) -> bool {
        let Some(mut held) = self.state.held.lock().unwrap().pop() else {
            return false;
        };
        let cqe = Cqe {
            dw0: event.dw0(),
            ..Cqe::new(held.cid, Status::SUCCESS)
        };
        let mut bytes = Vec::new();
        Pdu::CapsuleResp(cqe).encode(0, Digests::default(), 0, &mut bytes);
        held.stream.write_all(&bytes).is_ok()
    }
    pub fn waiting_requests(&self) -> usize {
        self.state.held.lock().unwrap().len()
    }
    pub fn set_ana(&self, log: AnaLog) {
        *self.state.ana.lock().unwrap() = log;
    }
    pub fn set_blocks(&self, blocks: u64) {
        self.state.blocks.store(blocks, Ordering::SeqCst);
    }
    pub fn set_changed(&self, changed: ChangedNamespaces) {
        *self.state.changed.lock().unwrap() = changed;
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

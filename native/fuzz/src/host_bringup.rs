//! Invariant: whatever a controller answers while a host connects to it, over a real socket and with the host's real life:
//! opening the device ends in time, with a device or with a sentence, and the I/O thread lives.

use headrace_host::testing::options;
use headrace_host::{NvmeTcpDevice, Portal};
use headrace_sim::client::encode;
use headrace_sim::{HOST, NQN};
use headrace_transfer::BlockDevice;
use headrace_wire::command::{admin, Cqe, Sqe};
use headrace_wire::fabrics::{fctype, property, Cap, PropertyAccess};
use headrace_wire::identify::{
    cns, encode_descriptors, IdentifyController, IdentifyNamespace, LbaFormat, NamespaceId, SGLS_TCP,
};
use headrace_wire::log::LogRequest;
use headrace_wire::pdu::{DataHeader, Digests, IcResp, Pdu};
use headrace_wire::Status;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::Mutex;
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_millis(150);
/// Generous: the machine may be busy.
const AT_MOST: Duration = Duration::from_secs(15);

/// What the fuzzer still has to say.
struct Script<'a>(Mutex<&'a [u8]>);

impl Script<'_> {
    fn byte(&self) -> Option<u8> {
        let mut rest = self.0.lock().unwrap_or_else(|e| e.into_inner());
        let (&first, behind) = rest.split_first()?;
        *rest = behind;
        Some(first)
    }

    fn number(&self) -> usize {
        usize::from(self.byte().unwrap_or(0)) | usize::from(self.byte().unwrap_or(0)) << 8
    }

    /// The right answer, or what the input makes of it; `None`: the connection ends.
    fn spoil(&self, mut answer: Vec<u8>) -> Option<Vec<u8>> {
        match self.byte().unwrap_or(0) {
            0..=120 => {}
            what @ 121..=220 => {
                for _ in 0..=what % 4 {
                    let (at, value) = (self.number(), self.byte().unwrap_or(0));
                    let length = answer.len().max(1);
                    if let Some(byte) = answer.get_mut(at % length) {
                        *byte = value;
                    }
                }
            }
            221..=230 => {
                let again = answer.clone();
                answer.extend(again);
            }
            231..=240 => answer.truncate(self.number() % (answer.len() + 1)),
            241..=248 => {
                let length = self.number() % 200;
                answer = (0..length).map_while(|_| self.byte()).collect();
            }
            249..=252 => answer.clear(),
            _ => return None,
        }
        Some(answer)
    }
}

pub fn run(data: &[u8]) {
    let script = Script(Mutex::new(data));
    let (done, cc) = (AtomicBool::new(false), AtomicU32::new(0));
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port();
    listener.set_nonblocking(true).expect("a socket");
    std::thread::scope(|scope| {
        let (script, done, cc) = (&script, &done, &cc);
        let listener = &listener;
        scope.spawn(move || {
            while !done.load(Ordering::SeqCst) {
                match listener.accept() {
                    Ok((stream, _)) => {
                        scope.spawn(move || serve(stream, script, done, cc));
                    }
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {
                        std::thread::sleep(Duration::from_micros(200));
                    }
                    Err(error) => panic!("accept: {error}"),
                }
            }
        });
        let mut asked = options(NQN, HOST);
        asked.portals = vec![Portal::new("127.0.0.1", port)];
        asked.connect_timeout = PATIENCE;
        asked.io_timeout = PATIENCE;
        let begin = Instant::now();
        let opened = std::panic::catch_unwind(|| NvmeTcpDevice::open(asked));
        match opened {
            Ok(Ok(device)) => {
                let info = device.info();
                assert!(info.block_bytes >= 512 && info.size_bytes > 0 && info.max_transfer_bytes > 0);
                device.close(PATIENCE);
            }
            Ok(Err(error)) => {
                let text = error.to_string();
                assert!(!data.is_empty(), "a right controller is refused: {text}");
                assert!(!text.is_empty() && !text.contains("defect of headrace"), "{text}");
            }
            Err(_) => {
                done.store(true, Ordering::SeqCst);
                panic!("opening panics");
            }
        }
        done.store(true, Ordering::SeqCst);
        assert!(begin.elapsed() < AT_MOST, "opening took {:?}", begin.elapsed());
    });
}

/// `false`: the connection or the test is over.
fn receive(stream: &mut TcpStream, bytes: &mut [u8], done: &AtomicBool) -> bool {
    let mut have = 0;
    while have < bytes.len() {
        match stream.read(&mut bytes[have..]) {
            Ok(0) => return false,
            Ok(count) => have += count,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                if done.load(Ordering::SeqCst) {
                    return false;
                }
            }
            Err(_) => return false,
        }
    }
    true
}

fn serve(mut stream: TcpStream, script: &Script<'_>, done: &AtomicBool, cc: &AtomicU32) {
    // Accepted sockets may inherit it; and nobody waits for an answer for long.
    let ready = stream.set_nonblocking(false).is_ok()
        && stream.set_read_timeout(Some(Duration::from_millis(20))).is_ok()
        && stream.set_nodelay(true).is_ok();
    let mut hello = [0; 128];
    if !ready || !receive(&mut stream, &mut hello, done) {
        return;
    }
    let response = Pdu::IcResp(IcResp {
        pfv: 0,
        cpda: 0,
        digests: Digests::default(),
        maxh2cdata: 65536,
    });
    let mut answer = encode(&response, &[], Digests::default(), 0);
    loop {
        match script.spoil(answer) {
            Some(bytes) if stream.write_all(&bytes).is_ok() => {}
            _ => return,
        }
        let mut capsule = [0; 72];
        if !receive(&mut stream, &mut capsule, done) {
            return;
        }
        let plen = u32::from_le_bytes([capsule[4], capsule[5], capsule[6], capsule[7]]) as usize;
        let mut data = vec![0; plen.saturating_sub(72).min(1 << 16)];
        if capsule[0] != 4 || !receive(&mut stream, &mut data, done) {
            return;
        }
        let mut sqe = [0; 64];
        sqe.copy_from_slice(&capsule[8..]);
        answer = respond(&Sqe(sqe), cc);
    }
}

/// As a right controller would; empty: not now.
fn respond(sqe: &Sqe, cc: &AtomicU32) -> Vec<u8> {
    let none = Digests::default();
    let value = |dw0: u64| {
        let cqe = Cqe {
            dw0: dw0 as u32,
            dw1: (dw0 >> 32) as u32,
            ..Cqe::new(sqe.cid(), Status::SUCCESS)
        };
        encode(&Pdu::CapsuleResp(cqe), &[], none, 0)
    };
    let refuse = || {
        encode(
            &Pdu::CapsuleResp(Cqe::new(sqe.cid(), Status::INVALID_FIELD)),
            &[],
            none,
            0,
        )
    };
    let bytes = |data: Vec<u8>| {
        let header = DataHeader {
            cccid: sqe.cid(),
            ttag: 0,
            datao: 0,
            datal: data.len() as u32,
            last: true,
            success: false,
        };
        let mut out = encode(&Pdu::C2hData(header), &data, none, 0);
        out.extend(value(0));
        out
    };
    match (sqe.opcode(), sqe.fctype()) {
        (admin::FABRICS, fctype::CONNECT) => value(1),
        (admin::FABRICS, fctype::PROPERTY_SET) => {
            cc.store(PropertyAccess::decode(sqe).value as u32, Ordering::SeqCst);
            value(0)
        }
        (admin::FABRICS, _) => match PropertyAccess::decode(sqe).offset {
            property::CAP => value(Cap::new(127, 1).0),
            property::VS => value(0x0001_0400),
            // Ready; shut down where that was asked for.
            _ => value(if cc.load(Ordering::SeqCst) >> 14 & 3 != 0 {
                9
            } else {
                1
            }),
        },
        (admin::IDENTIFY, _) => match sqe.cdw(10) as u8 {
            cns::CONTROLLER => bytes(
                IdentifyController {
                    cntrltype: 1,
                    cmic: 0x0B,
                    sgls: SGLS_TCP,
                    ioccsz: 260,
                    iorcsz: 1,
                    kas: 10,
                    nn: 4,
                    subnqn: NQN.into(),
                    ..IdentifyController::default()
                }
                .encode(),
            ),
            cns::NAMESPACE => bytes(
                IdentifyNamespace {
                    nsze: 2048,
                    ncap: 2048,
                    formats: vec![LbaFormat { ms: 0, lbads: 9 }],
                    ..IdentifyNamespace::default()
                }
                .encode(),
            ),
            cns::ACTIVE_NAMESPACES => bytes(headrace_wire::event::encode_nsids(&[1])),
            cns::NAMESPACE_DESCRIPTORS => bytes(encode_descriptors(&[NamespaceId::Uuid([5; 16])])),
            _ => refuse(),
        },
        (admin::SET_FEATURES | admin::KEEP_ALIVE, _) => value(0),
        (admin::GET_LOG_PAGE, _) => bytes(vec![0; LogRequest::decode(sqe).length.min(1 << 16) as usize]),
        (admin::ASYNC_EVENT_REQUEST, _) => Vec::new(),
        _ => refuse(),
    }
}

//! How fast a memory namespace is over one queue, beside a bare socket that moves the same bytes the same way.
//!
//! `cargo run --release -p headrace-target --example throughput`. Pairs are interleaved, the medians compared.

use headrace_target::{Target, TargetConfig};
use headrace_wire::fabrics::{
    property_set, Connect, ConnectData, CATTR_NO_SQ_FLOW, CC_ENABLE, CNTLID_DYNAMIC,
};
use headrace_wire::pdu::{CommonHeader, DataHeader, Digests, IcReq, Pdu};
use headrace_wire::{Sgl, Sqe};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Instant;

const NQN: &str = "nqn.2026-01.io.headrace:throughput";
const SIZE: u64 = 256 << 20;
const NONE: Digests = Digests {
    header: false,
    data: false,
};

struct Wire(TcpStream);

impl Wire {
    fn send(&mut self, pdu: &Pdu, data: &[u8]) {
        let mut out = Vec::with_capacity(256);
        pdu.encode(data.len(), NONE, 0, &mut out);
        self.0.write_all(&out).expect("send");
        self.0.write_all(data).expect("send");
    }

    /// The next PDU; its data go to `into`.
    fn receive(&mut self, into: &mut [u8]) -> (Pdu, usize) {
        let mut header = [0; 128];
        self.0.read_exact(&mut header[..8]).expect("header");
        let mut first = [0; 8];
        first.copy_from_slice(&header[..8]);
        let common = CommonHeader::decode(&first, NONE, 0).expect("a PDU");
        let hlen = usize::from(common.hlen);
        self.0.read_exact(&mut header[8..hlen]).expect("header");
        let data = common.plen as usize - hlen;
        self.0.read_exact(&mut into[..data]).expect("data");
        (Pdu::decode(&common, &header[..hlen]).expect("a PDU"), data)
    }

    fn open(address: SocketAddr, qid: u16, cntlid: u16) -> (Wire, u16) {
        let stream = TcpStream::connect(address).expect("connect");
        stream.set_nodelay(true).expect("nodelay");
        let mut wire = Wire(stream);
        wire.send(
            &Pdu::IcReq(IcReq {
                pfv: 0,
                hpda: 0,
                digests: NONE,
                maxr2t: 0,
            }),
            &[],
        );
        wire.receive(&mut []);
        let connect = Connect {
            recfmt: 0,
            qid,
            sqsize: 127,
            cattr: CATTR_NO_SQ_FLOW,
            kato_ms: 0,
        };
        let data = ConnectData {
            hostid: [1; 16],
            cntlid,
            subnqn: NQN.into(),
            hostnqn: "nqn.2026-01.io.x:h".into(),
        };
        wire.send(&Pdu::CapsuleCmd(connect.encode(1)), &data.encode());
        let (Pdu::CapsuleResp(cqe), _) = wire.receive(&mut []) else {
            panic!("no answer to Connect")
        };
        assert!(cqe.status.is_success(), "{}", cqe.status);
        (wire, cqe.dw0 as u16)
    }
}

/// `count` reads of `length` bytes with `depth` under way; returns bytes a second.
fn reads(wire: &mut Wire, length: usize, depth: usize, count: usize, random: bool) -> f64 {
    let blocks = (length / 4096) as u64;
    let places = SIZE / 4096 / blocks;
    let mut buffer = vec![0; length];
    let mut next = 0u64;
    let mut state = 88_172_645_463_325_252u64;
    let mut command = |cid: u16| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let place = if random { state % places } else { next % places };
        next += 1;
        Pdu::CapsuleCmd(
            Sqe::rw(2, cid, 1, place * blocks, blocks as u32).with_sgl(Sgl::Transport {
                length: length as u32,
            }),
        )
    };
    let begin = Instant::now();
    for cid in 0..depth {
        let pdu = command(cid as u16);
        wire.send(&pdu, &[]);
    }
    for done in 0..count {
        let (Pdu::C2hData(header), _) = wire.receive(&mut buffer) else {
            panic!("no data")
        };
        if done + depth < count {
            let pdu = command(header.cccid);
            wire.send(&pdu, &[]);
        }
    }
    (count * length) as f64 / begin.elapsed().as_secs_f64()
}

fn writes(wire: &mut Wire, length: usize, depth: usize, count: usize) -> f64 {
    let blocks = (length / 4096) as u64;
    let places = SIZE / 4096 / blocks;
    let data = vec![7; length];
    let mut next = 0u64;
    let mut command = |cid: u16| {
        next += 1;
        let slba = next % places * blocks;
        Pdu::CapsuleCmd(Sqe::rw(1, cid, 1, slba, blocks as u32).with_sgl(Sgl::Transport {
            length: length as u32,
        }))
    };
    let begin = Instant::now();
    let mut sent = depth.min(count);
    for cid in 0..sent {
        let pdu = command(cid as u16);
        wire.send(&pdu, &[]);
    }
    let mut done = 0;
    while done < count {
        match wire.receive(&mut []).0 {
            Pdu::R2t(r2t) => {
                let header = DataHeader {
                    cccid: r2t.cccid,
                    ttag: r2t.ttag,
                    datao: 0,
                    datal: r2t.r2tl,
                    last: true,
                    success: false,
                };
                wire.send(&Pdu::H2cData(header), &data);
            }
            Pdu::CapsuleResp(cqe) => {
                assert!(cqe.status.is_success(), "{}", cqe.status);
                done += 1;
                if sent < count {
                    sent += 1;
                    let pdu = command(cqe.cid);
                    wire.send(&pdu, &[]);
                }
            }
            other => panic!("{other:?}"),
        }
    }
    (count * length) as f64 / begin.elapsed().as_secs_f64()
}

/// A sender that walks through as much memory, and a receiver with one buffer. `reverse`: the memory receives.
fn bare(length: usize, count: usize, memory: &mut [u8], reverse: bool) -> f64 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("listen");
    let mut near = TcpStream::connect(listener.local_addr().expect("address")).expect("connect");
    let (mut far, _) = listener.accept().expect("accept");
    let mut buffer = vec![0; length];
    let begin = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let places = memory.len() / length;
            for n in 0..count {
                let at = n % places * length;
                let piece = &mut memory[at..at + length];
                if reverse {
                    far.read_exact(piece).expect("read");
                } else {
                    far.write_all(piece).expect("write");
                }
            }
        });
        for _ in 0..count {
            if reverse {
                near.write_all(&buffer).expect("write");
            } else {
                near.read_exact(&mut buffer).expect("read");
            }
        }
    });
    (count * length) as f64 / begin.elapsed().as_secs_f64()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    let config = format!(
        r#"{{"subsystems": [{{"nqn": "{NQN}", "namespaces": [{{"nsid": 1,
            "media": {{"kind": "memory", "size_bytes": {SIZE}}}}}]}}]}}"#
    );
    let target = Target::start(TargetConfig::from_json(&config).expect("config")).expect("start");
    let address = target.addresses()[0];
    let (mut admin, cntlid) = Wire::open(address, 0, CNTLID_DYNAMIC);
    admin.send(
        &Pdu::CapsuleCmd(property_set(2, 0x14, u64::from(CC_ENABLE), false)),
        &[],
    );
    admin.receive(&mut []);
    let (mut wire, _) = Wire::open(address, 1, cntlid);
    let mut memory = vec![1; SIZE as usize];
    // Fill, so that reads touch real pages.
    writes(&mut wire, 1 << 20, 8, SIZE as usize >> 20);
    for (name, length, count, write) in [
        ("read 1 MiB, depth 16", 1 << 20, 1024, false),
        ("write 1 MiB, depth 16", 1 << 20, 1024, true),
        ("read 128 KiB, depth 16", 128 << 10, 8192, false),
    ] {
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for _ in 0..5 {
            theirs.push(bare(length, count, &mut memory, write));
            ours.push(if write {
                writes(&mut wire, length, 16, count)
            } else {
                reads(&mut wire, length, 16, count, false)
            });
        }
        let ratio = median(ours.iter().zip(&theirs).map(|(a, b)| a / b).collect());
        println!(
            "{name}: {:.2} GB/s, bare socket {:.2} GB/s, ratio {ratio:.2}",
            median(ours) / 1e9,
            median(theirs) / 1e9
        );
    }
    let iops = median(
        (0..5)
            .map(|_| reads(&mut wire, 4096, 32, 50_000, true) / 4096.0)
            .collect(),
    );
    println!("read 4 KiB random, depth 32: {iops:.0} IOPS");
    let one = median(
        (0..5)
            .map(|_| reads(&mut wire, 4096, 1, 5_000, true) / 4096.0)
            .collect(),
    );
    println!("read 4 KiB random, depth 1: {:.1} us", 1e6 / one);
}

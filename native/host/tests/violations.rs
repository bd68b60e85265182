//! What a broken peer does to us: an error that names it, never wrong data, never a hang.

#[path = "fake/calls.rs"]
mod calls;
mod fake;

use calls::{close, pattern, read, write};
use fake::{Action, Fake, Script};
use headrace_host::NvmeTcpDevice;
use headrace_transfer::{BlockDevice, ErrorKind, IoError};
use headrace_wire::pdu::{DataHeader, Digests, IcResp, Pdu, R2t, TermReq};
use headrace_wire::{io, Cqe, Status};

fn bytes(pdu: Pdu, data: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    pdu.encode(data.len(), Digests::default(), 0, &mut out);
    out.extend_from_slice(data);
    out
}

fn c2h(cid: u16, at: u32, length: usize, last: bool) -> Vec<u8> {
    let header = DataHeader {
        cccid: cid,
        ttag: 0,
        datao: at,
        datal: length as u32,
        last,
        success: false,
    };
    bytes(Pdu::C2hData(header), &vec![1; length])
}

fn r2t(cid: u16, at: u32, length: u32) -> Vec<u8> {
    bytes(
        Pdu::R2t(R2t {
            cccid: cid,
            ttag: 9,
            r2to: at,
            r2tl: length,
        }),
        &[],
    )
}

/// Every read and write is met by these bytes, built from its CID; the device gives up after a few associations.
fn met_by(answer: impl Fn(u16) -> Vec<u8> + Send + Sync + 'static, write_it: bool) -> (IoError, Fake) {
    let fake = Fake::start(Script {
        hook: Box::new(move |qid, sqe, _| match (qid, sqe.opcode()) {
            (1, io::READ | io::WRITE) => Action::RawThenNormal(answer(sqe.cid())),
            _ => Action::Normal,
        }),
        ..Default::default()
    });
    let device = NvmeTcpDevice::open(fake.options()).unwrap();
    let error = if write_it {
        write(&device, 0, &pattern(65536, 0)).unwrap_err()
    } else {
        read(&device, 0, 65536).unwrap_err()
    };
    assert!(device.loss_count() >= 2, "an association was given up for each");
    close(&device);
    (error, fake)
}

#[test]
fn every_violation_ends_the_association_and_is_named() {
    type Answer = fn(u16) -> Vec<u8>;
    let cases: [(&str, u16, bool, Answer); 14] = [
        ("CID 900, which is not under way", 1, false, |_| {
            c2h(900, 0, 512, false)
        }),
        ("CapsuleResp for CID 77", 1, false, |_| {
            bytes(Pdu::CapsuleResp(Cqe::new(77, Status::SUCCESS)), &[])
        }),
        ("the last ended at 0", 4, false, |cid| c2h(cid, 512, 512, false)),
        ("the last ended at 512", 4, false, |cid| {
            [c2h(cid, 0, 512, false), c2h(cid, 0, 512, false)].concat()
        }),
        ("of a read of 65536", 4, false, |cid| {
            c2h(cid, 0, 65536 + 512, true)
        }),
        ("after the last", 4, false, |cid| {
            [c2h(cid, 0, 512, true), c2h(cid, 512, 512, true)].concat()
        }),
        ("does not read", 1, true, |cid| c2h(cid, 0, 512, false)),
        ("does not write", 1, false, |cid| r2t(cid, 0, 512)),
        ("R2T of no bytes", 1, true, |cid| r2t(cid, 0, 0)),
        ("of a write of 65536", 4, true, |cid| r2t(cid, 0, 65537)),
        ("R2T at R2TO 4", 4, true, |cid| r2t(cid, 4, 512)),
        ("a second ICResp", 2, false, |_| {
            let ic = IcResp {
                pfv: 0,
                cpda: 0,
                digests: Digests::default(),
                maxh2cdata: 4096,
            };
            bytes(Pdu::IcResp(ic), &[])
        }),
        ("PDU type 0x08", 1, false, |_| vec![8, 0, 24, 0, 24, 0, 0, 0]),
        ("is not the controller's to send", 1, false, |_| {
            let header = DataHeader {
                cccid: 0,
                ttag: 0,
                datao: 0,
                datal: 4,
                last: true,
                success: false,
            };
            bytes(Pdu::H2cData(header), &[0; 4])
        }),
    ];
    for (says, fes, write_it, answer) in cases {
        let (error, mut fake) = met_by(answer, write_it);
        assert_eq!(error.kind, ErrorKind::Protocol, "{says}: {error}");
        assert!(error.to_string().contains(says), "{says}: {error}");
        fake.stop();
        // TCP may take the termination request back when the connection is reset, but not each time.
        let terms = fake.terms();
        assert!(terms.iter().all(|term| term.fes == fes), "{says}: {terms:?}");
    }
}

#[test]
fn a_violation_is_answered_with_a_termination_request() {
    let (_, mut fake) = {
        let fake = Fake::start(Script {
            hook: Box::new(|qid, sqe, _| match (qid, sqe.opcode()) {
                (1, io::READ) => Action::Raw(c2h(sqe.cid(), 512, 512, false)[..24].to_vec()),
                _ => Action::Normal,
            }),
            ..Default::default()
        });
        let device = NvmeTcpDevice::open(fake.options()).unwrap();
        (read(&device, 0, 1024).unwrap_err(), fake)
    };
    fake.stop();
    assert!(
        fake.terms().contains(&TermReq { fes: 4, fei: 0 }),
        "{:?}",
        fake.terms()
    );
}

#[test]
fn a_termination_request_is_shown() {
    let (error, _fake) = met_by(
        |_| bytes(Pdu::C2hTermReq(TermReq { fes: 1, fei: 12 }), &[0xAA; 72]),
        false,
    );
    assert!(error.to_string().contains("FES 1, FEI 12"), "{error}");
}

#[test]
fn short_reads_fail_and_the_connection_lives() {
    for success in [false, true] {
        let fake = Fake::start(Script {
            success,
            hook: Box::new(|qid, sqe, _| match (qid, sqe.opcode(), sqe.slba()) {
                (1, io::READ, 0) => Action::Short(512),
                _ => Action::Normal,
            }),
            ..Default::default()
        });
        let device = NvmeTcpDevice::open(fake.options()).unwrap();
        let error = read(&device, 0, 4096).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Protocol);
        assert!(error.to_string().contains("success after 512"), "{error}");
        read(&device, 4096, 4096).unwrap();
        assert_eq!(device.loss_count(), 0);
    }
}

#[test]
fn wrong_digests_are_caught() {
    use std::sync::atomic::{AtomicUsize, Ordering};
    for (header, times, survives) in [
        (false, 2, true),
        (false, 9, false),
        (true, 1, true),
        (true, 9, false),
    ] {
        let count = AtomicUsize::new(0);
        let fake = Fake::start(Script {
            hook: Box::new(move |qid, sqe, _| match (qid, sqe.opcode()) {
                (1, io::READ) if count.fetch_add(1, Ordering::SeqCst) < times => {
                    if header {
                        Action::BadHeaderDigest
                    } else {
                        Action::BadDataDigest
                    }
                }
                _ => Action::Normal,
            }),
            ..Default::default()
        });
        fake.set_media(0, &pattern(4096, 5));
        let mut options = fake.options();
        (options.header_digest, options.data_digest) = (true, true);
        let device = NvmeTcpDevice::open(options).unwrap();
        let result = read(&device, 0, 4096);
        assert_eq!(
            device.loss_count() > 0,
            header,
            "only a wrong header digest ends the connection"
        );
        match result {
            Ok(bytes) => assert!(survives && bytes == pattern(4096, 5)),
            Err(error) => {
                assert!(!survives && error.to_string().contains("digest"), "{error}");
            }
        }
    }
}

#[test]
fn digests_that_are_not_agreed_are_refused() {
    let fake = Fake::start(Script {
        refuse_digests: true,
        ..Default::default()
    });
    let mut options = fake.options();
    options.header_digest = true;
    let error = NvmeTcpDevice::open(options).err().unwrap();
    assert_eq!(error.kind, ErrorKind::Protocol);
    assert!(error.to_string().contains("header digest"), "{error}");
}

#[test]
fn something_else_on_the_port_is_named() {
    use std::io::Write;
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(b"SSH-2.0-OpenSSH_9.9\r\n").unwrap();
        std::thread::sleep(std::time::Duration::from_millis(100));
    });
    let fake = Fake::start(Script::default());
    let mut options = fake.options();
    options.portals[0].port = port;
    let error = NvmeTcpDevice::open(options).err().unwrap();
    assert_eq!(error.kind, ErrorKind::Protocol);
    assert!(error.to_string().contains("PDU type 0x53"), "{error}");
    server.join().unwrap();
}

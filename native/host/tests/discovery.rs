//! The discovery log page.

mod fake;

use fake::{Action, Fake, Script};
use headrace_host::{discover, DiscoverOptions, Route};
use headrace_transfer::ErrorKind;
use headrace_wire::log::{DiscoveryEntry, DiscoveryHeader, LogRequest};
use headrace_wire::pdu::{DataHeader, Digests, Pdu};
use headrace_wire::{admin, Cqe, Status, DISCOVERY_NQN};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

fn options(fake: &Fake) -> DiscoverOptions {
    DiscoverOptions {
        host: "127.0.0.1".into(),
        port: fake.port,
        route: Route::default(),
        hostnqn: "nqn.2026-01.test:host".into(),
        hostid: [1; 16],
        connect_timeout: Duration::from_secs(5),
    }
}

fn entries(count: usize) -> Vec<DiscoveryEntry> {
    (0..count)
        .map(|i| DiscoveryEntry {
            trtype: 3,
            adrfam: 1,
            subtype: 2,
            portid: 1,
            cntlid: 0xFFFF,
            asqsz: 32,
            trsvcid: "4420 ".into(),
            subnqn: format!("nqn.test:{i}"),
            traddr: " 127.0.0.1".into(),
            ..Default::default()
        })
        .collect()
}

#[test]
fn records_are_read_in_pages_and_cleaned() {
    let fake = Fake::start(Script {
        entries: entries(40),
        ..Default::default()
    });
    let log = discover(options(&fake)).unwrap();
    assert_eq!(
        (
            log["generation"].as_u64(),
            log["records"].as_array().unwrap().len()
        ),
        (Some(3), 40)
    );
    let last = &log["records"][39];
    assert_eq!(
        (last["subnqn"].as_str(), last["trtype"].as_str()),
        (Some("nqn.test:39"), Some("tcp"))
    );
    assert_eq!(
        (last["traddr"].as_str(), last["trsvcid"].as_str()),
        (Some("127.0.0.1"), Some("4420"))
    );
    assert_eq!(last["subtype"], "nvm");
    assert!(fake.seen()[0].data[256..].starts_with(DISCOVERY_NQN.as_bytes()));
}

/// A header whose generation moves at every look.
fn restless(numrec: u64, moves: u64) -> Script {
    let generation = AtomicU64::new(0);
    Script {
        entries: entries(2),
        hook: Box::new(move |_, sqe, _| {
            if sqe.opcode() != admin::GET_LOG_PAGE || LogRequest::decode(sqe).offset != 0 {
                return Action::Normal;
            }
            let genctr = generation.fetch_add(1, Ordering::SeqCst).min(moves);
            let data = DiscoveryHeader { genctr, numrec }.encode();
            let header = DataHeader {
                cccid: sqe.cid(),
                ttag: 0,
                datao: 0,
                datal: 1024,
                last: true,
                success: false,
            };
            let mut bytes = Vec::new();
            Pdu::C2hData(header).encode(1024, Digests::default(), 0, &mut bytes);
            bytes.extend_from_slice(&data);
            Pdu::CapsuleResp(Cqe::new(sqe.cid(), Status::SUCCESS)).encode(
                0,
                Digests::default(),
                0,
                &mut bytes,
            );
            Action::Raw(bytes)
        }),
        ..Default::default()
    }
}

#[test]
fn a_generation_that_moves_is_read_again_and_not_for_ever() {
    let fake = Fake::start(restless(2, 3));
    let log = discover(options(&fake)).unwrap();
    assert_eq!(
        (
            log["generation"].as_u64(),
            log["records"].as_array().unwrap().len()
        ),
        (Some(3), 2)
    );
    let fake = Fake::start(restless(2, u64::MAX));
    let error = discover(options(&fake)).unwrap_err();
    assert!(error.to_string().contains("does not hold still"), "{error}");
}

#[test]
fn absurd_record_counts_are_refused() {
    let fake = Fake::start(restless(u64::MAX, 0));
    let error = discover(options(&fake)).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Protocol);
    assert!(error.to_string().contains("too long"), "{error}");
}

#[test]
fn silence_and_refusal_end_in_time() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let fake = Fake::start(Script::default());
    let mut silent = options(&fake);
    silent.port = listener.local_addr().unwrap().port();
    silent.connect_timeout = Duration::from_millis(300);
    let error = discover(silent.clone()).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Timeout);
    drop(listener);
    assert_eq!(discover(silent).unwrap_err().kind, ErrorKind::Refused);
}

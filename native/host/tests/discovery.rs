//! The discovery log page.

mod fake;

use fake::{free_port, Action, Fake, Script};
use headrace_host::{discover, survey, DiscoverOptions, Portal, Route, SurveyOptions};
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
    let fake = Fake::start(Script::default());
    let mut silent = options(&fake);
    silent.port = free_port();
    let listener = std::net::TcpListener::bind(("127.0.0.1", silent.port)).unwrap();
    silent.connect_timeout = Duration::from_millis(300);
    let error = discover(silent.clone()).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Timeout);
    drop(listener);
    assert_eq!(discover(silent).unwrap_err().kind, ErrorKind::Refused);
}

fn referral(port: u16) -> DiscoveryEntry {
    DiscoveryEntry {
        subtype: 1,
        trsvcid: format!("{port}\0"),
        subnqn: DISCOVERY_NQN.into(),
        ..entries(1).remove(0)
    }
}

fn all(starts: &[u16]) -> SurveyOptions {
    SurveyOptions {
        starts: starts
            .iter()
            .map(|&port| Portal::new("127.0.0.1", port))
            .collect(),
        referrals: true,
        each: DiscoverOptions {
            host: String::new(),
            port: 0,
            route: Route::default(),
            hostnqn: "nqn.2026-01.test:host".into(),
            hostid: [1; 16],
            connect_timeout: Duration::from_secs(5),
        },
    }
}

fn at(port: u16, entries: Vec<DiscoveryEntry>) -> Fake {
    let script = Script {
        entries,
        ..Default::default()
    };
    Fake::start_at(port, script, vec![])
}

fn strings<'a>(found: &'a serde_json::Value, list: &str, name: &str) -> Vec<&'a str> {
    let list = found[list].as_array().unwrap().iter();
    list.map(|entry| entry[name].as_str().unwrap_or_default())
        .collect()
}

/// A pair that refers to each other and to itself is asked once each; what both know is said once.
#[test]
fn mutual_referrals_end() {
    let (a, b) = (free_port(), free_port());
    let mut here = entries(2);
    here.extend([referral(b), referral(a)]);
    let mut there = entries(3);
    there.extend([referral(a), referral(b)]);
    let (first, second) = (at(a, here), at(b, there));
    let found = survey(&all(&[a])).unwrap();
    assert_eq!(
        strings(&found, "controllers", "address"),
        [format!("127.0.0.1:{a}"), format!("127.0.0.1:{b}")]
    );
    assert_eq!(found["controllers"][1]["via"], format!("127.0.0.1:{a}"));
    let nvm: Vec<_> = found["records"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|r| r["subtype"] == "nvm")
        .collect();
    assert_eq!(nvm.len(), 3);
    assert_eq!(nvm[2]["controller"], format!("127.0.0.1:{b}"));
    assert_eq!((first.connections(), second.connections()), (1, 1));
    assert!(strings(&found, "failures", "error").is_empty());
    // Both asked for at once; and only the first, where referrals are not wanted.
    survey(&all(&[a, b, a])).unwrap();
    assert_eq!((first.connections(), second.connections()), (2, 2));
    let alone = survey(&SurveyOptions {
        referrals: false,
        ..all(&[a])
    })
    .unwrap();
    assert_eq!(strings(&alone, "controllers", "address").len(), 1);
    assert_eq!(second.connections(), 2);
}

/// A chain is followed so far and no farther; a referral into nothing does not take the rest with it.
#[test]
fn a_chain_of_referrals_and_a_dead_one() {
    let ports: Vec<u16> = (0..11).map(|_| free_port()).collect();
    let dead = free_port();
    let fakes: Vec<Fake> = (0..11)
        .map(|i| {
            let next = ports.get(i + 1).map(|&port| referral(port));
            let mut list = entries(1);
            list[0].subnqn = format!("nqn.test:link-{i}");
            list.push(referral(dead));
            list.extend(next);
            at(ports[i], list)
        })
        .collect();
    let found = survey(&all(&ports[..1])).unwrap();
    let asked: Vec<usize> = fakes.iter().map(Fake::connections).collect();
    assert_eq!(asked, [1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0]);
    let failures = strings(&found, "failures", "error");
    assert_eq!(failures.len(), 2, "{failures:?}");
    assert!(failures[0].contains("cannot connect"), "{failures:?}");
    assert!(failures[1].contains("8 times"), "{failures:?}");
    assert!(strings(&found, "records", "subnqn").contains(&"nqn.test:link-8"));
}

/// A controller that refers to more than anybody has.
#[test]
fn a_crowd_of_referrals_is_bounded() {
    // Addresses of this machine where nobody listens: each is refused at once.
    let port = free_port();
    let crowd = (0..900).map(|i| DiscoveryEntry {
        traddr: format!("127.0.{}.{}", 1 + i / 250, 1 + i % 250),
        ..referral(9)
    });
    let fake = at(port, crowd.collect());
    let found = survey(&all(&[port])).unwrap();
    let failures = strings(&found, "failures", "error");
    assert_eq!(
        failures
            .iter()
            .filter(|error| error.contains("cannot connect"))
            .count(),
        63
    );
    assert!(failures.len() < 130, "{}", failures.len());
    assert_eq!(fake.connections(), 1);
}

#[test]
fn entries_that_nobody_can_use_are_named_and_not_followed() {
    let port = free_port();
    let mut list = entries(1);
    list.push(DiscoveryEntry {
        traddr: "0.0.0.0".into(),
        ..entries(1).remove(0)
    });
    list.push(DiscoveryEntry {
        traddr: "::".into(),
        ..referral(port)
    });
    list.push(DiscoveryEntry {
        subnqn: "nqn.\u{1b}[31mred".into(),
        traddr: "10.0.0.7\0\0  ".into(),
        ..entries(1).remove(0)
    });
    let fake = at(port, list);
    let found = survey(&all(&[port])).unwrap();
    let problems = strings(&found, "records", "problem");
    assert_eq!(problems[0], "");
    assert!(problems[1].contains("wildcard 0.0.0.0"), "{problems:?}");
    assert!(problems[3].contains("no name"), "{problems:?}");
    assert!(strings(&found, "records", "subnqn")
        .iter()
        .all(|nqn| !nqn.contains('\u{1b}')));
    let failures = strings(&found, "failures", "error");
    assert_eq!(failures.len(), 1);
    assert!(failures[0].contains("wildcard ::"), "{failures:?}");
    assert_eq!(fake.connections(), 1);
}

#[test]
fn nothing_answers_is_an_error_and_one_of_two_is_not() {
    let (here, dead) = (free_port(), free_port());
    let _fake = at(here, entries(1));
    assert_eq!(survey(&all(&[dead])).unwrap_err().kind, ErrorKind::Refused);
    let found = survey(&all(&[dead, here])).unwrap();
    assert_eq!(
        strings(&found, "failures", "address"),
        [format!("127.0.0.1:{dead}")]
    );
    assert_eq!(strings(&found, "records", "subnqn"), ["nqn.test:0"]);
    assert_eq!(survey(&all(&[])).unwrap_err().kind, ErrorKind::Usage);
}

/// Referrals to machines that take a connection and say nothing cost a bounded time, whatever their number.
#[test]
fn mute_referrals_do_not_take_for_ever() {
    let port = free_port();
    let mute: Vec<_> = (0..20)
        .map(|_| std::net::TcpListener::bind("127.0.0.1:0").unwrap())
        .collect();
    let mut list = entries(1);
    list.extend(
        mute.iter()
            .map(|listener| referral(listener.local_addr().unwrap().port())),
    );
    let fake = at(port, list);
    let mut options = all(&[port]);
    options.each.connect_timeout = Duration::from_millis(400);
    let found = survey(&options).unwrap();
    let failures = strings(&found, "failures", "error");
    assert_eq!(failures.len(), 20);
    let asked = failures
        .iter()
        .filter(|error| error.contains("did not answer in time"))
        .count();
    assert!((1..=6).contains(&asked), "{asked} were waited for: {failures:?}");
    assert!(failures[19].contains("took all the time"), "{failures:?}");
    assert_eq!(fake.connections(), 1);
}

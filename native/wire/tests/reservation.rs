//! Reservation commands and data: golden bytes, both directions, every length.

use headrace_wire::command::io;
use headrace_wire::reservation::{
    report_command, report_request, AcquireAction, Change, Notification, RegisterAction, Registrant,
    ReleaseAction, Report, ReservationType,
};
use headrace_wire::{Sgl, Sqe, Status};

const KEY: u64 = 0x1122_3344_5566_7788;
const OTHER: u64 = 0x99AA_BBCC_DDEE_FF00;
const KEY_BYTES: [u8; 8] = [0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11];
const OTHER_BYTES: [u8; 8] = [0x00, 0xFF, 0xEE, 0xDD, 0xCC, 0xBB, 0xAA, 0x99];

fn both() -> Vec<u8> {
    [KEY_BYTES, OTHER_BYTES].concat()
}

fn register(action: RegisterAction, ignore_existing: bool, persist: Option<bool>) -> Change {
    Change::Register {
        action,
        ignore_existing,
        persist,
        key: KEY,
        new_key: OTHER,
    }
}

fn acquire(action: AcquireAction, kind: ReservationType) -> Change {
    Change::Acquire {
        action,
        kind,
        key: KEY,
        victim: OTHER,
    }
}

/// One table, used in both directions.
#[test]
fn golden_commands() {
    use ReservationType as T;
    let release = |action, kind| Change::Release {
        action,
        kind,
        key: KEY,
    };
    let cases: Vec<(Change, u8, u32, Vec<u8>)> = vec![
        (register(RegisterAction::Register, false, None), 0x0D, 0, both()),
        (
            register(RegisterAction::Unregister, true, None),
            0x0D,
            0x9,
            both(),
        ),
        (
            register(RegisterAction::Replace, true, Some(true)),
            0x0D,
            0xC000_000A,
            both(),
        ),
        (
            register(RegisterAction::Register, false, Some(false)),
            0x0D,
            0x8000_0000,
            both(),
        ),
        (
            acquire(AcquireAction::Acquire, T::WriteExclusive),
            0x11,
            0x100,
            both(),
        ),
        (
            acquire(AcquireAction::Preempt, T::WriteExclusiveRegistrants),
            0x11,
            0x301,
            both(),
        ),
        (
            acquire(AcquireAction::PreemptAndAbort, T::ExclusiveAccessAll),
            0x11,
            0x602,
            both(),
        ),
        (
            release(ReleaseAction::Release, Some(T::ExclusiveAccess)),
            0x15,
            0x200,
            KEY_BYTES.to_vec(),
        ),
        (release(ReleaseAction::Clear, None), 0x15, 1, KEY_BYTES.to_vec()),
    ];
    for (change, opcode, cdw10, data) in cases {
        let (sqe, encoded) = change.command(5, 7);
        assert_eq!(
            (sqe.opcode(), sqe.cid(), sqe.nsid(), sqe.cdw(10)),
            (opcode, 5, 7, cdw10)
        );
        assert_eq!(encoded, data);
        let length = data.len() as u32;
        assert_eq!(sqe.sgl(), Sgl::Transport { length });
        // Whole, with trailing bytes, and cut anywhere.
        assert_eq!(Change::decode(&sqe, &data), Ok(change));
        let longer = [&data[..], &[0xAA; 48]].concat();
        assert_eq!(Change::decode(&sqe, &longer), Ok(change));
        for cut in 0..data.len() {
            let error = Change::decode(&sqe, &data[..cut]).unwrap_err();
            assert_eq!(error, Status::SGL_DATA_LENGTH.do_not_retry());
        }
    }
}

#[test]
fn reserved_values_are_refused() {
    for (opcode, cdw10) in [
        (io::RESERVATION_REGISTER, 3),
        (io::RESERVATION_REGISTER, 7),
        // CPTPL 01b.
        (io::RESERVATION_REGISTER, 1 << 30),
        (io::RESERVATION_ACQUIRE, 0x103),
        (io::RESERVATION_ACQUIRE, 0),
        (io::RESERVATION_ACQUIRE, 0x700),
        // IEKEY.
        (io::RESERVATION_ACQUIRE, 0x108),
        (io::RESERVATION_RELEASE, 2),
        (io::RESERVATION_RELEASE, 0x108),
    ] {
        let sqe = Sqe::new(opcode, 1, 1).with_cdw(10, cdw10);
        assert_eq!(
            Change::decode(&sqe, &[0; 16]),
            Err(Status::INVALID_FIELD.do_not_retry()),
            "opcode {opcode:#x}, CDW10 {cdw10:#x}"
        );
    }
    assert!(Change::decode(&Sqe::new(io::WRITE, 1, 1), &[0; 16]).is_err());
    assert_eq!(Change::data_bytes(io::RESERVATION_REPORT), None);
}

#[test]
fn types_and_their_bits() {
    for kind in ReservationType::ALL {
        assert_eq!(ReservationType::from_u8(kind as u8), Some(kind));
        let bit = 1 << kind as u8;
        assert_eq!(headrace_wire::reservation::rescap::ALL_TYPES & bit, bit);
    }
    assert_eq!(ReservationType::from_u8(0), None);
    assert_eq!(ReservationType::from_u8(7), None);
}

fn sample() -> Report {
    let mut hostid = [0; 16];
    hostid
        .iter_mut()
        .enumerate()
        .for_each(|(at, byte)| *byte = 0xA0 + at as u8);
    Report {
        generation: 0x0102_0304,
        rtype: 3,
        persistent: true,
        registered: 2,
        registrants: vec![
            Registrant {
                cntlid: 0xFFFF,
                holds: true,
                hostid,
                key: KEY,
            },
            Registrant {
                cntlid: 2,
                holds: false,
                hostid: [0; 16],
                key: OTHER,
            },
        ],
    }
}

#[test]
fn golden_extended_report() {
    let mut bytes = vec![0xEE; 256];
    sample().encode_into(true, &mut bytes);
    assert_eq!(bytes[..10], [4, 3, 2, 1, 3, 2, 0, 0, 0, 1]);
    assert!(bytes[10..64].iter().all(|&b| b == 0));
    assert_eq!(bytes[64..72], [0xFF, 0xFF, 1, 0, 0, 0, 0, 0]);
    assert_eq!(bytes[72..80], KEY_BYTES);
    assert_eq!((bytes[80], bytes[95]), (0xA0, 0xAF));
    assert!(bytes[96..128].iter().all(|&b| b == 0));
    assert_eq!(bytes[128..136], [2, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(bytes[136..144], OTHER_BYTES);
    assert!(bytes[144..].iter().all(|&b| b == 0), "the rest is zero");
    assert_eq!(Report::decode(&bytes, true), Some(sample()));
}

#[test]
fn golden_standard_report() {
    let mut bytes = vec![0xEE; 72];
    sample().encode_into(false, &mut bytes);
    assert_eq!(bytes[24..32], [0xFF, 0xFF, 1, 0, 0, 0, 0, 0]);
    assert_eq!(bytes[32..40], [0xA0, 0xA1, 0xA2, 0xA3, 0xA4, 0xA5, 0xA6, 0xA7]);
    assert_eq!(bytes[40..48], KEY_BYTES);
    assert_eq!(bytes[64..72], OTHER_BYTES);
    let back = Report::decode(&bytes, false).unwrap();
    assert_eq!(back.registrants[0].hostid[..8], bytes[32..40]);
    assert_eq!(back.registrants[0].hostid[8..], [0; 8]);
    assert_eq!(back.registrants[1].key, OTHER);
}

/// Any buffer length cuts, and any REGCTL is bounded by what is there.
#[test]
fn every_length() {
    for extended in [false, true] {
        let unit = Report::entry_bytes(extended);
        let mut whole = vec![0; 3 * unit];
        sample().encode_into(extended, &mut whole);
        for length in 0..=whole.len() {
            let mut bytes = vec![0xEE; length];
            sample().encode_into(extended, &mut bytes);
            assert_eq!(bytes, whole[..length]);
            match Report::decode(&bytes, extended) {
                None => assert!(length < unit),
                Some(report) => {
                    assert_eq!(report.registrants.len(), length / unit - 1);
                    assert_eq!(report.is_whole(), length == whole.len());
                }
            }
        }
        whole[5..7].fill(0xFF);
        let report = Report::decode(&whole, extended).unwrap();
        assert_eq!((report.registered, report.registrants.len()), (0xFFFF, 2));
        assert!(!report.is_whole());
    }
}

#[test]
fn report_command_round_trip() {
    let sqe = report_command(3, 1, true, 4096);
    assert_eq!((sqe.cdw(10), sqe.cdw(11)), (1023, 1));
    assert_eq!(report_request(&sqe), (4096, true));
    let most = Sqe::new(io::RESERVATION_REPORT, 1, 1).with_cdw(10, u32::MAX);
    assert_eq!(report_request(&most), (1 << 34, false));
}

#[test]
fn golden_notification() {
    let page = Notification {
        count: 0x0102,
        kind: 3,
        further: 9,
        nsid: 0x0A0B_0C0D,
    };
    let bytes = page.encode();
    assert_eq!(
        bytes[..16],
        [2, 1, 0, 0, 0, 0, 0, 0, 3, 9, 0, 0, 0x0D, 0x0C, 0x0B, 0x0A]
    );
    assert_eq!(Notification::decode(&bytes), Some(page));
    assert_eq!(Notification::decode(&bytes[..63]), None);
}

//! Invariant: a decoder of `headrace-wire` takes any bytes without a panic, and what it accepts means the same after it was
//! encoded and decoded again.

use headrace_wire::ana::AnaLog;
use headrace_wire::command::{Cqe, DsmRange, Sqe};
use headrace_wire::event::{decode_nsids, AsyncEvent, ChangedNamespaces};
use headrace_wire::fabrics::{Connect, ConnectData, ConnectResponse, PropertyAccess, CONNECT_DATA_BYTES};
use headrace_wire::identify::{
    decode_descriptors, encode_descriptors, IdentifyController, IdentifyNamespace, IDENTIFY_BYTES,
};
use headrace_wire::log::{DiscoveryEntry, DiscoveryHeader, LogRequest, DISCOVERY_ENTRY_BYTES};
use headrace_wire::pdu::{CommonHeader, Digests, Pdu};
use headrace_wire::reservation::{report_request, Change, Notification, Report};
use headrace_wire::Status;

pub fn run(data: &[u8]) {
    let Some((&kind, data)) = data.split_first() else {
        return;
    };
    match kind % 12 {
        0 => pdu(data),
        1 => sqe(data),
        2 => controller(data),
        3 => namespace(data),
        4 => descriptors(data),
        5 => discovery(data),
        6 => connect(data),
        7 => cqe(data),
        8 => ana(data),
        9 => events(data),
        10 => reservation(data),
        _ => report(data),
    }
}

/// `data`, zeros behind it.
fn padded<const N: usize>(data: &[u8]) -> [u8; N] {
    let mut bytes = [0; N];
    let length = data.len().min(N);
    bytes[..length].copy_from_slice(&data[..length]);
    bytes
}

fn pdu(data: &[u8]) {
    let Some((&mode, data)) = data.split_first() else {
        return;
    };
    let digests = Digests {
        header: mode & 1 != 0,
        data: mode & 2 != 0,
    };
    let xpda = mode >> 3;
    let bytes: [u8; 160] = padded(data);
    let mut first = [0; 8];
    first.copy_from_slice(&bytes[..8]);
    let common = match CommonHeader::decode(&first, digests, xpda) {
        Ok(common) => common,
        Err(error) => {
            assert!(error.fei < 8, "{error}");
            return;
        }
    };
    let layout = common.layout(digests).expect("what was accepted has a layout");
    assert_eq!(layout.plen(), common.plen as usize);
    assert!(layout.prefix_bytes() <= 255 + 4, "the prefix has a bound");
    match Pdu::decode(&common, &bytes[..layout.header_bytes]) {
        Ok(pdu) => {
            // With the least pad, which may be less than the sender's.
            let mut out = Vec::new();
            let again = pdu.encode(layout.data_bytes.min(1 << 20), digests, xpda, &mut out);
            let mut first = [0; 8];
            first.copy_from_slice(&out[..8]);
            let common = CommonHeader::decode(&first, digests, xpda).expect("our own");
            assert_eq!(common.layout(digests), Ok(again));
            assert_eq!(Pdu::decode(&common, &out[..again.header_bytes]), Ok(pdu));
        }
        Err(error) => assert!((error.fei as usize) < layout.header_bytes, "{error}"),
    }
}

fn sqe(data: &[u8]) {
    let sqe = Sqe(padded(data));
    let _ = format!("{sqe:?} {:?}", sqe.sgl());
    assert_eq!(sqe.with_cid(sqe.cid()), sqe);
    assert!(sqe.nlb() >= 1 && sqe.nlb() <= 65536);
    let request = LogRequest::decode(&sqe);
    assert!(request.length >= 4 && request.length % 4 == 0 && request.length <= 1 << 34);
    let connect = Connect::decode(&sqe);
    assert_eq!(Connect::decode(&connect.encode(1)), connect);
    let _ = PropertyAccess::decode(&sqe);
    let range = DsmRange::decode(&padded(data));
    assert_eq!(DsmRange::decode(&range.encode()), range);
}

fn controller(data: &[u8]) {
    assert_eq!(
        IdentifyController::decode(data).is_some(),
        data.len() == IDENTIFY_BYTES
    );
    let bytes: [u8; IDENTIFY_BYTES] = padded(data);
    let decoded = IdentifyController::decode(&bytes).expect("the right length");
    if bytes.is_ascii() {
        assert_eq!(IdentifyController::decode(&decoded.encode()), Some(decoded));
    }
}

fn namespace(data: &[u8]) {
    let bytes: [u8; IDENTIFY_BYTES] = padded(data);
    let decoded = IdentifyNamespace::decode(&bytes).expect("the right length");
    let _ = decoded.format();
    assert!(decoded.formats.len() <= 64);
    assert_eq!(IdentifyNamespace::decode(&decoded.encode()), Some(decoded));
}

fn descriptors(data: &[u8]) {
    let ids = decode_descriptors(data);
    assert!(ids.len() * 5 <= data.len());
    if data.len() <= IDENTIFY_BYTES {
        assert_eq!(decode_descriptors(&encode_descriptors(&ids)), ids);
    }
}

fn discovery(data: &[u8]) {
    assert_eq!(DiscoveryHeader::decode(data).is_some(), data.len() >= 16);
    let bytes: [u8; DISCOVERY_ENTRY_BYTES] = padded(data);
    let entry = DiscoveryEntry::decode(&bytes).expect("the right length");
    if bytes.is_ascii() {
        assert_eq!(DiscoveryEntry::decode(&entry.encode()), Some(entry));
    }
}

fn connect(data: &[u8]) {
    let bytes: [u8; CONNECT_DATA_BYTES] = padded(data);
    let decoded = ConnectData::decode(&bytes);
    if bytes.is_ascii() {
        assert_eq!(ConnectData::decode(&decoded.encode()), decoded);
    }
}

fn cqe(data: &[u8]) {
    let cqe = Cqe::decode(&padded(data));
    assert_eq!(Cqe::decode(&cqe.encode()), cqe);
    let _ = (cqe.status.to_string(), ConnectResponse(cqe.dw0).field_name());
    assert_eq!(Status::from_field(cqe.status.to_field()), cqe.status);
}

fn ana(data: &[u8]) {
    if let Some(log) = AnaLog::decode(data) {
        let held: usize = log.groups.iter().map(|group| 32 + 4 * group.nsids.len()).sum();
        assert!(16 + held <= data.len(), "more than was there");
        let _ = log.group(1);
        assert_eq!(AnaLog::decode(&log.encode()), Some(log));
    }
}

fn events(data: &[u8]) {
    let nsids = decode_nsids(data);
    assert!(nsids.len() <= data.len() / 4 && !nsids.contains(&0));
    let changed = ChangedNamespaces::decode(data);
    if data.len() <= ChangedNamespaces::BYTES {
        assert_eq!(ChangedNamespaces::decode(&changed.encode()), changed);
    }
    let event = AsyncEvent::from_dw0(u32::from_le_bytes(padded(data)));
    assert_eq!(AsyncEvent::from_dw0(event.dw0()), event);
}

fn reservation(data: &[u8]) {
    let sqe = Sqe(padded(data));
    let rest = data.get(64..).unwrap_or_default();
    let (length, _) = report_request(&sqe);
    assert!((4..=1 << 34).contains(&length));
    if let Ok(change) = Change::decode(&sqe, rest) {
        let (again, bytes) = change.command(1, 2);
        assert!(bytes.len() <= rest.len(), "more than was there");
        assert_eq!(Change::decode(&again, &bytes), Ok(change));
    }
    if let Some(notification) = Notification::decode(rest) {
        assert_eq!(Notification::decode(&notification.encode()), Some(notification));
    }
}

fn report(data: &[u8]) {
    for extended in [false, true] {
        if let Some(report) = Report::decode(data, extended) {
            let unit = Report::entry_bytes(extended);
            assert!((report.registrants.len() + 1) * unit <= data.len());
            let mut bytes = vec![0; (report.registrants.len() + 1) * unit];
            report.encode_into(extended, &mut bytes);
            assert_eq!(Report::decode(&bytes, extended), Some(report));
        }
    }
}

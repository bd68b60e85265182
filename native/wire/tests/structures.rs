//! Where each field of the NVMe structures lies: written by offset with values of its own, read by name, and the other way.
//! Offsets are the specification's (Base Specification 4.1, 4.2, 5.1.13, 6.3).

use headrace_wire::command::{Cqe, DsmRange, Sgl, Sqe, CQE_BYTES, SQE_BYTES};
use headrace_wire::fabrics::{self, Connect, ConnectData, PropertyAccess, CONNECT_DATA_BYTES};
use headrace_wire::identify::{IdentifyController, IdentifyNamespace, LbaFormat, IDENTIFY_BYTES};
use headrace_wire::log::{DiscoveryEntry, DiscoveryHeader, LogRequest, DISCOVERY_ENTRY_BYTES};
use headrace_wire::{crc32c, io, Status};

const _: () = assert!(SQE_BYTES == 64 && CQE_BYTES == 16 && DsmRange::BYTES == 16);
const _: () = assert!(CONNECT_DATA_BYTES == 1024 && IDENTIFY_BYTES == 4096);
const _: () = assert!(DISCOVERY_ENTRY_BYTES == 1024 && DiscoveryHeader::BYTES == 1024);

/// `size` zero bytes but for these.
fn bytes(size: usize, fields: &[(usize, &[u8])]) -> Vec<u8> {
    let mut all = vec![0; size];
    for (at, field) in fields {
        assert!(
            all[*at..at + field.len()].iter().all(|&byte| byte == 0),
            "byte {at} twice"
        );
        all[*at..at + field.len()].copy_from_slice(field);
    }
    all
}

#[test]
fn submission_queue_entry() {
    let expected = bytes(
        64,
        &[
            (0, &[0x02]),
            (1, &[0x40]),
            (2, &[0x34, 0x12]),
            (4, &[0x0D, 0x0C, 0x0B, 0x0A]),
            (32, &[0x00, 0x10, 0, 0]),
            (39, &[0x5A]),
            (40, &[0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11]),
            (48, &[0x07, 0, 0, 0x40]),
            (52, &[13]),
            (56, &[14]),
            (60, &[15]),
        ],
    );
    let sqe = Sqe::rw(io::READ, 0x1234, 0x0A0B_0C0D, 0x1122_3344_5566_7788, 8)
        .with_sgl(Sgl::Transport { length: 4096 })
        .with_cdw(13, 13)
        .with_cdw(14, 14)
        .with_cdw(15, 15);
    let sqe = sqe.with_cdw(12, sqe.cdw(12) | 1 << 30);
    assert_eq!(sqe.0[..], expected[..]);
    assert_eq!(
        (sqe.opcode(), sqe.fuse(), sqe.psdt(), sqe.cid()),
        (2, 0, 1, 0x1234)
    );
    assert_eq!(
        (sqe.nsid(), sqe.slba(), sqe.nlb(), sqe.fua()),
        (0x0A0B_0C0D, 0x1122_3344_5566_7788, 8, true)
    );
    let fused = Sqe(bytes(64, &[(1, &[0b1000_0010])]).try_into().unwrap());
    assert_eq!((fused.fuse(), fused.psdt()), (2, 2));
}

#[test]
fn data_descriptors() {
    for (sgl, expected) in [
        (Sgl::None, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x5A]),
        (
            Sgl::Transport { length: 0x0403_0201 },
            [0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 0, 0, 0, 0x5A],
        ),
        (
            Sgl::InCapsule {
                offset: 0x0807_0605_0403_0201,
                length: 0x0C0B_0A09,
            },
            [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 0, 0, 0, 0x01],
        ),
        // Keyed, as RDMA has it: refused by whoever looks, never misread.
        (
            Sgl::Other(0x40),
            [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x40],
        ),
    ] {
        let sqe = Sqe::new(io::WRITE, 0, 0).with_sgl(sgl);
        assert_eq!(sqe.0[24..40], expected);
        assert_eq!(sqe.sgl(), sgl);
    }
}

#[test]
fn completion_queue_entry() {
    let expected: [u8; 16] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 0x06, 0xD1];
    let cqe = Cqe {
        dw0: 0x0403_0201,
        dw1: 0x0807_0605,
        sqhd: 0x0A09,
        sqid: 0x0C0B,
        cid: 0x0E0D,
        // SC 83h (8:1), SCT 0 (11:9), CRD 1 (13:12), M (14), DNR (15)
        status: Status {
            crd: 1,
            more: true,
            ..Status::RESERVATION_CONFLICT.do_not_retry()
        },
    };
    assert_eq!(cqe.encode(), expected);
    assert_eq!(Cqe::decode(&expected), cqe);
    // The phase tag means nothing on fabrics.
    let mut phased = expected;
    phased[14] |= 1;
    assert_eq!(Cqe::decode(&phased), cqe);
}

#[test]
fn connect() {
    let sqe = Connect {
        recfmt: 0x0201,
        qid: 0x0403,
        sqsize: 0x0605,
        cattr: 7,
        kato_ms: 0x0B0A_0908,
    }
    .encode(0x1234);
    let expected = bytes(
        64,
        &[
            (0, &[0x7F, 0x40, 0x34, 0x12, 0x01]),
            (32, &[0, 4, 0, 0]),
            (39, &[0x01]),
            (40, &[1, 2, 3, 4, 5, 6, 7, 0, 8, 9, 10, 11]),
        ],
    );
    assert_eq!(sqe.0[..], expected[..]);
    let data = ConnectData {
        hostid: *b"0123456789abcdef",
        cntlid: 0x0201,
        subnqn: "nqn.subsystem".into(),
        hostnqn: "nqn.host".into(),
    };
    let expected = bytes(
        1024,
        &[
            (0, b"0123456789abcdef"),
            (16, &[1, 2]),
            (256, b"nqn.subsystem"),
            (512, b"nqn.host"),
        ],
    );
    assert_eq!(data.encode()[..], expected[..]);
    assert_eq!(ConnectData::decode(&expected.try_into().unwrap()), data);
}

#[test]
fn properties() {
    let set = fabrics::property_set(0x1234, 0x14, 0x0807_0605_0403_0201, true);
    let expected = bytes(
        64,
        &[
            (0, &[0x7F, 0x40, 0x34, 0x12]),
            (39, &[0x5A]),
            (40, &[1]),
            (44, &[0x14]),
            (48, &[1, 2, 3, 4, 5, 6, 7, 8]),
        ],
    );
    assert_eq!(set.0[..], expected[..]);
    let get = fabrics::property_get(0x1234, 0x1C, false);
    let expected = bytes(
        64,
        &[(0, &[0x7F, 0x40, 0x34, 0x12, 0x04]), (39, &[0x5A]), (44, &[0x1C])],
    );
    assert_eq!(get.0[..], expected[..]);
    let access = PropertyAccess::decode(&get);
    assert_eq!((access.offset, access.eight_bytes), (0x1C, false));
}

#[test]
fn get_log_page() {
    // LID, LSP, RAE, NUMDL; NUMDU; offset.
    let sqe = Sqe(bytes(
        64,
        &[
            (40, &[0x0C, 0x81, 0x34, 0x12]),
            (44, &[0x01, 0]),
            (48, &[4, 0, 0, 0, 1]),
        ],
    )
    .try_into()
    .unwrap());
    let request = LogRequest::decode(&sqe);
    assert_eq!((request.lid, request.rae), (0x0C, true));
    assert_eq!(
        (request.offset, request.length),
        ((1 << 32) + 4, (0x0001_1234 + 1) * 4)
    );
}

#[test]
fn dataset_management_range() {
    let range = DsmRange {
        blocks: 0x0807_0605,
        slba: 0x100F_0E0D_0C0B_0A09,
    };
    let expected: [u8; 16] = [0, 0, 0, 0, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16];
    assert_eq!(range.encode(), expected);
    assert_eq!(DsmRange::decode(&expected), range);
}

#[test]
fn identify_controller() {
    let expected = bytes(
        4096,
        &[
            (0, &[0x01, 0x02, 0x01, 0x02]),
            (4, b"SERIAL              "),
            (24, b"MODEL                                   "),
            (64, b"FW      "),
            (76, &[0x0B, 9]),
            (78, &[0x34, 0x12]),
            (80, &[0, 4, 1, 0]),
            (92, &[0, 1, 2, 3]),
            (96, &[4, 5, 6, 7]),
            (111, &[1]),
            (128, &[1, 0, 2, 0, 3, 0]),
            (256, &[8, 9]),
            (258, &[10, 11, 12, 13]),
            (320, &[14, 15]),
            (512, &[0x66, 0x44]),
            (514, &[16, 17]),
            (516, &[18, 19, 20, 21]),
            (520, &[22, 23]),
            (522, &[24, 25]),
            (525, &[7]),
            (526, &[26, 27]),
            (528, &[28, 29]),
            (536, &[30, 31, 32, 33]),
            (540, &[34, 35, 36, 37]),
            (768, b"nqn.subsystem"),
            (1792, &[38, 39, 40, 41]),
            (1796, &[42, 43, 44, 45]),
            (1800, &[46, 47]),
            (1802, &[48, 49]),
            (1804, &[50, 51]),
        ],
    );
    let c = IdentifyController::decode(&expected).unwrap();
    assert_eq!(
        (c.vid, c.serial.as_str(), c.model.as_str(), c.firmware.as_str()),
        (0x0201, "SERIAL", "MODEL", "FW")
    );
    assert_eq!((c.cmic, c.mdts, c.cntlid, c.ver), (0x0B, 9, 0x1234, 0x0001_0400));
    assert_eq!(
        (c.oaes, c.ctratt, c.cntrltype, c.crdt),
        (0x0302_0100, 0x0706_0504, 1, [1, 2, 3])
    );
    assert_eq!((c.oacs, c.acl, c.aerl, c.frmw, c.lpa), (0x0908, 10, 11, 12, 13));
    assert_eq!((c.kas, c.maxcmd, c.nn), (0x0F0E, 0x1110, 0x1514_1312));
    assert_eq!(
        (c.oncs, c.fuses, c.vwc, c.awun, c.awupf),
        (0x1716, 0x1918, 7, 0x1B1A, 0x1D1C)
    );
    assert_eq!(
        (c.sgls, c.mnan, c.subnqn.as_str()),
        (0x2120_1F1E, 0x2524_2322, "nqn.subsystem")
    );
    assert_eq!((c.ioccsz, c.iorcsz, c.icdoff), (0x2928_2726, 0x2D2C_2B2A, 0x2F2E));
    assert_eq!((c.fcatt, c.msdbd, c.ofcs), (48, 49, 0x3332));
    assert_eq!(c.encode(), expected);
}

#[test]
fn identify_namespace() {
    let expected = bytes(
        4096,
        &[
            (0, &[1, 2, 3, 4, 5, 6, 7, 8]),
            (8, &[9, 10, 11, 12, 13, 14, 15, 16]),
            (16, &[17, 18, 19, 20, 21, 22, 23, 24]),
            (24, &[25]),
            (25, &[1]),
            (26, &[0x01]),
            (30, &[28]),
            (31, &[29]),
            (33, &[30]),
            (46, &[31, 32]),
            (99, &[33]),
            (104, b"0123456789abcdef"),
            (120, b"euieui64"),
            (128, &[0, 0, 9]),
            (132, &[8, 0, 12]),
        ],
    );
    let n = IdentifyNamespace::decode(&expected).unwrap();
    assert_eq!(n.nsze, 0x0807_0605_0403_0201);
    assert_eq!((n.ncap, n.nuse), (0x100F_0E0D_0C0B_0A09, 0x1817_1615_1413_1211));
    assert_eq!(
        (n.nsfeat, n.flbas, n.nmic, n.rescap, n.dlfeat),
        (25, 1, 28, 29, 30)
    );
    assert_eq!((n.noiob, n.nsattr), (0x201F, 33));
    assert_eq!((&n.nguid, &n.eui64), (b"0123456789abcdef", b"euieui64"));
    assert_eq!(n.format(), Some(LbaFormat { ms: 8, lbads: 12 }));
    assert_eq!(n.encode(), expected);
}

#[test]
fn discovery_log() {
    let header = bytes(
        1024,
        &[
            (0, &[1, 2, 3, 4, 5, 6, 7, 8]),
            (8, &[9, 10, 11, 12, 13, 14, 15, 16]),
        ],
    );
    let decoded = DiscoveryHeader::decode(&header).unwrap();
    assert_eq!(
        (decoded.genctr, decoded.numrec),
        (0x0807_0605_0403_0201, 0x100F_0E0D_0C0B_0A09)
    );
    assert_eq!(decoded.encode()[..], header[..]);
    let mut traddr = b"127.0.0.1".to_vec();
    traddr.resize(256, b' ');
    let mut trsvcid = b"4420".to_vec();
    trsvcid.resize(32, b' ');
    let entry = bytes(
        1024,
        &[
            (0, &[3, 1, 2, 4]),
            (4, &[5, 6]),
            (6, &[7, 8]),
            (8, &[9, 10]),
            (10, &[11, 12]),
            (32, &trsvcid),
            (256, b"nqn.subsystem"),
            (512, &traddr),
            (768, &[2]),
        ],
    );
    let e = DiscoveryEntry::decode(&entry).unwrap();
    assert_eq!((e.trtype, e.adrfam, e.subtype, e.treq), (3, 1, 2, 4));
    assert_eq!(
        (e.portid, e.cntlid, e.asqsz, e.eflags),
        (0x0605, 0x0807, 0x0A09, 0x0C0B)
    );
    assert_eq!(
        (
            e.trsvcid.as_str(),
            e.subnqn.as_str(),
            e.traddr.as_str(),
            e.sectype
        ),
        ("4420", "nqn.subsystem", "127.0.0.1", 2)
    );
    assert_eq!(e.encode()[..], entry[..]);
}

#[test]
fn the_checksum_has_no_seam() {
    let all: Vec<u8> = (0..=255).cycle().take(5000).collect();
    for cut in [0, 1, 7, 8, 9, 63, 64, 4096, 4999] {
        let mut digester = headrace_wire::Digester::new();
        digester.update(&all[..cut]);
        digester.update(&all[cut..]);
        assert_eq!(digester.value(), crc32c(&all), "cut at {cut}");
    }
}

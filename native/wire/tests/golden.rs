//! One row a PDU: its bytes as the transport specification lays them out, written by hand, in every combination of digests
//! and alignments. Used in both directions, whole, cut everywhere, with other PDUs behind, and with each field made wrong.
//!
//! The checksums here are computed bit by bit, by other code than the one under test.

use headrace_wire::command::{Cqe, Sgl, Sqe};
use headrace_wire::pdu::*;
use headrace_wire::Status;

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text
        .chars()
        .filter(|c| !c.is_whitespace())
        .map(|c| c.to_digit(16).expect("a hex digit") as u8)
        .collect();
    digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect()
}

/// Castagnoli, reflected, bit by bit.
fn crc(bytes: &[u8]) -> [u8; 4] {
    let mut register = !0u32;
    for &byte in bytes {
        register ^= u32::from(byte);
        for _ in 0..8 {
            register = register >> 1 ^ if register & 1 != 0 { 0x82F6_3B78 } else { 0 };
        }
    }
    (!register).to_le_bytes()
}

const OFF: Digests = Digests {
    header: false,
    data: false,
};
const HEADER: Digests = Digests {
    header: true,
    data: false,
};
const DATA: Digests = Digests {
    header: false,
    data: true,
};
const BOTH: Digests = Digests {
    header: true,
    data: true,
};

/// Digests in force, receiver's alignment field, then the FLAGS (of the digests), PDO and PLEN of the PDU.
type Shape = (Digests, u8, u8, u8, u32);

/// With 72 bytes of header and 16 of data.
const CAPSULE_WITH_DATA: &[Shape] = &[
    (OFF, 0, 0, 72, 88),
    (HEADER, 0, 1, 76, 92),
    (DATA, 0, 2, 72, 92),
    (BOTH, 0, 3, 76, 96),
    (OFF, 1, 0, 72, 88),
    (HEADER, 1, 1, 80, 96),
    (DATA, 1, 2, 72, 92),
    (BOTH, 1, 3, 80, 100),
    (OFF, 31, 0, 128, 144),
    (HEADER, 31, 1, 128, 144),
    (DATA, 31, 2, 128, 148),
    (BOTH, 31, 3, 128, 148),
];
const CAPSULE: &[Shape] = &[
    (OFF, 0, 0, 0, 72),
    (HEADER, 0, 1, 0, 76),
    (DATA, 0, 0, 0, 72),
    (BOTH, 0, 1, 0, 76),
    (BOTH, 1, 1, 0, 76),
    (BOTH, 31, 1, 0, 76),
];
/// With 24 bytes of header and 16 of data.
const DATA_PDU: &[Shape] = &[
    (OFF, 0, 0, 24, 40),
    (HEADER, 0, 1, 28, 44),
    (DATA, 0, 2, 24, 44),
    (BOTH, 0, 3, 28, 48),
    (OFF, 1, 0, 24, 40),
    (HEADER, 1, 1, 32, 48),
    (DATA, 1, 2, 24, 44),
    (BOTH, 1, 3, 32, 52),
    (OFF, 31, 0, 128, 144),
    (HEADER, 31, 1, 128, 144),
    (DATA, 31, 2, 128, 148),
    (BOTH, 31, 3, 128, 148),
];
/// 24 bytes of header, never data.
const SHORT: &[Shape] = &[
    (OFF, 0, 0, 0, 24),
    (HEADER, 0, 1, 0, 28),
    (DATA, 0, 0, 0, 24),
    (BOTH, 0, 1, 0, 28),
    (BOTH, 1, 1, 0, 28),
    (BOTH, 31, 1, 0, 28),
];
/// Sent before anything is agreed: nothing changes it.
const SETUP: &[Shape] = &[(OFF, 0, 0, 0, 128), (BOTH, 0, 0, 0, 128), (BOTH, 31, 0, 0, 128)];
/// 24 bytes of header, 16 of the offending one, no digest ever.
const TERM: &[Shape] = &[(OFF, 0, 0, 0, 40), (BOTH, 0, 0, 0, 40), (BOTH, 31, 0, 0, 40)];

struct Row {
    name: &'static str,
    pdu: Pdu,
    /// First byte, FLAGS beyond those of the digests, HLEN.
    head: (u8, u8, u8),
    /// From byte 8 to HLEN.
    body: String,
    data: usize,
    shapes: &'static [Shape],
}

fn rows() -> Vec<Row> {
    let zeros = |count: usize| "00".repeat(count);
    let write = Sqe::rw(0x01, 0x1234, 0x0A0B_0C0D, 0x1122_3344_5566_7788, 256);
    let data = |ttag, last, success| DataHeader {
        cccid: 0x1234,
        ttag,
        datao: 0x0001_0000,
        datal: 16,
        last,
        success,
    };
    vec![
        Row {
            name: "ICReq",
            pdu: Pdu::IcReq(IcReq {
                pfv: 0,
                hpda: 31,
                digests: BOTH,
                maxr2t: 0x0000_0203,
            }),
            head: (0x00, 0, 128),
            // PFV, HPDA, DGST, MAXR2T
            body: format!("0000 1F 03 03020000 {}", zeros(112)),
            data: 0,
            shapes: SETUP,
        },
        Row {
            name: "ICResp",
            pdu: Pdu::IcResp(IcResp {
                pfv: 0,
                cpda: 1,
                digests: DATA,
                maxh2cdata: 0x0002_0000,
            }),
            head: (0x01, 0, 128),
            // PFV, CPDA, DGST, MAXH2CDATA
            body: format!("0000 01 02 00000200 {}", zeros(112)),
            data: 0,
            shapes: SETUP,
        },
        Row {
            name: "H2CTermReq",
            pdu: Pdu::H2cTermReq(TermReq {
                fes: 1,
                fei: 0x0403_0201,
            }),
            head: (0x02, 0, 24),
            // FES, FEI (not aligned)
            body: format!("0100 01020304 {}", zeros(10)),
            data: 16,
            shapes: TERM,
        },
        Row {
            name: "C2HTermReq",
            pdu: Pdu::C2hTermReq(TermReq { fes: 3, fei: 0 }),
            head: (0x03, 0, 24),
            body: format!("0300 00000000 {}", zeros(10)),
            data: 16,
            shapes: TERM,
        },
        Row {
            name: "CapsuleCmd with data",
            pdu: Pdu::CapsuleCmd(write.with_sgl(Sgl::InCapsule {
                offset: 0,
                length: 16,
            })),
            head: (0x04, 0, 72),
            // OPC, PSDT, CID, NSID; CDW2, CDW3; MPTR; SGL1: address, length, type; SLBA; CDW12: NLB; CDW13 to 15
            body: format!(
                "01 40 3412 0D0C0B0A {} {} {} 10000000 000000 01 8877665544332211 FF000000 {}",
                zeros(8),
                zeros(8),
                zeros(8),
                zeros(12)
            ),
            data: 16,
            shapes: CAPSULE_WITH_DATA,
        },
        Row {
            name: "CapsuleCmd",
            pdu: Pdu::CapsuleCmd(write.with_sgl(Sgl::Transport { length: 0x0010_0000 })),
            head: (0x04, 0, 72),
            body: format!(
                "01 40 3412 0D0C0B0A {} {} {} 00001000 000000 5A 8877665544332211 FF000000 {}",
                zeros(8),
                zeros(8),
                zeros(8),
                zeros(12)
            ),
            data: 0,
            shapes: CAPSULE,
        },
        Row {
            name: "CapsuleResp",
            pdu: Pdu::CapsuleResp(Cqe {
                dw0: 0x0403_0201,
                dw1: 0x0807_0605,
                sqhd: 0x0A09,
                sqid: 0x0C0B,
                cid: 0x1234,
                // SC 82h, SCT 1, DNR
                status: Status::CONNECT_INVALID_PARAMETERS.do_not_retry(),
            }),
            head: (0x05, 0, 24),
            // DW0, DW1, SQHD, SQID, CID, STATUS
            body: "01020304 05060708 090A 0B0C 3412 0483".into(),
            data: 0,
            shapes: SHORT,
        },
        Row {
            name: "H2CData, more to come",
            pdu: Pdu::H2cData(data(0xBEEF, false, false)),
            head: (0x06, 0, 24),
            // CCCID, TTAG, DATAO, DATAL, reserved
            body: "3412 EFBE 00000100 10000000 00000000".into(),
            data: 16,
            shapes: DATA_PDU,
        },
        Row {
            name: "H2CData, last",
            pdu: Pdu::H2cData(data(0xBEEF, true, false)),
            head: (0x06, 4, 24),
            body: "3412 EFBE 00000100 10000000 00000000".into(),
            data: 16,
            shapes: DATA_PDU,
        },
        Row {
            name: "C2HData, more to come",
            pdu: Pdu::C2hData(data(0, false, false)),
            head: (0x07, 0, 24),
            // CCCID, reserved, DATAO, DATAL, reserved
            body: "3412 0000 00000100 10000000 00000000".into(),
            data: 16,
            shapes: DATA_PDU,
        },
        Row {
            name: "C2HData, last",
            pdu: Pdu::C2hData(data(0, true, false)),
            head: (0x07, 4, 24),
            body: "3412 0000 00000100 10000000 00000000".into(),
            data: 16,
            shapes: DATA_PDU,
        },
        Row {
            name: "C2HData, last, SUCCESS",
            pdu: Pdu::C2hData(data(0, true, true)),
            head: (0x07, 12, 24),
            body: "3412 0000 00000100 10000000 00000000".into(),
            data: 16,
            shapes: DATA_PDU,
        },
        Row {
            name: "R2T",
            pdu: Pdu::R2t(R2t {
                cccid: 0x1234,
                ttag: 0xBEEF,
                r2to: 0x0001_0000,
                r2tl: 0x0002_0000,
            }),
            head: (0x09, 0, 24),
            // CCCID, TTAG, R2TO, R2TL, reserved
            body: "3412 EFBE 00000100 00000200 00000000".into(),
            data: 0,
            shapes: SHORT,
        },
    ]
}

struct Built {
    digests: Digests,
    xpda: u8,
    bytes: Vec<u8>,
    /// Bytes of the data; the rest before them is header, digest and pad.
    data_at: usize,
}

/// A row in one shape, put together from the row's own numbers.
fn build(row: &Row, &(digests, xpda, flags, pdo, plen): &Shape) -> Built {
    let (kind, more_flags, hlen) = row.head;
    let mut bytes = vec![kind, flags | more_flags, hlen, pdo];
    bytes.extend(plen.to_le_bytes());
    bytes.extend(hex(&row.body));
    assert_eq!(
        bytes.len(),
        usize::from(hlen),
        "the row of {} has a wrong length",
        row.name
    );
    if flags & 1 != 0 {
        bytes.extend(crc(&bytes));
    }
    if pdo > 0 {
        bytes.resize(pdo.into(), 0);
    }
    let data_at = bytes.len();
    let data: Vec<u8> = (1..=row.data as u8).collect();
    bytes.extend(&data);
    if flags & 2 != 0 {
        bytes.extend(crc(&data));
    }
    assert_eq!(bytes.len(), plen as usize, "{}", row.name);
    Built {
        digests,
        xpda,
        bytes,
        data_at,
    }
}

fn each(mut test: impl FnMut(&Row, &Built)) -> usize {
    let mut shapes = 0;
    for row in rows() {
        for shape in row.shapes {
            test(&row, &build(&row, shape));
            shapes += 1;
        }
    }
    shapes
}

/// What both receivers do: eight bytes, then the rest of the prefix, then data and digest; from pieces as they come.
#[derive(Default)]
struct Reader {
    have: Vec<u8>,
}

#[derive(Debug, PartialEq, Eq)]
struct Whole {
    pdu: Pdu,
    data: Vec<u8>,
}

impl Reader {
    fn next(&mut self, digests: Digests, xpda: u8) -> Result<Option<Whole>, PduError> {
        let Some(first) = self.have.first_chunk::<8>() else {
            return Ok(None);
        };
        let common = CommonHeader::decode(first, digests, xpda)?;
        let layout = common.layout(digests)?;
        if self.have.len() < layout.plen() {
            return Ok(None);
        }
        let rest = self.have.split_off(layout.plen());
        let one = std::mem::replace(&mut self.have, rest);
        let header = &one[..layout.header_bytes];
        if layout.header_digest_bytes > 0 {
            assert_eq!(one[layout.header_bytes..layout.header_bytes + 4], crc(header));
        }
        let data = one[layout.prefix_bytes()..layout.prefix_bytes() + layout.data_bytes].to_vec();
        if layout.data_digest_bytes > 0 {
            assert_eq!(one[layout.plen() - 4..], crc(&data));
        }
        Ok(Some(Whole {
            pdu: Pdu::decode(&common, header)?,
            data,
        }))
    }
}

#[test]
fn every_row_in_every_shape_both_ways() {
    let shapes = each(|row, built| {
        let what = format!("{} with {:?}, alignment {}", row.name, built.digests, built.xpda);
        let mut encoded = Vec::new();
        let layout = row.pdu.encode(row.data, built.digests, built.xpda, &mut encoded);
        assert_eq!(encoded, built.bytes[..built.data_at], "{what}");
        assert_eq!(layout.plen(), built.bytes.len(), "{what}");

        let mut reader = Reader {
            have: built.bytes.clone(),
        };
        let whole = reader.next(built.digests, built.xpda).expect(&what).expect(&what);
        assert_eq!(whole.pdu, row.pdu, "{what}");
        assert_eq!(whole.data, (1..=row.data as u8).collect::<Vec<u8>>(), "{what}");
        assert!(reader.have.is_empty());
    });
    assert_eq!(shapes, 102, "a shape is missing");
}

#[test]
fn every_cut_every_split_and_what_comes_behind() {
    each(|row, built| {
        let (digests, xpda) = (built.digests, built.xpda);
        let mut reader = Reader::default();
        for (at, &byte) in built.bytes.iter().enumerate() {
            // Truncated here: nothing comes of it, and nothing is refused.
            assert_eq!(reader.next(digests, xpda), Ok(None), "{} cut at {at}", row.name);
            reader.have.push(byte);
        }
        assert_eq!(reader.next(digests, xpda).unwrap().unwrap().pdu, row.pdu);
        for at in 0..=built.bytes.len() {
            // In two pieces, the second with the next PDU and half of another behind it.
            let mut reader = Reader {
                have: built.bytes[..at].to_vec(),
            };
            let early = reader.next(digests, xpda).unwrap();
            assert_eq!(early.is_some(), at == built.bytes.len());
            reader.have.extend(&built.bytes[at..]);
            reader.have.extend(&built.bytes);
            reader.have.extend(&built.bytes[..built.bytes.len() / 2]);
            let first = early.or_else(|| reader.next(digests, xpda).unwrap()).unwrap();
            let second = reader.next(digests, xpda).unwrap().unwrap();
            assert_eq!((&first.pdu, &first), (&row.pdu, &second));
            assert_eq!(reader.have.len(), built.bytes.len() / 2);
        }
        let mut first = [0; 8];
        first.copy_from_slice(&built.bytes[..8]);
        let common = CommonHeader::decode(&first, digests, xpda).unwrap();
        let header = usize::from(row.head.2);
        for length in (0..header).chain(header + 1..=built.bytes.len()) {
            assert!(
                Pdu::decode(&common, &built.bytes[..length]).is_err(),
                "{} of {length} bytes",
                row.name
            );
        }
    });
}

/// A byte of the header and its wrong value, the digests in force and the alignment asked for; then FES and FEI.
type Wrong = (&'static str, usize, u8, Digests, u8, u16, u32);

const WRONG: &[Wrong] = &[
    // PDU-Type: there is no 08h, nothing from 0Ah.
    ("ICReq", 0, 0x08, OFF, 0, 1, 0),
    ("CapsuleCmd", 0, 0x0A, OFF, 0, 1, 0),
    ("R2T", 0, 0xFF, OFF, 0, 1, 0),
    // FLAGS: a digest that is not in force, none where it is, SUCCESS without LAST_PDU.
    ("ICReq", 1, 0x01, OFF, 0, 1, 1),
    ("ICResp", 1, 0x01, BOTH, 0, 1, 1),
    ("H2CTermReq", 1, 0x01, BOTH, 0, 1, 1),
    ("H2CTermReq", 1, 0x02, OFF, 0, 1, 1),
    ("C2HTermReq", 1, 0x02, OFF, 0, 1, 1),
    ("CapsuleCmd", 1, 0x01, OFF, 0, 1, 1),
    ("CapsuleCmd", 1, 0x00, HEADER, 0, 1, 1),
    ("CapsuleCmd with data", 1, 0x02, OFF, 0, 1, 1),
    ("CapsuleCmd with data", 1, 0x00, DATA, 0, 1, 1),
    ("CapsuleCmd with data", 1, 0x01, BOTH, 0, 1, 1),
    ("CapsuleResp", 1, 0x01, OFF, 0, 1, 1),
    ("H2CData, last", 1, 0x06, OFF, 0, 1, 1),
    ("H2CData, last", 1, 0x04, DATA, 0, 1, 1),
    ("C2HData, last", 1, 0x08, OFF, 0, 1, 1),
    ("R2T", 1, 0x00, BOTH, 0, 1, 1),
    // HLEN
    ("ICReq", 2, 127, OFF, 0, 1, 2),
    ("ICResp", 2, 0, OFF, 0, 1, 2),
    ("H2CTermReq", 2, 23, OFF, 0, 1, 2),
    ("C2HTermReq", 2, 25, OFF, 0, 1, 2),
    ("CapsuleCmd", 2, 64, OFF, 0, 1, 2),
    ("CapsuleResp", 2, 72, OFF, 0, 1, 2),
    ("H2CData, last", 2, 28, HEADER, 0, 1, 2),
    ("C2HData, last", 2, 20, OFF, 0, 1, 2),
    ("R2T", 2, 16, OFF, 0, 1, 2),
    // PDO: inside of the header or its digest, behind the end, not aligned.
    ("CapsuleCmd with data", 3, 0, OFF, 0, 1, 3),
    ("CapsuleCmd with data", 3, 71, OFF, 0, 1, 3),
    ("CapsuleCmd with data", 3, 72, HEADER, 0, 1, 3),
    ("CapsuleCmd with data", 3, 88, OFF, 0, 1, 3),
    ("CapsuleCmd with data", 3, 73, OFF, 0, 1, 3),
    ("CapsuleCmd with data", 3, 76, OFF, 1, 1, 3),
    ("CapsuleCmd with data", 3, 72, OFF, 31, 1, 3),
    ("H2CData, last", 3, 26, OFF, 0, 1, 3),
    ("H2CData, last", 3, 28, OFF, 1, 1, 3),
    ("C2HData, last", 3, 23, OFF, 0, 1, 3),
    ("C2HData, last", 3, 255, OFF, 0, 1, 3),
    ("C2HData, last", 3, 40, DATA, 0, 1, 3),
    // PLEN: below the header, or data where there are none.
    ("ICReq", 4, 127, OFF, 0, 1, 4),
    ("ICReq", 4, 129, OFF, 0, 1, 4),
    ("ICResp", 5, 1, OFF, 0, 1, 4),
    ("H2CTermReq", 4, 8, OFF, 0, 1, 4),
    ("H2CTermReq", 4, 153, OFF, 0, 1, 4),
    ("C2HTermReq", 7, 0x80, OFF, 0, 1, 4),
    ("CapsuleCmd", 4, 71, OFF, 0, 1, 4),
    ("CapsuleCmd", 4, 72, HEADER, 0, 1, 4),
    ("CapsuleResp", 4, 23, OFF, 0, 1, 4),
    ("CapsuleResp", 4, 28, OFF, 0, 1, 4),
    ("R2T", 6, 1, OFF, 0, 1, 4),
    // PFV, HPDA, CPDA, MAXH2CDATA.
    ("ICReq", 8, 1, OFF, 0, 6, 8),
    ("ICReq", 9, 1, OFF, 0, 6, 8),
    ("ICReq", 10, 32, OFF, 0, 1, 10),
    ("ICReq", 10, 255, OFF, 0, 1, 10),
    ("ICResp", 8, 1, OFF, 0, 6, 8),
    ("ICResp", 10, 32, OFF, 0, 1, 10),
    ("ICResp", 12, 2, OFF, 0, 1, 12),
    ("ICResp", 14, 0, OFF, 0, 1, 12),
];

#[test]
fn each_wrong_field_is_named() {
    for &(name, at, value, digests, xpda, fes, fei) in WRONG {
        let row = rows().into_iter().find(|row| row.name == name).expect(name);
        // The shape that is right for these digests, or the nearest; the wrong byte is the only fault.
        let shape = row
            .shapes
            .iter()
            .find(|shape| (shape.0, shape.1) == (digests, xpda))
            .or_else(|| row.shapes.iter().find(|shape| shape.0 == digests))
            .unwrap_or(&row.shapes[0]);
        let mut bytes = build(&row, shape).bytes;
        assert_ne!(bytes[at], value, "{name}: byte {at} is {value} anyway");
        bytes[at] = value;
        let first = bytes.first_chunk::<8>().expect("eight bytes");
        let error = CommonHeader::decode(first, digests, xpda)
            .and_then(|common| {
                common.layout(digests)?;
                Pdu::decode(&common, &bytes[..usize::from(common.hlen)])
            })
            .expect_err(&format!("{name}: byte {at} = {value} is taken"));
        assert_eq!(
            (error.fes as u16, error.fei),
            (fes, fei),
            "{name}: byte {at} = {value}: {error}"
        );
    }
}

#[test]
fn known_answers_of_the_checksum() {
    let ramp: Vec<u8> = (0..32).collect();
    for (bytes, answer) in [
        (&b""[..], 0u32),
        (b"123456789", 0xE306_9283),
        (&[0; 32], 0x8A91_36AA),
        (&[0xFF; 32], 0x62A8_AB43),
        (&ramp, 0x46DD_794E),
    ] {
        assert_eq!(headrace_wire::crc32c(bytes), answer);
        assert_eq!(crc(bytes), answer.to_le_bytes(), "the test's own checksum");
    }
}

#[test]
fn the_list_of_fatal_errors() {
    let list = [
        (Fes::InvalidHeaderField, 1),
        (Fes::SequenceError, 2),
        (Fes::HeaderDigest, 3),
        (Fes::DataOutOfRange, 4),
        (Fes::LimitExceeded, 5),
        (Fes::UnsupportedParameter, 6),
    ];
    for (fes, number) in list {
        assert_eq!(fes as u16, number);
        assert_ne!(fes_name(number), "unknown fatal error status");
    }
}

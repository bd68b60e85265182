//! One table of PDUs with their bytes, used in both directions: whole, truncated, damaged, with trailing data.

use headrace_wire::command::{Cqe, Sgl, Sqe};
use headrace_wire::pdu::*;
use headrace_wire::{io, Status};

const NONE: Digests = Digests {
    header: false,
    data: false,
};
const BOTH: Digests = Digests {
    header: true,
    data: true,
};

struct Case {
    name: &'static str,
    pdu: Pdu,
    data_bytes: usize,
    digests: Digests,
    xpda: u8,
    /// The first bytes on the wire, golden.
    prefix: &'static [u8],
    /// Bytes before the data, and in all.
    lengths: (usize, usize),
}

fn cases() -> Vec<Case> {
    let write = Sqe::rw(io::WRITE, 0x0102, 1, 0x1_0000_0002, 8).with_sgl(Sgl::InCapsule {
        offset: 0,
        length: 4096,
    });
    let data = |last, success| DataHeader {
        cccid: 7,
        ttag: 9,
        datao: 4096,
        datal: 8192,
        last,
        success,
    };
    vec![
        Case {
            name: "icreq",
            pdu: Pdu::IcReq(IcReq {
                pfv: 0,
                hpda: 0,
                digests: BOTH,
                maxr2t: 0,
            }),
            data_bytes: 0,
            digests: NONE,
            xpda: 0,
            prefix: &[0, 0, 128, 0, 128, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0],
            lengths: (128, 128),
        },
        Case {
            name: "icresp",
            pdu: Pdu::IcResp(IcResp {
                pfv: 0,
                cpda: 3,
                digests: NONE,
                maxh2cdata: 131072,
            }),
            data_bytes: 0,
            digests: NONE,
            xpda: 0,
            prefix: &[1, 0, 128, 0, 128, 0, 0, 0, 0, 0, 3, 0, 0, 0, 2, 0],
            lengths: (128, 128),
        },
        Case {
            name: "write in capsule",
            pdu: Pdu::CapsuleCmd(write),
            data_bytes: 4096,
            digests: NONE,
            xpda: 0,
            prefix: &[4, 0, 72, 72, 0x48, 0x10, 0, 0, 1, 0x40, 2, 1, 1, 0, 0, 0],
            lengths: (72, 72 + 4096),
        },
        Case {
            name: "write in capsule, digests, CPDA 31",
            pdu: Pdu::CapsuleCmd(write),
            data_bytes: 4096,
            digests: BOTH,
            xpda: 31,
            prefix: &[4, 3, 72, 128, 0x84, 0x10, 0, 0],
            lengths: (128, 128 + 4096 + 4),
        },
        Case {
            name: "response",
            pdu: Pdu::CapsuleResp(Cqe {
                dw0: 1,
                dw1: 2,
                sqhd: 3,
                sqid: 4,
                cid: 5,
                status: Status::LBA_RANGE.do_not_retry(),
            }),
            data_bytes: 0,
            digests: BOTH,
            xpda: 0,
            prefix: &[
                5, 1, 24, 0, 28, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 4, 0, 5, 0, 0, 0x81,
            ],
            lengths: (28, 28),
        },
        Case {
            name: "h2c data",
            pdu: Pdu::H2cData(data(true, false)),
            data_bytes: 8192,
            digests: BOTH,
            xpda: 0,
            prefix: &[6, 7, 24, 28, 32, 32, 0, 0, 7, 0, 9, 0, 0, 16, 0, 0, 0, 32, 0, 0],
            lengths: (28, 28 + 8192 + 4),
        },
        Case {
            name: "c2h data with success",
            pdu: Pdu::C2hData(data(true, true)),
            data_bytes: 8192,
            digests: NONE,
            xpda: 1,
            prefix: &[7, 12, 24, 24, 24, 32, 0, 0],
            lengths: (24, 24 + 8192),
        },
        Case {
            name: "r2t",
            pdu: Pdu::R2t(R2t {
                cccid: 1,
                ttag: 2,
                r2to: 3,
                r2tl: 4,
            }),
            data_bytes: 0,
            digests: NONE,
            xpda: 0,
            prefix: &[
                9, 0, 24, 0, 24, 0, 0, 0, 1, 0, 2, 0, 3, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0,
            ],
            lengths: (24, 24),
        },
        Case {
            name: "termination, FEI not aligned",
            pdu: Pdu::C2hTermReq(TermReq {
                fes: 1,
                fei: 0x0403_0201,
            }),
            data_bytes: 8,
            digests: BOTH,
            xpda: 0,
            prefix: &[3, 0, 24, 0, 32, 0, 0, 0, 1, 0, 1, 2, 3, 4, 0],
            lengths: (24, 32),
        },
    ]
}

fn encode(case: &Case) -> (Vec<u8>, Layout) {
    let mut out = Vec::new();
    let layout = case
        .pdu
        .encode(case.data_bytes, case.digests, case.xpda, &mut out);
    (out, layout)
}

fn common(bytes: &[u8], case: &Case) -> Result<CommonHeader, PduError> {
    CommonHeader::decode(bytes[..8].try_into().unwrap(), case.digests, case.xpda)
}

#[test]
fn golden_bytes_both_ways() {
    for case in cases() {
        let (out, layout) = encode(&case);
        assert_eq!(&out[..case.prefix.len()], case.prefix, "{}", case.name);
        assert_eq!((out.len(), layout.plen()), case.lengths, "{}", case.name);
        let header = common(&out, &case).unwrap();
        assert_eq!(header.layout(case.digests).unwrap(), layout, "{}", case.name);
        let pdu = Pdu::decode(&header, &out[..layout.header_bytes]).unwrap();
        assert_eq!(pdu, case.pdu, "{}", case.name);
        if layout.header_digest_bytes > 0 {
            let digest = headrace_wire::crc32c(&out[..layout.header_bytes]).to_le_bytes();
            assert_eq!(out[layout.header_bytes..layout.header_bytes + 4], digest);
        }
        // A header of another length is refused, not read past.
        for cut in 0..layout.header_bytes {
            assert!(Pdu::decode(&header, &out[..cut]).is_err());
        }
    }
}

#[test]
fn damaged_common_headers_name_the_byte() {
    let case = &cases()[2];
    let (good, _) = encode(case);
    for (at, value, fei) in [
        (0, 8, 0),
        (0, 200, 0),
        (1, 1, 1),
        (1, 2, 1),
        (1, 8, 1),
        (2, 71, 2),
        (3, 0, 3),
        (3, 73, 3),
    ] {
        let mut bad = good.clone();
        bad[at] = value;
        let error = common(&bad, case).unwrap_err();
        assert_eq!(
            (error.fes, error.fei),
            (Fes::InvalidHeaderField, fei),
            "byte {at} = {value}: {error}"
        );
    }
    for plen in [0u32, 8, 71] {
        let mut bad = good.clone();
        bad[4..8].copy_from_slice(&plen.to_le_bytes());
        assert_eq!(common(&bad, case).unwrap_err().fei, 4);
    }
}

#[test]
fn every_first_eight_bytes_decode_or_refuse() {
    // Deterministic noise: nothing here may panic, and what is accepted must have a layout that adds up to PLEN.
    let mut state = 0x9E37_79B9_7F4A_7C15u64;
    for _ in 0..200_000 {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let mut bytes = state.to_le_bytes();
        bytes[0] &= 15;
        if state & 1 == 0 {
            if let Some(t) = PduType::from_byte(bytes[0]) {
                bytes[2] = t.header_bytes() as u8;
            }
        }
        for digests in [NONE, BOTH] {
            if let Ok(header) = CommonHeader::decode(&bytes, digests, 0) {
                assert_eq!(header.layout(digests).unwrap().plen(), header.plen as usize);
            }
        }
    }
}

#[test]
fn bad_parameters_in_connection_setup() {
    for (at, value, fes, fei) in [
        (8, 1, Fes::UnsupportedParameter, 8),
        (10, 32, Fes::InvalidHeaderField, 10),
    ] {
        for case in [&cases()[0], &cases()[1]] {
            let (mut bytes, _) = encode(case);
            bytes[at] = value;
            let error = Pdu::decode(&common(&bytes, case).unwrap(), &bytes).unwrap_err();
            assert_eq!((error.fes, error.fei), (fes, fei), "{}", case.name);
        }
    }
    let case = &cases()[1];
    for small in [0u32, 4095, 4098] {
        let (mut bytes, _) = encode(case);
        bytes[12..16].copy_from_slice(&small.to_le_bytes());
        assert_eq!(
            Pdu::decode(&common(&bytes, case).unwrap(), &bytes)
                .unwrap_err()
                .fei,
            12
        );
    }
}

#[test]
fn sqe_fields() {
    let sqe = Sqe::rw(io::READ, 0xBEEF, 0x0A0B_0C0D, 0x1122_3344_5566_7788, 65536)
        .with_sgl(Sgl::Transport { length: 5 });
    assert_eq!(sqe.0[..8], [2, 0x40, 0xEF, 0xBE, 0x0D, 0x0C, 0x0B, 0x0A]);
    assert_eq!(sqe.0[24..40], [0, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0x5A]);
    assert_eq!(
        (sqe.slba(), sqe.nlb(), sqe.fua()),
        (0x1122_3344_5566_7788, 65536, false)
    );
    assert_eq!(sqe.sgl(), Sgl::Transport { length: 5 });
    assert_eq!(Sqe::new(io::FLUSH, 0, 1).sgl(), Sgl::None);
}

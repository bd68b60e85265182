//! Header and data digests: CRC32C over exactly the header bytes, or exactly the data bytes of one PDU (pad excluded),
//! stored little-endian (NVMe/TCP 3.1).

/// CRC32C of `bytes`, register all-ones, inverted at the end.
pub fn crc32c(bytes: &[u8]) -> u32 {
    ::crc32c::crc32c(bytes)
}

/// A digest over data that arrives in pieces.
#[derive(Clone, Copy, Debug, Default)]
pub struct Digester(u32);

impl Digester {
    pub fn new() -> Self {
        Digester(0)
    }
    pub fn update(&mut self, bytes: &[u8]) {
        self.0 = ::crc32c::crc32c_append(self.0, bytes);
    }
    pub fn value(self) -> u32 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_answers() {
        let ramp: Vec<u8> = (0..32).collect();
        for (bytes, answer) in [
            (&b""[..], 0),
            (b"123456789", 0xE306_9283),
            (&[0; 32], 0x8A91_36AA),
            (&[0xFF; 32], 0x62A8_AB43),
            (&ramp, 0x46DD_794E),
        ] {
            assert_eq!(crc32c(bytes), answer);
            let mut digester = Digester::new();
            bytes.chunks(7).for_each(|piece| digester.update(piece));
            assert_eq!(digester.value(), answer);
        }
    }
}

//! The checksum of a data block: CRC32C with the block's identity mixed in.
//!
//! ```text
//! crc32c( volume_id (16 bytes) || birth (u64 LE) || block index (u64 LE) || data )
//! ```
//!
//! A block that was written for another volume, another allocation or another place cannot match, so a stale or
//! misdirected block is found as surely as a flipped bit.

/// What all blocks of a batch share.
#[derive(Clone, Copy, Debug)]
pub struct ChecksumSpec {
    /// Data bytes under one checksum; the last block of a segment may be shorter. 0: no checksums.
    pub block_bytes: u64,
    /// CRC of the 16 bytes of volume identity, the common start of every block's checksum.
    seed: u32,
}

impl ChecksumSpec {
    pub fn new(block_bytes: u64, volume_id: [u8; 16]) -> Self {
        ChecksumSpec {
            block_bytes,
            seed: crc32c::crc32c(&volume_id),
        }
    }

    /// The checksum of block `index` of allocation `birth`.
    pub fn of(&self, birth: u64, index: u64, data: &[u8]) -> u32 {
        let mut identity = [0; 16];
        identity[..8].copy_from_slice(&birth.to_le_bytes());
        identity[8..].copy_from_slice(&index.to_le_bytes());
        crc32c::crc32c_append(crc32c::crc32c_append(self.seed, &identity), data)
    }

    /// How many checksums `length` bytes of data have.
    pub fn count(&self, length: u64) -> u64 {
        if self.block_bytes == 0 {
            0
        } else {
            length.div_ceil(self.block_bytes)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_the_crc_of_identity_and_data_in_a_row() {
        let id = *b"0123456789abcdef";
        let mut row = id.to_vec();
        row.extend(7u64.to_le_bytes());
        row.extend(9u64.to_le_bytes());
        row.extend(b"data");
        assert_eq!(
            ChecksumSpec::new(4096, id).of(7, 9, b"data"),
            crc32c::crc32c(&row)
        );
        // RFC 3720, B.4: 32 bytes of zeros.
        assert_eq!(crc32c::crc32c(&[0; 32]), 0x8a91_36aa);
    }

    #[test]
    fn identity_matters() {
        let spec = ChecksumSpec::new(4096, [0; 16]);
        let here = spec.of(1, 2, b"x");
        assert_ne!(here, spec.of(2, 2, b"x"));
        assert_ne!(here, spec.of(1, 3, b"x"));
        assert_ne!(here, ChecksumSpec::new(4096, [1; 16]).of(1, 2, b"x"));
    }
}

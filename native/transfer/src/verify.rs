//! Checking what was read against its checksums, block by block: while it comes, and the rest at its end. And taking those
//! of what is written, while it goes.
//!
//! A block that was just received or sent is in the processor's cache, and is not when a request of a megabyte has ended.
//! What comes early proves nothing by itself: it may come again, from another path and with other bytes, so whatever comes
//! again is looked at again. So it is with what is sent again.

use crate::checksum::ChecksumSpec;
use crate::piece::Piece;
use crate::segment::Segment;
use crate::{Buffer, ErrorKind, IoError};

/// How far a piece was verified while it came.
#[derive(Clone, Copy)]
pub(crate) enum Verified {
    To(Checked),
    /// A thread is at it.
    Now,
    /// It did not match, or came again under a thread that was at it: all of it is verified at its end.
    Nothing,
}

#[derive(Clone, Copy, Default)]
pub(crate) struct Checked {
    /// So many bytes of the piece came without a gap.
    come: u64,
    /// So many of those are whole checksum blocks, and match.
    bytes: u64,
    /// Where the next block begins: so many segments behind the piece's first, and how far in that.
    segments: usize,
    position: u64,
}

impl Checked {
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Default for Verified {
    fn default() -> Self {
        Verified::To(Checked::default())
    }
}

impl Verified {
    /// The bytes from `at` to `end` came. Gives what to verify now, from where and how many bytes; less than a checksum
    /// block of `unit` bytes waits for more.
    pub fn come(&mut self, at: u64, end: u64, unit: u64) -> Option<(Checked, u64)> {
        let Verified::To(mut checked) = *self else {
            *self = Verified::Nothing;
            return None;
        };
        if at > checked.come {
            return None;
        }
        if at < checked.bytes {
            checked = Checked::default();
        }
        checked.come = end;
        *self = Verified::To(checked);
        let fresh = end.checked_sub(checked.bytes).filter(|&fresh| fresh >= unit)?;
        Some((checked, fresh))
    }

    /// What the thread found that was at it; `None` where it did not match.
    pub fn got(&mut self, checked: Option<Checked>) {
        *self = match (*self, checked) {
            (Verified::Now, Some(checked)) => Verified::To(checked),
            _ => Verified::Nothing,
        };
    }
}

/// What becomes of a block's checksum.
pub(crate) enum Sums<'a> {
    Expected(&'a [u32]),
    /// 4 bytes each, native byte order: they are put here.
    Taken(&'a Buffer),
}

/// What the pieces of a batch are verified against. An error comes with the segment in which it is.
pub(crate) struct Verifier<'a> {
    pub segments: &'a [Segment],
    pub checksum: ChecksumSpec,
    pub sums: Sums<'a>,
}

impl Verifier<'_> {
    /// `data` is all of a piece: verify what was not yet.
    pub fn finish(&self, piece: &Piece, verified: Verified, data: &[u8]) -> Result<(), (IoError, usize)> {
        let from = match verified {
            Verified::To(checked) => checked,
            Verified::Now | Verified::Nothing => Checked::default(),
        };
        let checked = self.verify(piece, from, &data[from.bytes as usize..])?;
        if checked.bytes < data.len() as u64 {
            let error = IoError::new(ErrorKind::Failed, "a piece ended inside of a checksum block")
                .at(format!("segment {}", piece.segment));
            return Err((error, piece.segment));
        }
        Ok(())
    }

    /// The checksum blocks that are whole in `data`, what came of a piece behind `at`; gives where it got to.
    pub fn verify(
        &self,
        piece: &Piece,
        mut at: Checked,
        mut data: &[u8],
    ) -> Result<Checked, (IoError, usize)> {
        let unit = self.checksum.block_bytes;
        while !data.is_empty() {
            let index = piece.segment + at.segments;
            let segment = &self.segments[index];
            // The first segment of a piece may have begun before it.
            let position = at.position + if at.segments == 0 { piece.start } else { 0 };
            let length = (segment.length - position).min(unit);
            if length == 0 {
                (at.segments, at.position) = (at.segments + 1, 0);
                continue;
            }
            let Some((block, rest)) = data.split_at_checked(length as usize) else {
                break;
            };
            let number = position / unit;
            let identity = segment.first_block.wrapping_add(number);
            let found = self.checksum.of(segment.birth, identity, block);
            let place = (segment.first_checksum + number) as usize;
            let wanted = match self.sums {
                Sums::Expected(expected) => expected.get(place).copied(),
                Sums::Taken(array) => {
                    array.copy_from(place * 4, &found.to_ne_bytes());
                    Some(found)
                }
            };
            if wanted != Some(found) {
                let place = format!(
                    "segment {index}, member {}, offset {}, block {identity}",
                    segment.member,
                    segment.offset + position
                );
                let error = IoError::new(ErrorKind::Checksum, "data do not match their checksum")
                    .at(place)
                    .expected(format!("crc32c {:#010x}", wanted.unwrap_or_default()))
                    .found(format!("{found:#010x}"));
                return Err((error, index));
            }
            at.bytes += length;
            at.position += length;
            data = rest;
        }
        Ok(at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_again_under_a_thread_that_is_at_it_takes_its_result_away() {
        let mut verified = Verified::default();
        let (from, fresh) = verified.come(0, 8192, 4096).expect("two blocks");
        assert_eq!((from.bytes, fresh), (0, 8192));
        verified = Verified::Now;
        assert!(verified.come(0, 4096, 4096).is_none());
        verified.got(Some(Checked { bytes: 8192, ..from }));
        assert!(matches!(verified, Verified::Nothing));
    }
}

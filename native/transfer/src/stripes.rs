//! A row of bytes that is dealt out over members, and the segments that a range of it is.
//!
//! The same arithmetic as `headrace.volume.data.extents`, for the reads that a loader makes by the hundred thousand: there
//! it is a dozen passes over columns, here a few divisions a range.
//!
//! ```text
//! byte -> run -> unit k = (byte - run start) / unit -> column k mod width, row k div width -> member, offset
//! ```
//!
//! What the numbers say comes from media and is not trusted: sums saturate, and [`crate::segment::check`] refuses what
//! then leaves a device.

use crate::{ErrorKind, IoError};

/// `width` columns of stripe units, dealt out round-robin; a run of width 1 is one piece.
#[derive(Clone, Copy, Debug)]
struct Run {
    start: u64,
    end: u64,
    unit: u64,
    width: u64,
    /// Index of its first column.
    column: u64,
}

/// Immutable.
#[derive(Debug)]
pub struct Stripes {
    runs: Vec<Run>,
    /// Member, and where the column begins on it.
    columns: Vec<(u32, u64)>,
    length: u64,
    block_bytes: u64,
}

/// A part of a range that lies in one piece on one member, widened to whole blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    pub member: u32,
    pub offset: u64,
    /// Where it begins in the row, and how long it is.
    pub start: u64,
    pub length: u64,
    /// What of it is wanted.
    pub skip: u64,
    pub take: u64,
    /// Where the wanted bytes begin within the range.
    pub within: u64,
}

impl Stripes {
    /// `runs`: length and width of each; `columns`: member and offset of each. `Usage` where they contradict each other.
    pub fn new(
        runs: &[(u64, u32)],
        columns: Vec<(u32, u64)>,
        length: u64,
        block_bytes: u64,
        stripe_bytes: u64,
    ) -> Result<Self, IoError> {
        let mut laid = Vec::with_capacity(runs.len());
        let (mut start, mut column) = (0u64, 0u64);
        let mut sound = block_bytes > 0 && stripe_bytes > 0;
        for (index, &(run, width)) in runs.iter().enumerate() {
            let last = index + 1 == runs.len();
            sound &= run > 0 && width > 0 && (last || block_bytes > 0 && run % block_bytes == 0);
            let end = start.saturating_add(run);
            laid.push(Run {
                start,
                end,
                unit: if width > 1 { stripe_bytes } else { run.max(1) },
                width: u64::from(width).max(1),
                column,
            });
            start = end;
            column += u64::from(width);
        }
        if !sound || start != length || column != columns.len() as u64 {
            return Err(
                IoError::new(ErrorKind::Usage, "runs and columns contradict each other")
                    .expected(format!("{length} bytes in whole blocks of {block_bytes}"))
                    .found(format!("{runs:?}, {} columns", columns.len())),
            );
        }
        Ok(Stripes {
            runs: laid,
            columns,
            length,
            block_bytes,
        })
    }

    pub fn len(&self) -> u64 {
        self.length
    }

    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    pub fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    /// The parts of `length` bytes from `start` on, in their order; false where these leave the row.
    pub fn cut(&self, start: u64, length: u64, mut part: impl FnMut(Part)) -> bool {
        let Some(end) = start.checked_add(length).filter(|&end| end <= self.length) else {
            return false;
        };
        if length == 0 {
            return true;
        }
        let low = start - start % self.block_bytes;
        let high = end
            .div_ceil(self.block_bytes)
            .saturating_mul(self.block_bytes)
            .min(self.length);
        let mut index = self.runs.partition_point(|run| run.end <= low);
        let mut position = low;
        while position < high {
            let run = self.runs[index];
            let unit = (position - run.start) / run.unit;
            let unit_start = run.start + unit * run.unit;
            let stop = unit_start.saturating_add(run.unit).min(run.end).min(high);
            let (member, base) = self.columns[(run.column + unit % run.width) as usize];
            let first = position.max(start);
            let last = stop.min(end);
            part(Part {
                member,
                offset: base
                    .saturating_add((unit / run.width).saturating_mul(run.unit))
                    .saturating_add(position - unit_start),
                start: position,
                length: stop - position,
                skip: first - position,
                take: last.saturating_sub(first),
                within: first - start,
            });
            position = stop;
            if position == run.end {
                index += 1;
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(stripes: &Stripes, start: u64, length: u64) -> Vec<Part> {
        let mut parts = Vec::new();
        assert!(stripes.cut(start, length, |part| parts.push(part)));
        parts
    }

    #[test]
    fn every_byte_of_every_range_has_one_place() {
        // Two runs: three columns of units of 8 bytes, then one piece; blocks of 4.
        let columns = vec![(0, 1000), (1, 2000), (2, 3000), (1, 5000)];
        let stripes = Stripes::new(&[(44, 3), (10, 1)], columns, 54, 4, 8).unwrap();
        let place = |byte: u64| {
            if byte >= 44 {
                return (1, 5000 + byte - 44);
            }
            let (unit, at) = (byte / 8, byte % 8);
            ((unit % 3) as u32, 1000 * (unit % 3 + 1) + unit / 3 * 8 + at)
        };
        for start in 0..=54 {
            for length in 0..=54 - start {
                let mut wanted = start;
                for part in cut(&stripes, start, length) {
                    assert_eq!(part.start % 4, 0);
                    assert!((part.start + part.length) % 4 == 0 || part.start + part.length == 54);
                    assert_eq!(part.within, wanted - start);
                    for byte in 0..part.length {
                        assert_eq!((part.member, part.offset + byte), place(part.start + byte));
                    }
                    assert_eq!(part.start + part.skip, wanted);
                    wanted += part.take;
                }
                assert_eq!(wanted, start + length);
            }
        }
        assert!(!stripes.cut(50, 5, |_| ()) && !stripes.cut(u64::MAX, 2, |_| ()));
    }

    #[test]
    fn what_contradicts_itself_is_refused() {
        let made = |runs: &[(u64, u32)], columns: usize, length, block, stripe| {
            Stripes::new(runs, vec![(0, 0); columns], length, block, stripe).is_ok()
        };
        assert!(made(&[(8, 2), (3, 1)], 3, 11, 4, 8) && made(&[], 0, 0, 4, 8));
        assert!(!made(&[(8, 2), (3, 1)], 3, 12, 4, 8), "the length");
        assert!(!made(&[(8, 2), (3, 1)], 2, 11, 4, 8), "the columns");
        assert!(
            !made(&[(7, 2), (4, 1)], 3, 11, 4, 8),
            "a run that ends within a block"
        );
        assert!(!made(&[(8, 0)], 0, 8, 4, 8) && !made(&[(0, 1)], 1, 0, 4, 8));
        assert!(!made(&[(8, 1)], 1, 8, 0, 8) && !made(&[(8, 1)], 1, 8, 4, 0));
        assert!(
            !made(&[(u64::MAX - 3, 1), (8, 1)], 2, 4, 4, 8),
            "a sum that wraps round"
        );
    }

    #[test]
    fn hostile_places_leave_the_device_and_nothing_else() {
        let columns = vec![(0, u64::MAX - 4), (0, u64::MAX)];
        let stripes = Stripes::new(&[(1 << 40, 2)], columns, 1 << 40, 4096, 1 << 20).unwrap();
        for part in cut(&stripes, (1 << 40) - (1 << 21), 1 << 21) {
            assert_eq!(part.offset, u64::MAX);
        }
    }
}

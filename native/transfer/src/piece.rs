//! How a batch is cut into requests.
//!
//! ```text
//! a read of one segment       |<------------------------ length ----------------------->|
//!                             |<- skip ->|<---------------- take ------------->|
//!   units (checksum or        |     |     |     |     |     |     |     |     |     |   |
//!   logical blocks)           [ head: bounced   ][ direct: into the caller's ][ tail: bounced ]
//! ```
//!
//! * Whole, wanted units go straight into the caller's buffer, and are verified there.
//! * Units that are wanted in part, or that end inside a logical block, go through a bounce buffer.
//! * A small segment that would need a head or a tail is bounced whole: one command costs more than the copy.
//! * What spills goes whole to the caller's buffer, head and tail, too: neither a command more nor a copy.
//! * Small segments that follow each other on the device and in the buffer become one request.

use crate::segment::{Direction, Segment};

/// Longest direct request: long enough that the cost of a command disappears, short enough that others are under way.
pub const DIRECT_BYTES: u64 = 1 << 20;
/// Longest bounced request, and the size up to which a segment is bounced whole.
pub const BOUNCE_BYTES: u64 = 128 << 10;

/// One request of the batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The segment in which it begins.
    pub segment: usize,
    /// Where in that segment's data.
    pub start: u64,
    /// Bytes of data; a merged piece goes on through the segments that follow.
    pub length: u64,
    /// Bytes on the device: `length` rounded up to logical blocks.
    pub device_length: u64,
    /// Through a buffer of the engine's.
    pub bounced: bool,
}

/// What the cutting needs to know.
pub struct Cutter<'a> {
    pub segments: &'a [Segment],
    /// Logical block of each member.
    pub block_bytes: &'a [u64],
    /// 0 where there are no checksums: then only the wanted blocks are read. Else a piece is of whole checksum blocks, but for a
    /// segment's last.
    pub checksum_block_bytes: u64,
    pub direction: Direction,
}

/// Where the next piece begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cursor {
    segment: usize,
    position: u64,
}

fn down(value: u64, unit: u64) -> u64 {
    value - value % unit
}

/// Never overflows for a value inside of a segment: `check` bounded it by the size of a device.
fn up(value: u64, unit: u64) -> u64 {
    value.div_ceil(unit).saturating_mul(unit)
}

impl Cutter<'_> {
    /// The next piece and the cursor behind it; `None` at the end.
    pub fn next(&self, mut at: Cursor) -> Option<(Piece, Cursor)> {
        loop {
            let segment = self.segments.get(at.segment)?;
            let block = self.block_bytes[segment.member as usize];
            let unit = if self.checksum_block_bytes == 0 {
                block
            } else {
                block.max(self.checksum_block_bytes)
            };
            let (first, last) = self.needed(segment, unit);
            at.position = at.position.max(first);
            if at.position >= last {
                at = Cursor {
                    segment: at.segment + 1,
                    position: 0,
                };
                continue;
            }
            let (direct_first, direct_last) = self.direct(segment, unit, block, first, last);
            let position = at.position;
            let direct = (direct_first..direct_last).contains(&position);
            let (limit, longest) = if direct {
                (direct_last, DIRECT_BYTES)
            } else if position < direct_first {
                (direct_first, BOUNCE_BYTES)
            } else {
                (last, BOUNCE_BYTES)
            };
            let length = down(longest, unit).max(unit).min(limit - position);
            let mut piece = Piece {
                segment: at.segment,
                start: position,
                length,
                device_length: up(length, block),
                bounced: !direct,
            };
            at.position += length;
            if direct && at.position == segment.length {
                at = self.merge(&mut piece, segment, block, unit);
            }
            return Some((piece, at));
        }
    }

    /// The part of the data that must move.
    fn needed(&self, segment: &Segment, unit: u64) -> (u64, u64) {
        if self.direction == Direction::Write || self.checksum_block_bytes > 0 {
            (0, segment.length)
        } else if segment.take == 0 {
            (0, 0)
        } else {
            (
                down(segment.skip, unit),
                up(segment.skip + segment.take, unit).min(segment.length),
            )
        }
    }

    /// The part that can move without a bounce; `(last, last)` where there is none.
    fn direct(&self, segment: &Segment, unit: u64, block: u64, first: u64, last: u64) -> (u64, u64) {
        if segment.spills && self.direction == Direction::Read && last % block == 0 {
            return (first, last);
        }
        let wanted_end = segment.skip + segment.take;
        let begin = up(segment.skip, unit);
        let end = if wanted_end == segment.length {
            // Its end need not be a whole checksum block, only whole logical blocks.
            down(wanted_end, if segment.length % block == 0 { block } else { unit })
        } else {
            down(wanted_end, unit)
        };
        let whole = begin <= first && end == last;
        if begin >= end || (!whole && self.direction == Direction::Read && last - first <= BOUNCE_BYTES) {
            (last, last)
        } else {
            (begin, end)
        }
    }

    /// Take whole segments that go on where `piece` ends; returns the cursor behind the last.
    fn merge(&self, piece: &mut Piece, first: &Segment, block: u64, unit: u64) -> Cursor {
        let mut previous = first;
        let mut index = piece.segment + 1;
        while let Some(segment) = self.segments.get(index) {
            let goes_on = segment.member == previous.member
                && previous.skip + previous.take == previous.length
                && segment.buffer == previous.buffer
                && segment.offset == previous.offset + previous.length
                && segment.skip == 0
                && segment.take == segment.length
                && segment.buffer_offset == previous.buffer_offset + previous.take
                && segment.length % block == 0
                && piece.length + segment.length <= DIRECT_BYTES.max(unit);
            if !goes_on {
                break;
            }
            piece.length += segment.length;
            piece.device_length += segment.length;
            previous = segment;
            index += 1;
        }
        Cursor {
            segment: index,
            position: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(segments: &[Segment], checksum_block_bytes: u64, direction: Direction) -> Vec<Piece> {
        let cutter = Cutter {
            segments,
            block_bytes: &[4096],
            checksum_block_bytes,
            direction,
        };
        let mut pieces = Vec::new();
        let mut cursor = Cursor::default();
        while let Some((piece, next)) = cutter.next(cursor) {
            assert_ne!(cursor, next);
            pieces.push(piece);
            cursor = next;
        }
        pieces
    }

    fn whole(offset: u64, length: u64, buffer_offset: u64) -> Segment {
        Segment {
            offset,
            length,
            take: length,
            buffer_offset,
            ..Segment::default()
        }
    }

    #[test]
    fn a_long_aligned_read_is_direct() {
        for checksum_block in [0, 65536, 1 << 20] {
            let pieces = cut(&[whole(0, 3 << 20, 0)], checksum_block, Direction::Read);
            assert_eq!(pieces.len(), 3);
            assert!(pieces
                .iter()
                .all(|p| !p.bounced && p.length == 1 << 20 && p.device_length == p.length));
        }
    }

    #[test]
    fn a_long_unaligned_read_bounces_only_its_ends() {
        let segment = Segment {
            skip: 100,
            take: (2 << 20) - 200,
            ..whole(0, 2 << 20, 0)
        };
        let pieces = cut(&[segment], 65536, Direction::Read);
        let shape: Vec<_> = pieces.iter().map(|p| (p.start, p.length, p.bounced)).collect();
        let (end, long) = (2 << 20, 1 << 20);
        assert_eq!(
            shape,
            [
                (0, 65536, true),
                (65536, long, false),
                (65536 + long, end - 65536 - 65536 - long, false),
                (end - 65536, 65536, true)
            ]
        );
    }

    #[test]
    fn what_spills_is_one_command_into_its_place() {
        let spilled = Segment {
            skip: 10,
            take: 9000,
            spills: true,
            ..whole(0, 12288, 5000)
        };
        let direct = |length| Piece {
            segment: 0,
            start: 0,
            length,
            device_length: length,
            bounced: false,
        };
        assert_eq!(cut(&[spilled], 4096, Direction::Read), [direct(12288)]);
        assert_eq!(spilled.buffer_position(0), 4990);
        // A segment that goes on at once where its wanted part ends is not behind its last byte in the buffer.
        let next = whole(12288, 4096, 5000 + 9000);
        let pieces = cut(&[spilled, next], 4096, Direction::Read);
        assert_eq!((pieces.len(), pieces[0]), (2, direct(12288)));
        // The end of a member's last block is not there to be read.
        let odd = Segment { take: 200, ..spilled };
        let pieces = cut(&[Segment { length: 300, ..odd }], 4096, Direction::Read);
        assert!(pieces.len() == 1 && pieces[0].bounced && pieces[0].device_length == 4096);
        let nothing = Segment {
            skip: 5000,
            take: 10,
            ..spilled
        };
        let pieces = cut(&[nothing], 0, Direction::Read);
        assert_eq!(
            (pieces[0].start, pieces[0].length, pieces[0].bounced),
            (4096, 4096, false)
        );
    }

    #[test]
    fn a_small_unaligned_read_is_one_command() {
        let pieces = cut(
            &[Segment {
                skip: 10,
                take: 9000,
                ..whole(0, 12288, 0)
            }],
            4096,
            Direction::Read,
        );
        assert_eq!(
            pieces,
            [Piece {
                segment: 0,
                start: 0,
                length: 12288,
                device_length: 12288,
                bounced: true
            }]
        );
    }

    #[test]
    fn without_checksums_only_wanted_blocks_are_read() {
        let segment = Segment {
            skip: 5000,
            take: 10,
            ..whole(0, 1 << 20, 0)
        };
        let pieces = cut(&[segment], 0, Direction::Read);
        assert_eq!(
            pieces,
            [Piece {
                segment: 0,
                start: 4096,
                length: 4096,
                device_length: 4096,
                bounced: true
            }]
        );
        assert!(cut(
            &[Segment {
                take: 0,
                ..whole(0, 4096, 0)
            }],
            0,
            Direction::Read
        )
        .is_empty());
        assert_eq!(
            cut(
                &[Segment {
                    take: 0,
                    ..whole(0, 4096, 0)
                }],
                4096,
                Direction::Read
            )
            .len(),
            1
        );
    }

    #[test]
    fn a_write_bounces_only_its_last_block() {
        let pieces = cut(&[whole(0, 10_000, 0)], 0, Direction::Write);
        let shape: Vec<_> = pieces
            .iter()
            .map(|p| (p.start, p.length, p.device_length, p.bounced))
            .collect();
        assert_eq!(shape, [(0, 8192, 8192, false), (8192, 1808, 4096, true)]);
        // With checksums that of which one is taken: it goes in one piece.
        let pieces = cut(&[whole(0, 90_000, 0)], 65536, Direction::Write);
        let shape: Vec<_> = pieces
            .iter()
            .map(|p| (p.start, p.length, p.device_length, p.bounced))
            .collect();
        assert_eq!(shape, [(0, 65536, 65536, false), (65536, 24464, 24576, true)]);
    }

    #[test]
    fn neighbours_become_one_request() {
        let segments: Vec<_> = (0..4).map(|i| whole(i * 8192, 8192, i * 8192)).collect();
        let pieces = cut(&segments, 4096, Direction::Read);
        assert_eq!(
            pieces,
            [Piece {
                segment: 0,
                start: 0,
                length: 32768,
                device_length: 32768,
                bounced: false
            }]
        );
        let mut apart = segments;
        apart[2].buffer_offset += 1;
        assert_eq!(cut(&apart, 4096, Direction::Read).len(), 3);
    }
}

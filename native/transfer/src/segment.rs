//! One row of a batch, and everything that must hold before it may move.

use crate::checksum::ChecksumSpec;
use crate::{Buffer, DeviceInfo, ErrorKind, IoError};

/// A checksum block is verified in one piece of memory, so its size is bounded before anything is allocated.
pub const MAX_CHECKSUM_BLOCK_BYTES: u64 = 16 << 20;

/// See `headrace.device.batch` for the columns.
#[derive(Clone, Copy, Debug, Default)]
pub struct Segment {
    /// On the member; a multiple of its logical block.
    pub offset: u64,
    /// Bytes of data; may end inside a logical block.
    pub length: u64,
    /// Reads: where the wanted part begins in the data, and how long it is. Writes: `0` and `length`.
    pub skip: u64,
    pub take: u64,
    /// Where in the buffer the wanted part lies.
    pub buffer_offset: u64,
    /// Identity of the allocation and index of the segment's first checksum block.
    pub birth: u64,
    pub first_block: u64,
    pub member: u32,
    pub buffer: u32,
    /// Place of the segment's first checksum in the flat array; filled by [`check`].
    pub first_checksum: u64,
    /// Reads: the bytes around the wanted part may go to the buffer, too, where there is room for them.
    pub spills: bool,
}

impl Segment {
    /// Where data byte `position` lies in the caller's buffer; only for wanted bytes, unless the segment spills.
    pub(crate) fn buffer_position(&self, position: u64) -> usize {
        (self.buffer_offset + position - self.skip) as usize
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    Read,
    Write,
}

/// What one batch works on, for [`check`].
pub struct Surroundings<'a> {
    pub devices: &'a [DeviceInfo],
    pub buffers: &'a [Buffer],
    pub checksum: ChecksumSpec,
    /// Length of the checksum array that was given.
    pub checksums: Option<usize>,
    pub direction: Direction,
}

fn usage(what: impl Into<String>, place: impl Into<String>) -> IoError {
    IoError::new(ErrorKind::Usage, what).at(place)
}

/// Validate every segment against devices and buffers, and number its checksums. The engine's memory safety and its
/// arithmetic rest on this: afterwards no sum overflows and no range leaves its buffer or device.
pub fn check(segments: &mut [Segment], around: &Surroundings<'_>) -> Result<(), IoError> {
    let unit = around.checksum.block_bytes;
    if around.checksums.is_some() && unit == 0 {
        return Err(usage("checksums need a block size", "checksum_block_bytes")
            .expected("more than 0")
            .found("0"));
    }
    if unit > MAX_CHECKSUM_BLOCK_BYTES {
        return Err(usage("the checksum block is too long", "checksum_block_bytes")
            .expected(format!("at most {MAX_CHECKSUM_BLOCK_BYTES}"))
            .found(unit.to_string()));
    }
    let mut checksum_count = 0u64;
    for (index, segment) in segments.iter_mut().enumerate() {
        let place = || format!("segment {index}");
        let Some(device) = around.devices.get(segment.member as usize) else {
            return Err(usage("no such member", place())
                .expected(format!("less than {}", around.devices.len()))
                .found(segment.member.to_string()));
        };
        let Some(buffer) = around.buffers.get(segment.buffer as usize) else {
            return Err(usage("no such buffer", place())
                .expected(format!("less than {}", around.buffers.len()))
                .found(segment.buffer.to_string()));
        };
        let block = u64::from(device.block_bytes);
        if segment.offset % block != 0 {
            return Err(usage("the offset is not aligned", place())
                .expected(format!("a multiple of {block}"))
                .found(segment.offset.to_string()));
        }
        // A device ends at a block boundary, so what fits in bytes also fits rounded up to blocks.
        let end = segment
            .offset
            .checked_add(segment.length)
            .filter(|&end| end <= device.size_bytes);
        if end.is_none() {
            return Err(usage(
                "the range leaves the device",
                format!("segment {index}, member {}", segment.member),
            )
            .expected(format!("an end of at most {}", device.size_bytes))
            .found(format!("{} + {}", segment.offset, segment.length)));
        }
        if segment
            .skip
            .checked_add(segment.take)
            .is_none_or(|end| end > segment.length)
        {
            return Err(usage("the wanted part leaves the segment", place())
                .expected(format!("skip + take of at most {}", segment.length))
                .found(format!("{} + {}", segment.skip, segment.take)));
        }
        if segment
            .buffer_offset
            .checked_add(segment.take)
            .is_none_or(|end| end > buffer.len() as u64)
        {
            return Err(usage(
                "the segment leaves its buffer",
                format!("segment {index}, buffer {}", segment.buffer),
            )
            .expected(format!("an end of at most {}", buffer.len()))
            .found(format!("{} + {}", segment.buffer_offset, segment.take)));
        }
        if segment.spills
            && (segment.buffer_offset < segment.skip
                || buffer.len() as u64 - segment.buffer_offset < segment.length - segment.skip)
        {
            return Err(usage(
                "there is no room around the wanted part",
                format!("segment {index}, buffer {}", segment.buffer),
            ));
        }
        if around.checksums.is_some() && unit % block != 0 && block % unit != 0 {
            return Err(
                usage("checksum blocks and logical blocks do not fit together", place())
                    .expected(format!("a multiple or a divisor of {block}"))
                    .found(unit.to_string()),
            );
        }
        if around.direction == Direction::Write && device.read_only && segment.length > 0 {
            return Err(usage(
                "the device is open for reading only",
                format!("segment {index}, member {}", segment.member),
            )
            .next("open it without read_only"));
        }
        segment.first_checksum = checksum_count;
        checksum_count += around.checksum.count(segment.length);
    }
    if let Some(given) = around.checksums {
        if given as u64 != checksum_count {
            return Err(usage("the checksum array has the wrong length", "checksums")
                .expected(checksum_count.to_string())
                .found(given.to_string()));
        }
    }
    Ok(())
}

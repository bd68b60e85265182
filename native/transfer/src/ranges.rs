//! Reads of byte ranges of sources: rows of bytes dealt out over members, with their checksums.
//!
//! # How checksums come
//!
//! A source has its checksums at hand, or in a table on the members, whose pages are verified against the `roots` that are
//! at hand. Pages that were read before are in a [`PageCache`]. Where pages are missing, two batches follow each other:
//! that of the pages begins at once, and whichever thread ends it fills in what it brought, keeps the pages, and begins
//! that of the data. Nobody waits in between: neither who submits, nor reads of other pages.
//!
//! Batches that are under way at once and miss the same page each read it. What they read is the same, or does not verify.

use crate::engine::{self, Plan, Transfer};
use crate::pages::{PageCache, PageKey};
use crate::segment::MAX_CHECKSUM_BLOCK_BYTES;
use crate::stripes::{Part, Stripes};
use crate::{BlockDevice, Buffer, ChecksumSpec, ErrorKind, IoError, Segment};
use std::collections::HashMap;
use std::sync::Arc;

/// Or-ed to the index of a page where its checksum is taken, so that no page passes for a block of data.
pub const TABLE_BLOCK: u64 = 1 << 63;

/// Where checksums of a source are.
#[derive(Debug)]
pub enum Sums {
    /// One for each block.
    Here(Vec<u32>),
    /// In a table, little-endian; its blocks are its pages, and `roots` are their checksums.
    Table { stripes: Stripes, roots: Vec<u32> },
}

/// Something that can be read in ranges. Immutable.
#[derive(Debug)]
pub struct Source {
    birth: u64,
    data: Stripes,
    sums: Sums,
}

impl Source {
    /// `Usage` where there are not as many checksums as blocks, or roots as pages.
    pub fn new(birth: u64, data: Stripes, sums: Sums) -> Result<Self, IoError> {
        let blocks = data.len().div_ceil(data.block_bytes());
        let (expected, found) = match &sums {
            Sums::Here(sums) => (blocks, sums.len() as u64),
            Sums::Table { stripes, roots } => {
                if blocks.checked_mul(4) != Some(stripes.len()) || stripes.block_bytes() % 4 != 0 {
                    return Err(
                        IoError::new(ErrorKind::Usage, "the checksum table has the wrong length")
                            .expected(format!("{blocks} numbers of 4 bytes"))
                            .found(format!("{} bytes", stripes.len())),
                    );
                }
                if stripes.block_bytes() > MAX_CHECKSUM_BLOCK_BYTES {
                    return Err(
                        IoError::new(ErrorKind::Usage, "the page of a checksum table is too long")
                            .expected(format!("at most {MAX_CHECKSUM_BLOCK_BYTES} bytes"))
                            .found(stripes.block_bytes().to_string()),
                    );
                }
                (stripes.len().div_ceil(stripes.block_bytes()), roots.len() as u64)
            }
        };
        if expected != found {
            return Err(
                IoError::new(ErrorKind::Usage, "a source with the wrong number of checksums")
                    .expected(expected.to_string())
                    .found(found.to_string()),
            );
        }
        Ok(Source { birth, data, sums })
    }
}

/// One range that is wanted.
#[derive(Clone, Copy, Debug)]
pub struct Range {
    /// Index into the sources.
    pub source: u32,
    /// Index into the buffers, and where in it.
    pub buffer: u32,
    pub buffer_offset: u64,
    /// In the source.
    pub start: u64,
    pub length: u64,
}

/// Which range each segment of a batch serves, and where within it: for messages.
pub type Origins = Vec<(u32, u64)>;

/// What is read from, into what.
pub struct Reading {
    pub devices: Vec<Arc<dyn BlockDevice>>,
    pub volume_id: [u8; 16],
    /// All of them have checksum blocks of one size.
    pub sources: Vec<Arc<Source>>,
    pub buffers: Vec<Buffer>,
}

/// Checksums of a run of blocks that are not there yet.
struct Hole {
    /// Where they go in the flat array, and how many they are.
    at: usize,
    count: usize,
    source: u32,
    page: u64,
    /// Where they are in the page.
    within: usize,
}

/// Read `ranges`. With `pages` every block is verified, and pages of tables come from there or are read into it.
pub fn submit_ranges(
    reading: Reading,
    ranges: &[Range],
    pages: Option<&Arc<PageCache>>,
) -> Result<(Transfer, Origins), IoError> {
    let Reading {
        devices,
        volume_id,
        sources,
        buffers,
    } = reading;
    let block_bytes = sources.first().map_or(4096, |source| source.data.block_bytes());
    if sources
        .iter()
        .any(|source| source.data.block_bytes() != block_bytes)
    {
        return Err(IoError::new(
            ErrorKind::Usage,
            "sources with checksum blocks of several sizes in one batch",
        ));
    }
    let mut segments = Vec::with_capacity(ranges.len());
    let mut origins = Vec::with_capacity(ranges.len());
    let mut wanted = Vec::with_capacity(ranges.len());
    for (index, range) in ranges.iter().enumerate() {
        // Before it is cut: a source may have more segments than there is memory for.
        let room = buffers.get(range.buffer as usize).map_or(0, Buffer::len) as u64;
        let end = range.buffer_offset.checked_add(range.length);
        if range.length > 0 && end.is_none_or(|end| end > room) {
            return Err(IoError::new(ErrorKind::Usage, "the range leaves its buffer")
                .at(format!("range {index}, buffer {}", range.buffer))
                .expected(format!("an end of at most {room}"))
                .found(format!("{} + {}", range.buffer_offset, range.length)));
        }
        let inside = sources.get(range.source as usize).is_some_and(|source| {
            source.data.cut(range.start, range.length, |part| {
                segments.push(segment(&part, range, source.birth, block_bytes));
                origins.push((index as u32, part.within));
                wanted.push(range.source);
            })
        });
        if !inside {
            return Err(IoError::new(ErrorKind::Usage, "the range leaves its source")
                .at(format!("range {index}"))
                .found(format!("{} bytes from {}", range.length, range.start)));
        }
    }
    let checksum = ChecksumSpec::new(block_bytes, volume_id);
    let mut plan = Plan {
        devices,
        segments,
        buffers,
        checksum,
    };
    let Some(cache) = pages else {
        return Ok((engine::submit_read(plan, None)?, origins));
    };
    let (sums, holes) = gather(&plan.segments, &wanted, &sources, &checksum, cache);
    if holes.is_empty() {
        return Ok((engine::submit_read(plan, Some(sums))?, origins));
    }
    let missing = Missing::new(&holes, &sources)?;
    let first = Plan {
        devices: plan.devices.clone(),
        segments: missing.segments,
        buffers: vec![Buffer::zeroed(missing.bytes)],
        checksum: ChecksumSpec::new(missing.longest, volume_id),
    };
    let memory = first.buffers[0].clone();
    let cache = cache.clone();
    let fill = move || {
        let mut sums = sums;
        let mut found = HashMap::new();
        let mut kept: Vec<(PageKey, Arc<[u32]>)> = Vec::new();
        for page in missing.pages {
            let numbers = numbers(&memory, page.start, page.length);
            kept.push(((page.birth, page.page), numbers.clone()));
            found.insert((page.source, page.page), numbers);
        }
        for hole in holes {
            let from = &found[&(hole.source, hole.page)][hole.within..hole.within + hole.count];
            sums[hole.at..hole.at + hole.count].copy_from_slice(from);
        }
        cache.keep(&kept);
        sums
    };
    plan.segments.shrink_to_fit();
    let transfer = engine::submit_read_behind(first, missing.roots, plan, fill)?;
    Ok((transfer, origins))
}

fn segment(part: &Part, range: &Range, birth: u64, block_bytes: u64) -> Segment {
    Segment {
        offset: part.offset,
        length: part.length,
        skip: part.skip,
        take: part.take,
        // An end that does not fit into 64 bits is refused by `check`.
        buffer_offset: range.buffer_offset.saturating_add(part.within),
        birth,
        first_block: part.start / block_bytes,
        member: part.member,
        buffer: range.buffer,
        first_checksum: 0,
    }
}

/// The checksums of all segments, in their order, as far as they are at hand.
fn gather(
    segments: &[Segment],
    wanted: &[u32],
    sources: &[Arc<Source>],
    checksum: &ChecksumSpec,
    cache: &PageCache,
) -> (Vec<u32>, Vec<Hole>) {
    let count: u64 = segments
        .iter()
        .map(|segment| checksum.count(segment.length))
        .sum();
    let mut sums = Vec::with_capacity(count as usize);
    let mut holes = Vec::new();
    let mut look = None;
    for (segment, &index) in segments.iter().zip(wanted) {
        let source = &sources[index as usize];
        let blocks = checksum.count(segment.length);
        let (first, last) = (segment.first_block, segment.first_block + blocks);
        let (per_page, table) = match &source.sums {
            Sums::Here(all) => {
                sums.extend_from_slice(&all[first as usize..last as usize]);
                continue;
            }
            Sums::Table { stripes, .. } => (stripes.block_bytes() / 4, stripes.len() / 4),
        };
        let look = look.get_or_insert_with(|| cache.look());
        let mut block = first;
        while block < last {
            let (page, within) = (block / per_page, (block % per_page) as usize);
            let count = (per_page - block % per_page).min(last - block) as usize;
            let whole = per_page.min(table - page * per_page) as usize;
            match look.page((source.birth, page)) {
                // Of a damaged volume another blob may have this birth: what is kept must fit, and then it need not match.
                Some(found) if found.len() == whole => sums.extend_from_slice(&found[within..within + count]),
                _ => {
                    holes.push(Hole {
                        at: sums.len(),
                        count,
                        source: index,
                        page,
                        within,
                    });
                    sums.resize(sums.len() + count, 0);
                }
            }
            block += count as u64;
        }
    }
    (sums, holes)
}

/// One page to be read, and where it goes in the buffer of all.
struct MissingPage {
    source: u32,
    birth: u64,
    page: u64,
    start: usize,
    length: usize,
}

/// Pages to be read.
struct Missing {
    pages: Vec<MissingPage>,
    segments: Vec<Segment>,
    roots: Vec<u32>,
    bytes: usize,
    /// Of a page: each is one checksum block, whatever its size.
    longest: u64,
}

impl Missing {
    fn new(holes: &[Hole], sources: &[Arc<Source>]) -> Result<Self, IoError> {
        let mut keys: Vec<(u32, u64)> = holes.iter().map(|hole| (hole.source, hole.page)).collect();
        keys.sort_unstable();
        keys.dedup();
        let mut missing = Missing {
            pages: Vec::with_capacity(keys.len()),
            segments: Vec::with_capacity(keys.len()),
            roots: Vec::with_capacity(keys.len()),
            bytes: 0,
            longest: 1,
        };
        for (index, page) in keys {
            let source = &sources[index as usize];
            let birth = source.birth;
            let Sums::Table { stripes, roots } = &source.sums else {
                unreachable!("only sources with a table miss pages");
            };
            let page_bytes = stripes.block_bytes();
            let start = page * page_bytes;
            let length = page_bytes.min(stripes.len() - start);
            let range = Range {
                source: 0,
                buffer: 0,
                buffer_offset: missing.bytes as u64,
                start,
                length,
            };
            let before = missing.segments.len();
            stripes.cut(start, length, |part| {
                let mut segment = segment(&part, &range, birth, page_bytes);
                segment.first_block |= TABLE_BLOCK;
                missing.segments.push(segment);
            });
            if missing.segments.len() != before + 1 {
                return Err(
                    IoError::new(ErrorKind::Usage, "a page of a checksum table lies in two pieces")
                        .at(format!("page {page} of blob {birth:#x}")),
                );
            }
            missing.roots.push(roots[page as usize]);
            missing.pages.push(MissingPage {
                source: index,
                birth,
                page,
                start: missing.bytes,
                length: length as usize,
            });
            missing.bytes += length as usize;
            missing.longest = missing.longest.max(page_bytes);
        }
        Ok(missing)
    }
}

/// The numbers of a page that has been read and verified.
fn numbers(memory: &Buffer, start: usize, length: usize) -> Arc<[u32]> {
    let mut bytes = vec![0; length];
    memory.copy_to(start, &mut bytes);
    bytes
        .chunks_exact(4)
        .map(|four| u32::from_le_bytes([four[0], four[1], four[2], four[3]]))
        .collect()
}

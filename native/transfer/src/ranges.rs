//! Reads of byte ranges of sources: rows of bytes dealt out over members, with their checksums.
//!
//! # How checksums come
//!
//! A source has its checksums at hand, or in a table on the members, whose pages are verified against the `roots` that are
//! at hand. Pages that were read before are in a [`PageCache`]. Where pages are missing, two batches follow each other:
//! that of the pages begins at once; each page that comes is filled in by the thread that completed it, and kept in the
//! memory that it was read into; and whoever ends the batch begins that of the data. Nobody waits in between: neither who
//! submits, nor reads of other pages.
//!
//! So of pages there are in memory those that are under way, which the engine bounds as it does all memory of its own, and
//! those that the cache keeps, which has its limit; whatever a batch asks for. Of the numbers themselves it needs those of
//! the blocks that it reads.
//!
//! Batches that are under way at once and miss the same page each read it. What they read is the same, or does not verify.

use crate::engine::{self, Before, Plan, Transfer};
use crate::pages::{copy_numbers, PageCache, PageKey};
use crate::segment::MAX_CHECKSUM_BLOCK_BYTES;
use crate::stripes::{Part, Stripes};
use crate::{BlockDevice, Buffer, ChecksumSpec, ErrorKind, IoError, Segment};
use std::sync::{Arc, Mutex, PoisonError};

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
    /// Around the place of each range so much of its buffer may be overwritten, too; it need not be there. Spares the copy of
    /// what is not whole blocks. Of no two ranges those places meet.
    pub room: u64,
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
        room,
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
        let size = buffers.get(range.buffer as usize).map_or(0, Buffer::len) as u64;
        let end = range.buffer_offset.checked_add(range.length);
        if range.length > 0 && end.is_none_or(|end| end > size) {
            return Err(IoError::new(ErrorKind::Usage, "the range leaves its buffer")
                .at(format!("range {index}, buffer {}", range.buffer))
                .expected(format!("an end of at most {size}"))
                .found(format!("{} + {}", range.buffer_offset, range.length)));
        }
        let inside = sources.get(range.source as usize).is_some_and(|source| {
            source.data.cut(range.start, range.length, |part| {
                let mut segment = segment(&part, range, source.birth, block_bytes);
                segment.spills = fits(&segment, room, size);
                segments.push(segment);
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
    let missing = Missing::new(holes, &sources)?;
    let filling = Arc::new(Filling {
        cache: cache.clone(),
        pages: missing.pages,
        holes: missing.holes,
        sums: Mutex::new(sums),
    });
    let filled = filling.clone();
    let before = Before {
        devices: plan.devices.clone(),
        segments: missing.segments,
        checksum: ChecksumSpec::new(missing.longest, volume_id),
        checksums: missing.roots,
        take: Box::new(move |page, numbers| filling.take(page, numbers)),
    };
    plan.segments.shrink_to_fit();
    let transfer = engine::submit_read_behind(before, plan, move || filled.sums())?;
    Ok((transfer, origins))
}

/// The checksums of a batch, while pages come that have some of them.
struct Filling {
    cache: Arc<PageCache>,
    pages: Vec<MissingPage>,
    holes: Vec<Hole>,
    sums: Mutex<Vec<u32>>,
}

impl Filling {
    /// A page that was read and verified.
    fn take(&self, page: usize, numbers: Buffer) {
        let page = &self.pages[page];
        {
            let mut sums = self.sums.lock().unwrap_or_else(PoisonError::into_inner);
            for hole in &self.holes[page.holes.0..page.holes.1] {
                copy_numbers(&numbers, hole.within, &mut sums[hole.at..hole.at + hole.count]);
            }
        }
        self.cache.keep(page.key, numbers);
    }

    /// All of them, when every page has come.
    fn sums(&self) -> Vec<u32> {
        std::mem::take(&mut *self.sums.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// What is read around the wanted part has room in a buffer of so many bytes.
fn fits(segment: &Segment, room: u64, size: u64) -> bool {
    let tail = segment.length - segment.skip - segment.take;
    let end = segment.buffer_offset.saturating_add(segment.take);
    segment.skip.max(tail) <= room
        && segment.skip <= segment.buffer_offset
        && tail <= size.saturating_sub(end)
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
        spills: false,
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
            let at = sums.len();
            sums.resize(at + count, 0);
            if !look.copy((source.birth, page), whole, within, &mut sums[at..]) {
                holes.push(Hole {
                    at,
                    count,
                    source: index,
                    page,
                    within,
                });
            }
            block += count as u64;
        }
    }
    (sums, holes)
}

/// One page to be read, and which of the holes it fills.
struct MissingPage {
    key: PageKey,
    holes: (usize, usize),
}

/// Pages to be read, each a segment.
struct Missing {
    pages: Vec<MissingPage>,
    /// By page.
    holes: Vec<Hole>,
    segments: Vec<Segment>,
    roots: Vec<u32>,
    /// Of a page: each is one checksum block, whatever its size.
    longest: u64,
}

impl Missing {
    fn new(mut holes: Vec<Hole>, sources: &[Arc<Source>]) -> Result<Self, IoError> {
        holes.sort_unstable_by_key(|hole| (hole.source, hole.page));
        let mut missing = Missing {
            pages: Vec::new(),
            holes: Vec::new(),
            segments: Vec::new(),
            roots: Vec::new(),
            longest: 1,
        };
        let mut first = 0;
        for same in holes.chunk_by(|one, next| (one.source, one.page) == (next.source, next.page)) {
            let source = &sources[same[0].source as usize];
            let (birth, page) = (source.birth, same[0].page);
            let Sums::Table { stripes, roots } = &source.sums else {
                unreachable!("only sources with a table miss pages");
            };
            let page_bytes = stripes.block_bytes();
            let start = page * page_bytes;
            let length = page_bytes.min(stripes.len() - start);
            let nowhere = Range {
                source: 0,
                buffer: 0,
                buffer_offset: 0,
                start,
                length,
            };
            let before = missing.segments.len();
            stripes.cut(start, length, |part| {
                let mut segment = segment(&part, &nowhere, birth, page_bytes);
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
                key: (birth, page),
                holes: (first, first + same.len()),
            });
            missing.longest = missing.longest.max(page_bytes);
            first += same.len();
        }
        missing.holes = holes;
        Ok(missing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DeviceInfo, Op, Request};
    use std::sync::{OnceLock, Weak};
    use std::time::Duration;

    const BLOCK: u64 = 512;
    const ID: [u8; 16] = *b"a volume's name!";

    /// A device of zeros, but for its table at byte 0, that does nothing before it is told to.
    struct Held {
        table: Vec<u8>,
        size_bytes: u64,
        waiting: Mutex<Vec<Request>>,
    }

    impl Held {
        fn new(table: Vec<u8>, size_bytes: u64) -> Arc<Self> {
            Arc::new(Held {
                table,
                size_bytes,
                waiting: Mutex::default(),
            })
        }

        fn waiting(&self) -> usize {
            self.waiting.lock().unwrap().len()
        }

        /// End the oldest request; gives where its memory was.
        fn end_one(&self, failed: Option<IoError>) -> *mut u8 {
            let Request {
                op,
                offset,
                token,
                sink,
            } = self.waiting.lock().unwrap().remove(0);
            let Op::Read { into } = op else {
                panic!("only reads come here");
            };
            let at = offset as usize;
            if failed.is_none() && at < self.table.len() {
                into.copy_from(0, &self.table[at..at + into.len()]);
            }
            let memory = into.as_ptr();
            drop(into);
            sink.complete(token, failed.map_or(Ok(()), Err));
            memory
        }
    }

    impl BlockDevice for Held {
        fn info(&self) -> DeviceInfo {
            DeviceInfo {
                size_bytes: self.size_bytes,
                block_bytes: BLOCK as u32,
                max_transfer_bytes: 1 << 20,
                volatile_cache: false,
                read_only: true,
            }
        }
        fn loss_count(&self) -> u64 {
            0
        }
        fn submit(&self, requests: Vec<Request>) {
            self.waiting.lock().unwrap().extend(requests);
        }
        fn describe(&self) -> serde_json::Value {
            serde_json::Value::Null
        }
        fn close(&self, _: Duration) {}
    }

    /// `pages` pages of zeros' checksums at byte 0 of a device, and the zeros behind them.
    fn source(pages: u64, page_bytes: u64, roots: Vec<u32>) -> Arc<Source> {
        let (table, length) = (pages * page_bytes, pages * page_bytes / 4 * BLOCK);
        let laid =
            |length, at, block| Stripes::new(&[(length, 1)], vec![(0, at)], length, block, 1 << 40).unwrap();
        let sums = Sums::Table {
            stripes: laid(table, 0, page_bytes),
            roots,
        };
        Arc::new(Source::new(7, laid(length, table, BLOCK), sums).unwrap())
    }

    /// A byte of every page's data.
    fn begin(
        device: &Arc<Held>,
        source: &Arc<Source>,
        pages: u64,
        into: Buffer,
        cache: &Arc<PageCache>,
    ) -> Transfer {
        let each = source.data.len() / pages;
        let ranges: Vec<Range> = (0..pages)
            .map(|page| Range {
                source: 0,
                buffer: 0,
                buffer_offset: page,
                start: page * each + 5,
                length: 1,
            })
            .collect();
        let reading = Reading {
            devices: vec![device.clone()],
            volume_id: ID,
            sources: vec![source.clone()],
            buffers: vec![into],
            room: 0,
        };
        submit_ranges(reading, &ranges, Some(cache)).unwrap().0
    }

    #[test]
    fn a_page_is_kept_when_it_comes_and_where_it_was_read_to() {
        const PAGES: u64 = 6;
        let checksum = ChecksumSpec::new(BLOCK, ID);
        let table: Vec<u8> = (0..PAGES * BLOCK / 4)
            .flat_map(|index| checksum.of(7, index, &[0; BLOCK as usize]).to_le_bytes())
            .collect();
        let roots = (0..PAGES)
            .zip(table.chunks(BLOCK as usize))
            .map(|(page, bytes)| checksum.of(7, page | TABLE_BLOCK, bytes))
            .collect();
        let source = source(PAGES, BLOCK, roots);
        let device = Held::new(table, PAGES * BLOCK + source.data.len());
        // Room for three pages.
        let cache = Arc::new(PageCache::new(3 * BLOCK as usize));
        let into = Buffer::from_vec(vec![9; PAGES as usize]);
        let transfer = begin(&device, &source, PAGES, into.clone(), &cache);
        assert_eq!(device.waiting(), PAGES as usize);
        for page in 0..PAGES {
            let memory = device.end_one(None);
            let kept = cache.memory_of((7, page)).expect("the page that came last");
            assert_eq!((kept.as_ptr(), kept.len()), (memory, BLOCK as usize));
            drop(kept);
            assert!(cache.bytes() <= 3 * BLOCK as usize);
        }
        // Of pages that are not kept any more the numbers are there all the same.
        assert!(cache.memory_of((7, 0)).is_none());
        assert_eq!(device.waiting(), PAGES as usize, "now the data");
        while device.waiting() > 0 {
            device.end_one(None);
        }
        transfer
            .wait(Duration::ZERO)
            .expect("all of it has ended")
            .unwrap();
        let mut found = vec![1; PAGES as usize];
        into.copy_to(0, &mut found);
        assert_eq!(found, vec![0; PAGES as usize]);
    }

    #[test]
    fn a_page_that_is_shorter_than_a_block_of_its_device_keeps_no_more_than_itself() {
        let checksum = ChecksumSpec::new(BLOCK, ID);
        let page: Vec<u8> = (0..3)
            .flat_map(|index| checksum.of(7, index, &[0; BLOCK as usize]).to_le_bytes())
            .collect();
        let laid = |length, at| Stripes::new(&[(length, 1)], vec![(0, at)], length, BLOCK, 1 << 40).unwrap();
        let sums = Sums::Table {
            stripes: laid(page.len() as u64, 0),
            roots: vec![checksum.of(7, TABLE_BLOCK, &page)],
        };
        let source = Arc::new(Source::new(7, laid(3 * BLOCK, BLOCK), sums).unwrap());
        let mut block = page.clone();
        block.resize(BLOCK as usize, 0);
        let device = Held::new(block, 4 * BLOCK);
        let cache = Arc::new(PageCache::new(1 << 20));
        let transfer = begin(&device, &source, 1, Buffer::from_vec(vec![9]), &cache);
        let memory = device.end_one(None);
        let kept = cache.memory_of((7, 0)).expect("it was verified");
        assert_ne!(kept.as_ptr(), memory);
        let mut bytes = vec![0; kept.len()];
        kept.copy_to(0, &mut bytes);
        assert_eq!((bytes, cache.bytes()), (page, 12 + crate::pages::BESIDE));
        while device.waiting() > 0 {
            device.end_one(None);
        }
        transfer
            .wait(Duration::ZERO)
            .expect("all of it has ended")
            .unwrap();
    }

    #[test]
    fn missing_pages_take_bounded_memory_and_their_failure_lets_go_of_buffers_before_it_is_known() {
        // As long as a page can be, so that five are more than may be under way.
        let source = source(5, MAX_CHECKSUM_BLOCK_BYTES, vec![0; 5]);
        let device = Held::new(Vec::new(), 5 * MAX_CHECKSUM_BLOCK_BYTES + source.data.len());
        let cache = Arc::new(PageCache::new(1 << 20));
        let begun: Arc<OnceLock<Weak<Transfer>>> = Arc::default();
        let seen = begun.clone();
        let done_when_dropped = Arc::new(OnceLock::new());
        let noted = done_when_dropped.clone();
        let into = crate::buffer::watched(vec![0; 5], move || {
            let transfer = seen.get().and_then(Weak::upgrade).expect("it has begun");
            noted.set(transfer.done()).expect("dropped once");
        });
        let transfer = Arc::new(begin(&device, &source, 5, into, &cache));
        assert!(begun.set(Arc::downgrade(&transfer)).is_ok());
        let under_way = device.waiting() as u64 * MAX_CHECKSUM_BLOCK_BYTES;
        assert!(
            under_way > 0 && under_way <= engine::BOUNCE_LIMIT_BYTES,
            "{under_way}"
        );
        while device.waiting() > 0 {
            assert!(!transfer.done() && done_when_dropped.get().is_none());
            device.end_one(Some(IoError::new(ErrorKind::Gone, "the device is gone")));
        }
        assert_eq!(done_when_dropped.get(), Some(&false));
        let error = transfer.wait(Duration::ZERO).expect("it has ended").unwrap_err();
        assert_eq!((error.kind, transfer.failed_segment()), (ErrorKind::Gone, None));
        assert_eq!(cache.bytes(), 0);
    }
}

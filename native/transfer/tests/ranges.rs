//! Ranges of sources whose checksums lie in tables: read cold and warm, by many at once, and damaged anywhere.

use headrace_media::MemoryMedia;
use headrace_transfer::ranges::{Range, Reading, Sums, TABLE_BLOCK};
use headrace_transfer::{
    submit_one, submit_ranges, BlockDevice, Buffer, ChecksumSpec, ErrorKind, IoError, MediaDevice, Op,
    PageCache, Source, Stripes,
};
use std::sync::Arc;
use std::time::Duration;

const BLOCK: u64 = 512;
const STRIPE: u64 = 4096;
const LENGTH: usize = 300_000;
const BIRTH: u64 = 77;
/// Where columns begin on both members: data, table.
const DATA: u64 = 8192;
const TABLE: u64 = 1 << 19;
const ID: [u8; 16] = *b"a volume's name!";
const LONG: Duration = Duration::from_secs(20);

struct World {
    devices: Vec<Arc<dyn BlockDevice>>,
    source: Arc<Source>,
    data: Vec<u8>,
}

fn write(device: &Arc<dyn BlockDevice>, offset: u64, bytes: &[u8]) {
    let mut whole = bytes.to_vec();
    whole.resize(bytes.len().next_multiple_of(BLOCK as usize), 0);
    let op = Op::Write {
        from: Buffer::from_vec(whole),
        fua: false,
    };
    submit_one(device.as_ref(), op, offset)
        .wait(LONG)
        .unwrap()
        .unwrap();
}

fn put(devices: &[Arc<dyn BlockDevice>], stripes: &Stripes, bytes: &[u8]) {
    assert!(stripes.cut(0, stripes.len(), |part| {
        let from = part.start as usize;
        write(
            &devices[part.member as usize],
            part.offset,
            &bytes[from..from + part.length as usize],
        );
    }));
}

fn world() -> World {
    let devices: Vec<Arc<dyn BlockDevice>> = (0..2)
        .map(|_| {
            let media = MemoryMedia::new(1 << 20, BLOCK as u32).unwrap();
            MediaDevice::start(Box::new(media), "memory", "mem:test", 2, 0).unwrap() as Arc<dyn BlockDevice>
        })
        .collect();
    let data: Vec<u8> = (0..LENGTH as u64)
        .map(|i| (i.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as u8)
        .collect();
    let laid = |length: u64, at| {
        Stripes::new(&[(length, 2)], vec![(0, at), (1, at)], length, BLOCK, STRIPE).unwrap()
    };
    let checksum = ChecksumSpec::new(BLOCK, ID);
    let sums = |bytes: &[u8], mark: u64| -> Vec<u32> {
        let blocks = bytes.chunks(BLOCK as usize).enumerate();
        blocks
            .map(|(index, block)| checksum.of(BIRTH, index as u64 | mark, block))
            .collect()
    };
    let table: Vec<u8> = sums(&data, 0).iter().flat_map(|sum| sum.to_le_bytes()).collect();
    let stripes = laid(LENGTH as u64, DATA);
    let pages = laid(table.len() as u64, TABLE);
    put(&devices, &stripes, &data);
    put(&devices, &pages, &table);
    let roots = sums(&table, TABLE_BLOCK);
    let sums = Sums::Table {
        stripes: pages,
        roots,
    };
    World {
        devices,
        source: Arc::new(Source::new(BIRTH, stripes, sums).unwrap()),
        data,
    }
}

/// Bytes of the ranges, one after another; or the error, and the segment in which it was.
fn read(
    world: &World,
    ranges: &[(usize, usize)],
    pages: Option<&Arc<PageCache>>,
) -> Result<Vec<u8>, (IoError, Option<usize>)> {
    let total = ranges.iter().map(|range| range.1).sum();
    let buffer = Buffer::zeroed(total);
    let mut at = 0;
    let rows: Vec<Range> = ranges
        .iter()
        .map(|&(start, length)| {
            at += length as u64;
            Range {
                source: 0,
                buffer: 0,
                buffer_offset: at - length as u64,
                start: start as u64,
                length: length as u64,
            }
        })
        .collect();
    let reading = Reading {
        devices: world.devices.clone(),
        volume_id: ID,
        sources: vec![world.source.clone()],
        buffers: vec![buffer.clone()],
        room: 0,
    };
    let (transfer, _) = submit_ranges(reading, &rows, pages).map_err(|error| (error, None))?;
    let result = transfer.wait(LONG).expect("in time");
    result.map_err(|error| (error, transfer.failed_segment()))?;
    let mut bytes = vec![0; total];
    buffer.copy_to(0, &mut bytes);
    Ok(bytes)
}

/// Ranges of many lengths, at places that only the number decides.
fn some(number: usize) -> Vec<(usize, usize)> {
    (number..number + 24)
        .map(|i| {
            let start = (i * 7_919 * 31) % LENGTH;
            (start, (i * 613 % 9_000).min(LENGTH - start))
        })
        .collect()
}

fn wanted(world: &World, ranges: &[(usize, usize)]) -> Vec<u8> {
    ranges
        .iter()
        .flat_map(|&(start, length)| world.data[start..start + length].to_vec())
        .collect()
}

/// What a page costs in the cache beside its bytes.
fn beside() -> usize {
    let one = PageCache::new(1 << 20);
    one.keep((1, 0), Buffer::zeroed(0));
    one.bytes()
}

fn reads_of(world: &World) -> u64 {
    let reads = |device: &Arc<dyn BlockDevice>| device.describe()["counters"]["reads"].as_u64().unwrap();
    world.devices.iter().map(reads).sum()
}

#[test]
fn cold_and_warm_reads_give_the_bytes_and_pages_are_read_once() {
    let world = world();
    let pages = Arc::new(PageCache::new(1 << 20));
    for ranges in [
        some(0),
        vec![(0, LENGTH)],
        some(100),
        vec![(LENGTH - 1, 1), (5, 0)],
    ] {
        let want = wanted(&world, &ranges);
        assert_eq!(read(&world, &ranges, None).unwrap(), want);
        assert_eq!(read(&world, &ranges, Some(&pages)).unwrap(), want);
        let (kept, before) = (pages.bytes(), reads_of(&world));
        assert_eq!(read(&world, &ranges, Some(&pages)).unwrap(), want);
        let warm = reads_of(&world) - before;
        assert_eq!(pages.bytes(), kept);
        let cold = Arc::new(PageCache::new(1 << 20));
        read(&world, &ranges, Some(&cold)).unwrap();
        assert!(
            reads_of(&world) - before > 2 * warm,
            "pages cost reads only when they are missing"
        );
    }
    let table = LENGTH.div_ceil(BLOCK as usize) * 4;
    assert_eq!(pages.bytes(), table + table.div_ceil(BLOCK as usize) * beside());
}

#[test]
fn room_around_a_range_is_all_that_is_overwritten_beside_it() {
    let world = world();
    let pages = Arc::new(PageCache::new(1 << 20));
    let ranges = some(0);
    for room in [0, 100, BLOCK, 4 * BLOCK] {
        // Between the rooms of two ranges there are three bytes, and none at the ends of the buffer.
        let step = |length: usize| length + 2 * room as usize + 3;
        let total = ranges.iter().map(|&(_, length)| step(length)).sum::<usize>() - 3;
        let buffer = Buffer::from_vec(vec![7; total]);
        let mut at = room as usize;
        let rows: Vec<Range> = ranges
            .iter()
            .map(|&(start, length)| {
                let row = Range {
                    source: 0,
                    buffer: 0,
                    buffer_offset: at as u64,
                    start: start as u64,
                    length: length as u64,
                };
                at += step(length);
                row
            })
            .collect();
        let reading = Reading {
            devices: world.devices.clone(),
            volume_id: ID,
            sources: vec![world.source.clone()],
            buffers: vec![buffer.clone()],
            room,
        };
        let (transfer, _) = submit_ranges(reading, &rows, Some(&pages)).unwrap();
        transfer.wait(LONG).expect("in time").unwrap();
        let mut found = vec![0; total];
        buffer.copy_to(0, &mut found);
        let mut spilled = 0;
        for (row, (start, length)) in rows.iter().zip(&ranges) {
            let (first, last) = (row.buffer_offset as usize, row.buffer_offset as usize + length);
            assert_eq!(
                found[first..last],
                world.data[*start..start + length],
                "room {room}"
            );
            let around = [
                &found[first - room as usize..first],
                &found[last..last + room as usize],
            ];
            spilled += around.concat().iter().filter(|&&byte| byte != 7).count();
            let behind = last + room as usize;
            assert!(found[behind..(behind + 3).min(total)]
                .iter()
                .all(|&byte| byte == 7));
        }
        // Little room does for some of the ranges.
        assert!(
            if room < BLOCK {
                room > 0 || spilled == 0
            } else {
                spilled > 0
            },
            "room {room}"
        );
    }
}

#[test]
fn many_at_once_with_room_for_hardly_a_page() {
    let world = world();
    let pages = Arc::new(PageCache::new(1200));
    std::thread::scope(|scope| {
        for thread in 0..6 {
            let (world, pages) = (&world, &pages);
            scope.spawn(move || {
                for round in 0..20 {
                    let ranges = some(thread * 1000 + round);
                    assert_eq!(read(world, &ranges, Some(pages)).unwrap(), wanted(world, &ranges));
                }
            });
        }
    });
    assert!(pages.bytes() <= 1200);
}

#[test]
fn a_wrong_byte_of_data_or_of_the_table_is_found_and_no_bad_page_is_kept() {
    let world = world();
    let ranges = [(100_000, 3000)];
    let pages = Arc::new(PageCache::new(1 << 20));
    // Byte 100,000 lies in unit 24: member 0, row 12. Its checksum is number 195, in page 1 of the table, unit 0.
    let place = DATA + 12 * STRIPE + (100_000 - 24 * STRIPE) / BLOCK * BLOCK;
    let from = 100_000 / BLOCK as usize * BLOCK as usize;
    let good = &world.data[from..from + BLOCK as usize];
    let mut bad = good.to_vec();
    bad[7] ^= 1;
    write(&world.devices[0], place, &bad);
    let (error, segment) = read(&world, &ranges, Some(&pages)).unwrap_err();
    assert_eq!((error.kind, segment), (ErrorKind::Checksum, Some(0)));
    assert_eq!(pages.bytes(), 512 + beside(), "the page was good");
    write(&world.devices[0], place, good);

    let page = Buffer::zeroed(BLOCK as usize);
    let op = Op::Read { into: page.clone() };
    submit_one(world.devices[0].as_ref(), op, TABLE + BLOCK)
        .wait(LONG)
        .unwrap()
        .unwrap();
    let mut bytes = vec![0; BLOCK as usize];
    page.copy_to(0, &mut bytes);
    bytes[500] ^= 0x80;
    write(&world.devices[0], TABLE + BLOCK, &bytes);
    assert_eq!(
        read(&world, &ranges, Some(&pages)).unwrap(),
        wanted(&world, &ranges),
        "it is kept"
    );
    let cold = Arc::new(PageCache::new(1 << 20));
    let (error, segment) = read(&world, &ranges, Some(&cold)).unwrap_err();
    assert_eq!((error.kind, segment), (ErrorKind::Checksum, None));
    assert_eq!(cold.bytes(), 0);
    assert_eq!(read(&world, &ranges, None).unwrap(), wanted(&world, &ranges));
}

#[test]
fn what_does_not_fit_is_refused_before_anything_moves() {
    let world = world();
    let pages = Arc::new(PageCache::new(1 << 20));
    let before = reads_of(&world);
    for (start, length, at) in [
        (LENGTH as u64, 1, 0),
        (u64::MAX - 5, 10, 0),
        (0, LENGTH as u64 + 1, 0),
        (0, 10, 7),
        (0, 10, u64::MAX - 3),
    ] {
        let row = |start, length, buffer_offset| Range {
            source: 0,
            buffer: 0,
            buffer_offset,
            start,
            length,
        };
        let reading = Reading {
            devices: world.devices.clone(),
            volume_id: ID,
            sources: vec![world.source.clone()],
            buffers: vec![Buffer::zeroed(16)],
            room: 0,
        };
        let rows = [row(0, 10, 0), row(start, length, at)];
        let error = submit_ranges(reading, &rows, Some(&pages)).err().unwrap();
        assert_eq!(error.kind, ErrorKind::Usage, "{start} {length} {at}");
        // Said before it is cut, of a range and not of a segment.
        assert!(error.place.starts_with("range 1"), "{error}");
    }
    assert_eq!(reads_of(&world), before);
    let short = Sums::Here(vec![0; 3]);
    let stripes = Stripes::new(&[(2048, 1)], vec![(0, 0)], 2048, 512, 4096).unwrap();
    assert_eq!(Source::new(1, stripes, short).unwrap_err().kind, ErrorKind::Usage);
    let page = |bytes| {
        let data = Stripes::new(&[(512, 1)], vec![(0, 0)], 512, 512, 4096).unwrap();
        let stripes = Stripes::new(&[(4, 1)], vec![(0, 0)], 4, bytes, 4096).unwrap();
        let roots = vec![0];
        Source::new(1, data, Sums::Table { stripes, roots }).is_ok()
    };
    assert!(
        page(16 << 20) && !page(32 << 20),
        "memory is taken for whole pages"
    );
}

//! One contract, kept by every media and engine; what is given back to the system is in `given_back.rs`.

use headrace_media::{Cache, Engine, FileMedia, Media, MemoryMedia, VolatileCache};
use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};

const SIZE: u64 = 4 << 20;
const BLOCK: u32 = 4096;

/// A file that goes away with the value.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let name = format!(
            "media-{}-{}",
            std::process::id(),
            NEXT.fetch_add(1, Ordering::Relaxed)
        );
        Scratch(PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name))
    }

    fn create(size: u64) -> Self {
        let scratch = Self::new();
        FileMedia::create(&scratch.0, size).unwrap();
        scratch
    }

    fn open(&self, engine: Engine) -> Box<dyn Media> {
        Box::new(FileMedia::open(&self.0, BLOCK, false, engine).unwrap())
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Run `test` on each kind of media; io_uring where this system allows it.
fn on_each(test: impl Fn(&str, &dyn Media)) {
    test("memory", &MemoryMedia::new(SIZE, BLOCK).unwrap());
    for engine in [Engine::Auto, Engine::Pread, Engine::IoUring] {
        let scratch = Scratch::create(SIZE);
        match FileMedia::open(&scratch.0, BLOCK, false, engine) {
            Ok(media) => test(media.engine(), &media),
            Err(error) if engine == Engine::IoUring => {
                assert_eq!(error.kind(), ErrorKind::Unsupported);
                println!("io_uring is not tested: {error}");
            }
            Err(error) => panic!("{engine:?}: {error}"),
        }
    }
    let scratch = Scratch::create(SIZE);
    for engine in [Engine::Pread, Engine::IoUring] {
        match FileMedia::open_as(&scratch.0, BLOCK, false, engine, Cache::Bypass) {
            Ok(media) => {
                assert!(media.direct());
                media.deallocate(0, SIZE).unwrap();
                test("past the page cache", &media);
            }
            Err(error) => println!("O_DIRECT ({engine:?}) is not tested: {error}"),
        }
    }
    for limit in [0, 40_000, SIZE] {
        let scratch = Scratch::create(SIZE);
        test(
            "volatile cache",
            &VolatileCache::new(scratch.open(Engine::Pread), limit),
        );
        test(
            "volatile cache over memory",
            &VolatileCache::new(Box::new(MemoryMedia::new(SIZE, BLOCK).unwrap()), limit),
        );
    }
}

fn pattern(length: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..length)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state as u8
        })
        .collect()
}

fn read(media: &dyn Media, offset: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0xEE; length];
    media.read(offset, &mut bytes).unwrap();
    let mut again = vec![0xDD; length];
    if media.try_read(offset, &mut again).unwrap() {
        assert!(again == bytes, "try_read differs from read");
    }
    bytes
}

#[test]
fn reads_see_what_was_written_and_zeros_elsewhere() {
    on_each(|name, media| {
        assert_eq!(
            (media.size_bytes(), media.block_bytes(), media.read_only()),
            (SIZE, BLOCK, false)
        );
        assert!(read(media, 0, SIZE as usize).iter().all(|&b| b == 0), "{name}");
        for (n, (offset, length, fua)) in [
            (0, 4096, false),
            (8192, 1 << 20, false),
            (SIZE - 4096, 4096, true),
            (12288, 8192, true),
        ]
        .into_iter()
        .enumerate()
        {
            let data = pattern(length, n as u64);
            media.write(offset, &data, fua).unwrap();
            assert!(read(media, offset, length) == data, "{name} at {offset}");
        }
        assert!(
            read(media, 4096, 4096).iter().all(|&b| b == 0),
            "{name}: a neighbour was hit"
        );
        media.flush().unwrap();
        assert!(
            read(media, 8192, 4096) == pattern(1 << 20, 1)[..4096],
            "{name} after flush"
        );
        media.read(0, &mut []).unwrap();
        media.write(SIZE, &[], false).unwrap();
    });
}

#[test]
fn what_is_not_aligned_or_not_inside_is_refused() {
    on_each(|name, media| {
        media.write(0, &pattern(8192, 1), false).unwrap();
        for (offset, length) in [
            (1, 4096),
            (0, 100),
            (512, 4096),
            (SIZE, 4096),
            (SIZE - 4096, 8192),
            (u64::MAX - 4095, 4096),
        ] {
            let place = format!("{name}: {length} at {offset}");
            let mut bytes = vec![0; length];
            assert_eq!(
                media.read(offset, &mut bytes).unwrap_err().kind(),
                ErrorKind::InvalidInput,
                "{place}"
            );
            assert_eq!(
                media.write(offset, &bytes, false).unwrap_err().kind(),
                ErrorKind::InvalidInput,
                "{place}"
            );
            assert_eq!(
                media.deallocate(offset, length as u64).unwrap_err().kind(),
                ErrorKind::InvalidInput,
                "{place}"
            );
            assert_eq!(
                media
                    .write_zeroes(offset, length as u64, false)
                    .unwrap_err()
                    .kind(),
                ErrorKind::InvalidInput
            );
        }
        assert!(read(media, 0, 8192) == pattern(8192, 1), "{name}");
    });
}

#[test]
fn zeroed_and_deallocated_ranges() {
    on_each(|name, media| {
        let data = pattern(1 << 20, 3);
        media.write(0, &data, false).unwrap();
        media.write_zeroes(4096, 300 * 1024 / 4096 * 4096, false).unwrap();
        let now = read(media, 0, 1 << 20);
        assert!(
            now[..4096] == data[..4096] && now[4096 + 307_200..] == data[4096 + 307_200..],
            "{name}"
        );
        assert!(now[4096..4096 + 307_200].iter().all(|&b| b == 0), "{name}");
        media.deallocate(524_288, 8192).unwrap();
        let now = read(media, 524_288, 8192);
        let kept = !media.deallocated_reads_zeros() && now == data[524_288..532_480];
        assert!(now.iter().all(|&b| b == 0) || kept, "{name}: not as it says");
        assert!(read(media, 532_480, 4096) == data[532_480..536_576], "{name}");
        media.write_zeroes(0, 4096, true).unwrap();
        assert!(read(media, 0, 4096).iter().all(|&b| b == 0), "{name}");
    });
}

/// Threads on ranges of their own never see each other.
#[test]
fn many_threads_at_once() {
    on_each(|name, media| {
        std::thread::scope(|scope| {
            for thread in 0..4u64 {
                scope.spawn(move || {
                    let start = thread << 20;
                    for round in 0..20 {
                        let data = pattern(64 << 10, thread * 100 + round);
                        let at = start + round % 8 * (64 << 10);
                        media.write(at, &data, false).unwrap();
                        assert!(read(media, at, 64 << 10) == data, "{name}");
                        if round % 5 == 0 {
                            media.flush().unwrap();
                        }
                    }
                });
            }
        });
    });
}

#[test]
fn a_sparse_memory_of_any_size_costs_nothing() {
    let media = MemoryMedia::new(64 << 30, 512).unwrap();
    media.write((64 << 30) - 512, &[7; 512], false).unwrap();
    assert_eq!(read(&media, (64 << 30) - 1024, 1024)[511..513], [0, 7]);
    assert!(!media.volatile_cache());
}

#[test]
fn files_are_what_they_say() {
    let scratch = Scratch::create(SIZE);
    assert_eq!(
        FileMedia::create(&scratch.0, SIZE).unwrap_err().kind(),
        ErrorKind::AlreadyExists
    );
    let data = pattern(8192, 1);
    let media = scratch.open(Engine::Auto);
    assert!(media.volatile_cache(), "the page cache is one");
    media.write(4096, &data, true).unwrap();
    drop(media);
    assert!(std::fs::read(&scratch.0).unwrap()[4096..12288] == data);
    let only = FileMedia::open(&scratch.0, 512, true, Engine::Auto).unwrap();
    assert!(read(&only, 4096, 8192) == data);
    assert_eq!(
        only.write(0, &[0; 512], false).unwrap_err().kind(),
        ErrorKind::PermissionDenied
    );
    assert_eq!(
        only.deallocate(0, 512).unwrap_err().kind(),
        ErrorKind::PermissionDenied
    );
    only.flush().unwrap();
    // A tail that is no whole block is not part of the media.
    std::fs::write(&scratch.0, [1; 5000]).unwrap();
    assert_eq!(
        FileMedia::open(&scratch.0, BLOCK, false, Engine::Auto)
            .unwrap()
            .size_bytes(),
        4096
    );
    std::fs::write(&scratch.0, [1; 100]).unwrap();
    assert!(FileMedia::open(&scratch.0, BLOCK, false, Engine::Auto).is_err());
    assert_eq!(
        FileMedia::open(&Scratch::new().0, BLOCK, false, Engine::Auto)
            .err()
            .unwrap()
            .kind(),
        ErrorKind::NotFound
    );
    for block in [0, 100, 256, 3000, 131_072] {
        assert!(MemoryMedia::new(1 << 20, block).is_err(), "block {block}");
    }
    assert!(MemoryMedia::new(0, 512).is_err() && MemoryMedia::new(1000, 512).is_err());
}

#[test]
fn one_server_a_file() {
    let scratch = Scratch::create(SIZE);
    let open = |read_only| FileMedia::open(&scratch.0, BLOCK, read_only, Engine::Auto).unwrap();
    let first = open(false);
    first.lock().unwrap();
    assert_eq!(open(false).lock().unwrap_err().kind(), ErrorKind::WouldBlock);
    assert_eq!(open(true).lock().unwrap_err().kind(), ErrorKind::WouldBlock);
    drop(first);
    let (a, b) = (open(true), open(true));
    a.lock().unwrap();
    b.lock().unwrap();
    assert!(open(false).lock().is_err());
}

// ---- the volatile cache ----

/// What a restarted process would find.
fn below(scratch: &Scratch, offset: usize, length: usize) -> Vec<u8> {
    std::fs::read(&scratch.0).unwrap()[offset..offset + length].to_vec()
}

#[test]
fn unflushed_writes_die_with_it_and_flushed_ones_stay() {
    let scratch = Scratch::create(SIZE);
    let cache = VolatileCache::new(scratch.open(Engine::Auto), SIZE);
    let (old, new) = (pattern(65536, 1), pattern(65536, 2));
    cache.write(0, &old, false).unwrap();
    assert_eq!(cache.cached_bytes(), 65536);
    assert!(
        below(&scratch, 0, 65536).iter().all(|&b| b == 0),
        "it went down before it was flushed"
    );
    cache.flush().unwrap();
    assert_eq!(cache.cached_bytes(), 0);
    cache.write(0, &new, false).unwrap();
    cache.write(1 << 20, &new, false).unwrap();
    assert!(read(&cache, 0, 65536) == new);
    drop(cache);
    assert!(below(&scratch, 0, 65536) == old && below(&scratch, 1 << 20, 65536).iter().all(|&b| b == 0));
}

#[test]
fn fua_goes_through_and_takes_nothing_along() {
    let scratch = Scratch::create(SIZE);
    let cache = VolatileCache::new(scratch.open(Engine::Auto), SIZE);
    let data = pattern(12288, 1);
    cache.write(0, &data, false).unwrap();
    let through = pattern(4096, 2);
    cache.write(4096, &through, true).unwrap();
    assert_eq!(cache.cached_bytes(), 8192);
    assert!(below(&scratch, 4096, 4096) == through && below(&scratch, 0, 4096).iter().all(|&b| b == 0));
    let now = read(&cache, 0, 12288);
    assert!(now[..4096] == data[..4096] && now[4096..8192] == through && now[8192..] == data[8192..]);
    cache.flush().unwrap();
    // The older cached block must not come down over the newer one.
    assert!(below(&scratch, 4096, 4096) == through);
}

#[test]
fn over_the_limit_the_oldest_go_down() {
    let scratch = Scratch::create(SIZE);
    let cache = VolatileCache::new(scratch.open(Engine::Auto), 4 * 4096);
    for block in [10u64, 20, 30, 40] {
        cache.write(block * 4096, &pattern(4096, block), false).unwrap();
    }
    // Written again, so block 20 is the oldest now.
    cache.write(10 * 4096, &pattern(4096, 11), false).unwrap();
    assert!(std::fs::read(&scratch.0).unwrap().iter().all(|&b| b == 0));
    cache.write(50 * 4096, &pattern(4096, 50), false).unwrap();
    assert_eq!(cache.cached_bytes(), 4 * 4096);
    assert!(below(&scratch, 20 * 4096, 4096) == pattern(4096, 20));
    assert!(
        below(&scratch, 10 * 4096, 4096).iter().all(|&b| b == 0),
        "a younger one went down"
    );
    // One write longer than the limit.
    cache.write(1 << 20, &pattern(1 << 20, 9), false).unwrap();
    assert!(cache.cached_bytes() <= 4 * 4096);
    assert!(read(&cache, 1 << 20, 1 << 20) == pattern(1 << 20, 9));
    assert!(read(&cache, 10 * 4096, 4096) == pattern(4096, 11));
}

/// Against a model: two plain byte arrays, one for what reads must see, one for what was durable at the last flush.
#[test]
fn random_operations_agree_with_a_model() {
    let seed = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap()
        .subsec_nanos();
    println!("seed {seed}");
    let mut state = u64::from(seed) | 1;
    let mut random = |below: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % below
    };
    const BLOCKS: u64 = 64;
    for limit in [0, 5 * 512, 20 * 512, BLOCKS * 512] {
        let scratch = Scratch::create(BLOCKS * 512);
        let open = || {
            let file = FileMedia::open(&scratch.0, 512, false, Engine::Auto).unwrap();
            VolatileCache::new(Box::new(file), limit)
        };
        let mut cache = open();
        let mut seen = vec![0u8; (BLOCKS * 512) as usize];
        for step in 0..600u64 {
            let first = random(BLOCKS);
            let count = 1 + random((BLOCKS - first).min(9));
            let range = (first * 512) as usize..((first + count) * 512) as usize;
            match random(12) {
                0..=5 => {
                    let data = pattern(range.len(), step);
                    cache.write(first * 512, &data, random(6) == 0).unwrap();
                    seen[range].copy_from_slice(&data);
                }
                6..=8 => assert!(
                    read(&cache, first * 512, range.len()) == seen[range],
                    "seed {seed}, step {step}"
                ),
                9 => {
                    cache.write_zeroes(first * 512, count * 512, false).unwrap();
                    seen[range].fill(0);
                }
                10 => {
                    cache.flush().unwrap();
                    assert!(
                        std::fs::read(&scratch.0).unwrap() == seen,
                        "seed {seed}, step {step}: flushed"
                    );
                }
                _ => {
                    // The process dies. Each block is as it was last written, or as it was before.
                    cache.flush().unwrap();
                    let data = pattern(range.len(), step);
                    cache.write(first * 512, &data, false).unwrap();
                    drop(cache);
                    cache = open();
                    let now = read(&cache, 0, seen.len());
                    for block in 0..BLOCKS as usize {
                        let at = block * 512..(block + 1) * 512;
                        let new = range
                            .contains(&at.start)
                            .then(|| &data[at.start - range.start..][..512]);
                        let found = &now[at.clone()];
                        assert!(
                            found == &seen[at] || Some(found) == new,
                            "seed {seed}, step {step}, block {block}"
                        );
                    }
                    seen = now;
                }
            }
        }
    }
}

/// Longer: what is new reads as zeros and can be written. Shorter: what lies beyond is refused, and zeros when it comes back.
#[test]
fn another_size() {
    on_each(|name, media| {
        let block = u64::from(BLOCK);
        let data = pattern(BLOCK as usize, 3);
        media.write(SIZE - block, &data, false).unwrap();
        media.resize(2 * SIZE).unwrap();
        assert_eq!(media.size_bytes(), 2 * SIZE, "{name}");
        media.write(2 * SIZE - block, &data, false).unwrap();
        media.write(SIZE, &data, false).unwrap();
        let mut found = vec![1; BLOCK as usize];
        media.read(SIZE + block, &mut found).unwrap();
        assert!(found.iter().all(|&byte| byte == 0), "{name}");

        media.resize(SIZE).unwrap();
        for offset in [SIZE, 2 * SIZE - block] {
            assert!(media.write(offset, &data, false).is_err(), "{name}");
            assert!(media.read(offset, &mut found).is_err(), "{name}");
            assert!(media.write_zeroes(offset, block, false).is_err(), "{name}");
        }
        media.read(SIZE - block, &mut found).unwrap();
        assert!(found == data, "{name}: what remains is as it was");
        media.flush().unwrap();
        media.resize(2 * SIZE).unwrap();
        for offset in [SIZE, 2 * SIZE - block] {
            media.read(offset, &mut found).unwrap();
            assert!(found.iter().all(|&byte| byte == 0), "{name}: {offset}");
        }
        assert!(
            media.resize(0).is_err() && media.resize(SIZE + 1).is_err(),
            "{name}"
        );
        media.resize(SIZE).unwrap();
    });
}

/// What may be written may be kept: a new end is zeroed before anybody may write there.
#[test]
fn a_write_to_a_new_end_stays() {
    const SHORT: u64 = 4 << 20;
    const LONG: u64 = 16 * SHORT;
    let media = MemoryMedia::new(SHORT, BLOCK).unwrap();
    let mapping = media.mapping().unwrap();
    let (at, data) = (LONG - u64::from(BLOCK), pattern(BLOCK as usize, 9));
    for _ in 0..8 {
        // Pages that are there make zeroing take its time.
        mapping.copy_in(SHORT as usize, &vec![1; (LONG - SHORT) as usize]);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while media.size_bytes() < LONG {
                    std::hint::spin_loop();
                }
                media.write(at, &data, false).unwrap();
            });
            media.resize(LONG).unwrap();
        });
        assert!(
            read(&media, at, BLOCK as usize) == data,
            "an answered write is gone"
        );
        assert!(read(&media, SHORT, BLOCK as usize).iter().all(|&byte| byte == 0));
        media.resize(SHORT).unwrap();
    }
}

/// Whose change of size lets a writer come to the cache meanwhile.
struct SlowToResize(MemoryMedia, AtomicUsize);

impl Media for SlowToResize {
    fn size_bytes(&self) -> u64 {
        // The writer's check is one look, and its write follows.
        self.1.fetch_add(1, Ordering::SeqCst);
        self.0.size_bytes()
    }
    fn block_bytes(&self) -> u32 {
        self.0.block_bytes()
    }
    fn read_only(&self) -> bool {
        false
    }
    fn volatile_cache(&self) -> bool {
        false
    }
    fn engine(&self) -> &'static str {
        "memory"
    }
    fn read(&self, offset: u64, into: &mut [u8]) -> std::io::Result<()> {
        self.0.read(offset, into)
    }
    fn write(&self, offset: u64, from: &[u8], fua: bool) -> std::io::Result<()> {
        self.0.write(offset, from, fua)
    }
    fn flush(&self) -> std::io::Result<()> {
        self.0.flush()
    }
    fn deallocate(&self, offset: u64, length: u64) -> std::io::Result<()> {
        self.0.deallocate(offset, length)
    }
    fn resize(&self, size_bytes: u64) -> std::io::Result<()> {
        let before = self.1.load(Ordering::SeqCst);
        // Long enough for a writer to look, if it looks before it may go on.
        let until = std::time::Instant::now() + std::time::Duration::from_millis(300);
        while self.1.load(Ordering::SeqCst) == before && std::time::Instant::now() < until {
            std::thread::yield_now();
        }
        self.0.resize(size_bytes)
    }
}

/// A write that came to the cache beside a change to a smaller size would stay in it for ever, and fail every flush.
#[test]
fn nothing_is_cached_beyond_the_end() {
    let below = SlowToResize(MemoryMedia::new(SIZE, BLOCK).unwrap(), AtomicUsize::new(0));
    let media = VolatileCache::new(Box::new(below), SIZE);
    let data = pattern(BLOCK as usize, 4);
    std::thread::scope(|scope| {
        let shrink = scope.spawn(|| media.resize(SIZE / 2));
        let writer = scope.spawn(|| {
            while media.write(SIZE - u64::from(BLOCK), &data, false).is_ok() {
                std::thread::yield_now();
            }
        });
        shrink.join().unwrap().unwrap();
        writer.join().unwrap();
    });
    assert_eq!(media.cached_bytes(), 0);
    media.flush().unwrap();
}

/// Runs itself again with files that may not become longer than 1 MiB. A durable write that has no room is refused, and
/// that is all: nothing that was answered before is lost, so flushes and durable writes elsewhere go on.
#[test]
fn a_durable_write_without_room_is_no_failed_sync() {
    const FILE: &str = "FILE_WITHOUT_ROOM";
    if let Some(path) = std::env::var_os(FILE) {
        for engine in [Engine::Pread, Engine::IoUring] {
            let Ok(media) = FileMedia::open(path.as_ref(), 4096, false, engine) else {
                println!("not tested: {engine:?}");
                continue;
            };
            let error = media.write(4 << 20, &[1; 4096], true).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EFBIG), "{error}");
            media.flush().unwrap();
            media.write(0, &[2; 4096], true).unwrap();
            let mut found = [0; 4096];
            media.read(0, &mut found).unwrap();
            assert_eq!(found, [2; 4096]);
        }
        return;
    }
    let scratch = Scratch::create(8 << 20);
    let status = std::process::Command::new("sh")
        .args([
            "-c",
            "trap '' XFSZ; ulimit -f 2048 && exec \"$0\" --exact a_durable_write_without_room_is_no_failed_sync",
        ])
        .arg(std::env::current_exe().unwrap())
        .env(FILE, &scratch.0)
        .status()
        .unwrap();
    assert!(status.success());
}

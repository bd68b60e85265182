//! A volatile cache: what dies with it, and what does not.

mod scratch;

use headrace_media::{Engine, FileMedia, Media, MemoryMedia, VolatileCache};
use scratch::{pattern, read, Scratch, BLOCK, SIZE};
use std::sync::atomic::{AtomicUsize, Ordering};

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

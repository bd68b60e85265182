//! One contract, kept by every media and engine; what is given back to the system is in `given_back.rs`.

mod scratch;

use headrace_media::{Cache, Engine, FileMedia, Media, MemoryMedia, VolatileCache};
use scratch::{pattern, read, Scratch, BLOCK, SIZE};
use std::io::ErrorKind;

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

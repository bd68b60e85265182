//! What is of files alone, or of memory.

mod scratch;

use headrace_media::{Engine, FileMedia, Media, MemoryMedia};
use scratch::{pattern, read, Scratch, BLOCK, SIZE};
use std::io::ErrorKind;

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

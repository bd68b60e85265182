//! A real block device, by loop: its size, its blocks, its zeros, and a sync that really fails. Needs root and loop devices; says
//! what is missing where they are.

use headrace_media::{Cache, Engine, FileMedia, Media};
use std::io::ErrorKind;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

fn run(program: &str, arguments: &[&str]) -> Result<String, String> {
    let output = Command::new(program)
        .args(arguments)
        .output()
        .map_err(|e| format!("{program}: {e}"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(format!("{program}: {}", said.trim()));
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_string())
}

/// A loop device over a file in a small tmpfs of its own; all gone with the value.
struct Loop {
    mount: PathBuf,
    device: String,
}

impl Loop {
    fn new(file_bytes: u64, room: &str, sector: &str) -> Result<Loop, String> {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("loop-{}-{number}", std::process::id());
        let mount = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
        std::fs::create_dir(&mount).map_err(|e| e.to_string())?;
        let place = mount.to_string_lossy().to_string();
        let mut made = Loop {
            mount: mount.clone(),
            device: String::new(),
        };
        run(
            "mount",
            &["-t", "tmpfs", "-o", &format!("size={room}"), "none", &place],
        )?;
        let file = mount.join("image");
        FileMedia::create(&file, file_bytes).map_err(|e| e.to_string())?;
        let file = file.to_string_lossy().to_string();
        made.device = run("losetup", &["--find", "--show", "--sector-size", sector, &file])?;
        Ok(made)
    }

    fn open(&self, block: u32, cache: Cache) -> std::io::Result<FileMedia> {
        FileMedia::open_as(self.device.as_ref(), block, false, Engine::Pread, cache)
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        if !self.device.is_empty() {
            let _ = run("losetup", &["--detach", &self.device]);
        }
        let _ = run("umount", &["--lazy", &self.mount.to_string_lossy()]);
        let _ = std::fs::remove_dir(&self.mount);
    }
}

fn pattern(length: usize, seed: u8) -> Vec<u8> {
    (0..length).map(|n| (n as u8).wrapping_mul(31) ^ seed).collect()
}

#[test]
fn a_block_device_is_served_past_the_page_cache() {
    const SIZE: u64 = 8 << 20;
    let device = match Loop::new(SIZE, "32m", "512") {
        Ok(device) => device,
        Err(why) => return println!("not tested: {why}"),
    };
    for (cache, direct) in [(Cache::Auto, true), (Cache::Bypass, true), (Cache::Use, false)] {
        let media = device.open(4096, cache).unwrap();
        assert_eq!((media.size_bytes(), media.direct()), (SIZE, direct));
        assert!(media.volatile_cache(), "a loop device says \"write back\"");
        let data = pattern(3 << 20, direct as u8);
        // Memory that is not aligned, and memory that is.
        for shift in [0, 1, 512] {
            let mut memory = vec![0; data.len() + 8192];
            let start = memory.as_ptr().align_offset(4096) + shift;
            memory[start..start + data.len()].copy_from_slice(&data);
            for fua in [false, true] {
                media
                    .write(4096, &memory[start..start + data.len()], fua)
                    .unwrap();
                memory.fill(0);
                media.read(4096, &mut memory[start..start + data.len()]).unwrap();
                assert!(
                    memory[start..start + data.len()] == data,
                    "{cache:?}, shift {shift}"
                );
            }
        }
        media.flush().unwrap();
        let mut found = vec![1; 16384];
        if media.deallocated_reads_zeros() {
            media.deallocate(8192, 8192).unwrap();
            media.read(4096, &mut found).unwrap();
            assert!(found[4096..12288].iter().all(|&byte| byte == 0), "{cache:?}");
            assert!(found[..4096] == data[..4096] && found[12288..] == data[12288..16384]);
        }
        media.write_zeroes(1 << 20, 1 << 20, true).unwrap();
        media.read((1 << 20) - 4096, &mut found).unwrap();
        assert!(found[4096..].iter().all(|&byte| byte == 0), "{cache:?}");
        assert!(found[..4096] == data[(1 << 20) - 8192..(1 << 20) - 4096]);
    }
}

#[test]
fn a_device_with_larger_blocks_is_named() {
    let device = match Loop::new(8 << 20, "32m", "4096") {
        Ok(device) => device,
        Err(why) => return println!("not tested: {why}"),
    };
    let error = device.open(512, Cache::Auto).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    assert!(error.to_string().contains("block_bytes 4096 or more"), "{error}");
    assert!(device.open(4096, Cache::Auto).unwrap().direct());
}

/// A device that has less room than it says: the page cache takes the writes, and the sync fails. The kernel tells it once;
/// the media goes on telling it.
#[test]
fn a_failed_sync_stays_failed() {
    let device = match Loop::new(16 << 20, "4m", "512") {
        Ok(device) => device,
        Err(why) => return println!("not tested: {why}"),
    };
    let media = device.open(4096, Cache::Use).unwrap();
    media.write(0, &pattern(4096, 1), true).unwrap();
    media.flush().unwrap();
    media.write(0, &pattern(12 << 20, 2), false).unwrap();
    let first = media.flush().unwrap_err();
    assert!(!first.to_string().contains("an earlier sync failed"), "{first}");
    // Little enough to fit, were it not for what was lost before.
    for _ in 0..2 {
        let error = media.flush().unwrap_err();
        assert!(error.to_string().contains("an earlier sync failed"), "{error}");
        assert!(media.write(0, &pattern(4096, 3), true).is_err());
        assert!(media.write_zeroes(0, 4096, true).is_err());
    }
    let mut found = vec![0; 4096];
    media.read(0, &mut found).unwrap();
    drop(media);
    // Opened again, it is what is there, and durable writes are possible.
    let media = device.open(4096, Cache::Use).unwrap();
    media.write(0, &pattern(4096, 4), true).unwrap();
    media.flush().unwrap();
}

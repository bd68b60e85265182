//! A file to test on, and bytes to write there.

use headrace_media::{Engine, FileMedia, Media};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};

pub const SIZE: u64 = 4 << 20;
pub const BLOCK: u32 = 4096;

/// A file that goes away with the value.
pub struct Scratch(pub PathBuf);

impl Scratch {
    pub fn new() -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let name = format!(
            "media-{}-{}",
            std::process::id(),
            NEXT.fetch_add(1, Ordering::Relaxed)
        );
        Scratch(PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name))
    }

    pub fn create(size: u64) -> Self {
        let scratch = Self::new();
        FileMedia::create(&scratch.0, size).unwrap();
        scratch
    }

    pub fn open(&self, engine: Engine) -> Box<dyn Media> {
        Box::new(FileMedia::open(&self.0, BLOCK, false, engine).unwrap())
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

pub fn pattern(length: usize, seed: u64) -> Vec<u8> {
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

pub fn read(media: &dyn Media, offset: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0xEE; length];
    media.read(offset, &mut bytes).unwrap();
    let mut again = vec![0xDD; length];
    if media.try_read(offset, &mut again).unwrap() {
        assert!(again == bytes, "try_read differs from read");
    }
    bytes
}

//! What a volume frees is free for others: the file has fewer blocks, the process less memory. A process of its own, as
//! what is resident is a number of the whole process and other tests would be in it.

use headrace_media::{Engine, FileMedia, Media, MemoryMedia};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

const LENGTH: u64 = 64 << 20;
const BLOCK: u32 = 4096;
const PIECE: usize = 1 << 20;

fn resident() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    pages.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

fn check(media: &dyn Media, used: &dyn Fn() -> u64) {
    if !media.deallocated_reads_zeros() {
        println!("not tested: this file system has no holes");
        return;
    }
    let piece: Vec<u8> = (0..PIECE).map(|at| (at % 251 + 1) as u8).collect();
    for at in (0..LENGTH).step_by(PIECE) {
        media.write(at, &piece, false).unwrap();
    }
    media.flush().unwrap();
    let before = used();
    let block = u64::from(BLOCK);
    media.deallocate(block, LENGTH - 2 * block).unwrap();
    media.flush().unwrap();
    let engine = media.engine();
    let after = used();
    assert!(
        before.saturating_sub(after) > LENGTH / 2,
        "{engine}: {before} bytes, {after} after"
    );
    let mut found = vec![0; BLOCK as usize];
    media.read(0, &mut found).unwrap();
    assert!(found == piece[..BLOCK as usize], "{engine}");
    let mut found = vec![0xEE; PIECE];
    media.read(block, &mut found).unwrap();
    assert!(found.iter().all(|&byte| byte == 0), "{engine}");
}

#[test]
fn deallocated_ranges_are_given_back() {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("given-back-{}", std::process::id()));
    FileMedia::create(&path, LENGTH).unwrap();
    let file = FileMedia::open(&path, BLOCK, false, Engine::Pread).unwrap();
    check(&file, &|| std::fs::metadata(&path).unwrap().blocks() * 512);
    std::fs::remove_file(&path).unwrap();
    let memory = MemoryMedia::new(LENGTH, BLOCK).unwrap();
    check(&memory, &resident);
}

//! `pread` beside io_uring, from the page cache and around it: `cargo run --release -p headrace-media --example engines`.

use headrace_media::{Engine, FileMedia, Media};
use std::time::Instant;

const SIZE: u64 = 256 << 20;

fn main() -> std::io::Result<()> {
    let path = std::env::temp_dir().join(format!("headrace-engines-{}", std::process::id()));
    FileMedia::create(&path, SIZE)?;
    let pread = FileMedia::open(&path, 4096, false, Engine::Pread)?;
    let uring = FileMedia::open(&path, 4096, false, Engine::IoUring)?;
    let mut buffer = vec![7; 1 << 20];
    for at in (0..SIZE).step_by(1 << 20) {
        pread.write(at, &buffer, false)?;
    }
    pread.flush()?;
    for length in [4096, 65536, 1 << 20] {
        let count = (64 << 20) / length;
        let mut rates = [Vec::new(), Vec::new()];
        for _ in 0..5 {
            for (rate, media) in rates.iter_mut().zip([&pread, &uring]) {
                let begin = Instant::now();
                for n in 0..count as u64 {
                    media.read(
                        n * 7919 * length as u64 % (SIZE - length as u64) / 4096 * 4096,
                        &mut buffer[..length],
                    )?;
                }
                rate.push((count * length) as f64 / begin.elapsed().as_secs_f64() / 1e9);
            }
        }
        let middle = |rate: &mut Vec<f64>| {
            rate.sort_by(f64::total_cmp);
            rate[rate.len() / 2]
        };
        let [a, b] = &mut rates;
        println!(
            "cached reads of {length}: pread {:.2} GB/s, io_uring {:.2} GB/s",
            middle(a),
            middle(b)
        );
    }
    std::fs::remove_file(path)
}

//! What an event costs its writer, the least of many runs: `cargo run --release -p headrace-transfer --example ring`.

use headrace_transfer::{Event, EventKind, Recorder};
use std::time::{Duration, Instant};

const EVENTS: u32 = 1 << 18;
const RUNS: usize = 40;

fn main() {
    let mut recorder = Recorder::new(1 << 16).expect("a ring of some size");
    let begun = Instant::now();
    let mut quickest = Duration::MAX;
    for _ in 0..RUNS {
        let run = Instant::now();
        for number in 0..EVENTS {
            // As the host does: both times are there already, and become nanoseconds of the kernel's clock.
            let event = Event::new(EventKind::Read, begun, Some(run));
            recorder.record(&Event {
                offset: u64::from(number) << 12,
                bytes: 4096,
                path: 1,
                ..event
            });
        }
        quickest = quickest.min(run.elapsed());
    }
    let each = quickest.as_nanos() as f64 / f64::from(EVENTS);
    println!("{each:.1} ns an event, {} events", recorder.recorded());
}

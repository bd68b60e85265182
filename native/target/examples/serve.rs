//! Serve a JSON configuration until standard input ends: `cargo run -p headrace-target --example serve -- '{...}'`.
//!
//! `headrace serve` is the tool for people; this one needs no Python.

use headrace_target::{Target, TargetConfig};
use std::io::Read;
use std::time::Duration;

fn main() -> Result<(), String> {
    let text = std::env::args().nth(1).ok_or("usage: serve CONFIGURATION")?;
    let target = Target::start(TargetConfig::from_json(&text)?)?;
    for address in target.addresses() {
        println!("{address}");
    }
    std::io::stdin()
        .read_to_end(&mut Vec::new())
        .map_err(|e| e.to_string())?;
    println!("{:#}", target.status());
    target.stop(Duration::from_secs(10))
}

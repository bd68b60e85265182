//! Jobs on standard input, one JSON object a line; an answer for each on standard output. The end of the input ends it.

use crate::socket::cpu_s;
use crate::Failure;
use serde::{Deserialize, Serialize};
use std::io::{BufRead, Write};
use std::time::Instant;

#[derive(Deserialize)]
#[serde(tag = "job", rename_all = "snake_case", deny_unknown_fields)]
pub enum Job {
    /// Transfers of `block` bytes, `depth` of them under way, `count` in all.
    Move(Move),
    /// One transfer after the other; each is timed.
    Ping { block: usize, count: u64, spin: bool },
    /// Fill the client's memory with the pattern of `seed`.
    Fill { seed: u64 },
    /// Is the client's memory what reading all of a memory of `seed` leaves?
    Check { seed: u64, block: usize, random: bool },
    /// Sleep, with everything open.
    Idle { seconds: f64 },
}

#[derive(Deserialize, Clone, Copy)]
#[serde(deny_unknown_fields)]
pub struct Move {
    pub write: bool,
    pub block: usize,
    pub depth: usize,
    pub count: u64,
    /// Scattered over the other side's memory; on this side always in a row.
    pub random: bool,
    /// So many are taken, and asked for anew, at a time.
    pub batch: usize,
}

#[derive(Serialize, Default)]
pub struct Answer {
    pub seconds: f64,
    /// Of this process.
    pub cpu_s: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub median_us: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub same: Option<bool>,
}

/// What a client can do.
pub trait Client {
    fn transfer(&mut self, what: Move) -> Result<(), Failure>;
    /// Seconds of each.
    fn ping(&mut self, block: usize, count: u64, spin: bool) -> Result<Vec<f64>, Failure>;
    fn fill(&mut self, seed: u64);
    fn check(&self, seed: u64, block: usize, random: bool) -> bool;
}

pub fn serve(mut client: impl Client) -> Result<(), Failure> {
    let mut output = std::io::stdout();
    writeln!(output, "ready")?;
    for line in std::io::stdin().lock().lines() {
        let job = serde_json::from_str(&line?)?;
        let mut answer = Answer::default();
        let (begun, cpu) = (Instant::now(), cpu_s());
        match job {
            Job::Move(what) => client.transfer(what)?,
            Job::Ping { block, count, spin } => {
                let mut times = client.ping(block, count, spin)?;
                times.sort_by(f64::total_cmp);
                answer.median_us = times.get(times.len() / 2).map(|time| time * 1e6);
            }
            Job::Fill { seed } => client.fill(seed),
            Job::Check { seed, block, random } => answer.same = Some(client.check(seed, block, random)),
            Job::Idle { seconds } => std::thread::sleep(std::time::Duration::try_from_secs_f64(seconds)?),
        }
        answer.seconds = begun.elapsed().as_secs_f64();
        answer.cpu_s = cpu_s() - cpu;
        writeln!(output, "{}", serde_json::to_string(&answer)?)?;
    }
    Ok(())
}

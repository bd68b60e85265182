//! A load on our own host, from the completions themselves: no thread but the host's own takes part.

use crate::control::{Client, Move};
use crate::memory;
use crate::Failure;
use headrace_host::{HostOptions, NvmeTcpDevice, Portal};
use headrace_transfer::{BlockDevice, Buffer, IoError, Op, Request, Sink};
use serde::Deserialize;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{mpsc, Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Options {
    depth: u16,
    #[serde(default)]
    digests: bool,
    #[serde(default = "one")]
    nsid: u32,
    #[serde(default)]
    poll_us: u64,
}

fn one() -> u32 {
    1
}

pub struct HostLoad {
    device: Arc<NvmeTcpDevice>,
    memory: Buffer,
}

/// A run of transfers. Each completion brings the next ones, `batch` at a time.
struct Run {
    this: Weak<Run>,
    device: Arc<NvmeTcpDevice>,
    memory: Buffer,
    what: Move,
    made: AtomicU64,
    ended: AtomicU64,
    done: mpsc::Sender<Result<(), IoError>>,
    /// When the transfer under way began, and how long earlier ones took: for `ping` only.
    times: Option<Mutex<(Instant, Vec<f64>)>>,
}

impl Run {
    fn submit(&self, most: u64) {
        let first = self.made.fetch_add(most, Ordering::Relaxed);
        let last = (first + most).min(self.what.count);
        let blocks = self.memory.len() as u64 / self.what.block as u64;
        let requests = (first..last).filter_map(|number| {
            let place = memory::place(number, blocks, self.what.random) * self.what.block as u64;
            let here = if self.what.write {
                place
            } else {
                number % blocks * self.what.block as u64
            };
            let buffer = self.memory.slice(here as usize, self.what.block)?;
            Some(Request {
                op: if self.what.write {
                    Op::Write {
                        from: buffer,
                        fua: false,
                    }
                } else {
                    Op::Read { into: buffer }
                },
                offset: place,
                token: number,
                sink: self.this.upgrade()?,
            })
        });
        let requests: Vec<_> = requests.collect();
        if !requests.is_empty() {
            self.device.submit(requests);
        }
    }
}

impl Sink for Run {
    fn complete(&self, _token: u64, result: Result<(), IoError>) {
        if let Err(error) = result {
            // Whoever waits has gone at a second error.
            let _ = self.done.send(Err(error));
            return;
        }
        if let Some(times) = &self.times {
            let mut times = times.lock().unwrap_or_else(PoisonError::into_inner);
            let now = Instant::now();
            let took = now - times.0;
            times.1.push(took.as_secs_f64());
            times.0 = now;
        }
        let ended = self.ended.fetch_add(1, Ordering::Relaxed) + 1;
        if ended % self.what.batch as u64 == 0 {
            self.submit(self.what.batch as u64);
        }
        if ended == self.what.count {
            let _ = self.done.send(Ok(()));
        }
    }
}

impl HostLoad {
    pub fn open(port: u16, nqn: &str, size: usize, options: &str) -> Result<Self, Failure> {
        let options: Options = serde_json::from_str(options)?;
        let host = HostOptions {
            portals: vec![Portal::new("127.0.0.1", port)],
            subsysnqn: nqn.into(),
            namespace: headrace_host::NamespaceKey::Nsid(options.nsid),
            hostnqn: "nqn.2024-01.headrace:bench".into(),
            hostid: [7; 16],
            header_digest: options.digests,
            data_digest: options.digests,
            depth: options.depth,
            poll: Duration::from_micros(options.poll_us),
            ..HostOptions::default()
        };
        let device = NvmeTcpDevice::open(host)?;
        let mut memory = vec![0; size];
        memory::fill(&mut memory, 0);
        Ok(HostLoad {
            device,
            memory: Buffer::from_vec(memory),
        })
    }

    fn run(&self, what: Move, times: bool) -> Result<Vec<f64>, Failure> {
        let (done, wait) = mpsc::channel();
        let times = times.then(|| Mutex::new((Instant::now(), Vec::with_capacity(what.count as usize))));
        let run = Arc::new_cyclic(|this| Run {
            this: this.clone(),
            device: self.device.clone(),
            memory: self.memory.clone(),
            what,
            made: AtomicU64::new(0),
            ended: AtomicU64::new(0),
            done,
            times,
        });
        // The queue holds `depth`; what waits for room in it is at most one batch.
        run.submit((what.depth + what.batch - 1) as u64);
        wait.recv_timeout(Duration::from_secs(60))??;
        let times = run.times.as_ref().map(|times| {
            let mut times = times.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::take(&mut times.1)
        });
        Ok(times.unwrap_or_default())
    }
}

impl Client for HostLoad {
    fn transfer(&mut self, what: Move) -> Result<(), Failure> {
        self.run(what, false).map(drop)
    }

    fn ping(&mut self, block: usize, count: u64, _spin: bool) -> Result<Vec<f64>, Failure> {
        let what = Move {
            write: false,
            block,
            depth: 1,
            count,
            random: true,
            batch: 1,
        };
        self.run(what, true)
    }

    fn fill(&mut self, seed: u64) {
        let mut bytes = vec![0; self.memory.len()];
        memory::fill(&mut bytes, seed);
        self.memory.copy_from(0, &bytes);
    }

    fn check(&self, seed: u64, block: usize, random: bool) -> bool {
        let mut bytes = vec![0; self.memory.len()];
        self.memory.copy_to(0, &mut bytes);
        memory::is_read(&bytes, seed, block, random)
    }
}

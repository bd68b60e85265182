//! The whole governor over a simulated link: no socket, no thread, time as an argument.

use super::*;
use std::collections::VecDeque;
use std::path::PathBuf;

const MIB: u64 = 1 << 20;

/// One governor that shares with nobody.
fn alone(nonce: u64) -> Governor {
    Governor::with(Node::at(PathBuf::from("/proc/no-such-place"), nonce), nonce)
}

struct Read {
    governor: usize,
    flow: usize,
    bytes: u64,
    sent: Instant,
}

/// A link that serves one read after the other, at `rate` bytes a second after `way`.
struct World {
    governors: Vec<Governor>,
    /// Of each governor and flow: size of a read, reads wanted at once, reads that are neither under way nor held back.
    flows: Vec<Vec<(u64, u64, u64)>>,
    link: VecDeque<Read>,
    rate: f64,
    way: Duration,
    now: Instant,
    got: Vec<Vec<u64>>,
    longest: Duration,
    most: u64,
}

impl World {
    fn new(governors: Vec<Governor>, flows: Vec<Vec<(u64, u64)>>, rate: f64) -> Self {
        let mut world = World {
            got: flows.iter().map(|of| vec![0; of.len()]).collect(),
            flows: flows
                .iter()
                .map(|of| of.iter().map(|&(size, depth)| (size, depth, depth)).collect())
                .collect(),
            governors,
            link: VecDeque::new(),
            rate,
            way: Duration::from_micros(100),
            now: Instant::now(),
            longest: Duration::ZERO,
            most: 0,
        };
        for governor in 0..world.governors.len() {
            for flow in 0..world.flows[governor].len() {
                world.pump(governor, flow);
            }
        }
        world
    }

    fn pump(&mut self, governor: usize, flow: usize) {
        let (bytes, _, wanted) = &mut self.flows[governor][flow];
        while *wanted > 0 && self.governors[governor].admit(flow, *bytes, self.now) {
            *wanted -= 1;
            self.link.push_back(Read {
                governor,
                flow,
                bytes: *bytes,
                sent: self.now,
            });
        }
        let under_way: u64 = self.governors.iter().map(|governor| governor.in_flight).sum();
        self.most = self.most.max(under_way);
    }

    fn turns(&mut self, governor: usize) {
        while let Some(flow) = self.governors[governor].next() {
            self.pump(governor, flow);
        }
    }

    /// One read is served; `false` when there is none.
    fn step(&mut self) -> bool {
        let Some(read) = self.link.pop_front() else {
            return false;
        };
        self.now =
            (self.now + Duration::from_secs_f64(read.bytes as f64 / self.rate)).max(read.sent + self.way);
        let round_trip = self.now - read.sent;
        self.longest = self.longest.max(round_trip);
        self.got[read.governor][read.flow] += read.bytes;
        self.governors[read.governor].done(read.flow, read.bytes, round_trip, self.now);
        self.flows[read.governor][read.flow].2 += 1;
        self.pump(read.governor, read.flow);
        self.turns(read.governor);
        true
    }

    fn run(&mut self, steps: usize) {
        for _ in 0..steps {
            assert!(self.step(), "everybody waits and nothing is under way");
        }
    }

    fn forget_start(&mut self) {
        self.got.iter_mut().flatten().for_each(|got| *got = 0);
        (self.longest, self.most) = (Duration::ZERO, 0);
    }
}

fn join(governor: &mut Governor, flows: usize, mode: Inflight) {
    for flow in 0..flows {
        assert_eq!(governor.join(flow, mode), flow);
    }
}

#[test]
fn one_device_alone_is_not_held_back() {
    let mut governor = alone(1);
    join(&mut governor, 1, Inflight::Auto);
    let mut world = World::new(vec![governor], vec![vec![(MIB, 128)]], 50e6);
    assert_eq!(world.link.len(), 128);
    world.run(1000);
    assert_eq!(world.governors[0].held_back, 0);
    assert_eq!(world.most, 128 * MIB);
}

#[test]
fn sixteen_devices_on_a_slow_link_have_little_under_way_and_share_it_alike() {
    let mut governor = alone(1);
    join(&mut governor, 16, Inflight::Auto);
    let mut world = World::new(vec![governor], vec![vec![(MIB, 16); 16]], 50e6);
    world.run(500);
    world.forget_start();
    world.run(1600);
    assert!(world.most <= 6 * MIB, "{}", world.most);
    let (least, most) = (
        world.got[0].iter().min().unwrap(),
        world.got[0].iter().max().unwrap(),
    );
    assert!(most - least <= 2 * MIB, "{:?}", world.got);
}

#[test]
fn a_fast_link_stays_full() {
    let mut governor = alone(1);
    join(&mut governor, 16, Inflight::Auto);
    let mut world = World::new(vec![governor], vec![vec![(MIB, 16); 16]], 12.5e9);
    world.run(20_000);
    world.forget_start();
    let begun = world.now;
    world.run(100_000);
    let rate = world.got[0].iter().sum::<u64>() as f64 / (world.now - begun).as_secs_f64();
    assert!(rate > 0.98 * 12.5e9, "{rate:e}");
    assert!(world.most < 64 * MIB, "{}", world.most);
}

#[test]
fn sizes_do_not_decide_who_gets_how_much() {
    let mut governor = alone(1);
    join(&mut governor, 3, Inflight::Auto);
    let mut world = World::new(
        vec![governor],
        vec![vec![(MIB, 16), (128 << 10, 128), (512 << 10, 32)]],
        50e6,
    );
    world.run(2000);
    world.forget_start();
    world.run(8000);
    let got = &world.got[0];
    let (least, most) = (
        *got.iter().min().unwrap() as f64,
        *got.iter().max().unwrap() as f64,
    );
    assert!(least > 0.9 * most, "{got:?}");
}

#[test]
fn small_reads_of_a_quiet_device_pass_a_full_window() {
    let mut governor = alone(1);
    join(&mut governor, 3, Inflight::Auto);
    let now = Instant::now();
    assert!(governor.admit(1, MIB, now));
    while governor.admit(0, MIB, now) {}
    assert!(!governor.admit(1, MIB, now));
    assert!(governor.admit(2, 4096, now));
    assert!(governor.admit(2, 60 << 10, now));
    assert!(!governor.admit(2, 4096, now));
}

#[test]
fn a_fixed_cap_holds_for_one_device_too_and_lets_one_read_through() {
    let mut governor = alone(1);
    governor.join(0, Inflight::AtMost(3 * MIB));
    let mut world = World::new(vec![governor], vec![vec![(MIB, 16)]], 1e9);
    world.run(1000);
    assert_eq!(world.most, 3 * MIB);
    let mut governor = alone(1);
    governor.join(0, Inflight::AtMost(4096));
    let mut world = World::new(vec![governor], vec![vec![(MIB, 16)]], 1e9);
    world.run(1000);
    assert_eq!(world.most, MIB);
}

#[test]
fn off_is_neither_held_back_nor_counted() {
    let mut governor = alone(1);
    join(&mut governor, 4, Inflight::Off);
    let mut world = World::new(vec![governor], vec![vec![(MIB, 16); 4]], 50e6);
    world.run(1000);
    assert_eq!((world.governors[0].in_flight, world.governors[0].active), (0, 0));
    assert_eq!(world.link.len(), 64);
}

#[test]
fn processes_of_a_node_share_a_fixed_cap() {
    let directory = std::env::temp_dir().join(format!("headrace-flow-shared-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&directory);
    let mut governors = Vec::new();
    for nonce in 1..=4 {
        let mut governor = Governor::with(Node::at(directory.clone(), nonce), nonce);
        join(&mut governor, 2, Inflight::AtMost(16 * MIB));
        governors.push(governor);
    }
    let mut world = World::new(governors, vec![vec![(MIB, 16); 2]; 4], 1e9);
    world.run(2000);
    world.forget_start();
    world.run(4000);
    let _ = std::fs::remove_dir_all(&directory);
    assert_eq!(world.governors[0].others.processes, 3);
    assert!(world.most <= 16 * MIB, "{}", world.most);
    let got: Vec<u64> = world.got.iter().map(|of| of.iter().sum()).collect();
    let (least, most) = (got.iter().min().unwrap(), got.iter().max().unwrap());
    assert!(*least as f64 > 0.6 * *most as f64, "{got:?}");
}

/// Whatever is lost, closed, opened and refused: nothing is counted twice, nobody waits for ever.
#[test]
fn no_history_leaves_anything_behind() {
    let mut random = 0x9E37_79B9_7F4A_7C15u64;
    let mut governor = alone(1);
    let mut under_way: Vec<(usize, u64, Instant)> = Vec::new();
    let mut now = Instant::now();
    for _ in 0..200_000 {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let flow = (random >> 32) as usize % 9;
        let bytes = 4096 << ((random >> 40) % 9);
        now += Duration::from_micros(random % 997);
        match random % 41 {
            0 => {
                governor.reset(flow);
                under_way.retain(|(of, ..)| *of != flow);
            }
            1 => {
                governor.leave(flow);
                under_way.retain(|(of, ..)| *of != flow);
            }
            2 => {
                let mode =
                    [Inflight::Auto, Inflight::AtMost(5 * MIB), Inflight::Off][(random >> 8) as usize % 3];
                if governor.flows.iter().flatten().count() < 9 {
                    let flow = governor.join(0, mode);
                    governor.flows[flow].as_mut().unwrap().owner = flow;
                }
            }
            3..=20 => {
                if governor.admit(flow, bytes, now) && matches!(governor.flows.get(flow), Some(Some(_))) {
                    under_way.push((flow, bytes, now));
                }
            }
            _ if under_way.is_empty() => {}
            other => {
                let (flow, bytes, sent) = under_way.swap_remove((random >> 20) as usize % under_way.len());
                match other {
                    21 => governor.back(flow, bytes),
                    _ => governor.done(flow, bytes, now - sent, now),
                }
            }
        }
        while let Some(flow) = governor.next() {
            if governor.admit(flow, 4096, now) {
                under_way.push((flow, 4096, now));
            }
        }
        let counted =
            |of: usize| matches!(governor.flows.get(of), Some(Some(flow)) if flow.mode != Inflight::Off);
        let expected: u64 = under_way
            .iter()
            .filter(|(of, ..)| counted(*of))
            .map(|(_, bytes, _)| bytes)
            .sum();
        assert_eq!(governor.in_flight, expected);
        let active = governor
            .flows
            .iter()
            .flatten()
            .filter(|flow| flow.in_flight > 0 || flow.waiting);
        assert_eq!(governor.active as usize, active.count());
        assert!(
            governor.turns.is_empty() || governor.in_flight > 0,
            "somebody waits for nothing"
        );
    }
}

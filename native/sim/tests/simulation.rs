//! Many seeds of a bad network; see `headrace_sim::world`. A seed that fails is printed with the command that repeats it.
//! `HEADRACE_SIM_SEEDS=100000` for a long run, `HEADRACE_SIM_SEED=n` for one.

use headrace_sim::world::{run, Counts, Rules};

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(
        text.parse()
            .unwrap_or_else(|_| panic!("{name} is no number: {text}")),
    )
}

#[test]
fn no_effect_is_lost_or_doubled_and_nothing_hangs() {
    let seeds = match number("HEADRACE_SIM_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("HEADRACE_SIM_SEEDS").unwrap_or(300),
    };
    let many = seeds.end - seeds.start > 100;
    let mut sum = Counts::default();
    for seed in seeds {
        let repeat = format!(
            "HEADRACE_SIM_SEED={seed} cargo test --release -p headrace-sim --test simulation no_effect"
        );
        let counts = std::panic::catch_unwind(|| run(seed, Rules::ALL))
            .unwrap_or_else(|_| panic!("seed {seed} panics; repeat it: {repeat}"))
            .unwrap_or_else(|broken| panic!("seed {seed}: {broken}; repeat it: {repeat}"));
        sum.losses += counts.losses;
        sum.power_losses += counts.power_losses;
        sum.writes += counts.writes;
        sum.reads += counts.reads;
        sum.durable += counts.durable;
        sum.repeated += counts.repeated;
        sum.ghosts += counts.ghosts;
    }
    println!("{sum:?}");
    if many {
        // It is worth nothing where nothing happens.
        for count in [
            sum.losses,
            sum.power_losses,
            sum.writes,
            sum.reads,
            sum.durable,
            sum.repeated,
            sum.ghosts,
        ] {
            assert!(count > 1000, "too little happens: {sum:?}");
        }
    }
}

/// The simulation can see what each rule is for: without it, some seed breaks the promise.
fn missed(rules: Rules) {
    let broken = (0..300).find_map(|seed| run(seed, rules).err());
    let broken = broken.expect("nothing breaks without the rule: the simulation cannot see it");
    assert!(
        broken.contains("holds version"),
        "it breaks for another reason: {broken}"
    );
}

#[test]
fn a_flush_of_a_later_association_proves_nothing() {
    missed(Rules {
        loss_counter: false,
        ..Rules::ALL
    });
}

#[test]
fn a_late_first_copy_over_newer_bytes_is_seen() {
    missed(Rules {
        quarantine: false,
        ..Rules::ALL
    });
}

/// Where the target hears of every loss at once, its own promise is enough: what a lost association has at the media ends
/// before the host's next one begins.
#[test]
fn what_the_target_has_drained_is_dead() {
    let rules = Rules {
        quarantine: false,
        late: false,
        ..Rules::ALL
    };
    for seed in 0..150 {
        run(seed, rules).unwrap_or_else(|broken| panic!("seed {seed}: {broken}"));
    }
}

#[test]
fn a_seed_is_the_whole_story() {
    for seed in 0..5 {
        let first = format!("{:?}", run(seed, Rules::ALL));
        assert_eq!(first, format!("{:?}", run(seed, Rules::ALL)));
    }
}

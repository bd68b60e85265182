//! The kept corpus, replayed in every test run without a fuzzer.

use std::path::Path;

#[test]
fn nothing_in_the_corpus_hurts() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    for (name, run) in headrace_fuzz::TARGETS {
        let path = corpus.join(name);
        let bytes = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let (mut rest, mut inputs) = (&bytes[..], 0);
        while let Some((length, behind)) = rest.split_first_chunk::<4>() {
            let (input, behind) = behind.split_at(u32::from_le_bytes(*length) as usize);
            rest = behind;
            inputs += 1;
            std::panic::catch_unwind(|| run(input))
                .unwrap_or_else(|_| panic!("input {inputs} of {name}: {input:02x?}"));
        }
        assert!(
            rest.is_empty() && inputs > 0,
            "{name} has no corpus, or half of one"
        );
    }
}

/// The controller that the bring-up's inputs spoil is a right one where they do not.
#[test]
fn a_right_controller_comes_up() {
    headrace_fuzz::host_bringup::run(&[]);
}

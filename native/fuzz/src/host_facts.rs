//! Invariant: whatever a controller says about itself and its namespace, the host refuses it with a sentence, or believes
//! something that it can work with.

use headrace_host::testing::{believe, options};
use headrace_sim::{HOST, NQN};

/// The bytes of a structure that matter, at their places; the fuzzer need not carry the zeros between.
fn spread(data: &mut &[u8], places: &[(usize, usize)]) -> Vec<u8> {
    let mut bytes = vec![0; 4096];
    for &(at, length) in places {
        let taken = length.min(data.len());
        bytes[at..at + taken].copy_from_slice(&data[..taken]);
        *data = &data[taken..];
    }
    bytes
}

pub fn run(data: &[u8]) {
    let mut rest = data;
    let mut cap = [0; 8];
    let length = rest.len().min(8);
    cap[..length].copy_from_slice(&rest[..length]);
    rest = &rest[length..];
    let controller = spread(
        &mut rest,
        &[
            (76, 8),
            (92, 8),
            (111, 1),
            (128, 6),
            (256, 6),
            (512, 44),
            (1792, 14),
            (4, 68),
        ],
    );
    let namespace = spread(&mut rest, &[(0, 34), (46, 2), (99, 1), (104, 24), (128, 256)]);
    match believe(
        u64::from_le_bytes(cap),
        &controller,
        &namespace,
        rest,
        &options(NQN, HOST),
    ) {
        Ok((block, transfer, in_capsule)) => {
            assert!(block.is_power_of_two() && (512..=65536).contains(&block));
            assert!(transfer >= block && transfer % block == 0 && transfer <= 1 << 20);
            assert!(in_capsule <= 1 << 20);
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

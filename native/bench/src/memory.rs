//! Bytes that can be told from others: each 8 bytes are a function of their place and a seed.

fn word(place: u64, seed: u64) -> u64 {
    // splitmix64
    let mut z = place.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(seed);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z ^ (z >> 31)
}

pub fn fill(memory: &mut [u8], seed: u64) {
    for (place, bytes) in memory.chunks_exact_mut(8).enumerate() {
        bytes.copy_from_slice(&word(place as u64, seed).to_le_bytes());
    }
}

/// Whether `bytes` are those of `place` (a multiple of 8) and `seed`.
pub fn matches(bytes: &[u8], place: usize, seed: u64) -> bool {
    bytes
        .chunks_exact(8)
        .zip(place as u64 / 8..)
        .all(|(found, place)| found == word(place, seed).to_le_bytes())
}

/// Where the `number`th of `blocks` blocks lies: in a row, or scattered so that each comes once in a round.
pub fn place(number: u64, blocks: u64, random: bool) -> u64 {
    // An odd factor gives a permutation where `blocks` is a power of two, which the driver's sizes are.
    let number = if random {
        number.wrapping_mul(2_654_435_761)
    } else {
        number
    };
    number % blocks
}

/// Whether `memory` is what reading all of a memory of `seed` leaves in it.
pub fn is_read(memory: &[u8], seed: u64, block: usize, random: bool) -> bool {
    let blocks = (memory.len() / block) as u64;
    memory
        .chunks_exact(block)
        .zip(0..)
        .all(|(bytes, number)| matches(bytes, place(number, blocks, random) as usize * block, seed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_block_comes_once_and_wrong_bytes_are_seen() {
        let mut seen: Vec<u64> = (0..1024).map(|number| place(number, 1024, true)).collect();
        assert_ne!(seen, (0..1024).collect::<Vec<_>>());
        seen.sort_unstable();
        assert_eq!(seen, (0..1024).collect::<Vec<_>>());

        let mut memory = vec![0; 1 << 20];
        fill(&mut memory, 5);
        assert!(is_read(&memory, 5, 4096, false));
        assert!(!is_read(&memory, 6, 4096, false) && !is_read(&memory, 5, 4096, true));
        memory[60_000] ^= 1;
        assert!(!is_read(&memory, 5, 4096, false));
    }
}

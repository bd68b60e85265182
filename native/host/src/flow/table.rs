//! What the processes of a node tell each other: one slot each in a small file. Bytes only, no I/O.
//!
//! ```text
//!  file: 64 slots of 64 bytes            slot, little-endian
//!  +------+------+- - -+------+           0  magic "HRF1"    4  process id     8  nonce (who wrote it)
//!  |  0   |  1   |     |  63  |          16  beat            24  bytes in flight 32  window
//!  +------+------+- - -+------+          40  devices         44  flags           48  reserved, 0   60  CRC32C of 0..60
//! ```
//!
//! Nothing in it is believed: a slot that does not check is empty, one whose beat stands still is of a process that does
//! nothing (or is dead, which is the same here), and what the others claim only ever makes us more modest, down to the
//! floor of one read. So no lock is needed, and nobody has to clean up: who finds its slot taken moves to another.

use std::time::{Duration, Instant};

pub(crate) const SLOTS: usize = 64;
pub(crate) const SLOT_BYTES: usize = 64;
pub(crate) const TABLE_BYTES: usize = SLOTS * SLOT_BYTES;
const MAGIC: [u8; 4] = *b"HRF1";
const FLAG_WAITING: u32 = 1;
/// A process that is reading beats every epoch (10 ms to 1 s).
const STALE: Duration = Duration::from_secs(2);
/// More is no claim of a sound process.
const CLAIM_MAX: u64 = 1 << 40;
const DEVICES_MAX: u32 = 1 << 16;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Slot {
    pub process: u32,
    /// Random: two processes of different pid namespaces may have the same id.
    pub nonce: u64,
    /// Counts its writes.
    pub beat: u64,
    pub in_flight: u64,
    pub window: u64,
    /// With reads under way or waiting.
    pub devices: u32,
    /// Reads are held back.
    pub waiting: bool,
}

impl Slot {
    pub fn encode(&self) -> [u8; SLOT_BYTES] {
        let mut bytes = [0; SLOT_BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4..8].copy_from_slice(&self.process.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.nonce.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.beat.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.in_flight.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.window.to_le_bytes());
        bytes[40..44].copy_from_slice(&self.devices.to_le_bytes());
        bytes[44..48].copy_from_slice(&(u32::from(self.waiting) * FLAG_WAITING).to_le_bytes());
        let sum = headrace_wire::crc32c(&bytes[..60]);
        bytes[60..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    pub fn decode(bytes: &[u8]) -> Option<Slot> {
        let bytes: &[u8; SLOT_BYTES] = bytes.try_into().ok()?;
        let u32_at = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
        if bytes[..4] != MAGIC || u32_at(60) != headrace_wire::crc32c(&bytes[..60]) {
            return None;
        }
        let slot = Slot {
            process: u32_at(4),
            nonce: u64_at(8),
            beat: u64_at(16),
            in_flight: u64_at(24),
            window: u64_at(32),
            devices: u32_at(40),
            waiting: u32_at(44) & FLAG_WAITING != 0,
        };
        (slot.in_flight <= CLAIM_MAX && slot.window <= CLAIM_MAX && slot.devices <= DEVICES_MAX)
            .then_some(slot)
    }
}

/// The other processes that read now, together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Others {
    pub processes: u32,
    pub devices: u32,
    pub in_flight: u64,
    pub waiting: bool,
}

#[derive(Clone, Copy)]
struct Seen {
    nonce: u64,
    beat: u64,
    /// When the beat was first seen; `None`: it was there when we came, and did not move since.
    moved: Option<Instant>,
}

/// One process's view of the table.
pub(crate) struct View {
    nonce: u64,
    own: Option<usize>,
    seen: [Option<Seen>; SLOTS],
    first_look: Option<Instant>,
}

impl View {
    pub fn new(nonce: u64) -> Self {
        View {
            nonce,
            own: None,
            seen: [None; SLOTS],
            first_look: None,
        }
    }

    /// What the table says now. Afterwards [`View::own`] is the slot to write, if there is one.
    pub fn read(&mut self, table: &[u8], now: Instant) -> Others {
        let again = self.first_look.is_some();
        let first = *self.first_look.get_or_insert(now);
        let mut others = Others::default();
        let mut own = None;
        let mut free = None;
        let mut still = None;
        let begin = (self.nonce % SLOTS as u64) as usize;
        for number in (begin..SLOTS).chain(0..begin) {
            let bytes = table.get(number * SLOT_BYTES..(number + 1) * SLOT_BYTES);
            let Some(slot) = bytes.and_then(Slot::decode) else {
                self.seen[number] = None;
                free = free.or(Some(number));
                continue;
            };
            if slot.nonce == self.nonce {
                own = own.or(Some(number));
                continue;
            }
            let seen = self.seen[number]
                .filter(|seen| seen.nonce == slot.nonce && seen.beat == slot.beat)
                .unwrap_or(Seen {
                    nonce: slot.nonce,
                    beat: slot.beat,
                    moved: self.seen[number].map(|_| now),
                });
            self.seen[number] = Some(seen);
            let since = now.saturating_duration_since(seen.moved.unwrap_or(first));
            if since >= STALE {
                free = free.or(Some(number));
            } else if seen.moved.is_none() && again {
                // Most likely of a dead process. One that lives and only paused will find another.
                still = still.or(Some(number));
            } else if seen.moved.is_some() && (slot.devices > 0 || slot.in_flight > 0) {
                others.processes += 1;
                others.devices += slot.devices;
                others.in_flight += slot.in_flight;
                others.waiting |= slot.waiting;
            }
        }
        // Ours, if nobody took it; else the first that nobody needs.
        self.own = own.or(free).or(still);
        others
    }

    pub fn own(&self) -> Option<usize> {
        self.own
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(nonce: u64, beat: u64) -> Slot {
        Slot {
            process: 0x0403_0201,
            nonce,
            beat,
            in_flight: 3 << 20,
            window: 8 << 20,
            devices: 2,
            waiting: true,
        }
    }

    fn put(table: &mut [u8], number: usize, slot: &Slot) {
        table[number * SLOT_BYTES..(number + 1) * SLOT_BYTES].copy_from_slice(&slot.encode());
    }

    #[test]
    fn golden() {
        let bytes = slot(0x1122_3344_5566_7788, 5).encode();
        assert_eq!(
            bytes[..48],
            [
                b'H', b'R', b'F', b'1', 1, 2, 3, 4, 0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, 5, 0, 0,
                0, 0, 0, 0, 0, 0, 0, 0x30, 0, 0, 0, 0, 0, 0, 0, 0x80, 0, 0, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0
            ]
        );
        assert_eq!(bytes[48..60], [0; 12]);
        assert_eq!(Slot::decode(&bytes), Some(slot(0x1122_3344_5566_7788, 5)));
    }

    #[test]
    fn a_slot_with_any_bit_wrong_is_empty() {
        let good = slot(1, 1).encode();
        for bit in 0..SLOT_BYTES * 8 {
            let mut bytes = good;
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Slot::decode(&bytes), None, "bit {bit}");
        }
        assert_eq!(Slot::decode(&good[..63]), None);
        let absurd = Slot {
            in_flight: u64::MAX,
            ..slot(1, 1)
        };
        assert_eq!(Slot::decode(&absurd.encode()), None);
    }

    #[test]
    fn a_process_counts_while_its_beat_moves() {
        let (mut table, mut now) = (vec![0; TABLE_BYTES], Instant::now());
        let mut view = View::new(9);
        put(&mut table, 3, &slot(1, 1));
        // It may be dead for a year.
        assert_eq!(view.read(&table, now), Others::default());
        assert_eq!(view.own(), Some(9));
        now += Duration::from_millis(20);
        put(&mut table, 3, &slot(1, 2));
        let others = view.read(&table, now);
        assert_eq!(
            (others.processes, others.devices, others.in_flight),
            (1, 2, 3 << 20)
        );
        assert!(others.waiting);
        now += STALE / 2;
        assert_eq!(view.read(&table, now).processes, 1);
        now += STALE;
        assert_eq!(view.read(&table, now), Others::default());
    }

    #[test]
    fn who_finds_its_slot_taken_moves_on() {
        let (mut table, now) = (vec![0; TABLE_BYTES], Instant::now());
        let (mut one, mut other) = (View::new(5), View::new(5 + SLOTS as u64));
        one.read(&table, now);
        other.read(&table, now);
        assert_eq!((one.own(), other.own()), (Some(5), Some(5)));
        put(&mut table, 5, &slot(5, 1));
        put(&mut table, 5, &slot(5 + SLOTS as u64, 1));
        other.read(&table, now);
        assert_eq!(other.own(), Some(5));
        one.read(&table, now);
        assert_eq!(one.own(), Some(6));
    }

    #[test]
    fn a_full_table_has_room_again_when_its_processes_are_gone() {
        let (mut table, now) = (vec![0; TABLE_BYTES], Instant::now());
        for number in 0..SLOTS {
            put(&mut table, number, &slot(100 + number as u64, 1));
        }
        let mut view = View::new(1);
        view.read(&table, now);
        assert_eq!(view.own(), None);
        put(&mut table, 1, &slot(101, 2));
        view.read(&table, now + Duration::from_millis(10));
        assert_eq!(view.own(), Some(2), "1 is alive, 2 did not move");
    }

    #[test]
    fn any_bytes_are_read() {
        let mut random = 0x2545_F491_4F6C_DD1Du64;
        let (mut view, mut now) = (View::new(3), Instant::now());
        for round in 0..2000 {
            let length = (random % (TABLE_BYTES as u64 + 100)) as usize;
            let mut table: Vec<u8> = (0..length)
                .map(|_| {
                    random ^= random << 13;
                    random ^= random >> 7;
                    random ^= random << 17;
                    random as u8
                })
                .collect();
            if length > 10 * SLOT_BYTES {
                put(&mut table, 7, &slot(random, round));
            }
            let others = view.read(&table, now);
            assert!(others.in_flight <= CLAIM_MAX * SLOTS as u64);
            assert!(view.own().is_some());
            now += Duration::from_millis(random % 100);
        }
    }
}

//! The Asymmetric Namespace Access log page (LID 0Ch; Base Specification 5.1.12.1.13).
//!
//! ```text
//!  0          8         10        16          20          24         32      33        48
//! +----------+---------+---------+-----------+-----------+----------+-------+---------+-----------------+---
//! |  CHGCNT  |  NGRPS  |  rsvd   |   GRPID   |  NNSIDS   |  CHGCNT  | STATE |  rsvd   | NSID * NNSIDS   | next group
//! +----------+---------+---------+-----------+-----------+----------+-------+---------+-----------------+---
//!  header                         group descriptor, 32 bytes
//! ```
//!
//! With "return groups only" (LSP bit 0) NNSIDS is 0 everywhere, so that the page has a length that is known beforehand:
//! whoever needs the state of one namespace knows its group from Identify Namespace.

use crate::field::{put, u16_at, u32_at, u64_at};

/// LSP bit 0 of Get Log Page: no namespace identifiers.
pub const GROUPS_ONLY: u8 = 1;

/// How a controller reaches the namespaces of one group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum AnaState {
    Optimized,
    NonOptimized,
    Inaccessible,
    PersistentLoss,
    Change,
}

impl AnaState {
    pub fn from_bits(bits: u8) -> Option<Self> {
        Some(match bits & 15 {
            1 => AnaState::Optimized,
            2 => AnaState::NonOptimized,
            3 => AnaState::Inaccessible,
            4 => AnaState::PersistentLoss,
            15 => AnaState::Change,
            _ => return None,
        })
    }

    pub fn bits(self) -> u8 {
        match self {
            AnaState::Optimized => 1,
            AnaState::NonOptimized => 2,
            AnaState::Inaccessible => 3,
            AnaState::PersistentLoss => 4,
            AnaState::Change => 15,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            AnaState::Optimized => "optimized",
            AnaState::NonOptimized => "non-optimized",
            AnaState::Inaccessible => "inaccessible",
            AnaState::PersistentLoss => "persistent-loss",
            AnaState::Change => "change",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AnaGroup {
    pub id: u32,
    pub chgcnt: u64,
    pub state: AnaState,
    pub nsids: Vec<u32>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AnaLog {
    pub chgcnt: u64,
    pub groups: Vec<AnaGroup>,
}

impl AnaLog {
    pub const HEADER_BYTES: usize = 16;
    pub const GROUP_BYTES: usize = 32;

    pub fn encode(&self) -> Vec<u8> {
        let mut b = vec![0; Self::HEADER_BYTES];
        put(&mut b, 0, &self.chgcnt.to_le_bytes());
        put(&mut b, 8, &(self.groups.len() as u16).to_le_bytes());
        for group in &self.groups {
            let at = b.len();
            b.resize(at + Self::GROUP_BYTES, 0);
            put(&mut b, at, &group.id.to_le_bytes());
            put(&mut b, at + 4, &(group.nsids.len() as u32).to_le_bytes());
            put(&mut b, at + 8, &group.chgcnt.to_le_bytes());
            b[at + 16] = group.state.bits();
            group
                .nsids
                .iter()
                .for_each(|nsid| b.extend_from_slice(&nsid.to_le_bytes()));
        }
        b
    }

    /// `None` where a group is cut off by the end of `b`, or has a state that does not exist. Never allocates more than
    /// `b` holds.
    pub fn decode(b: &[u8]) -> Option<Self> {
        let header = b.get(..Self::HEADER_BYTES)?;
        let (mut groups, mut at) = (Vec::new(), Self::HEADER_BYTES);
        for _ in 0..u16_at(header, 8) {
            let group = b.get(at..at + Self::GROUP_BYTES)?;
            at += Self::GROUP_BYTES;
            let nsids = b.get(at..)?;
            let length = (u32_at(group, 4) as usize).checked_mul(4)?;
            let nsids = nsids.get(..length)?;
            at += length;
            groups.push(AnaGroup {
                id: u32_at(group, 0),
                chgcnt: u64_at(group, 8),
                state: AnaState::from_bits(group[16])?,
                nsids: nsids.chunks_exact(4).map(|nsid| u32_at(nsid, 0)).collect(),
            });
        }
        Some(AnaLog {
            chgcnt: u64_at(header, 0),
            groups,
        })
    }

    pub fn group(&self, id: u32) -> Option<&AnaGroup> {
        self.groups.iter().find(|group| group.id == id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log() -> AnaLog {
        AnaLog {
            chgcnt: 0x0102,
            groups: vec![
                AnaGroup {
                    id: 1,
                    chgcnt: 9,
                    state: AnaState::Optimized,
                    nsids: vec![1, 5],
                },
                AnaGroup {
                    id: 2,
                    chgcnt: 0,
                    state: AnaState::Change,
                    nsids: vec![],
                },
            ],
        }
    }

    #[test]
    fn golden_bytes() {
        let b = log().encode();
        assert_eq!(b.len(), 16 + 32 + 8 + 32);
        assert_eq!(&b[..16], &[2, 1, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(&b[16..33], &[1, 0, 0, 0, 2, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 1]);
        assert_eq!(&b[48..56], &[1, 0, 0, 0, 5, 0, 0, 0]);
        assert_eq!((b[56], b[60], b[72]), (2, 0, 15));
        assert_eq!(AnaLog::decode(&b), Some(log()));
        assert_eq!(log().group(2).map(|g| g.state), Some(AnaState::Change));
    }

    #[test]
    fn every_cut_is_refused_and_more_bytes_are_not_read() {
        let b = log().encode();
        for cut in 0..b.len() {
            assert_eq!(AnaLog::decode(&b[..cut]), None, "{cut}");
        }
        let mut longer = b.clone();
        longer.extend([0xFF; 64]);
        assert_eq!(AnaLog::decode(&longer), Some(log()));
    }

    #[test]
    fn absurd_counts_and_unknown_states_are_refused() {
        let mut b = log().encode();
        b[20..24].fill(0xFF);
        assert_eq!(AnaLog::decode(&b), None);
        let mut b = log().encode();
        b[8..10].fill(0xFF);
        assert_eq!(AnaLog::decode(&b), None);
        for bits in 0..16 {
            let mut b = log().encode();
            b[32] = bits;
            assert_eq!(AnaLog::decode(&b).is_some(), AnaState::from_bits(bits).is_some());
            if let Some(state) = AnaState::from_bits(bits) {
                assert_eq!(state.bits(), bits);
            }
        }
    }
}

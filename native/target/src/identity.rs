//! What a namespace has for itself alone: names that hosts know it by, and files. Two that shared one would be taken for the
//! same by a host, or write over each other.

use crate::config::{MediaConfig, NamespaceConfig};
use std::path::{Path, PathBuf};

#[derive(Clone, Debug)]
pub(crate) struct Identity {
    pub(crate) uuid: [u8; 16],
    pub(crate) nguid: [u8; 16],
    /// As the file system knows them, whatever links lead there.
    files: Vec<PathBuf>,
}

impl Identity {
    /// Of a namespace of which nobody said more; the same after every restart.
    pub(crate) fn derived(nqn: &str, nsid: u32) -> Self {
        Identity {
            uuid: derived_id(nqn, nsid, "uuid"),
            nguid: derived_id(nqn, nsid, "nguid"),
            files: Vec::new(),
        }
    }

    pub(crate) fn of(config: &NamespaceConfig, nqn: &str) -> Self {
        let given = |text: &Option<String>| text.as_deref().and_then(parse_uuid);
        let derived = Self::derived(nqn, config.nsid);
        let media = match &config.media {
            MediaConfig::File { path, .. } => Some(path),
            MediaConfig::Memory { .. } => None,
        };
        Identity {
            uuid: given(&config.uuid).unwrap_or(derived.uuid),
            nguid: given(&config.nguid).unwrap_or(derived.nguid),
            files: media
                .into_iter()
                .chain(&config.reservations_path)
                .map(|path| resolve(path))
                .collect(),
        }
    }

    /// What both have, and only one may have.
    pub(crate) fn clash(&self, other: &Identity) -> Option<String> {
        if let Some(file) = self.files.iter().find(|file| other.files.contains(file)) {
            return Some(format!("{} is in use", file.display()));
        }
        if self.uuid == other.uuid {
            return Some("its uuid is in use".into());
        }
        (self.nguid == other.nguid).then(|| "its nguid is in use".into())
    }
}

/// A file that is yet to be made has its folder's address.
fn resolve(path: &Path) -> PathBuf {
    let folder = || Some(path.parent()?.canonicalize().ok()?.join(path.file_name()?));
    path.canonicalize().ok().or_else(folder).unwrap_or(path.into())
}

/// 32 hexadecimal digits, hyphens anywhere.
pub(crate) fn parse_uuid(text: &str) -> Option<[u8; 16]> {
    let digits: Vec<u8> = text
        .chars()
        .filter(|&c| c != '-')
        .map(|c| c.to_digit(16).map(|d| d as u8))
        .collect::<Option<_>>()?;
    let mut uuid = [0; 16];
    if digits.len() != 32 {
        return None;
    }
    for (byte, pair) in uuid.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = pair[0] << 4 | pair[1];
    }
    Some(uuid)
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// FNV-1a over 128 bits: names to identifiers that stay the same over restarts. Not a secret, not a defence.
pub(crate) fn fnv128(parts: &[&[u8]]) -> u128 {
    let mut hash = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58du128;
    for byte in parts.iter().flat_map(|part| part.iter().chain(&[0])) {
        hash = (hash ^ u128::from(*byte)).wrapping_mul(0x0100_0000_0000_0000_0000_013b);
    }
    hash
}

/// A UUID of version 8 (RFC 9562: by an algorithm of one's own).
fn derived_id(nqn: &str, nsid: u32, purpose: &str) -> [u8; 16] {
    let mut id = fnv128(&[purpose.as_bytes(), nqn.as_bytes(), &nsid.to_le_bytes()]).to_be_bytes();
    id[6] = id[6] & 0x0F | 0x80;
    id[8] = id[8] & 0x3F | 0x80;
    id
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identifiers_differ_and_stay() {
        let a = derived_id("nqn.a", 1, "uuid");
        assert_eq!(a, derived_id("nqn.a", 1, "uuid"));
        for other in [
            derived_id("nqn.a", 2, "uuid"),
            derived_id("nqn.b", 1, "uuid"),
            derived_id("nqn.a", 1, "nguid"),
        ] {
            assert_ne!(a, other);
        }
        assert_eq!(a[6] >> 4, 8);
    }

    #[test]
    fn uuids() {
        let uuid = parse_uuid("00112233-4455-6677-8899-aabbccddeeff").unwrap();
        assert_eq!((uuid[1], uuid[15]), (0x11, 0xff));
        assert!(parse_uuid("0011").is_none() && parse_uuid("zz112233445566778899aabbccddeeff").is_none());
    }
}

//! Reservations that outlive the process: one small file a namespace, replaced as a whole.
//!
//! ```text
//! headrace reservations 1 <crc32c of the next line, 8 hexadecimal digits>
//! {"uuid": "...", "persist": true, "held": {"kind": 3, "holder": 0}, "registrants": [{"hostnqn", "hostid", "key"}]}
//! ```
//!
//! It is written before a change is answered: to a new file, synced, renamed, the directory synced. It is made when
//! persistence (PTPL) is first switched on. From then on a target that cannot find it, or cannot believe it, must not
//! serve the namespace: it would let everybody write. That it once existed is told
//!
//! * for a file whose state lies beside it, by an extended attribute of the file;
//! * where `reservations_path` is given, by the configuration: the file must be there. An empty one is a new one, unless
//!   the media file says by the same attribute that there were some: a file that was cut to nothing is a damaged one.
//!
//! Where neither is possible persistence is not offered (RESCAP bit 0), and `status` says why.

use super::rules::{Held, Registered, State, REGISTRANTS_MAX};
use crate::controller::HostKey;
use crate::identity::{hex, parse_uuid};
use crate::system;
use headrace_wire::reservation::ReservationType;
use headrace_wire::{crc32c, NQN_MAX};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

const MAGIC: &str = "headrace reservations 1 ";
/// Of a file that is believed; one with all registrants, with the longest names, is a fifth of it.
const BYTES_MAX: u64 = 4 << 20;
const MARK: &str = "user.headrace.reservations";
const SUFFIX: &str = ".reservations";

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Kept {
    uuid: String,
    persist: bool,
    held: Option<KeptHeld>,
    registrants: Vec<KeptRegistrant>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct KeptHeld {
    kind: u8,
    /// Index of the registrant.
    holder: usize,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct KeptRegistrant {
    hostnqn: String,
    hostid: String,
    key: u64,
}

/// Where the state is kept.
pub(crate) enum Store {
    /// Nowhere, and why.
    None(String),
    File {
        path: PathBuf,
        uuid: [u8; 16],
        /// The media file that is marked when something is first kept; `None`: it takes no mark.
        mark: Option<PathBuf>,
        marked: AtomicBool,
        /// The configuration says that there is one.
        configured: bool,
        exists: AtomicBool,
        /// Writing it failed, so it may say what is not true.
        unsure: AtomicBool,
    },
}

impl Default for Store {
    fn default() -> Self {
        Store::None("the media are gone with the process, too".into())
    }
}

impl Store {
    /// For a media file: `path` from the configuration, or beside it.
    pub(crate) fn beside(media: &Path, path: Option<&Path>, uuid: [u8; 16]) -> Result<Store, String> {
        let real = fs::canonicalize(media);
        let attribute = match &real {
            Ok(real) if real.is_file() => system::has_attribute(real, MARK),
            _ => Err(ErrorKind::Unsupported.into()),
        };
        let marked = matches!(attribute, Ok(true));
        let file = |path: PathBuf, configured, exists| Store::File {
            path,
            uuid,
            mark: real.as_ref().ok().filter(|_| attribute.is_ok()).cloned(),
            marked: AtomicBool::new(marked),
            configured,
            exists: AtomicBool::new(exists),
            unsure: AtomicBool::new(false),
        };
        if let Some(path) = path {
            // Followed, so that the new file takes the place of the old one and not of a link to it.
            let path = fs::canonicalize(path).map_err(|error| match error.kind() {
                ErrorKind::NotFound => format!(
                    "the reservations file {} is missing: without it hosts that were shut out could write; restore it, or \
                     make an empty one if this namespace never had any",
                    path.display()
                ),
                _ => format!("the reservations file {}: {error}", path.display()),
            })?;
            return Ok(file(path, true, true));
        }
        let media = match &real {
            Ok(media) => media.clone(),
            Err(error) => return Ok(Store::None(format!("{}: {error}", media.display()))),
        };
        let mut name = media.clone().into_os_string();
        name.push(SUFFIX);
        let path = PathBuf::from(name);
        if path.exists() {
            return Ok(file(path, false, true));
        }
        if !media.is_file() {
            return Ok(Store::None(
                "a block device: give reservations_path to keep them in".into(),
            ));
        }
        match &attribute {
            Ok(true) => Err(format!(
                "{} had persistent reservations, and their file {} is missing: without it hosts that were shut out could \
                 write; restore it, or give up the reservations with: setfattr -x {MARK} {}",
                media.display(),
                path.display(),
                media.display()
            )),
            Ok(false) => Ok(file(path, false, false)),
            Err(error) => Ok(Store::None(format!(
                "{}: no extended attributes to remember it by: {error}",
                media.display()
            ))),
        }
    }

    pub(crate) fn can_persist(&self) -> bool {
        matches!(self, Store::File { .. })
    }

    /// Where they are kept, or why nowhere.
    pub(crate) fn describe(&self) -> String {
        match self {
            Store::None(why) => format!("memory: {why}"),
            Store::File { path, .. } => path.display().to_string(),
        }
    }

    pub(crate) fn load(&self) -> Result<State, String> {
        let Store::File {
            path,
            uuid,
            mark,
            marked,
            exists,
            ..
        } = self
        else {
            return Ok(State::default());
        };
        let marked = mark.as_ref().filter(|_| marked.load(Ordering::Relaxed));
        if !exists.load(Ordering::Relaxed) {
            return Ok(State::default());
        }
        let wrong = |what: String| {
            let attribute = marked.map_or(String::new(), |media| {
                format!(", and run: setfattr -x {MARK} {}", media.display())
            });
            format!(
                "the reservations file {}: {what}; without it hosts that were shut out could write: restore it, or make it \
                 empty if all of them may be forgotten{attribute}",
                path.display()
            )
        };
        let mut text = String::new();
        File::open(path)
            .and_then(|file| file.take(BYTES_MAX + 1).read_to_string(&mut text))
            .map_err(|error| wrong(error.to_string()))?;
        if text.is_empty() {
            return match marked {
                Some(_) => Err(wrong(
                    "it is empty, and there were persistent reservations".into(),
                )),
                None => Ok(State::default()),
            };
        }
        if text.len() as u64 > BYTES_MAX {
            return Err(wrong(format!("longer than {BYTES_MAX} bytes")));
        }
        decode(&text, uuid).map_err(wrong)
    }

    /// `new` follows `old`: write what must outlive the process.
    pub(crate) fn keep(&self, old_persist: bool, new: &State) -> io::Result<()> {
        let Store::File {
            path,
            uuid,
            mark,
            marked,
            configured,
            exists,
            unsure,
        } = self
        else {
            return Ok(());
        };
        if !new.persist && !old_persist && !unsure.load(Ordering::Relaxed) {
            return Ok(());
        }
        unsure.store(true, Ordering::Relaxed);
        replace(path, &encode(new, uuid))?;
        if let (Some(media), false) = (mark, marked.load(Ordering::Relaxed)) {
            // After the file: a mark without a file would refuse to start, a file without a mark is found all the same.
            let result =
                system::set_attribute(media, MARK, b"1").and_then(|()| File::open(media)?.sync_all());
            // Media that are only read may take none. Without it a missing file is seen all the same where it is configured.
            if !configured {
                result?;
            }
            marked.store(true, Ordering::Relaxed);
        }
        exists.store(true, Ordering::Relaxed);
        unsure.store(false, Ordering::Relaxed);
        Ok(())
    }
}

fn encode(state: &State, uuid: &[u8; 16]) -> String {
    // Without PTPL a loss of power ends all of it.
    let kept = state.persist;
    let registrants: &[Registered] = if kept { &state.registrants } else { &[] };
    let held = state.held.as_ref().filter(|_| kept).map(|held| KeptHeld {
        kind: held.kind as u8,
        holder: registrants
            .iter()
            .position(|registered| registered.host == held.holder)
            .unwrap_or(0),
    });
    let body = Kept {
        uuid: hex(uuid),
        persist: state.persist,
        held,
        registrants: registrants
            .iter()
            .map(|registered| KeptRegistrant {
                hostnqn: registered.host.hostnqn.clone(),
                hostid: hex(&registered.host.hostid),
                key: registered.key,
            })
            .collect(),
    };
    // Strings and numbers only: it cannot fail.
    let body = serde_json::to_string(&body).unwrap_or_default();
    format!("{MAGIC}{:08x}\n{body}\n", crc32c(body.as_bytes()))
}

fn decode(text: &str, uuid: &[u8; 16]) -> Result<State, String> {
    let (sum, body) = text
        .strip_prefix(MAGIC)
        .and_then(|rest| rest.split_once('\n'))
        .ok_or("it does not begin as such a file of version 1 does")?;
    let body = body.strip_suffix('\n').ok_or("it ends in the middle")?;
    if sum != format!("{:08x}", crc32c(body.as_bytes())) {
        return Err("it is damaged: the checksum is wrong".into());
    }
    let kept: Kept = serde_json::from_str(body).map_err(|error| error.to_string())?;
    if kept.uuid != hex(uuid) {
        return Err(format!(
            "it belongs to namespace {}, this one is {}",
            kept.uuid,
            hex(uuid)
        ));
    }
    if kept.registrants.len() > REGISTRANTS_MAX {
        return Err(format!("more than {REGISTRANTS_MAX} registrants"));
    }
    let mut registrants: Vec<Registered> = Vec::with_capacity(kept.registrants.len());
    for registrant in kept.registrants {
        let hostid =
            parse_uuid(&registrant.hostid).ok_or("a host identifier is not 32 hexadecimal digits")?;
        let host = HostKey {
            hostnqn: registrant.hostnqn,
            hostid,
        };
        if host.hostnqn.len() > NQN_MAX || registrants.iter().any(|other| other.host == host) {
            return Err("a host's name is too long, or it is there twice".into());
        }
        registrants.push(Registered {
            host,
            key: registrant.key,
        });
    }
    let held = match kept.held {
        None => None,
        Some(held) => Some(Held {
            kind: ReservationType::from_u8(held.kind).ok_or("no such reservation type")?,
            holder: registrants
                .get(held.holder)
                .ok_or("the holder is not registered")?
                .host
                .clone(),
        }),
    };
    Ok(State {
        generation: 0,
        persist: kept.persist,
        registrants,
        held,
    })
}

/// Atomically and durably: after a crash at any time the old text or the new one is there, whole.
fn replace(path: &Path, text: &str) -> io::Result<()> {
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    let new = PathBuf::from(name);
    let mut file = File::create(&new)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    fs::rename(&new, path)?;
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    File::open(directory.unwrap_or(Path::new(".")))?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::super::tests::{acquire, host, register};
    use super::*;
    use headrace_wire::reservation::AcquireAction;

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Folder {
            let path = std::env::temp_dir().join(format!("headrace-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&path);
            fs::create_dir_all(&path).unwrap();
            Folder(path)
        }
        fn media(&self) -> PathBuf {
            let path = self.0.join("media");
            fs::write(&path, [0; 4096]).unwrap();
            path
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn sample() -> State {
        let mut state = State::default();
        for n in 1..=3 {
            state
                .apply(&host(n), &register(u64::MAX - u64::from(n)), true)
                .unwrap();
        }
        let change = acquire(
            AcquireAction::Acquire,
            ReservationType::WriteExclusiveRegistrants,
            u64::MAX - 2,
            0,
        );
        state.apply(&host(2), &change, true).unwrap();
        state.persist = true;
        state.generation = 0;
        state
    }

    #[test]
    fn what_is_kept_comes_back() {
        let folder = Folder::new("kept");
        let media = folder.media();
        let open = || Store::beside(&media, None, [9; 16]);
        let store = open().unwrap();
        assert_eq!(store.load(), Ok(State::default()));
        // Nothing is made before persistence is wanted.
        let mut state = sample();
        state.persist = false;
        store.keep(false, &state).unwrap();
        assert_eq!(fs::read_dir(&folder.0).unwrap().count(), 1);
        state.persist = true;
        store.keep(false, &state).unwrap();
        assert_eq!(open().unwrap().load(), Ok(sample()));
        // Switched off: the file stays, and says that nothing is left.
        state.persist = false;
        store.keep(true, &state).unwrap();
        assert_eq!(open().unwrap().load(), Ok(State::default()));
    }

    #[test]
    fn a_missing_file_is_no_empty_one() {
        let folder = Folder::new("missing");
        let media = folder.media();
        let store = Store::beside(&media, None, [9; 16]).unwrap();
        store.keep(false, &sample()).unwrap();
        fs::remove_file(folder.0.join("media.reservations")).unwrap();
        let error = Store::beside(&media, None, [9; 16]).err().unwrap();
        assert!(
            error.contains("is missing") && error.contains("setfattr"),
            "{error}"
        );
        // With a path it must be there from the beginning. (Other media: these are marked.)
        fs::remove_file(&media).unwrap();
        folder.media();
        let own = folder.0.join("own");
        let error = Store::beside(&media, Some(&own), [9; 16]).err().unwrap();
        assert!(error.contains("is missing"), "{error}");
        fs::write(&own, "").unwrap();
        let store = Store::beside(&media, Some(&own), [9; 16]).unwrap();
        assert_eq!(store.load(), Ok(State::default()));
        store.keep(false, &sample()).unwrap();
        assert_eq!(
            Store::beside(&media, Some(&own), [9; 16]).unwrap().load(),
            Ok(sample())
        );
    }

    /// A full disk, or a copy that broke off, leaves an empty file: then everybody could write.
    #[test]
    fn an_emptied_file_is_no_new_one() {
        let folder = Folder::new("emptied");
        let media = folder.media();
        let own = folder.0.join("own");
        fs::write(&own, "").unwrap();
        for (path, configured) in [
            (folder.0.join("media.reservations"), None),
            (own.clone(), Some(&*own)),
        ] {
            let open = || Store::beside(&media, configured, [9; 16]).unwrap();
            open().keep(false, &sample()).unwrap();
            assert_eq!(open().load(), Ok(sample()));
            fs::write(&path, "").unwrap();
            let error = open().load().unwrap_err();
            assert!(
                error.contains("is empty") && error.contains("setfattr -x"),
                "{error}"
            );
            // The mark goes with the file.
            fs::remove_file(&media).unwrap();
            folder.media();
            assert_eq!(open().load(), Ok(State::default()));
        }
    }

    #[test]
    fn every_damage_is_seen() {
        let text = encode(&sample(), &[9; 16]);
        assert_eq!(decode(&text, &[9; 16]), Ok(sample()));
        let bytes = text.as_bytes();
        for at in 0..bytes.len() {
            assert!(decode(&text[..at], &[9; 16]).is_err(), "cut at {at}");
            let mut damaged = bytes.to_vec();
            damaged[at] ^= 1;
            let damaged = String::from_utf8(damaged).unwrap();
            assert!(decode(&damaged, &[9; 16]).is_err(), "byte {at}");
        }
        let error = decode(&text, &[8; 16]).unwrap_err();
        assert!(error.contains("belongs to namespace 0909"), "{error}");
    }
}

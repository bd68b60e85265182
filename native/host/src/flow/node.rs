//! The file in which the processes of a user on this node share what they have under way ([`super::table`]).
//!
//! It is read and written with `pread` and `pwrite`, once an epoch, not mapped: a file that somebody truncates must not
//! kill us, and a view that is milliseconds old does. `/dev/shm` is memory, and of this node only.

use super::table::{Others, Slot, View, SLOT_BYTES, TABLE_BYTES};
use std::fs::{DirBuilder, File, OpenOptions};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const SHM: &str = "/dev/shm";
const NAME: &str = "inflight-1";
/// How often we look whether the file still has its name, or try again to have one.
const CHECK: Duration = Duration::from_secs(10);

pub(crate) struct Node {
    path: PathBuf,
    file: Result<File, String>,
    view: View,
    table: Vec<u8>,
    beat: u64,
    check_at: Option<Instant>,
}

impl Node {
    /// Opened when it is first used.
    pub fn new(nonce: u64) -> Self {
        Self::at(PathBuf::new(), nonce)
    }

    /// `path`: of the directory; empty: the user's own in `/dev/shm`.
    pub fn at(path: PathBuf, nonce: u64) -> Self {
        Node {
            path,
            file: Err("not opened yet".into()),
            view: View::new(nonce),
            table: vec![0; TABLE_BYTES],
            beat: 0,
            check_at: None,
        }
    }

    /// Where it is shared, or why it is not.
    pub fn place(&self) -> Result<String, String> {
        match &self.file {
            Ok(_) if self.view.own().is_none() => Err(format!("{} is full", self.path.display())),
            Ok(_) => Ok(self.path.join(NAME).display().to_string()),
            Err(reason) => Err(reason.clone()),
        }
    }

    /// Tell the others about `ours` (its nonce and beat are filled in here), and hear of theirs.
    pub fn exchange(&mut self, mut ours: Slot, nonce: u64, now: Instant) -> Others {
        if self.check_at.is_none_or(|at| at <= now) {
            self.check_at = Some(now + CHECK);
            let lost = match &self.file {
                Ok(file) => file.metadata().map_or(true, |metadata| metadata.nlink() == 0),
                Err(_) => true,
            };
            if lost {
                self.file = self.open();
            }
        }
        let Ok(file) = &self.file else {
            return Others::default();
        };
        let mut have = 0;
        while have < TABLE_BYTES {
            match file.read_at(&mut self.table[have..], have as u64) {
                Ok(0) => break,
                Ok(count) => have += count,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => {
                    self.file = Err(format!("{}: {error}", self.path.display()));
                    return Others::default();
                }
            }
        }
        let others = self.view.read(&self.table[..have], now);
        if let Some(number) = self.view.own() {
            self.beat += 1;
            (ours.nonce, ours.beat) = (nonce, self.beat);
            if let Err(error) = file.write_all_at(&ours.encode(), (number * SLOT_BYTES) as u64) {
                self.file = Err(format!("{}: {error}", self.path.display()));
            }
        }
        others
    }

    fn open(&mut self) -> Result<File, String> {
        // The owner of this entry is who we are.
        let uid = std::fs::metadata("/proc/self")
            .map_err(|error| format!("/proc/self: {error}"))?
            .uid();
        if self.path.as_os_str().is_empty() {
            self.path = Path::new(SHM).join(format!("headrace-{uid}"));
        }
        let place = self.path.display();
        match DirBuilder::new().mode(0o700).create(&self.path) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                return Err(format!("{place}: {error}"))
            }
            _ => {}
        }
        // `/dev/shm` is for everybody: what another user put there under our name is not ours to use.
        let found = std::fs::symlink_metadata(&self.path).map_err(|error| format!("{place}: {error}"))?;
        if !found.is_dir() || found.uid() != uid || found.mode() & 0o022 != 0 {
            return Err(format!(
                "{place} is not a directory that only this user can write to"
            ));
        }
        let path = self.path.join(NAME);
        OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&path)
            .map_err(|error| format!("{}: {error}", path.display()))
    }
}

/// An orderly end leaves its slot to others at once.
impl Drop for Node {
    fn drop(&mut self) {
        if let (Ok(file), Some(number), true) = (&self.file, self.view.own(), self.beat > 0) {
            // Where that fails, the slot is taken over as that of a process that was killed.
            let _ = file.write_all_at(&[0; SLOT_BYTES], (number * SLOT_BYTES) as u64);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    struct Directory(PathBuf);

    impl Directory {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("headrace-flow-{}-{name}", std::process::id()));
            let _ = std::fs::remove_dir_all(&path);
            Directory(path)
        }
    }

    impl Drop for Directory {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    fn ours(in_flight: u64) -> Slot {
        Slot {
            in_flight,
            devices: 1,
            ..Slot::default()
        }
    }

    #[test]
    fn two_processes_hear_of_each_other() {
        let directory = Directory::new("two");
        let (mut one, mut two) = (Node::at(directory.0.clone(), 1), Node::at(directory.0.clone(), 2));
        let mut now = Instant::now();
        for _ in 0..3 {
            one.exchange(ours(10), 1, now);
            two.exchange(ours(20), 2, now);
            now += Duration::from_millis(10);
        }
        assert_eq!(one.exchange(ours(10), 1, now).in_flight, 20);
        assert_eq!(two.exchange(ours(20), 2, now).in_flight, 10);
        assert!(one.place().unwrap().ends_with(NAME));
    }

    #[test]
    fn who_ends_in_order_leaves_nothing() {
        let directory = Directory::new("ends");
        let mut one = Node::at(directory.0.clone(), 1);
        one.exchange(ours(10), 1, Instant::now());
        let table = || std::fs::read(directory.0.join(NAME)).unwrap();
        assert!(table().iter().any(|byte| *byte != 0));
        drop(one);
        assert!(table().iter().all(|byte| *byte == 0));
    }

    #[test]
    fn a_damaged_or_truncated_or_removed_file_heals() {
        let directory = Directory::new("heals");
        let (mut one, mut two) = (Node::at(directory.0.clone(), 1), Node::at(directory.0.clone(), 2));
        let mut now = Instant::now();
        let file = directory.0.join(NAME);
        for damage in 0..4 {
            match damage {
                1 => std::fs::write(&file, vec![0xA5; 100_000]).unwrap(),
                2 => std::fs::write(&file, b"").unwrap(),
                3 => std::fs::remove_file(&file).unwrap(),
                _ => {}
            }
            now += CHECK;
            for _ in 0..3 {
                one.exchange(ours(10), 1, now);
                two.exchange(ours(20), 2, now);
                now += Duration::from_millis(10);
            }
            assert_eq!(one.exchange(ours(10), 1, now).in_flight, 20, "damage {damage}");
        }
    }

    #[test]
    fn without_a_place_of_its_own_each_is_alone_and_says_why() {
        let directory = Directory::new("alone");
        std::fs::create_dir(&directory.0).unwrap();
        std::fs::set_permissions(&directory.0, std::fs::Permissions::from_mode(0o777)).unwrap();
        let mut node = Node::at(directory.0.clone(), 1);
        assert_eq!(node.exchange(ours(1), 1, Instant::now()), Others::default());
        assert!(node.place().unwrap_err().contains("only this user"));
        let link = Directory::new("link");
        std::os::unix::fs::symlink("/", &link.0).unwrap();
        let mut node = Node::at(link.0.clone(), 1);
        node.exchange(ours(1), 1, Instant::now());
        assert!(node.place().unwrap_err().contains("only this user"));
        let _ = std::fs::remove_file(&link.0);
    }
}

//! Pages of checksum tables that were read and verified, of all blobs of a volume together.
//!
//! A page stays in the memory that it was read into (that of a longer block of a device it does not keep), as it stands on
//! the member: numbers are taken out of it when they are asked for. One lock, held for as long as that takes, never for
//! I/O. Beyond the limit the pages that were not used for longest go, one by one, so a table that is larger than all of it
//! does not throw itself out whole.

use crate::Buffer;
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Birth of the blob, and index of the page in its table.
pub type PageKey = (u64, u64);

/// Bytes of a number.
const NUMBER: usize = 4;
/// What a page costs beside its bytes: its place in the map, which is half empty when it has just grown, and the counts
/// and the owner of its memory.
pub(crate) const BESIDE: usize = 2 * (size_of::<(PageKey, Page)>() + 1) + 64;

struct Page {
    numbers: Buffer,
    used: u64,
}

#[derive(Default)]
struct State {
    pages: HashMap<PageKey, Page>,
    bytes: usize,
    clock: u64,
}

pub struct PageCache {
    limit_bytes: usize,
    state: Mutex<State>,
}

/// The cache, locked for one batch.
pub struct Look<'a>(MutexGuard<'a, State>);

impl Look<'_> {
    /// Numbers of a page from `from` on, as many as `into` takes; false where the page is not there, or does not have
    /// `whole` numbers.
    pub fn copy(&mut self, key: PageKey, whole: usize, from: usize, into: &mut [u32]) -> bool {
        let state = &mut *self.0;
        match state.pages.get_mut(&key) {
            // Of a damaged volume another blob may have this birth: what is kept must fit, and then it need not match.
            Some(page) if page.numbers.len() == whole * NUMBER => {
                page.used = state.clock;
                copy_numbers(&page.numbers, from, into);
                true
            }
            _ => false,
        }
    }
}

/// Numbers of a page as it stands on a member, little-endian, from `from` on. Panics where they leave it.
pub fn copy_numbers(page: &Buffer, from: usize, into: &mut [u32]) {
    let mut bytes = [0; 64 * NUMBER];
    let mut at = from * NUMBER;
    for some in into.chunks_mut(64) {
        let part = &mut bytes[..some.len() * NUMBER];
        page.copy_to(at, part);
        at += part.len();
        for (number, four) in some.iter_mut().zip(part.chunks_exact(NUMBER)) {
            *number = u32::from_le_bytes([four[0], four[1], four[2], four[3]]);
        }
    }
}

impl PageCache {
    pub fn new(limit_bytes: usize) -> Self {
        PageCache {
            limit_bytes,
            state: Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn look(&self) -> Look<'_> {
        let mut state = self.lock();
        state.clock += 1;
        Look(state)
    }

    /// Memory that all pages take which are kept, and what keeps them.
    pub fn bytes(&self) -> usize {
        self.lock().bytes
    }

    /// Keep a page that was verified: little-endian, in memory that nobody changes any more.
    pub fn keep(&self, key: PageKey, numbers: Buffer) {
        let mut state = self.lock();
        let used = state.clock;
        state.bytes += numbers.len() + BESIDE;
        if let Some(before) = state.pages.insert(key, Page { numbers, used }) {
            state.bytes -= before.numbers.len() + BESIDE;
        }
        if state.bytes > self.limit_bytes {
            state.shrink(self.limit_bytes - self.limit_bytes / 8);
        }
    }

    #[cfg(test)]
    pub(crate) fn memory_of(&self, key: PageKey) -> Option<Buffer> {
        self.lock().pages.get(&key).map(|page| page.numbers.clone())
    }
}

impl State {
    /// Forget pages, those that were used longest ago first.
    fn shrink(&mut self, to_bytes: usize) {
        let mut oldest: Vec<(u64, PageKey)> =
            self.pages.iter().map(|(key, page)| (page.used, *key)).collect();
        oldest.sort_unstable();
        for (_, key) in oldest {
            if self.bytes <= to_bytes {
                return;
            }
            if let Some(page) = self.pages.remove(&key) {
                self.bytes -= page.numbers.len() + BESIDE;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(number: u32) -> Buffer {
        Buffer::from_vec((0..256).flat_map(|i| (number + i).to_le_bytes()).collect())
    }

    fn first(look: &mut Look<'_>, key: PageKey) -> Option<u32> {
        let mut found = [0];
        look.copy(key, 256, 0, &mut found).then_some(found[0])
    }

    #[test]
    fn beyond_the_limit_what_was_not_used_for_longest_goes_page_by_page() {
        let cache = PageCache::new(16 * (1024 + BESIDE));
        for number in 0..16 {
            assert!(first(&mut cache.look(), (7, number)).is_none());
            cache.keep((7, number), page(number as u32));
        }
        assert_eq!(cache.bytes(), 16 * (1024 + BESIDE));
        // The first is used again, so it is not the first to go.
        assert_eq!(first(&mut cache.look(), (7, 0)), Some(0));
        cache.keep((8, 0), page(99));
        assert!(cache.bytes() <= 14 * (1024 + BESIDE));
        let mut look = cache.look();
        assert!(first(&mut look, (7, 0)).is_some() && first(&mut look, (8, 0)).is_some());
        assert!(first(&mut look, (7, 1)).is_none() && first(&mut look, (7, 15)).is_some());
    }

    #[test]
    fn a_page_that_two_batches_read_is_kept_once() {
        let cache = PageCache::new(1 << 20);
        cache.keep((1, 1), page(5));
        cache.keep((1, 1), page(5));
        assert_eq!(cache.bytes(), 1024 + BESIDE);
    }

    #[test]
    fn pages_without_bytes_have_their_bound_too() {
        let cache = PageCache::new(64 << 10);
        for number in 0..10_000 {
            cache.keep((number, 0), Buffer::from_vec(Vec::new()));
        }
        let held = cache.lock().pages.len();
        assert!(held > 100 && held * (size_of::<(PageKey, Page)>() + 64) <= 64 << 10);
    }

    #[test]
    fn numbers_from_anywhere_and_none_of_a_page_of_another_length() {
        let cache = PageCache::new(1 << 20);
        cache.keep((1, 1), page(1000));
        let mut look = cache.look();
        for (from, count) in [(0, 256), (3, 200), (255, 1), (64, 64), (1, 65)] {
            let mut found = vec![0; count];
            assert!(look.copy((1, 1), 256, from, &mut found));
            let wanted: Vec<u32> = (0..count).map(|i| (1000 + from + i) as u32).collect();
            assert_eq!(found, wanted);
        }
        assert!(!look.copy((1, 1), 255, 0, &mut [0]) && !look.copy((2, 1), 256, 0, &mut [0]));
    }
}

//! Pages of checksum tables that were read and verified, of all blobs of a volume together.
//!
//! One lock, held for as long as it takes to look some numbers up, never for I/O. Beyond the limit the pages that were not
//! used for longest go, one by one, so a table that is larger than all of it does not throw itself out whole.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Birth of the blob, and index of the page in its table.
pub type PageKey = (u64, u64);

struct Page {
    sums: Arc<[u32]>,
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
    pub fn page(&mut self, key: PageKey) -> Option<Arc<[u32]>> {
        let state = &mut *self.0;
        let page = state.pages.get_mut(&key)?;
        page.used = state.clock;
        Some(page.sums.clone())
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

    /// Bytes of all pages that are kept.
    pub fn bytes(&self) -> usize {
        self.lock().bytes
    }

    /// Keep pages that were verified.
    pub fn keep(&self, pages: &[(PageKey, Arc<[u32]>)]) {
        let mut state = self.lock();
        let used = state.clock;
        for (key, sums) in pages {
            let size = sums.len() * 4;
            let page = Page {
                sums: sums.clone(),
                used,
            };
            state.bytes += size;
            if let Some(before) = state.pages.insert(*key, page) {
                state.bytes -= before.sums.len() * 4;
            }
        }
        if state.bytes > self.limit_bytes {
            state.shrink(self.limit_bytes - self.limit_bytes / 8);
        }
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
                self.bytes -= page.sums.len() * 4;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(number: u32) -> Arc<[u32]> {
        vec![number; 256].into()
    }

    #[test]
    fn beyond_the_limit_what_was_not_used_for_longest_goes_page_by_page() {
        let cache = PageCache::new(16 << 10);
        for number in 0..16 {
            assert!(cache.look().page((7, number)).is_none());
            cache.keep(&[((7, number), page(number as u32))]);
        }
        assert_eq!(cache.bytes(), 16 << 10);
        // The first is used again, so it is not the first to go.
        assert_eq!(cache.look().page((7, 0)).unwrap()[0], 0);
        cache.keep(&[((8, 0), page(99))]);
        assert!(cache.bytes() <= 14 << 10);
        let mut look = cache.look();
        assert!(look.page((7, 0)).is_some() && look.page((8, 0)).is_some());
        assert!(look.page((7, 1)).is_none() && look.page((7, 15)).is_some());
    }

    #[test]
    fn a_page_that_two_batches_read_is_kept_once() {
        let cache = PageCache::new(1 << 20);
        cache.keep(&[((1, 1), page(5)), ((1, 1), page(5))]);
        assert_eq!(cache.bytes(), 1024);
    }
}

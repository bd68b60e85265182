//! One request and whoever waits for it: what `read_into`, `write`, `flush` and `deallocate` are made of.

use crate::{BlockDevice, IoError, Op, Request, Sink};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

#[derive(Default)]
struct Outcome {
    result: Mutex<Option<Result<(), IoError>>>,
    ended: Condvar,
}

impl Sink for Outcome {
    fn complete(&self, _token: u64, result: Result<(), IoError>) {
        *self.result.lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
        self.ended.notify_all();
    }
}

/// A request under way. Dropping it cancels nothing; its buffer lives until the device is done with it.
pub struct Pending(Arc<Outcome>);

pub fn submit_one(device: &dyn BlockDevice, op: Op, offset: u64) -> Pending {
    let outcome = Arc::new(Outcome::default());
    device.submit(vec![Request {
        op,
        offset,
        token: 0,
        sink: outcome.clone(),
    }]);
    Pending(outcome)
}

impl Pending {
    /// Wait at most `timeout`; `None` when it passed.
    pub fn wait(&self, timeout: Duration) -> Option<Result<(), IoError>> {
        let deadline = Instant::now() + timeout;
        let mut result = self.0.result.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(result) = result.as_ref() {
                return Some(result.clone());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            result = self
                .0
                .ended
                .wait_timeout(result, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

//! The one interface to anything that stores blocks.

use crate::{Buffer, IoError, Recorded};
use std::sync::Arc;
use std::time::Duration;

#[derive(Clone, Debug)]
pub struct DeviceInfo {
    pub size_bytes: u64,
    /// Logical block; offsets and lengths of requests are multiples of it.
    pub block_bytes: u32,
    /// Longest single transfer that the device takes without splitting; requests may be longer, the device splits them.
    pub max_transfer_bytes: u64,
    /// Writes are durable only after a flush, or with `fua`.
    pub volatile_cache: bool,
    pub read_only: bool,
}

pub enum Op {
    /// Fill `into` from `offset`.
    Read {
        into: Buffer,
    },
    Write {
        from: Buffer,
        fua: bool,
    },
    Flush,
    Deallocate {
        length: u64,
    },
}

/// Where results go. Called on an I/O thread, exactly once a request, in any order: it must not block.
///
/// What a device owes to a sink: it has dropped its own clones of the request's `Buffer` before the call, and holds no
/// lock during it. A batch submits its next requests from here, to the same device too, and the last reference to the
/// device may be dropped here (so a device's `Drop` must not join the thread it runs on).
pub trait Sink: Send + Sync {
    fn complete(&self, token: u64, result: Result<(), IoError>);

    /// Long reads should say what has come, see [`Sink::arrived`]; writes what has gone, see [`Sink::departed`].
    fn watches(&self) -> bool {
        false
    }

    /// Of a read that is under way, `count` bytes from `at` of its memory are in place: something to do while they are in
    /// the processor's cache. No promise: they come again where a command is sent again, and that is said again, from
    /// its first byte on. A device need not say it at all. Never after `complete`.
    fn arrived(&self, token: u64, at: usize, count: usize) {
        let _ = (token, at, count);
    }

    /// Of a write that is under way, `count` bytes from `at` of its memory were just sent. What holds of `arrived` holds here.
    fn departed(&self, token: u64, at: usize, count: usize) {
        let _ = (token, at, count);
    }
}

pub struct Request {
    pub op: Op,
    pub offset: u64,
    pub token: u64,
    pub sink: Arc<dyn Sink>,
}

pub trait BlockDevice: Send + Sync {
    fn info(&self) -> DeviceInfo;

    /// Its sinks are told of [`Sink::departed`].
    fn tells_departures(&self) -> bool {
        false
    }

    /// Associations lost since the device was opened; see "When is it durable" in ARCHITECTURE.md.
    fn loss_count(&self) -> u64;

    /// Queue all requests and wake the I/O thread once. Never blocks for I/O; every request is completed through its
    /// sink by the device's own deadline, whatever happens. Requests that cannot be queued complete with an error.
    /// Unaligned or out-of-range requests complete with `ErrorKind::Usage`.
    fn submit(&self, requests: Vec<Request>);

    /// What it did lately and has under way; `None`: it records nothing. It does not wait for I/O.
    fn events(&self) -> Option<Recorded> {
        None
    }

    /// One JSON object: transport, engine, address, digests, queues, depth, state, associations_lost, counters.
    fn describe(&self) -> serde_json::Value;

    /// Orderly end: what is queued gets `timeout` to finish, the rest completes with `ErrorKind::Closed`. Idempotent.
    fn close(&self, timeout: Duration);
}

//! Names to addresses, never on the I/O thread.
//!
//! The system's resolver blocks and cannot be called back, so each look-up has a short-lived thread of its own, which
//! owns nothing but its answer: whoever stops waiting just lets go.

use crate::errors::unreachable;
use crate::options::Portal;
use crate::shared::Latch;
use headrace_transfer::{ErrorKind, IoError};
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::time::Duration;

pub(crate) type Answer = Arc<Latch<io::Result<Vec<SocketAddr>>>>;

/// An address needs no look-up, today or later.
pub(crate) fn literal(portal: &Portal) -> Option<SocketAddr> {
    let address = portal.host.parse::<IpAddr>().ok()?;
    Some(SocketAddr::new(address, portal.port))
}

/// Begin to look a name up; `then` is called once the answer is there.
pub(crate) fn ask(host: &str, port: u16, then: impl FnOnce() + Send + 'static) -> io::Result<Answer> {
    let name = (host.to_string(), port);
    let answer: Answer = Arc::new(Latch::new());
    let to = answer.clone();
    std::thread::Builder::new()
        .name("headrace-resolve".into())
        .spawn(move || {
            to.set(name.to_socket_addrs().map(Iterator::collect));
            then();
        })?;
    Ok(answer)
}

/// Look a name up and wait for it, at most `timeout`.
pub(crate) fn resolve(host: &str, port: u16, timeout: Duration) -> Result<Vec<SocketAddr>, IoError> {
    if let Ok(address) = host.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(address, port)]);
    }
    let answer = ask(host, port, || {}).map_err(|error| {
        IoError::new(ErrorKind::Failed, "cannot start a thread to resolve a name").found(error.to_string())
    })?;
    match answer.wait(timeout) {
        Some(Ok(addresses)) if !addresses.is_empty() => Ok(addresses),
        Some(Ok(_)) => Err(unknown(host, "no address")),
        Some(Err(error)) => Err(unknown(host, &error.to_string())),
        None => Err(unreachable(host, port, &io::ErrorKind::TimedOut.into())),
    }
}

pub(crate) fn unknown(host: &str, found: &str) -> IoError {
    IoError::new(ErrorKind::Refused, "the name does not resolve")
        .at(host)
        .expected("an IPv4 or IPv6 address")
        .found(found)
        .next("check the name, or give an address")
}

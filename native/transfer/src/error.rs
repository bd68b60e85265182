//! One error type for all devices; `native/py` maps kinds to `headrace.errors`.

use std::fmt;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The caller asked for something that cannot be (alignment, range, bad option).
    Usage,
    /// Nobody listens, or the target refused the connection or the host.
    Refused,
    /// The deadline of one command or of connecting passed.
    Timeout,
    /// The device is lost for good.
    Gone,
    /// The peer broke the protocol.
    Protocol,
    /// The device answered with an error status, or the operating system did.
    Failed,
    /// Another host holds the reservation: this one may not do that, or not any more.
    Conflict,
    /// Nobody can say whether it was done.
    Unknown,
    /// Closed on this side.
    Closed,
    /// Data do not match their checksum.
    Checksum,
}

/// What happened, with the parts that `headrace.errors.HeadraceError` prints.
#[derive(Clone, Debug)]
pub struct IoError {
    pub kind: ErrorKind,
    pub what: Box<str>,
    pub place: Box<str>,
    pub expected: Box<str>,
    pub found: Box<str>,
    pub next_step: Box<str>,
}

impl IoError {
    pub fn new(kind: ErrorKind, what: impl Into<String>) -> Self {
        IoError {
            kind,
            what: what.into().into(),
            place: Box::default(),
            expected: Box::default(),
            found: Box::default(),
            next_step: Box::default(),
        }
    }
    pub fn at(mut self, place: impl Into<String>) -> Self {
        self.place = place.into().into();
        self
    }
    pub fn expected(mut self, expected: impl Into<String>) -> Self {
        self.expected = expected.into().into();
        self
    }
    pub fn found(mut self, found: impl Into<String>) -> Self {
        self.found = found.into().into();
        self
    }
    pub fn next(mut self, step: impl Into<String>) -> Self {
        self.next_step = step.into().into();
        self
    }
}

impl fmt::Display for IoError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.what)?;
        for (label, text) in [
            (" at ", &self.place),
            (": expected ", &self.expected),
            (", found ", &self.found),
            ("; ", &self.next_step),
        ] {
            if !text.is_empty() {
                write!(f, "{label}{text}")?;
            }
        }
        Ok(())
    }
}

impl std::error::Error for IoError {}

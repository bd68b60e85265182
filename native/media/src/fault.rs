//! An error of media that has more to say than the number of the system: what it means, and what to do.
//!
//! It travels inside an [`io::Error`], so that [`crate::Media`] has one type of error; who prints it asks [`Fault::of`].

use std::fmt;
use std::io;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// It was asked for wrongly.
    Usage,
    /// Another host holds the reservation of the device.
    Conflict,
    /// There is no such device any more, or not all of it.
    Gone,
    Failed,
}

#[derive(Clone, Debug)]
pub struct Fault {
    pub kind: FaultKind,
    pub what: String,
    pub expected: String,
    pub found: String,
    pub next_step: String,
}

impl Fault {
    pub fn new(kind: FaultKind, what: impl Into<String>) -> Self {
        Fault {
            kind,
            what: what.into(),
            expected: String::new(),
            found: String::new(),
            next_step: String::new(),
        }
    }
    pub fn expected(mut self, expected: impl Into<String>) -> Self {
        self.expected = expected.into();
        self
    }
    pub fn found(mut self, found: impl Into<String>) -> Self {
        self.found = found.into();
        self
    }
    pub fn next(mut self, step: impl Into<String>) -> Self {
        self.next_step = step.into();
        self
    }

    /// What `error` carries, if it is one of these.
    pub fn of(error: &io::Error) -> Option<&Fault> {
        error.get_ref()?.downcast_ref()
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.what)?;
        for (label, text) in [
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

impl std::error::Error for Fault {}

impl From<Fault> for io::Error {
    fn from(fault: Fault) -> io::Error {
        io::Error::other(fault)
    }
}

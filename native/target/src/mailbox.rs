//! Messages to a reactor thread from everybody else.

use crate::hosts::Arrival;
use crate::memory::Buffer;
use crate::system::Waker;
use crate::worker::Reply;
use headrace_wire::Status;
use std::io;
use std::net::TcpStream;
use std::sync::Mutex;

pub(crate) enum Message {
    /// A new connection for this reactor, accepted by another.
    Accepted(TcpStream, Arrival),
    /// A worker is through with a command.
    Done(Done),
    /// End this connection; its gate is closed already.
    Close {
        token: u64,
        why: &'static str,
    },
    /// An Abort command of the admin queue names this command of the connection's; the answer goes back as `Done`.
    Abort {
        token: u64,
        cid: u16,
        reply: Reply,
    },
    /// Events wait for the async event requests of this admin connection.
    Events {
        token: u64,
    },
    /// What this queue's subsystem holds has changed.
    Renew {
        token: u64,
    },
    /// Listen no more, and end each connection when its commands are through.
    Drain,
    Stop,
}

pub(crate) struct Done {
    pub(crate) token: u64,
    pub(crate) slot: u16,
    pub(crate) generation: u32,
    pub(crate) status: Status,
    /// What was read.
    pub(crate) buffer: Option<Buffer>,
    /// DW0 of the answer.
    pub(crate) value: u32,
}

pub(crate) struct Mailbox {
    messages: Mutex<Vec<Message>>,
    pub(crate) waker: Waker,
}

impl Mailbox {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Mailbox {
            messages: Mutex::default(),
            waker: Waker::new()?,
        })
    }

    pub(crate) fn post(&self, message: Message) {
        let mut messages = self.messages.lock().unwrap_or_else(|e| e.into_inner());
        messages.push(message);
        let first = messages.len() == 1;
        drop(messages);
        if first {
            self.waker.wake();
        }
    }

    pub(crate) fn take(&self, into: &mut Vec<Message>) {
        std::mem::swap(
            &mut *self.messages.lock().unwrap_or_else(|e| e.into_inner()),
            into,
        );
    }
}

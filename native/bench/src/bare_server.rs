//! The server of the bare socket: one client at a time, one blocking thread.

use crate::memory;
use crate::socket::{bound_send_buffer, receive, receive_all, send_all, PIECES};
use crate::Failure;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{TcpListener, TcpStream};

pub const REQUEST_BYTES: usize = 72;
pub const ANSWER_BYTES: usize = 24;

/// `write`: the data follow. `more`: another request follows for sure, without waiting for this one's answer.
#[derive(Clone, Copy, Default)]
pub struct Request {
    pub write: bool,
    pub more: bool,
    pub offset: usize,
    pub length: usize,
}

impl Request {
    pub fn encode(self) -> [u8; REQUEST_BYTES] {
        let mut bytes = [0; REQUEST_BYTES];
        bytes[0] = self.write.into();
        bytes[1] = self.more.into();
        bytes[8..16].copy_from_slice(&(self.offset as u64).to_le_bytes());
        bytes[16..24].copy_from_slice(&(self.length as u64).to_le_bytes());
        bytes
    }

    pub fn decode(bytes: &[u8]) -> Self {
        let number = |at: usize| {
            let mut eight = [0; 8];
            eight.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(eight) as usize
        };
        Request {
            write: bytes[0] == 1,
            more: bytes[1] == 1,
            offset: number(8),
            length: number(16),
        }
    }
}

pub fn run(size: usize, send_bytes: usize) -> Result<(), Failure> {
    let mut memory = vec![0; size];
    memory::fill(&mut memory, 1);
    let listener = TcpListener::bind("127.0.0.1:0")?;
    writeln!(io::stdout(), "{}", listener.local_addr()?.port())?;
    // Whoever started this holds the other end; when it is gone nobody needs a server.
    std::thread::spawn(|| {
        let _ = io::stdin().read_to_end(&mut Vec::new());
        std::process::exit(0);
    });
    loop {
        let (stream, _) = listener.accept()?;
        stream.set_nodelay(true)?;
        bound_send_buffer(&stream, send_bytes)?;
        // The end of a client is not the end of the server.
        let _ = talk(&stream, &mut memory);
    }
}

fn talk(stream: &TcpStream, memory: &mut [u8]) -> io::Result<()> {
    let mut requests = [0; REQUEST_BYTES * PIECES / 2];
    let mut have = 0;
    loop {
        match receive(stream, &mut [IoSliceMut::new(&mut requests[have..])], 0)? {
            0 => return Ok(()),
            got => have += got,
        }
        if have < REQUEST_BYTES {
            continue;
        }
        let first = Request::decode(&requests);
        if first.write {
            take(stream, memory, first, &requests[REQUEST_BYTES..have])?;
            have = 0;
            continue;
        }
        let whole = have / REQUEST_BYTES;
        let mut pieces = [IoSlice::new(&[]); PIECES];
        for (pair, request) in pieces
            .chunks_exact_mut(2)
            .zip(requests.chunks_exact(REQUEST_BYTES))
            .take(whole)
        {
            let request = Request::decode(request);
            pair[0] = IoSlice::new(&[0; ANSWER_BYTES]);
            pair[1] = IoSlice::new(&memory[request.offset..request.offset + request.length]);
        }
        send_all(stream, &mut pieces[..2 * whole])?;
        let used = whole * REQUEST_BYTES;
        requests.copy_within(used..have, 0);
        have -= used;
    }
}

/// Writes, from one whose data begin with `early` on, until one after which nothing is known to follow.
fn take(stream: &TcpStream, memory: &mut [u8], mut request: Request, mut early: &[u8]) -> io::Result<()> {
    loop {
        let mut next = [0; REQUEST_BYTES];
        let target = &mut memory[request.offset..request.offset + request.length];
        let direct = early.len().min(target.len());
        target[..direct].copy_from_slice(&early[..direct]);
        let behind = &early[direct..];
        next[..behind.len()].copy_from_slice(behind);
        let following = if request.more {
            &mut next[behind.len()..]
        } else {
            &mut []
        };
        receive_all(
            stream,
            &mut [IoSliceMut::new(&mut target[direct..]), IoSliceMut::new(following)],
        )?;
        early = &[];
        send_all(stream, &mut [IoSlice::new(&[0; ANSWER_BYTES])])?;
        if !request.more {
            return Ok(());
        }
        request = Request::decode(&next);
    }
}

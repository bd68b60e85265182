//! The client of the bare socket.

use crate::bare_server::{Request, ANSWER_BYTES, REQUEST_BYTES};
use crate::control::{Client, Move};
use crate::memory;
use crate::socket::{bound_send_buffer, receive, receive_all, send_all, PIECES};
use crate::Failure;
use std::io::{self, IoSlice, IoSliceMut};
use std::net::TcpStream;
use std::time::{Duration, Instant};

pub struct BareClient {
    stream: TcpStream,
    memory: Vec<u8>,
}

impl BareClient {
    pub fn open(port: u16, size: usize, send_bytes: usize) -> Result<Self, Failure> {
        let stream = TcpStream::connect(("127.0.0.1", port))?;
        stream.set_nodelay(true)?;
        bound_send_buffer(&stream, send_bytes)?;
        stream.set_read_timeout(Some(Duration::from_secs(30)))?;
        stream.set_write_timeout(Some(Duration::from_secs(30)))?;
        let mut memory = vec![0; size];
        memory::fill(&mut memory, 0);
        Ok(BareClient { stream, memory })
    }

    /// Ask in batches; take a batch with one call that fills all its places, then ask for as many again.
    fn read(&mut self, what: Move) -> io::Result<()> {
        let blocks = (self.memory.len() / what.block) as u64;
        let batch = what.batch.clamp(1, PIECES / 2);
        let mut asked = 0;
        let mut requests = vec![0; what.depth.max(batch) * REQUEST_BYTES];
        let mut ask = |stream: &TcpStream, most: usize| -> io::Result<()> {
            let now = most.min((what.count - asked) as usize);
            for bytes in requests.chunks_exact_mut(REQUEST_BYTES).take(now) {
                let request = Request {
                    offset: memory::place(asked, blocks, what.random) as usize * what.block,
                    length: what.block,
                    ..Request::default()
                };
                bytes.copy_from_slice(&request.encode());
                asked += 1;
            }
            send_all(stream, &mut [IoSlice::new(&requests[..now * REQUEST_BYTES])])
        };
        ask(&self.stream, what.depth)?;
        let mut headers = vec![[0; ANSWER_BYTES]; batch];
        let mut taken = 0;
        while taken < what.count {
            let now = batch.min((what.count - taken) as usize);
            let first = (taken % blocks) as usize;
            // A batch does not run over the memory's end.
            let now = now.min(blocks as usize - first);
            let places = self.memory[first * what.block..].chunks_exact_mut(what.block);
            let mut pieces: Vec<IoSliceMut<'_>> = Vec::with_capacity(2 * now);
            for (header, place) in headers.iter_mut().zip(places).take(now) {
                pieces.push(IoSliceMut::new(header));
                pieces.push(IoSliceMut::new(place));
            }
            receive_all(&self.stream, &mut pieces)?;
            taken += now as u64;
            ask(&self.stream, now)?;
        }
        Ok(())
    }

    fn write(&mut self, what: Move) -> io::Result<()> {
        let blocks = (self.memory.len() / what.block) as u64;
        let mut answers = vec![0; what.depth * ANSWER_BYTES];
        let mut answered_bytes = 0;
        for number in 0..what.count {
            while number >= answered_bytes as u64 / ANSWER_BYTES as u64 + what.depth as u64 {
                answered_bytes += answer(&self.stream, &mut answers)?;
            }
            let place = memory::place(number, blocks, what.random) as usize * what.block;
            let request = Request {
                write: true,
                more: what.depth > 1 && number + 1 < what.count,
                offset: place,
                length: what.block,
            };
            let data = &self.memory[place..place + what.block];
            send_all(
                &self.stream,
                &mut [IoSlice::new(&request.encode()), IoSlice::new(data)],
            )?;
        }
        while (answered_bytes as u64) < what.count * ANSWER_BYTES as u64 {
            answered_bytes += answer(&self.stream, &mut answers)?;
        }
        Ok(())
    }
}

fn answer(stream: &TcpStream, into: &mut [u8]) -> io::Result<usize> {
    match receive(stream, &mut [IoSliceMut::new(into)], 0)? {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        got => Ok(got),
    }
}

impl Client for BareClient {
    fn transfer(&mut self, what: Move) -> Result<(), Failure> {
        let result = if what.write {
            self.write(what)
        } else {
            self.read(what)
        };
        Ok(result?)
    }

    fn ping(&mut self, block: usize, count: u64, spin: bool) -> Result<Vec<f64>, Failure> {
        let blocks = (self.memory.len() / block) as u64;
        let mut times = Vec::with_capacity(count as usize);
        let mut header = [0; ANSWER_BYTES];
        for number in 0..count {
            let begun = Instant::now();
            let request = Request {
                offset: memory::place(number, blocks, true) as usize * block,
                length: block,
                ..Request::default()
            };
            send_all(&self.stream, &mut [IoSlice::new(&request.encode())])?;
            let at = (number % blocks) as usize * block;
            let mut pieces = [
                IoSliceMut::new(&mut header),
                IoSliceMut::new(&mut self.memory[at..at + block]),
            ];
            let mut rest = &mut pieces[..];
            let flags = if spin {
                libc::MSG_DONTWAIT
            } else {
                libc::MSG_WAITALL
            };
            while !rest.is_empty() {
                match receive(&self.stream, rest, flags) {
                    Ok(0) => return Err("the server went away".into()),
                    Ok(got) => IoSliceMut::advance_slices(&mut rest, got),
                    Err(error) if spin && error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(error) => return Err(error.into()),
                }
            }
            times.push(begun.elapsed().as_secs_f64());
        }
        Ok(times)
    }

    fn fill(&mut self, seed: u64) {
        memory::fill(&mut self.memory, seed);
    }

    fn check(&self, seed: u64, block: usize, random: bool) -> bool {
        memory::is_read(&self.memory, seed, block, random)
    }
}

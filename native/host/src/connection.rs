//! One TCP connection and its queue pair, non-blocking from the first SYN.
//!
//! The poll is edge-triggered: after an event we read (write) until the kernel has nothing (no room) left, and remember
//! in `readable` (`writable`) that we have not got there yet. A turn is bounded, so that one busy connection does not keep
//! the thread from the others; who has more to do says so.

use crate::options::Route;
use crate::queue::{Arrivals, Asked, Fault, QueuePair};
use crate::socket::{connect, socket};
use crate::transmit::PIECES_MAX;
use headrace_transfer::IoError;
use mio::net::TcpStream;
use mio::{Interest, Registry, Token};
use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::net::{Shutdown, SocketAddr};

/// Bytes of one turn, in each direction.
const TURN_BYTES: usize = 2 << 20;
/// System calls of one turn.
const TURN_CALLS: usize = 32;
/// What a caller of [`Connection::turn`] brings.
pub(crate) const SCRATCH_BYTES: usize = 64 * 1024;

/// Why a connection ended.
#[derive(Debug)]
pub(crate) enum Broken {
    /// The peer closed it.
    Closed,
    Io(io::Error),
    /// Our own machine does not let us.
    Ours(IoError),
    Fault(Fault),
}

impl std::fmt::Display for Broken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Broken::Closed => write!(f, "the controller closed the connection"),
            Broken::Io(error) => write!(f, "{error}"),
            Broken::Ours(error) => write!(f, "{error}"),
            Broken::Fault(fault) => write!(f, "{fault}"),
        }
    }
}

pub(crate) struct Connection<T> {
    stream: TcpStream,
    pub queue: QueuePair<T>,
    connected: bool,
    readable: bool,
    writable: bool,
    /// The peer's FIN was seen: read until it comes.
    ending: bool,
}

impl<T: Arrivals> Connection<T> {
    /// Begin to connect; ICReq follows by itself.
    pub fn open(
        (route, address): (&Route, SocketAddr),
        registry: &Registry,
        token: Token,
        depth: u16,
        asked: Asked,
        in_capsule: usize,
    ) -> Result<Self, Broken> {
        let socket = socket(route, address).map_err(Broken::Ours)?;
        let mut stream = TcpStream::from_std(connect(socket, address).map_err(Broken::Io)?);
        let interest = Interest::READABLE | Interest::WRITABLE;
        registry
            .register(&mut stream, token, interest)
            .map_err(Broken::Io)?;
        Ok(Connection {
            stream,
            queue: QueuePair::new(depth, asked, in_capsule),
            connected: false,
            readable: false,
            writable: false,
            ending: false,
        })
    }

    pub fn event(&mut self, event: &mio::event::Event) {
        self.readable |= event.is_readable() || event.is_error();
        self.writable |= event.is_writable() || event.is_error();
        self.ending |= event.is_read_closed() || event.is_error();
    }

    /// Send and receive what can be; `true` when there is more to do at once.
    pub fn turn(&mut self, scratch: &mut [u8]) -> Result<bool, Broken> {
        if !self.connected {
            if !self.writable {
                return Ok(false);
            }
            self.finish_connect()?;
            if !self.connected {
                return Ok(false);
            }
        }
        let more = self.send()?;
        Ok(self.receive(scratch)? || more)
    }

    fn finish_connect(&mut self) -> Result<(), Broken> {
        if let Some(error) = self.stream.take_error().map_err(Broken::Io)? {
            return Err(Broken::Io(error));
        }
        match self.stream.peer_addr() {
            // On loopback the kernel may pick the very port that nobody listens on, and connect us to ourselves, which
            // would also keep the target from coming back to its port.
            Ok(peer) if self.stream.local_addr().is_ok_and(|local| local == peer) => {
                return Err(Broken::Io(ErrorKind::ConnectionRefused.into()));
            }
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::NotConnected => {
                // A spurious wake-up; the next event tells.
                self.writable = false;
                return Ok(());
            }
            Err(error) => return Err(Broken::Io(error)),
        }
        self.stream.set_nodelay(true).map_err(Broken::Io)?;
        self.connected = true;
        Ok(())
    }

    /// Send what is queued, as far as the kernel takes it; `true` when this turn's share is used up before that.
    pub fn send(&mut self) -> Result<bool, Broken> {
        let mut bytes = 0;
        for _ in 0..TURN_CALLS {
            if !self.connected || !self.writable || !self.queue.has_output() {
                return Ok(false);
            }
            if bytes >= TURN_BYTES {
                break;
            }
            let mut pieces = [IoSlice::new(&[]); PIECES_MAX];
            let count = self.queue.gather(&mut pieces);
            let offered: usize = pieces[..count].iter().map(|piece| piece.len()).sum();
            match self.stream.write_vectored(&pieces[..count]) {
                Ok(0) => return Err(Broken::Closed),
                Ok(sent) => {
                    bytes += sent;
                    self.queue.sent(sent);
                    // Less than was offered: the socket is full, and room will be a new edge.
                    self.writable = sent == offered;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.writable = false,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(Broken::Io(error)),
            }
        }
        Ok(true)
    }

    fn receive(&mut self, scratch: &mut [u8]) -> Result<bool, Broken> {
        let mut bytes = 0;
        for call in 0..TURN_CALLS {
            if !self.readable {
                return Ok(false);
            }
            // Small answers are handed on as they come: what follows them is asked for before more is taken.
            if bytes >= TURN_BYTES || call > 0 && self.queue.reads_small() {
                break;
            }
            let tail = self.queue.tail().min(scratch.len());
            let destination = self.queue.destination();
            let room = destination.len();
            let result = if room == 0 {
                self.stream.read(&mut scratch[..tail])
            } else {
                let mut pieces = [
                    IoSliceMut::new(destination),
                    IoSliceMut::new(&mut scratch[..tail]),
                ];
                self.stream.read_vectored(&mut pieces)
            };
            match result {
                Ok(0) => return Err(Broken::Closed),
                Ok(count) => {
                    bytes += count;
                    let direct = room.min(count);
                    if let Err(fault) = self.queue.received(direct, &scratch[..count - direct]) {
                        return Err(self.refuse(fault));
                    }
                    // A read that did not fill its room emptied the socket: the next arrival is a new edge. Only the end
                    // of the stream may have come before it without another.
                    if count < room + tail && !self.ending {
                        self.readable = false;
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.readable = false,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(Broken::Io(error)),
            }
        }
        Ok(true)
    }

    /// Our side saw the peer break the protocol: say so, as far as one attempt goes.
    fn refuse(&mut self, fault: Fault) -> Broken {
        if let Fault::Violation(error) = &fault {
            self.queue.terminate(error);
            // The connection ends either way, and for the reason that is returned.
            if self.writable {
                let _ = self.send();
            }
        }
        Broken::Fault(fault)
    }

    /// End the connection, also for processes that inherited the socket.
    pub fn close(&mut self, registry: &Registry) {
        // It may be gone already, which is what we want.
        let _ = self.stream.shutdown(Shutdown::Both);
        let _ = registry.deregister(&mut self.stream);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::queue::Data;
    use headrace_transfer::Buffer;
    use headrace_wire::pdu::{DataHeader, Digests, IcResp, Pdu};
    use headrace_wire::{io, Sqe};
    use mio::{Events, Poll};
    use std::net::TcpListener;
    use std::time::{Duration, Instant};

    impl Arrivals for u16 {}

    const COUNT: u16 = 32;
    const BYTES: usize = 4096;

    /// Turns until `done`; each one after an event, or after a turn that said there is more.
    fn turns(
        poll: &mut Poll,
        connection: &mut Connection<u16>,
        mut done: impl FnMut(&mut Connection<u16>) -> bool,
    ) {
        let mut events = Events::with_capacity(8);
        let mut scratch = vec![0; SCRATCH_BYTES];
        let (mut more, end) = (false, Instant::now() + Duration::from_secs(30));
        while !done(connection) {
            assert!(Instant::now() < end, "nothing comes any more");
            let wait = if more { 0 } else { 100 };
            poll.poll(&mut events, Some(Duration::from_millis(wait))).unwrap();
            events.iter().for_each(|event| connection.event(event));
            more = connection.turn(&mut scratch).unwrap();
        }
    }

    /// With everything there at once, no turn takes more than a part of it: else nothing is under way while it is dealt with.
    #[test]
    fn small_answers_are_handed_on_before_all_of_them_are_taken() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut poll = Poll::new().unwrap();
        let way = (&Route::default(), listener.local_addr().unwrap());
        let asked = Asked::default();
        let mut connection = Connection::open(way, poll.registry(), Token(1), COUNT, asked, 4096).unwrap();
        let (mut peer, _) = listener.accept().unwrap();
        let mut said = Vec::new();
        let agree = Pdu::IcResp(IcResp {
            pfv: 0,
            cpda: 0,
            digests: Digests::default(),
            maxh2cdata: 131_072,
        });
        agree.encode(0, Digests::default(), 0, &mut said);
        peer.write_all(&said).unwrap();
        turns(&mut poll, &mut connection, |connection| {
            connection.queue.agreed().is_some()
        });

        said.clear();
        for cid in 0..COUNT {
            let sqe = Sqe::rw(io::READ, 0, 1, 0, 8);
            let data = Data::Read(Buffer::zeroed(BYTES));
            assert!(connection.queue.submit(sqe, data, cid, None).is_ok());
            let header = Pdu::C2hData(DataHeader {
                cccid: cid,
                ttag: 0,
                datao: 0,
                datal: BYTES as u32,
                last: true,
                success: true,
            });
            header.encode(BYTES, Digests::default(), 0, &mut said);
            said.resize(said.len() + BYTES, 1);
        }
        let writing = std::thread::spawn(move || {
            peer.write_all(&said).unwrap();
            peer
        });
        // More than one turn may take is there before the first.
        let mut there = vec![0; 48 << 10];
        let end = Instant::now() + Duration::from_secs(30);
        while connection.stream.peek(&mut there).unwrap_or(0) < there.len() {
            assert!(Instant::now() < end, "the answers do not come");
            std::thread::sleep(Duration::from_millis(1));
        }
        let (mut answered, mut most) = (0, 0);
        turns(&mut poll, &mut connection, |connection| {
            let now = std::iter::from_fn(|| connection.queue.completion()).count();
            most = most.max(now);
            answered += now;
            answered == usize::from(COUNT)
        });
        assert!((2..=8).contains(&most), "{most} answers in one turn");
        writing.join().unwrap();
    }
}

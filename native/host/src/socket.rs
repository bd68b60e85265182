//! Sockets as the options want them: bound to our address, to an interface, marked with a type of service.
//!
//! What our own machine refuses here is our side's fault, and the message says so; it is never mixed up with a target that
//! does not answer.

use crate::options::Route;
use headrace_transfer::{ErrorKind, IoError};
use socket2::{Domain, Protocol, Socket, Type};
use std::io;
use std::net::SocketAddr;

/// Decision 0021: on one machine more than this piles up between the two ends and leaves the cache before it is received.
const LOOPBACK_SEND_BYTES: usize = 256 << 10;

/// A socket for `to`, not connected yet.
pub(crate) fn socket(route: &Route, to: SocketAddr) -> Result<Socket, IoError> {
    let failed = |what: &str, error: &io::Error| {
        IoError::new(ErrorKind::Failed, what)
            .at(to.to_string())
            .found(error.to_string())
    };
    let socket =
        Socket::new(Domain::for_address(to), Type::STREAM, Some(Protocol::TCP)).map_err(|error| {
            failed("cannot make a socket", &error)
                .next("check the limit of open files, and that the address family exists here")
        })?;
    if let Some(iface) = &route.host_iface {
        socket.bind_device(Some(iface.as_bytes())).map_err(|error| {
            let next = match error.kind() {
                io::ErrorKind::PermissionDenied => {
                    "binding to an interface needs CAP_NET_RAW on older kernels: use host_traddr, or grant it"
                }
                _ => "check host_iface: `ip link` lists the interfaces",
            };
            failed("cannot bind to the interface of host_iface", &error)
                .expected(iface.clone())
                .next(next)
        })?;
    }
    if let Some(tos) = route.tos {
        let result = match to {
            SocketAddr::V4(_) => socket.set_tos_v4(tos.into()),
            SocketAddr::V6(_) => socket.set_tclass_v6(tos.into()),
        };
        result.map_err(|error| {
            failed("cannot set the type of service", &error)
                .expected(format!("tos {tos}"))
                .next("leave tos out, or choose a value that this system takes")
        })?;
    }
    if let Some(from) = route.host_traddr {
        if from.is_ipv4() != to.is_ipv4() {
            return Err(IoError::new(
                ErrorKind::Usage,
                "host_traddr and the target's address are of different families",
            )
            .at(to.to_string())
            .expected(format!("an address like {to}"))
            .found(from.to_string())
            .next("give host_traddr and the target both as IPv4 or both as IPv6"));
        }
        socket.bind(&SocketAddr::new(from, 0).into()).map_err(|error| {
            failed("cannot bind to host_traddr", &error)
                .expected("an address of this machine")
                .found(format!("{from}: {error}"))
                .next("check host_traddr: `ip address` lists the addresses")
        })?;
    }
    if to.ip().is_loopback() {
        // Only speed depends on it.
        let _ = socket.set_send_buffer_size(LOOPBACK_SEND_BYTES);
    }
    Ok(socket)
}

/// Begin to connect, without waiting.
pub(crate) fn connect(socket: Socket, to: SocketAddr) -> io::Result<std::net::TcpStream> {
    socket.set_nonblocking(true)?;
    match socket.connect(&to.into()) {
        Ok(()) => {}
        Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => {}
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
        Err(error) => return Err(error),
    }
    Ok(socket.into())
}

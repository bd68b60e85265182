//! The programs behind `benchmarks/fabric.py`; nothing here is part of the product.
//!
//! ```text
//! headrace-bench serve SIZE SEND_BYTES          a bare-socket server with so many bytes of memory; prints its port
//! headrace-bench bare PORT SIZE SEND_BYTES      its client
//! headrace-bench host PORT NQN SIZE JSON        a load on `headrace-host`, the options as JSON
//! ```
//!
//! Both clients take one job a line on standard input and answer with one line ([`control`]), so a driver can take turns
//! between processes that stay warm. The server ends with its standard input. SEND_BYTES: SO_SNDBUF; 0 is the kernel's choice.
//!
//! The bare socket is the ceiling of the figures: 72-byte requests (the length of a command capsule), 24-byte answers
//! (C2HData or CapsuleResp), the same data out of and into memory of the same size, and nothing else: no checks, no
//! retries, no deadlines, blocking calls of as many bytes as there are to move.

mod bare_client;
mod bare_server;
mod control;
mod host_load;
mod memory;
mod socket;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match words[..] {
        ["serve", size, send] => number(size).and_then(|size| bare_server::run(size, number(send)?)),
        ["bare", port, size, send] => number(port).and_then(|port| {
            control::serve(bare_client::BareClient::open(
                port as u16,
                number(size)?,
                number(send)?,
            )?)
        }),
        ["host", port, nqn, size, options] => number(port).and_then(|port| {
            control::serve(host_load::HostLoad::open(
                port as u16,
                nqn,
                number(size)?,
                options,
            )?)
        }),
        _ => Err("usage: headrace-bench serve SIZE SEND_BYTES | bare PORT SIZE SEND_BYTES | host PORT NQN SIZE JSON".into()),
    };
    if let Err(error) = result {
        eprintln!("headrace-bench: {error}");
        std::process::exit(1);
    }
}

type Failure = Box<dyn std::error::Error>;

fn number(text: &str) -> Result<usize, Failure> {
    text.parse().map_err(|_| format!("not a number: {text:?}").into())
}

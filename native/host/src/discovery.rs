//! The discovery log page, read by the caller's own thread: a queue pair on a blocking socket, every wait bounded.
//!
//! Connect to the discovery subsystem, enable, read the header, read the records, read the header again: when its
//! generation moved meanwhile, the records may be of two generations, and reading starts over.

use crate::errors::{step_failed, unreachable};
use crate::options::{authority, DiscoverOptions};
use crate::queue::{Asked, Data, End, QueuePair, ADMIN_IN_CAPSULE};
use crate::refusal::{self, connect_refused};
use crate::resolve::resolve;
use crate::socket::socket;
use crate::transmit::PIECES_MAX;
use headrace_transfer::{Buffer, ErrorKind, IoError};
use headrace_wire::fabrics::{
    property, property_get, property_set, Cc, Connect, ConnectData, Csts, CATTR_NO_SQ_FLOW, CC_ENABLE,
    CNTLID_DYNAMIC,
};
use headrace_wire::log::{get_log_page, lid, DiscoveryEntry, DiscoveryHeader, DISCOVERY_ENTRY_BYTES};
use headrace_wire::{Cqe, Sqe, DISCOVERY_NQN, NQN_MAX};
use std::io::{IoSlice, Read, Write};
use std::net::{IpAddr, Shutdown, TcpStream};
use std::time::{Duration, Instant};

/// Records that we are willing to read.
const RECORDS_MAX: u64 = 4096;
/// Records of one Get Log Page.
const RECORDS_AT_ONCE: u64 = 16;
/// How often the log may move under us.
const GENERATIONS_MAX: usize = 8;
const ADMIN_DEPTH: u16 = 31;
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// The discovery log page of a target: `{"generation": n, "records": [{"trtype": "tcp", ...}, ...]}`.
pub fn discover(options: DiscoverOptions) -> Result<serde_json::Value, IoError> {
    options.check()?;
    let deadline = Instant::now() + options.connect_timeout;
    let addresses = resolve(&options.host, options.port, options.connect_timeout)?;
    let mut session = Session::open(&options, &addresses, deadline)?;
    session.bring_up()?;
    let result = session.log();
    session.leave();
    result
}

struct Session<'a> {
    options: &'a DiscoverOptions,
    place: String,
    deadline: Instant,
    stream: TcpStream,
    queue: QueuePair<()>,
    scratch: Vec<u8>,
}

impl<'a> Session<'a> {
    fn open(
        options: &'a DiscoverOptions,
        addresses: &[std::net::SocketAddr],
        deadline: Instant,
    ) -> Result<Self, IoError> {
        let (mut last, mut ours) = (None, None);
        for address in addresses {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            let socket = match socket(&options.route, *address) {
                Ok(socket) => socket,
                Err(error) => {
                    ours = Some(error);
                    continue;
                }
            };
            let stream = socket.connect_timeout(&(*address).into(), left).and_then(|()| {
                socket.set_tcp_nodelay(true)?;
                Ok(TcpStream::from(socket))
            });
            match stream {
                Ok(stream) => {
                    return Ok(Session {
                        options,
                        place: authority(&options.host, options.port),
                        deadline,
                        stream,
                        queue: QueuePair::new(ADMIN_DEPTH, Asked::default(), ADMIN_IN_CAPSULE),
                        scratch: vec![0; 16 * 1024],
                    })
                }
                Err(error) => last = Some(error),
            }
        }
        if let Some(error) = ours.filter(|_| last.is_none()) {
            return Err(error);
        }
        let error = last.unwrap_or_else(|| std::io::ErrorKind::TimedOut.into());
        Err(unreachable(&options.host, options.port, &error))
    }

    fn bring_up(&mut self) -> Result<(), IoError> {
        while self.queue.agreed().is_none() {
            self.exchange("ICReq")?;
        }
        let connect = Connect {
            recfmt: 0,
            qid: 0,
            sqsize: ADMIN_DEPTH,
            cattr: CATTR_NO_SQ_FLOW,
            kato_ms: 0,
        };
        let data = ConnectData {
            hostid: self.options.hostid,
            cntlid: CNTLID_DYNAMIC,
            subnqn: DISCOVERY_NQN.into(),
            hostnqn: self.options.hostnqn.clone(),
        };
        let data = Data::Write(Buffer::from_vec(data.encode().to_vec()));
        let (cqe, _) = self.command("Connect", connect.encode(0), data)?;
        if !cqe.status.is_success() {
            let asked = refusal::Asked {
                place: &self.place,
                subsysnqn: DISCOVERY_NQN,
                hostnqn: &self.options.hostnqn,
                hostid: &self.options.hostid,
                qid: 0,
                sqsize: ADMIN_DEPTH,
                keep_alive: Duration::ZERO,
            };
            return Err(connect_refused(asked, &cqe));
        }
        self.succeed(
            "Property Set CC.EN",
            property_set(0, property::CC, CC_ENABLE.into(), false),
            Data::None,
        )?;
        loop {
            let sqe = property_get(0, property::CSTS, false);
            let (cqe, _) = self.succeed("Property Get CSTS", sqe, Data::None)?;
            if Csts(cqe.dw0).ready() {
                return Ok(());
            }
            self.left("CSTS.RDY")?;
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    fn log(&mut self) -> Result<serde_json::Value, IoError> {
        for _ in 0..GENERATIONS_MAX {
            let before = self.header()?;
            if before.numrec > RECORDS_MAX {
                return Err(self.bad(
                    "the discovery log page is too long",
                    format!("{} records", before.numrec),
                ));
            }
            let mut entries = Vec::new();
            let mut first = 0;
            while first < before.numrec {
                let step = RECORDS_AT_ONCE.min(before.numrec - first);
                let entry = DISCOVERY_ENTRY_BYTES as u64;
                let bytes = self.page((1 + first) * entry, (step * entry) as u32)?;
                entries.extend(
                    bytes
                        .chunks(DISCOVERY_ENTRY_BYTES)
                        .filter_map(DiscoveryEntry::decode),
                );
                first += step;
            }
            if self.header()? == before {
                let records: Vec<_> = entries.iter().map(record).collect();
                return Ok(serde_json::json!({ "generation": before.genctr, "records": records }));
            }
        }
        let found = format!("another one at each of {GENERATIONS_MAX} attempts");
        Err(self.bad("the discovery log page does not hold still", found))
    }

    fn header(&mut self) -> Result<DiscoveryHeader, IoError> {
        let bytes = self.page(0, DiscoveryHeader::BYTES as u32)?;
        DiscoveryHeader::decode(&bytes).ok_or_else(|| self.bad("the discovery log page has no header", ""))
    }

    fn page(&mut self, offset: u64, length: u32) -> Result<Vec<u8>, IoError> {
        let data = Data::Read(Buffer::zeroed(length as usize));
        let sqe = get_log_page(0, 0, lid::DISCOVERY, offset, length);
        Ok(self.succeed("Get Log Page (discovery)", sqe, data)?.1)
    }

    /// Orderly, but nothing depends on it.
    fn leave(&mut self) {
        let cc = Cc(CC_ENABLE).with_shutdown();
        let _ = self.command(
            "Property Set CC.SHN",
            property_set(0, property::CC, cc.0.into(), false),
            Data::None,
        );
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    fn succeed(&mut self, step: &str, sqe: Sqe, data: Data) -> Result<(Cqe, Vec<u8>), IoError> {
        let (cqe, bytes) = self.command(step, sqe, data)?;
        if !cqe.status.is_success() {
            return Err(step_failed(&self.place, step, cqe.status));
        }
        Ok((cqe, bytes))
    }

    fn command(&mut self, step: &str, sqe: Sqe, data: Data) -> Result<(Cqe, Vec<u8>), IoError> {
        if self.queue.submit(sqe, data, (), self.deadline).is_err() {
            return Err(self.bad("the admin queue is full", step));
        }
        let completion = loop {
            if let Some(completion) = self.queue.completion() {
                break completion;
            }
            self.exchange(step)?;
        };
        let mut bytes = Vec::new();
        if let Data::Read(buffer) = &completion.data {
            bytes.resize(buffer.len(), 0);
            buffer.copy_to(0, &mut bytes);
        }
        match completion.end {
            End::Answer(cqe) => Ok((cqe, bytes)),
            End::Short { came, wanted } => Err(self.bad(
                format!("{step} was answered short"),
                format!("{came} of {wanted} bytes"),
            )),
            End::DataDigest => Err(self.bad(format!("{step} was answered badly"), "a wrong data digest")),
        }
    }

    /// Send all that waits, then receive once.
    fn exchange(&mut self, step: &str) -> Result<(), IoError> {
        let (host, port) = (&self.options.host, self.options.port);
        while self.queue.has_output() {
            let left = self.left(step)?;
            self.stream
                .set_write_timeout(Some(left))
                .map_err(|error| unreachable(host, port, &error))?;
            let mut pieces = [IoSlice::new(&[]); PIECES_MAX];
            let count = self.queue.gather(&mut pieces);
            match self.stream.write_vectored(&pieces[..count]) {
                Ok(sent) => self.queue.sent(sent),
                Err(error) => self.again(step, error)?,
            }
        }
        let left = self.left(step)?;
        self.stream
            .set_read_timeout(Some(left))
            .map_err(|error| unreachable(host, port, &error))?;
        match self.stream.read(&mut self.scratch) {
            Ok(0) => Err(self.bad(
                format!("the target closed the connection during {step}"),
                "end of stream",
            )),
            Ok(count) => self
                .queue
                .received(0, &self.scratch[..count])
                .map_err(|fault| self.bad(fault.to_string(), step)),
            Err(error) => self.again(step, error),
        }
    }

    /// Timed out or interrupted: `left` decides; anything else ends it.
    fn again(&self, step: &str, error: std::io::Error) -> Result<(), IoError> {
        use std::io::ErrorKind::{Interrupted, TimedOut, WouldBlock};
        match error.kind() {
            Interrupted | TimedOut | WouldBlock => self.left(step).map(|_| ()),
            _ => Err(self.bad(format!("the connection broke during {step}"), error.to_string())),
        }
    }

    fn left(&self, step: &str) -> Result<Duration, IoError> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(IoError::new(
                ErrorKind::Timeout,
                "the discovery controller did not answer in time",
            )
            .at(&self.place)
            .expected(format!("all answers within {:?}", self.options.connect_timeout))
            .found(format!("no answer to {step}"))
            .next("check host and port, and the target's log"));
        }
        Ok(left)
    }

    fn bad(&self, what: impl Into<String>, found: impl Into<String>) -> IoError {
        IoError::new(ErrorKind::Protocol, what)
            .at(&self.place)
            .expected("an NVMe/TCP discovery controller")
            .found(found)
            .next("check that this is the target's NVMe/TCP port")
    }
}

fn record(entry: &DiscoveryEntry) -> serde_json::Value {
    let named = |name: Option<&str>, number: u8| name.map_or_else(|| number.to_string(), str::to_string);
    let trtype = match entry.trtype {
        1 => Some("rdma"),
        2 => Some("fc"),
        3 => Some("tcp"),
        254 => Some("loop"),
        _ => None,
    };
    let adrfam = match entry.adrfam {
        1 => Some("ipv4"),
        2 => Some("ipv6"),
        3 => Some("ib"),
        4 => Some("fc"),
        _ => None,
    };
    let subtype = match entry.subtype {
        1 => Some("referral"),
        2 => Some("nvm"),
        3 => Some("discovery"),
        _ => None,
    };
    let (trtype, adrfam, subtype) = (
        named(trtype, entry.trtype),
        named(adrfam, entry.adrfam),
        named(subtype, entry.subtype),
    );
    // Padding is spaces in some targets and NULs in others; `wire` strips the end, a careless target pads the front too.
    // What a terminal would obey is not printed as it is.
    let clean = |text: &str| -> String {
        let text = text.trim_matches([' ', '\0']).chars();
        text.map(|c| if c.is_control() { '\u{fffd}' } else { c })
            .collect()
    };
    let (traddr, trsvcid, subnqn) = (clean(&entry.traddr), clean(&entry.trsvcid), clean(&entry.subnqn));
    let problem = trouble(&trtype, &traddr, &trsvcid, &subnqn, entry.treq);
    serde_json::json!({
        "trtype": trtype,
        "adrfam": adrfam,
        "subtype": subtype,
        "treq": entry.treq,
        "portid": entry.portid,
        "cntlid": entry.cntlid,
        "asqsz": entry.asqsz,
        "eflags": entry.eflags,
        "traddr": traddr,
        "trsvcid": trsvcid,
        "subnqn": subnqn,
        "sectype": entry.sectype,
        "problem": problem,
    })
}

/// Why nobody can connect by an entry of NVMe/TCP; `None`: somebody can, or it is of another transport.
pub(crate) fn trouble(trtype: &str, traddr: &str, trsvcid: &str, subnqn: &str, treq: u8) -> Option<String> {
    if trtype != "tcp" {
        return None;
    }
    let name = |text: &str| {
        let sound = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
        (1..=253).contains(&text.len()) && text.chars().all(sound) && !text.starts_with('-')
    };
    match traddr.parse::<IpAddr>().map(|address| address.to_canonical()) {
        Ok(address) if address.is_unspecified() => {
            return Some(format!(
                "its address is the wildcard {traddr}, which is no place to connect to: on the target, give the port the \
                 address of the machine"
            ))
        }
        Ok(_) => {}
        Err(_) if name(traddr) => {}
        Err(_) => return Some(format!("its address is no address: {traddr:?}")),
    }
    let digits = !trsvcid.is_empty() && trsvcid.bytes().all(|b| b.is_ascii_digit());
    if !digits || trsvcid.parse::<u16>().unwrap_or(0) == 0 {
        return Some(format!("its port is no port: {trsvcid:?}"));
    }
    let sound = |c: char| !c.is_whitespace() && c != '\u{fffd}';
    if subnqn.is_empty() || subnqn.len() > NQN_MAX || !subnqn.chars().all(sound) {
        return Some(format!("its subsystem has no name that can be: {subnqn:?}"));
    }
    (treq & 3 == 1).then(|| "it demands a secure channel (TLS), which this version does not speak".into())
}

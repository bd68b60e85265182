//! Any command, as its caller builds it: the doctor's questions, and reservations.
//!
//! It is sent once and never again by itself, since nobody here knows what it does. If its association ends before the
//! answer came, whether it was carried out is *unknown*, and that is what the caller is told; the caller may ask the
//! controller and then decide. Its deadline passing ends the association, as any command's does, so that a late answer
//! never meets anybody.
//!
//! Commands that change what the medium holds are not for this way: they must count losses, obey the guard
//! ([`crate::guard`]) and report unsettled ranges, which the device's own verbs do.

use crate::device::{NvmeTcpDevice, GRACE};
use crate::queue::{Data, End};
use crate::shared::Latch;
use headrace_transfer::{Buffer, ErrorKind, IoError};
use headrace_wire::{admin, io, Cqe, Sgl, Sqe, Status};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Data of one command, either way; the controller's MDTS may allow less.
pub const COMMAND_BYTES_MAX: usize = 1 << 20;
/// Commands that wait or are under way.
pub(crate) const CALLS_MAX: usize = 256;
/// Longest time that a command may be given.
const TIMEOUT_MAX: Duration = Duration::from_secs(3600);

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CommandData {
    None,
    /// To the controller.
    Out(Vec<u8>),
    /// So many bytes from the controller.
    In(usize),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Command {
    /// For the admin queue; else an I/O queue.
    pub admin: bool,
    pub opcode: u8,
    /// `None`: the device's own namespace.
    pub nsid: Option<u32>,
    /// CDW10 to CDW15.
    pub cdw: [u32; 6],
    pub data: CommandData,
    /// From now to the answer.
    pub timeout: Duration,
}

/// What the controller said, whatever that is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandAnswer {
    pub status: Status,
    pub dw0: u32,
    pub dw1: u32,
    /// Empty where the status is not success.
    pub data: Vec<u8>,
}

type Reply = Arc<Latch<Result<CommandAnswer, IoError>>>;

/// A command on its way through the I/O thread. Dropped without an answer, it says itself what is known of its fate.
pub(crate) struct Call {
    pub admin: bool,
    sqe: Sqe,
    own_namespace: bool,
    data: Data,
    pub until: Instant,
    name: String,
    place: String,
    sent: bool,
    reply: Option<Reply>,
}

impl Command {
    fn name(&self) -> String {
        match (self.admin, io::name(self.opcode)) {
            (false, name) if name != "unknown command" => name.into(),
            (true, _) => format!("admin command {:02X}h", self.opcode),
            (false, _) => format!("I/O command {:02X}h", self.opcode),
        }
    }

    fn check(&self, place: &str) -> Result<(), IoError> {
        let usage = |what: &str| IoError::new(ErrorKind::Usage, what).at(place);
        let length = match &self.data {
            CommandData::None => 0,
            CommandData::Out(bytes) => bytes.len(),
            CommandData::In(length) => *length,
        };
        if length > COMMAND_BYTES_MAX || length % 4 != 0 || (length == 0 && self.data != CommandData::None) {
            return Err(usage("the command's data cannot be so long")
                .expected(format!(
                    "a multiple of 4 bytes, at least 4, at most {COMMAND_BYTES_MAX}"
                ))
                .found(format!("{length} bytes")));
        }
        if self.timeout.is_zero() || self.timeout > TIMEOUT_MAX {
            return Err(usage("the command's time-out is not possible")
                .expected(format!("more than 0, at most {TIMEOUT_MAX:?}"))
                .found(format!("{:?}", self.timeout)));
        }
        // Queues and associations are this side's business; event requests would never be answered.
        const CREATE_OR_DELETE_QUEUE: [u8; 4] = [0x00, 0x01, 0x04, 0x05];
        let ours = CREATE_OR_DELETE_QUEUE.contains(&self.opcode)
            || [admin::FABRICS, admin::ASYNC_EVENT_REQUEST].contains(&self.opcode);
        let allowed = [
            io::READ,
            io::COMPARE,
            io::VERIFY,
            io::RESERVATION_REGISTER,
            io::RESERVATION_REPORT,
            io::RESERVATION_ACQUIRE,
            io::RESERVATION_RELEASE,
        ];
        if self.admin && ours {
            return Err(usage("this command is the host's own")
                .found(self.name())
                .next("open another device for another association"));
        }
        if !self.admin && !allowed.contains(&self.opcode) {
            return Err(
                usage("a command that changes the medium, or may, is not passed through")
                    .found(self.name())
                    .next("use the device's write, flush or deallocate"),
            );
        }
        Ok(())
    }

    fn sqe(&self) -> Sqe {
        let sqe = (0..6).fold(Sqe::new(self.opcode, 0, self.nsid.unwrap_or(0)), |sqe, at| {
            sqe.with_cdw(10 + at, self.cdw[at])
        });
        sqe.with_sgl(Sgl::None)
    }
}

impl Call {
    pub fn new(command: Command, place: &str, reply: Reply) -> Result<Call, IoError> {
        command.check(place)?;
        Ok(Call {
            admin: command.admin,
            sqe: command.sqe(),
            own_namespace: command.nsid.is_none(),
            name: command.name(),
            until: Instant::now() + command.timeout,
            data: match command.data {
                CommandData::None => Data::None,
                CommandData::Out(bytes) => Data::Write(Buffer::from_vec(bytes)),
                CommandData::In(length) => Data::Read(Buffer::zeroed(length)),
            },
            place: place.into(),
            sent: false,
            reply: Some(reply),
        })
    }

    /// What to send on an association that knows the device's namespace as `nsid`; from here on it counts as sent.
    pub fn take(&mut self, nsid: u32) -> (Sqe, Data) {
        self.sent = true;
        let sqe = if self.own_namespace {
            self.sqe.with_nsid(nsid)
        } else {
            self.sqe
        };
        (sqe, std::mem::replace(&mut self.data, Data::None))
    }

    /// There was no room after all.
    pub fn put_back(&mut self, data: Data) {
        self.sent = false;
        self.data = data;
    }

    pub fn fail(mut self, error: IoError) {
        self.answer(Err(error));
    }

    /// Nothing was sent, and there is no more time.
    pub fn expire(mut self) {
        let error = IoError::new(ErrorKind::Timeout, format!("{} was not sent", self.name))
            .at(&*self.place)
            .expected("a path that takes it, in time")
            .next("check the target and the network");
        self.answer(Err(error));
    }

    pub fn complete(mut self, data: Data, end: End) {
        let result = match end {
            End::Answer(cqe) => Ok(answer(&cqe, data)),
            End::DataDigest => Err(IoError::new(
                ErrorKind::Failed,
                format!("{} gave damaged data", self.name),
            )
            .at(&*self.place)
            .expected("the data digest that the controller sent")
            .next("send it again")),
            End::Short { came, wanted } => Err(IoError::new(
                ErrorKind::Protocol,
                format!("{} gave too little", self.name),
            )
            .at(&*self.place)
            .expected(format!("{wanted} bytes"))
            .found(format!("success after {came}"))),
        };
        self.answer(result);
    }

    fn answer(&mut self, result: Result<CommandAnswer, IoError>) {
        if let Some(reply) = self.reply.take() {
            reply.set(result);
        }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        let error = if self.sent {
            IoError::new(
                ErrorKind::Unknown,
                format!("whether {} was carried out is unknown", self.name),
            )
            .at(&*self.place)
            .expected("an answer")
            .found("the association was lost, or the command's time passed")
            .next("ask the target what is so now, then decide")
        } else {
            IoError::new(ErrorKind::Closed, format!("{} was not sent", self.name)).at(&*self.place)
        };
        self.answer(Err(error));
    }
}

fn answer(cqe: &Cqe, data: Data) -> CommandAnswer {
    let mut bytes = Vec::new();
    if let (Data::Read(buffer), true) = (data, cqe.status.is_success()) {
        bytes.resize(buffer.len(), 0);
        buffer.copy_to(0, &mut bytes);
    }
    CommandAnswer {
        status: cqe.status,
        dw0: cqe.dw0,
        dw1: cqe.dw1,
        data: bytes,
    }
}

impl NvmeTcpDevice {
    /// Send a command once and wait for its answer. `Ok`: the controller answered, perhaps with an error status.
    /// `Unknown`: it was sent, and nobody answered. Other errors: it was not carried out.
    pub fn command(&self, command: Command) -> Result<CommandAnswer, IoError> {
        let timeout = command.timeout;
        let reply = Arc::new(Latch::new());
        self.send_call(Call::new(command, self.place(), reply.clone())?);
        // The I/O thread keeps the time, and knows what has become of the command.
        self.wait_for(&reply, timeout, GRACE)
    }
}

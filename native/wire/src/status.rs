//! Status codes (Base Specification 4.2.3), by name.

/// Status code type and code, with the Do Not Retry bit and the retry delay index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status {
    /// Status code type: 0 generic, 1 command specific, 2 media, 3 path, 7 vendor.
    pub sct: u8,
    pub sc: u8,
    pub dnr: bool,
    /// Command retry delay, an index into CRDT1..3.
    pub crd: u8,
    /// More information is in the error log page.
    pub more: bool,
}

macro_rules! statuses {
    ($($name:ident = $sct:literal, $sc:literal, $text:literal;)*) => {
        impl Status {
            $(pub const $name: Status = Status::new($sct, $sc);)*

            /// The specification's name of the code.
            pub fn name(self) -> &'static str {
                match (self.sct, self.sc) {
                    $(($sct, $sc) => $text,)*
                    _ => "unknown status",
                }
            }
        }
    };
}

statuses! {
    SUCCESS = 0, 0x00, "Successful Completion";
    INVALID_OPCODE = 0, 0x01, "Invalid Command Opcode";
    INVALID_FIELD = 0, 0x02, "Invalid Field in Command";
    CID_CONFLICT = 0, 0x03, "Command ID Conflict";
    DATA_TRANSFER_ERROR = 0, 0x04, "Data Transfer Error";
    POWER_LOSS = 0, 0x05, "Commands Aborted due to Power Loss Notification";
    INTERNAL_ERROR = 0, 0x06, "Internal Error";
    ABORT_REQUESTED = 0, 0x07, "Command Abort Requested";
    SQ_DELETED = 0, 0x08, "Command Aborted due to SQ Deletion";
    FAILED_FUSED = 0, 0x09, "Command Aborted due to Failed Fused Command";
    MISSING_FUSED = 0, 0x0A, "Command Aborted due to Missing Fused Command";
    INVALID_NAMESPACE = 0, 0x0B, "Invalid Namespace or Format";
    SEQUENCE_ERROR = 0, 0x0C, "Command Sequence Error";
    SGL_SEGMENT = 0, 0x0D, "Invalid SGL Segment Descriptor";
    SGL_COUNT = 0, 0x0E, "Invalid Number of SGL Descriptors";
    SGL_DATA_LENGTH = 0, 0x0F, "Data SGL Length Invalid";
    SGL_METADATA_LENGTH = 0, 0x10, "Metadata SGL Length Invalid";
    SGL_TYPE = 0, 0x11, "SGL Descriptor Type Invalid";
    ATOMIC_WRITE_UNIT = 0, 0x14, "Atomic Write Unit Exceeded";
    SGL_OFFSET = 0, 0x16, "SGL Offset Invalid";
    HOST_ID_INCONSISTENT = 0, 0x18, "Host Identifier Inconsistent Format";
    KEEP_ALIVE_EXPIRED = 0, 0x19, "Keep Alive Timer Expired";
    KEEP_ALIVE_INVALID = 0, 0x1A, "Keep Alive Timeout Invalid";
    PREEMPT_ABORT = 0, 0x1B, "Command Aborted due to Preempt and Abort";
    WRITE_PROTECTED = 0, 0x20, "Namespace is Write Protected";
    INTERRUPTED = 0, 0x21, "Command Interrupted";
    TRANSIENT_TRANSPORT = 0, 0x22, "Transient Transport Error";
    LBA_RANGE = 0, 0x80, "LBA Out of Range";
    CAPACITY_EXCEEDED = 0, 0x81, "Capacity Exceeded";
    NAMESPACE_NOT_READY = 0, 0x82, "Namespace Not Ready";
    RESERVATION_CONFLICT = 0, 0x83, "Reservation Conflict";
    CONNECT_INCOMPATIBLE_FORMAT = 1, 0x80, "Connect Incompatible Format";
    CONNECT_CONTROLLER_BUSY = 1, 0x81, "Connect Controller Busy";
    CONNECT_INVALID_PARAMETERS = 1, 0x82, "Connect Invalid Parameters";
    CONNECT_RESTART_DISCOVERY = 1, 0x83, "Connect Restart Discovery";
    CONNECT_INVALID_HOST = 1, 0x84, "Connect Invalid Host";
    INVALID_QUEUE_TYPE = 1, 0x85, "Invalid Queue Type";
    DISCOVER_RESTART = 1, 0x90, "Discover Restart";
    AUTHENTICATION_REQUIRED = 1, 0x91, "Authentication Required";
    INVALID_QUEUE_ID = 1, 0x01, "Invalid Queue Identifier";
    INVALID_LOG_PAGE = 1, 0x09, "Invalid Log Page";
    ABORT_LIMIT_EXCEEDED = 1, 0x03, "Abort Command Limit Exceeded";
    AER_LIMIT_EXCEEDED = 1, 0x05, "Asynchronous Event Request Limit Exceeded";
    FEATURE_NOT_CHANGEABLE = 1, 0x0E, "Feature Not Changeable";
    FEATURE_NOT_SAVEABLE = 1, 0x0D, "Feature Identifier Not Saveable";
    WRITE_FAULT = 2, 0x80, "Write Fault";
    UNRECOVERED_READ = 2, 0x81, "Unrecovered Read Error";
    COMPARE_FAILURE = 2, 0x85, "Compare Failure";
    ACCESS_DENIED = 2, 0x86, "Access Denied";
    INTERNAL_PATH_ERROR = 3, 0x00, "Internal Path Error";
    ANA_PERSISTENT_LOSS = 3, 0x01, "Asymmetric Access Persistent Loss";
    ANA_INACCESSIBLE = 3, 0x02, "Asymmetric Access Inaccessible";
    ANA_TRANSITION = 3, 0x03, "Asymmetric Access Transition";
    CONTROLLER_PATH_ERROR = 3, 0x60, "Controller Pathing Error";
    HOST_PATH_ERROR = 3, 0x70, "Host Pathing Error";
    ABORTED_BY_HOST = 3, 0x71, "Command Aborted By Host";
}

impl Status {
    pub const fn new(sct: u8, sc: u8) -> Self {
        Status {
            sct,
            sc,
            dnr: false,
            crd: 0,
            more: false,
        }
    }

    pub const fn do_not_retry(self) -> Self {
        Status { dnr: true, ..self }
    }

    pub fn is_success(self) -> bool {
        self.sct == 0 && self.sc == 0
    }

    /// Bytes 14 and 15 of a CQE: P 0, SC 8:1, SCT 11:9, CRD 13:12, M 14, DNR 15. The phase tag is not used on fabrics.
    pub fn from_field(field: u16) -> Self {
        Status {
            sc: (field >> 1) as u8,
            sct: (field >> 9) as u8 & 7,
            crd: (field >> 12) as u8 & 3,
            more: field & 1 << 14 != 0,
            dnr: field & 1 << 15 != 0,
        }
    }

    pub fn to_field(self) -> u16 {
        u16::from(self.sc) << 1
            | u16::from(self.sct & 7) << 9
            | u16::from(self.crd & 3) << 12
            | u16::from(self.more) << 14
            | u16::from(self.dnr) << 15
    }
}

impl std::fmt::Display for Status {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} (type {}, code 0x{:02x}", self.name(), self.sct, self.sc)?;
        if self.dnr {
            write!(f, ", do not retry")?;
        }
        write!(f, ")")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_field_value_survives() {
        for field in 0..=u16::MAX {
            assert_eq!(Status::from_field(field).to_field(), field & !1);
        }
    }

    #[test]
    fn names() {
        let status = Status::from_field(0x8000 | 0x82 << 1 | 1 << 9);
        assert_eq!(status, Status::CONNECT_INVALID_PARAMETERS.do_not_retry());
        assert_eq!(
            status.to_string(),
            "Connect Invalid Parameters (type 1, code 0x82, do not retry)"
        );
    }
}

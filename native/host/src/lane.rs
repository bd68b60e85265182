//! Traffic classes: views of one device whose commands never queue behind each other's.

use crate::device::NvmeTcpDevice;
use headrace_transfer::{BlockDevice, DeviceInfo, Recorded, Request};
use std::sync::Arc;
use std::time::Duration;

/// What a command is for. Each class has I/O queues of its own, connected when it is first used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TrafficClass {
    /// Reads of training data, and whatever says nothing.
    #[default]
    Feed,
    /// Large writes of checkpoints.
    Checkpoint,
    /// Small reads and writes that others wait for.
    Metadata,
}

/// How many classes there are.
pub(crate) const LANES: usize = 3;

impl TrafficClass {
    pub const ALL: [TrafficClass; LANES] = [
        TrafficClass::Feed,
        TrafficClass::Checkpoint,
        TrafficClass::Metadata,
    ];

    pub fn name(self) -> &'static str {
        match self {
            TrafficClass::Feed => "feed",
            TrafficClass::Checkpoint => "checkpoint",
            TrafficClass::Metadata => "metadata",
        }
    }
}

/// A device, seen by one traffic class. All views share the device: its paths, its loss counter, its end.
pub struct NvmeTcpLane {
    device: Arc<NvmeTcpDevice>,
    class: TrafficClass,
}

impl NvmeTcpDevice {
    /// The device for this class of traffic. The device itself is its feed.
    pub fn lane(self: &Arc<Self>, class: TrafficClass) -> Arc<NvmeTcpLane> {
        Arc::new(NvmeTcpLane {
            device: self.clone(),
            class,
        })
    }
}

impl BlockDevice for NvmeTcpLane {
    fn info(&self) -> DeviceInfo {
        self.device.info()
    }

    fn tells_departures(&self) -> bool {
        true
    }

    fn loss_count(&self) -> u64 {
        self.device.loss_count()
    }

    fn submit(&self, requests: Vec<Request>) {
        self.device.submit_as(self.class, requests);
    }

    fn events(&self) -> Option<Recorded> {
        self.device.events()
    }

    fn describe(&self) -> serde_json::Value {
        let mut said = self.device.describe();
        said["lane"] = self.class.name().into();
        said
    }

    /// A view has nothing to end; the device ends with its own `close`.
    fn close(&self, _timeout: Duration) {}
}

//! Traffic classes of one device: queues of their own, when first used and where there are enough.

#[path = "fake/calls.rs"]
mod calls;
mod fake;

use calls::{close, flush, pattern};
use fake::{Action, Fake, Media, Script, BLOCK, BLOCKS};
use headrace_host::{NvmeTcpDevice, NvmeTcpLane, TrafficClass};
use headrace_transfer::{submit_one, BlockDevice, Buffer, IoError, Op};
use headrace_wire::{admin, io, Status};
use std::sync::Arc;
use std::time::Duration;

fn write(lane: &NvmeTcpLane, offset: u64, bytes: &[u8]) -> Result<(), IoError> {
    let from = Buffer::from_vec(bytes.to_vec());
    let pending = submit_one(lane, Op::Write { from, fua: false }, offset);
    pending.wait(Duration::from_secs(20)).expect("an end")
}

fn queues(fake: &Fake, opcode: u8) -> Vec<u16> {
    let seen = fake.seen();
    let io = seen.iter().filter(|s| s.qid > 0 && s.sqe.opcode() == opcode);
    io.map(|s| s.qid).collect()
}

fn lanes(device: &Arc<NvmeTcpDevice>) -> [Arc<NvmeTcpLane>; 3] {
    TrafficClass::ALL.map(|class| device.lane(class))
}

#[test]
fn each_class_gets_its_own_queue_when_it_is_first_used() {
    let fake = Fake::start(Script::default());
    let device = NvmeTcpDevice::open(fake.options()).unwrap();
    assert_eq!(fake.connections(), 2);
    let [feed, checkpoint, metadata] = lanes(&device);
    write(&metadata, 0, &pattern(4096, 1)).unwrap();
    assert_eq!(fake.connections(), 3);
    write(&checkpoint, 4096, &pattern(4096, 2)).unwrap();
    write(&feed, 8192, &pattern(4096, 3)).unwrap();
    write(&metadata, 12288, &pattern(4096, 4)).unwrap();
    assert_eq!(queues(&fake, io::WRITE), [2, 3, 1, 2]);
    assert_eq!(fake.connections(), 4);
    let said = metadata.describe();
    assert_eq!(
        (&said["lanes"]["metadata"], &said["lane"]),
        (&1.into(), &"metadata".into())
    );
    // A view has no end of its own.
    metadata.close(Duration::from_secs(1));
    write(&metadata, 0, &pattern(4096, 5)).unwrap();
    close(&device);
    assert!(write(&metadata, 0, &pattern(4096, 6)).is_err());
}

#[test]
fn no_class_waits_behind_another() {
    let fake = Fake::start(Script {
        hook: Box::new(|qid, sqe, _| match (qid, sqe.opcode()) {
            (1, io::READ) => Action::Silent,
            _ => Action::Normal,
        }),
        ..Default::default()
    });
    let device = NvmeTcpDevice::open(fake.options()).unwrap();
    let [feed, checkpoint, metadata] = lanes(&device);
    // More than its queue takes: the rest waits in the device.
    let stuck: Vec<_> = (0..100)
        .map(|_| {
            submit_one(
                &*feed,
                Op::Read {
                    into: Buffer::zeroed(4096),
                },
                0,
            )
        })
        .collect();
    write(&checkpoint, 0, &pattern(1 << 20, 1)).unwrap();
    write(&metadata, 0, &pattern(4096, 1)).unwrap();
    assert!(stuck[0].wait(Duration::ZERO).is_none());
    assert_eq!(device.loss_count(), 0);
}

#[test]
fn where_queues_are_few_classes_share_and_say_so() {
    let fake = Fake::start(Script {
        queues: 2,
        ..Default::default()
    });
    let device = NvmeTcpDevice::open(fake.options()).unwrap();
    for lane in lanes(&device) {
        write(&lane, 0, &pattern(4096, 1)).unwrap();
    }
    assert_eq!(queues(&fake, io::WRITE), [1, 2, 1]);
    let said = device.describe();
    assert_eq!(
        (&said["lanes"]["checkpoint"], &said["lanes"]["metadata"]),
        (&1.into(), &"shares the feed's".into())
    );
}

#[test]
fn a_queue_that_is_refused_after_all_is_done_without() {
    let fake = Fake::start(Script {
        hook: Box::new(|qid, sqe, _| match (qid, sqe.opcode(), sqe.fctype()) {
            (2.., admin::FABRICS, 1) => Action::Status(Status::CONNECT_CONTROLLER_BUSY, 0),
            _ => Action::Normal,
        }),
        ..Default::default()
    });
    let device = NvmeTcpDevice::open(fake.options()).unwrap();
    let [_, checkpoint, _] = lanes(&device);
    write(&checkpoint, 0, &pattern(4096, 1)).unwrap();
    assert_eq!(queues(&fake, io::WRITE), [1]);
    assert_eq!(device.loss_count(), 1);
    assert_eq!(device.describe()["lanes"]["checkpoint"], "shares the feed's");
}

/// The volatile cache is the controller's, not a queue's.
#[test]
fn a_flush_by_one_class_covers_what_another_wrote() {
    let media = Media::new(vec![0; BLOCKS * BLOCK]);
    let fake = Fake::start_over(0, Script::default(), media.clone());
    let device = NvmeTcpDevice::open(fake.options()).unwrap();
    let bytes = pattern(4096, 9);
    write(&device.lane(TrafficClass::Checkpoint), 0, &bytes).unwrap();
    flush(&device).unwrap();
    assert_eq!(media.durable.lock().unwrap()[..4096], bytes);
}

//! Commands of the admin queue.

use crate::controller::{round_kato, Controller, HOST_BEHAVIOUR_BYTES};
use crate::identify::identify;
use crate::pages::get_log_page;
use crate::shared::Shared;
use headrace_wire::command::feature;
use headrace_wire::{admin, Sqe, Status};
use std::net::SocketAddr;
use std::sync::atomic::Ordering;

pub(crate) enum Outcome {
    Value(u32),
    Bytes(Vec<u8>),
    /// Answered when something happens.
    Held,
}

/// Bytes that the host sends with this command.
pub(crate) fn from_host(sqe: &Sqe) -> u32 {
    match (sqe.opcode(), sqe.cdw(10) as u8) {
        (admin::SET_FEATURES, feature::HOST_BEHAVIOUR) => HOST_BEHAVIOUR_BYTES as u32,
        _ => 0,
    }
}

pub(crate) fn execute(
    sqe: &Sqe,
    data: &[u8],
    controller: &Controller,
    shared: &Shared,
    local: SocketAddr,
) -> Result<Outcome, Status> {
    match sqe.opcode() {
        admin::IDENTIFY => identify(sqe, controller).map(Outcome::Bytes),
        admin::GET_LOG_PAGE => get_log_page(sqe, controller, shared, local).map(Outcome::Bytes),
        admin::KEEP_ALIVE => Ok(Outcome::Value(0)),
        admin::ASYNC_EVENT_REQUEST => Ok(Outcome::Held),
        admin::GET_FEATURES => get_feature(sqe, controller),
        admin::SET_FEATURES => set_feature(sqe, data, controller),
        _ => Err(Status::INVALID_OPCODE.do_not_retry()),
    }
}

/// Number of I/O queues in both halves, zero-based.
fn queue_count(queues: u16) -> u32 {
    let zero_based = u32::from(queues.saturating_sub(1));
    zero_based | zero_based << 16
}

fn get_feature(sqe: &Sqe, controller: &Controller) -> Result<Outcome, Status> {
    let refuse = |status: Status| Err(status.do_not_retry());
    // Only current values: ONCS says so.
    if sqe.cdw(10) >> 8 & 7 != 0 {
        return refuse(Status::INVALID_FIELD);
    }
    let state = controller.state();
    let io = !controller.subsystem.discovery;
    Ok(match sqe.cdw(10) as u8 {
        feature::ASYNC_EVENT_CONFIG => Outcome::Value(state.async_config),
        feature::KEEP_ALIVE_TIMER => Outcome::Value(controller.kato_ms.load(Ordering::Relaxed)),
        feature::ARBITRATION | feature::POWER_MANAGEMENT | feature::TEMPERATURE if io => Outcome::Value(0),
        feature::ERROR_RECOVERY | feature::WRITE_ATOMICITY if io => Outcome::Value(0),
        feature::VOLATILE_WRITE_CACHE if io => {
            Outcome::Value(u32::from(controller.write_cache.load(Ordering::Relaxed)))
        }
        feature::NUMBER_OF_QUEUES if io => {
            let granted = if state.queues_granted == 0 {
                controller.subsystem.limits.max_io_queues
            } else {
                state.queues_granted
            };
            Outcome::Value(queue_count(granted))
        }
        feature::HOST_BEHAVIOUR if io => Outcome::Bytes(state.host_behaviour.to_vec()),
        feature::RESERVATION_NOTIFICATION_MASK if io => Outcome::Value(controller.notice_mask(sqe)?),
        feature::RESERVATION_PERSISTENCE if io => Outcome::Value(controller.persists(sqe)?.into()),
        feature::HOST_IDENTIFIER if io => {
            // EXHID: the 128-bit form, the only one over fabrics.
            if sqe.cdw(11) & 1 == 0 {
                return refuse(Status::HOST_ID_INCONSISTENT);
            }
            Outcome::Bytes(controller.host.hostid.to_vec())
        }
        _ => return refuse(Status::INVALID_FIELD),
    })
}

fn set_feature(sqe: &Sqe, data: &[u8], controller: &Controller) -> Result<Outcome, Status> {
    let refuse = |status: Status| Err(status.do_not_retry());
    // SV: nothing is saved over a reset.
    if sqe.cdw(10) & 1 << 31 != 0 {
        return refuse(Status::FEATURE_NOT_SAVEABLE);
    }
    let value = sqe.cdw(11);
    let io = !controller.subsystem.discovery;
    let mut state = controller.state();
    match sqe.cdw(10) as u8 {
        feature::ASYNC_EVENT_CONFIG => state.async_config = value,
        feature::KEEP_ALIVE_TIMER => controller.kato_ms.store(round_kato(value), Ordering::Relaxed),
        feature::VOLATILE_WRITE_CACHE if io => {
            if !controller.cached() {
                return refuse(Status::INVALID_FIELD);
            }
            controller.write_cache.store(value & 1 != 0, Ordering::Relaxed);
        }
        feature::NUMBER_OF_QUEUES if io => {
            let (sq, cq) = (value as u16, (value >> 16) as u16);
            if sq == u16::MAX || cq == u16::MAX {
                return refuse(Status::INVALID_FIELD);
            }
            // Once, before the first I/O queue exists.
            if state.queues.range(1..).next().is_some() {
                return refuse(Status::SEQUENCE_ERROR);
            }
            state.queues_granted = (sq.min(cq) + 1).min(controller.subsystem.limits.max_io_queues);
            return Ok(Outcome::Value(queue_count(state.queues_granted)));
        }
        feature::HOST_BEHAVIOUR if io => {
            let Some(bytes) = data.get(..HOST_BEHAVIOUR_BYTES) else {
                return refuse(Status::SGL_DATA_LENGTH);
            };
            state.host_behaviour.copy_from_slice(bytes);
        }
        // Feature 83h, persistence, is carried out elsewhere: it syncs a file.
        feature::RESERVATION_NOTIFICATION_MASK if io => controller.set_notice_mask(sqe)?,
        // Accepted where it asks for what is so already.
        feature::POWER_MANAGEMENT if io && value & 0x1F == 0 => {}
        feature::ARBITRATION | feature::TEMPERATURE if io => return refuse(Status::FEATURE_NOT_CHANGEABLE),
        feature::ERROR_RECOVERY | feature::WRITE_ATOMICITY if io => {
            return refuse(Status::FEATURE_NOT_CHANGEABLE)
        }
        // Given in Connect.
        feature::HOST_IDENTIFIER if io => return refuse(Status::SEQUENCE_ERROR),
        _ => return refuse(Status::INVALID_FIELD),
    }
    Ok(Outcome::Value(0))
}

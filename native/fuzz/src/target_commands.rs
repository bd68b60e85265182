//! Invariant: whatever commands a host sends, in whatever order, with whatever fields, however it serves R2Ts, loses
//! connections and resets its controller: every command on a living connection ends exactly once, a correct one ends well,
//! the medium changes by valid writes only, and what is read is what was written.

mod world;

use arbitrary::{Result, Unstructured};
use headrace_wire::command::{CDW11_DEALLOCATE, CDW12_DEAC, CDW12_FUA};
use headrace_wire::log::get_log_page;
use headrace_wire::{admin, io, Sgl, Sqe};
use world::{Intent, World, BLOCK, BLOCKS, QUEUES};

const STEPS: usize = 300;

pub fn run(data: &[u8]) {
    let mut input = Unstructured::new(data);
    let Ok(mode) = input.arbitrary::<u8>() else { return };
    let mut world = World::new(mode);
    for _ in 0..STEPS {
        if input.is_empty() || step(&mut world, &mut input).is_err() {
            break;
        }
        world.observe();
    }
    world.settle();
}

fn below(input: &mut Unstructured<'_>, n: u32) -> Result<u32> {
    input.int_in_range(0..=n - 1)
}

fn step(world: &mut World, input: &mut Unstructured<'_>) -> Result<()> {
    let queue = 1 + below(input, QUEUES as u32 - 1)? as usize;
    match below(input, 20)? {
        0..=2 => write(world, input, queue, true)?,
        3..=4 => write(world, input, queue, false)?,
        5 => {
            let (slba, nlb) = range(input)?;
            let length = nlb * BLOCK as u32;
            let sqe = Sqe::rw(io::READ, 0, 1, slba, nlb).with_sgl(Sgl::Transport { length });
            world.issue(queue, sqe, Vec::new(), Intent::Read);
        }
        6 => world.issue(queue, Sqe::new(io::FLUSH, 0, 1), Vec::new(), Intent::Simple),
        7 => {
            let (slba, nlb) = range(input)?;
            let flags = below(input, 4)?;
            let fua = if flags & 1 != 0 { CDW12_FUA } else { 0 };
            let deac = if flags & 2 != 0 { CDW12_DEAC } else { 0 };
            let sqe = Sqe::rw(io::WRITE_ZEROES, 0, 1, slba, nlb);
            let sqe = sqe.with_cdw(12, sqe.cdw(12) | fua | deac);
            world.issue(queue, sqe, Vec::new(), Intent::Zero);
        }
        8 => manage(world, input, queue)?,
        9 => {
            let (slba, nlb) = range(input)?;
            let data = world.expected(slba, nlb);
            let length = data.len() as u32;
            let sqe = Sqe::rw(io::COMPARE, 0, 1, slba, nlb).with_sgl(Sgl::Transport { length });
            world.issue(queue, sqe, data, Intent::Any);
        }
        10 | 11 => {
            // Anything.
            let mut sqe = Sqe::new(input.arbitrary()?, 0, below(input, 3)?);
            for number in [10, 11, 12, 13, 14, 15] {
                if below(input, 3)? == 0 {
                    sqe = sqe.with_cdw(number, input.arbitrary()?);
                }
            }
            let length = below(input, 600)?;
            let (sgl, data) = match below(input, 4)? {
                0 => (Sgl::None, 0),
                1 => (Sgl::Transport { length }, 0),
                2 => (Sgl::InCapsule { offset: 0, length }, length),
                _ => (Sgl::Other(input.arbitrary()?), length),
            };
            let on = if below(input, 3)? == 0 { 0 } else { queue };
            world.issue(on, sqe.with_sgl(sgl), vec![1; data as usize], Intent::Any);
        }
        12 | 13 => {
            let (part, whole) = (input.arbitrary()?, below(input, 2)? == 0);
            world.serve_r2t(queue, if whole { usize::MAX } else { part });
        }
        14 => {
            let change = (below(input, 7)?, input.arbitrary()?);
            world.serve_wrongly(queue, change);
        }
        15 => administer(world, input)?,
        16 => match below(input, 4)? {
            0 => world.hang_up(0),
            1 => world.hang_up(queue),
            2 => world.reset(),
            _ => {
                let millis = u64::from(input.arbitrary::<u16>()?);
                world.advance(millis);
            }
        },
        17 => world.work(input.arbitrary()?),
        18 => world.mutation = Some((input.arbitrary()?, input.arbitrary()?)),
        _ => {
            let length = below(input, 40)? as usize;
            let bytes = input.bytes(length)?.to_vec();
            world.raw(queue, &bytes);
        }
    }
    Ok(())
}

fn range(input: &mut Unstructured<'_>) -> Result<(u64, u32)> {
    let slba = u64::from(below(input, BLOCKS as u32)?);
    let most = (BLOCKS as u64 - slba).min(64) as u32;
    Ok((slba, 1 + below(input, most)?))
}

fn write(world: &mut World, input: &mut Unstructured<'_>, queue: usize, in_capsule: bool) -> Result<()> {
    let (slba, nlb) = range(input)?;
    let nlb = if in_capsule { nlb.min(8) } else { nlb };
    let fua = if below(input, 4)? == 0 { CDW12_FUA } else { 0 };
    let data = world.fresh(nlb);
    let length = data.len() as u32;
    let sgl = if in_capsule {
        Sgl::InCapsule { offset: 0, length }
    } else {
        Sgl::Transport { length }
    };
    let sqe = Sqe::rw(io::WRITE, 0, 1, slba, nlb).with_sgl(sgl);
    world.issue(queue, sqe.with_cdw(12, sqe.cdw(12) | fua), data, Intent::Write);
    Ok(())
}

fn manage(world: &mut World, input: &mut Unstructured<'_>, queue: usize) -> Result<()> {
    let count = 1 + below(input, 4)?;
    let mut data = Vec::new();
    for _ in 0..count {
        let (slba, nlb) = range(input)?;
        data.extend(headrace_wire::command::DsmRange { blocks: nlb, slba }.encode());
    }
    let length = data.len() as u32;
    let sqe = Sqe::new(io::DATASET_MANAGEMENT, 0, 1)
        .with_cdw(10, count - 1)
        .with_cdw(11, CDW11_DEALLOCATE)
        .with_sgl(Sgl::InCapsule { offset: 0, length });
    world.issue(queue, sqe, data, Intent::Deallocate);
    Ok(())
}

fn administer(world: &mut World, input: &mut Unstructured<'_>) -> Result<()> {
    let sqe = match below(input, 8)? {
        0 => Sqe::new(admin::IDENTIFY, 0, below(input, 3)?)
            .with_cdw(10, below(input, 32)?)
            .with_sgl(Sgl::Transport { length: 4096 }),
        1 => {
            let length = 4 + 4 * below(input, 2048)?;
            let offset = u64::from(below(input, 4096)?);
            get_log_page(0, below(input, 2)?, input.arbitrary()?, offset, length)
        }
        2 => Sqe::new(admin::GET_FEATURES, 0, 1).with_cdw(10, below(input, 0x90)?),
        3 => Sqe::new(admin::SET_FEATURES, 0, 1)
            .with_cdw(10, below(input, 0x90)?)
            .with_cdw(11, input.arbitrary()?),
        4 => Sqe::new(admin::ASYNC_EVENT_REQUEST, 0, 0),
        5 => Sqe::new(admin::KEEP_ALIVE, 0, 0),
        6 => Sqe::new(admin::ABORT, 0, 0).with_cdw(10, input.arbitrary()?),
        _ => {
            let mut sqe = Sqe::new(admin::FABRICS, 0, 0);
            sqe.0[4] = input.arbitrary()?;
            sqe.with_cdw(10, below(input, 3)?)
                .with_cdw(11, below(input, 0x80)?)
                .with_cdw(12, input.arbitrary()?)
        }
    };
    world.issue(0, sqe, Vec::new(), Intent::Any);
    Ok(())
}

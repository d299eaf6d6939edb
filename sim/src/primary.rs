//! Primary contexts: one for each device, shared by whoever retains it.

use crate::call::{Out, Res};
use crate::clock::Turn;
use crate::context::Context;
use crate::sync::lock;
use crate::{code, device, knobs};
use cudarc::driver::sys::CUctx_flags;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, OnceLock};

struct Primary {
    context: &'static Context,
    owners: Mutex<u64>,
    /// Held while the context changes between active and inactive, work being waited for. Nothing but other
    /// such changes of the same device waits for this lock.
    transition: Turn,
}

/// The device's primary context; made at first use, inactive until it is retained.
fn primary(ordinal: i32) -> Res<&'static Primary> {
    static ALL: [OnceLock<Primary>; knobs::MAX_DEVICES] = [const { OnceLock::new() }; knobs::MAX_DEVICES];
    let device = device::get(ordinal)?;
    Ok(ALL[device.ordinal].get_or_init(|| Primary {
        context: Context::create(device.ordinal, true, 0, false),
        owners: Mutex::new(0),
        transition: Turn::new(),
    }))
}

/// What can be set after the context was made.
pub const KNOWN_FLAGS: u32 = CUctx_flags::CU_CTX_SCHED_MASK as u32
    | CUctx_flags::CU_CTX_MAP_HOST as u32
    | CUctx_flags::CU_CTX_LMEM_RESIZE_TO_MAX as u32;

/// Ways for threads to wait are bits of which at most one is set.
pub fn check_flags(flags: u32, known: u32) -> Res {
    let ways = flags & CUctx_flags::CU_CTX_SCHED_MASK as u32;
    if flags & !known != 0 || ways.count_ones() > 1 {
        return Err(code::INVALID_VALUE);
    }
    Ok(())
}

fn retain(out: Out<usize>, device: i32) -> Res {
    out.check()?;
    let primary = primary(device)?;
    let _transition = primary.transition.take();
    *lock(&primary.owners) += 1;
    if !primary.context.is_active() {
        primary.context.activate();
    }
    out.put(primary.context.handle)
}

fn release(device: i32) -> Res {
    let primary = primary(device)?;
    let _transition = primary.transition.take();
    let last = {
        let mut owners = lock(&primary.owners);
        *owners = owners.checked_sub(1).ok_or(code::INVALID_CONTEXT)?;
        *owners == 0
    };
    if last && primary.context.is_active() {
        primary.context.deactivate();
    }
    Ok(())
}

fn reset(device: i32) -> Res {
    let primary = primary(device)?;
    let _transition = primary.transition.take();
    if primary.context.is_active() {
        primary.context.deactivate();
    }
    Ok(())
}

fn state(device: i32, flags: Out<u32>, active: Out<i32>) -> Res {
    flags.check()?;
    active.check()?;
    let primary = primary(device)?;
    flags.put(primary.context.flags.load(Ordering::Relaxed))?;
    active.put(primary.context.is_active() as i32)
}

fn set_flags(device: i32, flags: u32) -> Res {
    let primary = primary(device)?;
    check_flags(flags, KNOWN_FLAGS)?;
    primary.context.flags.store(flags, Ordering::Relaxed);
    Ok(())
}

exports! {
    fn cuDevicePrimaryCtxRetain(out: Out<usize>, device: i32) => retain(out, device);
    fn cuDevicePrimaryCtxRelease(device: i32) => release(device);
    fn cuDevicePrimaryCtxRelease_v2(device: i32) => release(device);
    fn cuDevicePrimaryCtxReset(device: i32) => reset(device);
    fn cuDevicePrimaryCtxReset_v2(device: i32) => reset(device);
    fn cuDevicePrimaryCtxGetState(device: i32, flags: Out<u32>, active: Out<i32>)
        => state(device, flags, active);
    fn cuDevicePrimaryCtxSetFlags(device: i32, flags: u32) => set_flags(device, flags);
    fn cuDevicePrimaryCtxSetFlags_v2(device: i32, flags: u32) => set_flags(device, flags);
}

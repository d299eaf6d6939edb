//! Primary contexts: one for each device, shared by whoever retains it.

use crate::call::{Out, Res};
use crate::context::Context;
use crate::sync::lock;
use crate::{code, device, knobs};
use std::sync::atomic::Ordering;
use std::sync::{Mutex, OnceLock};

struct Primary {
    context: &'static Context,
    owners: u64,
}

/// The device's primary context, with its lock; made at first use, inactive until it is retained.
fn primary(ordinal: i32) -> Res<&'static Mutex<Primary>> {
    static ALL: [OnceLock<Mutex<Primary>>; knobs::MAX_DEVICES] =
        [const { OnceLock::new() }; knobs::MAX_DEVICES];
    let device = device::get(ordinal)?;
    Ok(ALL[device.ordinal].get_or_init(|| {
        Mutex::new(Primary { context: Context::create(device.ordinal, true, 0, false), owners: 0 })
    }))
}

pub fn check_flags(flags: u32) -> Res {
    let schedule = flags & 7;
    if flags & !0x1f != 0 || !matches!(schedule, 0 | 1 | 2 | 4) {
        return Err(code::INVALID_VALUE);
    }
    Ok(())
}

fn retain(out: Out<usize>, device: i32) -> Res {
    out.check()?;
    let mut primary = lock(primary(device)?);
    primary.owners += 1;
    if !primary.context.is_active() {
        primary.context.activate();
    }
    out.put(primary.context.handle)
}

fn release(device: i32) -> Res {
    let ended = {
        let mut primary = lock(primary(device)?);
        if primary.owners == 0 {
            return Err(code::INVALID_CONTEXT);
        }
        primary.owners -= 1;
        (primary.owners == 0 && primary.context.is_active()).then_some(primary.context)
    };
    // Waits for its work, so not under the lock.
    if let Some(context) = ended {
        context.deactivate();
    }
    Ok(())
}

fn reset(device: i32) -> Res {
    let context = lock(primary(device)?).context;
    if context.is_active() {
        context.deactivate();
    }
    Ok(())
}

fn state(device: i32, flags: Out<u32>, active: Out<i32>) -> Res {
    flags.check()?;
    active.check()?;
    let primary = lock(primary(device)?);
    flags.put(primary.context.flags.load(Ordering::Relaxed))?;
    active.put(primary.context.is_active() as i32)
}

fn set_flags(device: i32, flags: u32) -> Res {
    let primary = lock(primary(device)?);
    check_flags(flags)?;
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

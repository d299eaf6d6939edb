//! Contexts: which one is current, whether one is still alive, and calling with one current.

use super::{Api, Ctx, check, code};
use crate::error::{Result, bail};

/// A context of the driver, in one of its lives: a reset makes another life of the same handle.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Context {
    pub handle: Ctx,
    pub device: i32,
    /// The driver's number for it, never reused (drivers from 12.0).
    id: Option<u64>,
    /// It is its device's primary context.
    primary: bool,
}

/// The calling thread's current context, 0 if none.
pub fn current_handle(api: &Api) -> Ctx {
    let mut handle = 0;
    // SAFETY: the pointer is to a local.
    match unsafe { (api.ctx_current)(&mut handle) } {
        code::SUCCESS => handle,
        _ => 0,
    }
}

/// The device of the calling thread's current context, which there must be.
fn current_device(api: &Api) -> Result<i32> {
    let mut device = 0;
    // SAFETY: the pointer is to a local.
    check(api, unsafe { (api.ctx_device)(&mut device) }, "cuCtxGetDevice")?;
    Ok(device)
}

/// The device's primary context, brought to life if it is not. The reference is kept for good: the pool is there as long
/// as the process.
pub fn primary(api: &Api, device: i32) -> Result<Context> {
    if device < 0 || device >= super::device_count() {
        bail!(POOL_ERROR_NO_DEVICE, "there is no device {device}; the driver sees {}", super::device_count());
    }
    let mut handle = 0;
    // SAFETY: the pointer is to a local.
    check(api, unsafe { (api.primary_retain)(&mut handle, device) }, "cuDevicePrimaryCtxRetain")?;
    Ok(Context { handle, device, id: id_of(api, handle), primary: true })
}

/// The calling thread's current context, or the primary one of device 0 if there is none.
pub fn current_or_primary(api: &Api) -> Result<Context> {
    let handle = current_handle(api);
    if handle == 0 {
        return primary(api, 0);
    }
    let device = current_device(api)?;
    of(api, handle, device)
}

/// What is to be known of a context that is current or was named by the driver.
pub fn of(api: &Api, handle: Ctx, device: i32) -> Result<Context> {
    let context = Context { handle, device, id: id_of(api, handle), primary: false };
    if api_version(api, handle) {
        return Ok(Context { primary: is_active_primary(api, handle, device)?, ..context });
    }
    // A primary context that was reset stays current and dead until somebody retains it again.
    let revived = primary(api, device)?;
    if revived.handle == handle {
        return Ok(revived);
    }
    bail!(POOL_ERROR_CONTEXT_LOST, "the current context was destroyed")
}

/// Whether the handle is that of the device's primary context. Asking means retaining, so an inactive one is not asked.
fn is_active_primary(api: &Api, handle: Ctx, device: i32) -> Result<bool> {
    Ok(is_primary_active(api, device) && primary(api, device)?.handle == handle)
}

fn is_primary_active(api: &Api, device: i32) -> bool {
    let (mut flags, mut active) = (0, 0);
    // SAFETY: the pointers are to locals.
    let result = unsafe { (api.primary_state)(device, &mut flags, &mut active) };
    result == code::SUCCESS && active != 0
}

fn id_of(api: &Api, handle: Ctx) -> Option<u64> {
    let mut id = 0;
    // SAFETY: the pointer is to a local; the driver answers for dead contexts with an error.
    (unsafe { api.ctx_id?(handle, &mut id) } == code::SUCCESS).then_some(id)
}

fn api_version(api: &Api, handle: Ctx) -> bool {
    let mut version = 0;
    // SAFETY: the pointer is to a local; the driver answers 201 for destroyed and inactive contexts.
    unsafe { (api.ctx_api_version)(handle, &mut version) == code::SUCCESS }
}

impl Context {
    /// Whether it is its device's primary context.
    pub fn is_primary(&self) -> bool {
        self.primary
    }

    /// Whether this life of the context goes on.
    pub fn is_alive(&self, api: &Api) -> bool {
        api_version(api, self.handle)
            && (!self.primary || is_primary_active(api, self.device))
            && (self.id.is_none() || id_of(api, self.handle) == self.id)
    }

    /// Calls `f` with this context current, and leaves the calling thread as it was.
    pub fn with<R>(&self, api: &Api, f: impl FnOnce() -> R) -> Result<R> {
        if current_handle(api) == self.handle {
            return Ok(f());
        }
        // SAFETY: the handle was given by the driver; a destroyed one is answered with an error.
        check(api, unsafe { (api.ctx_push)(self.handle) }, "cuCtxPushCurrent")?;
        let result = f();
        let mut popped = 0;
        // SAFETY: takes off what was pushed above; the pointer is to a local.
        unsafe { (api.ctx_pop)(&mut popped) };
        Ok(result)
    }
}

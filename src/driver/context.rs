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
pub fn current_handle(api: &Api) -> Result<Ctx> {
    let mut handle = 0;
    // SAFETY: the pointer is to a local.
    check(api, unsafe { (api.ctx_current)(&mut handle) }, "cuCtxGetCurrent")?;
    Ok(handle)
}

/// The device of the calling thread's current context, which there must be.
pub fn current_device(api: &Api) -> Result<i32> {
    let mut device = 0;
    // SAFETY: the pointer is to a local.
    check(api, unsafe { (api.ctx_device)(&mut device) }, "cuCtxGetDevice")?;
    Ok(device)
}

/// The device's primary context, brought to life if it is not. The reference is kept for good: the pool is
/// there as long as the process.
pub fn primary(api: &Api, device: i32) -> Result<Context> {
    if device < 0 || device >= super::device_count() {
        bail!(POOL_ERROR_NO_DEVICE, "there is no device {device}; the driver sees {}", super::device_count());
    }
    let mut handle = 0;
    // SAFETY: the pointer is to a local.
    check(api, unsafe { (api.primary_retain)(&mut handle, device) }, "cuDevicePrimaryCtxRetain")?;
    let id = id_of(api, handle).inspect_err(|_| release_primary(api, device))?;
    Ok(Context { handle, device, id, primary: true })
}

/// Gives back a reference that [`primary`] took.
fn release_primary(api: &Api, device: i32) {
    // SAFETY: takes no pointer, and the reference is the caller's of this function.
    unsafe { (api.primary_release)(device) };
}

/// The calling thread's current context, or the primary one of device 0 if there is none.
pub fn current_or_primary(api: &Api) -> Result<Context> {
    let handle = current_handle(api)?;
    if handle == 0 {
        return primary(api, 0);
    }
    let device = current_device(api)?;
    of(api, handle, device)
}

/// What is to be known of a context that is current or was named by the driver.
pub fn of(api: &Api, handle: Ctx, device: i32) -> Result<Context> {
    if is_dead(api, handle) {
        // A primary context that was reset stays current and dead until somebody retains it again.
        let revived = primary(api, device)?;
        if revived.handle == handle {
            return Ok(revived);
        }
        release_primary(api, device);
        bail!(POOL_ERROR_CONTEXT_LOST, "the current context was destroyed");
    }
    // Asking for the primary context's handle means retaining it, so an inactive one is not asked for. The
    // reference is kept if it is the one that is used from now on.
    if !is_primary_inactive(api, device) {
        let primary = primary(api, device)?;
        if primary.handle == handle {
            return Ok(primary);
        }
        release_primary(api, device);
    }
    Ok(Context { handle, device, id: id_of(api, handle)?, primary: false })
}

/// The context of a stream that is none of the default ones; `None` where drivers cannot tell.
pub fn of_stream(api: &Api, stream: super::Stream) -> Result<Option<Ctx>> {
    let Some(stream_ctx) = api.stream_ctx.filter(|_| stream > 2) else { return Ok(None) };
    let mut handle = 0;
    // SAFETY: the stream is the caller's own, in this call; the pointer is to a local.
    let result = unsafe { stream_ctx(stream, &mut handle) };
    if result == code::NOT_SUPPORTED {
        return Ok(None);
    }
    check(api, result, "cuStreamGetCtx")?;
    Ok(Some(handle).filter(|handle| *handle != 0))
}

/// What is to be known of a context that need not be current.
pub fn by_handle(api: &Api, handle: Ctx) -> Result<Context> {
    let unknown = Context { handle, device: 0, id: None, primary: false };
    let device = unknown.with(api, || current_device(api))??;
    of(api, handle, device)
}

/// Whether the driver says that the device's primary context is inactive. A failure to say is none.
fn is_primary_inactive(api: &Api, device: i32) -> bool {
    let (mut flags, mut active) = (0, 0);
    // SAFETY: the pointers are to locals.
    let result = unsafe { (api.primary_state)(device, &mut flags, &mut active) };
    result == code::SUCCESS && active == 0
}

/// `None` where drivers do not number contexts. Where they do, a failure is not taken for that: the context
/// would pass for another life of itself.
fn id_of(api: &Api, handle: Ctx) -> Result<Option<u64>> {
    let Some(ctx_id) = api.ctx_id else { return Ok(None) };
    let mut id = 0;
    // SAFETY: the pointer is to a local; the driver answers for dead contexts with an error.
    check(api, unsafe { ctx_id(handle, &mut id) }, "cuCtxGetId")?;
    Ok(Some(id))
}

/// Whether the driver says that the context is destroyed or inactive. A failure to say is none.
fn is_dead(api: &Api, handle: Ctx) -> bool {
    let mut version = 0;
    // SAFETY: the pointer is to a local; the driver answers for destroyed and inactive contexts with an
    // error.
    let result = unsafe { (api.ctx_api_version)(handle, &mut version) };
    matches!(result, code::INVALID_CONTEXT | code::CONTEXT_IS_DESTROYED)
}

impl Context {
    /// Whether it is its device's primary context.
    pub fn is_primary(&self) -> bool {
        self.primary
    }

    /// Whether this life of the context goes on, as far as the driver can tell.
    pub fn is_alive(&self, api: &Api) -> bool {
        let other_life = || id_of(api, self.handle).is_ok_and(|now| now != self.id);
        let reset = || self.primary && is_primary_inactive(api, self.device);
        !(is_dead(api, self.handle) || reset() || other_life())
    }

    /// Calls `f` with this context current, and leaves the calling thread as it was.
    pub fn with<R>(&self, api: &Api, f: impl FnOnce() -> R) -> Result<R> {
        if current_handle(api)? == self.handle {
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

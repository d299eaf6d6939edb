//! Whether the driver may be used: before `cuInit`, after it, in a child of `fork`, and while the process
//! exits.

use crate::call::Res;
use crate::{clock, code, device, knobs, work};
use std::cell::Cell;
use std::sync::Once;
use std::sync::atomic::{AtomicU8, Ordering};

const UNUSED: u8 = 0;
const LIVE: u8 = 1;
const EXITING: u8 = 2;
const FORKED: u8 = 3;

static PHASE: AtomicU8 = AtomicU8::new(UNUSED);

thread_local! {
    /// Set while this thread runs a host function of a stream, which must not call the driver.
    static IN_HOST_FUNCTION: Cell<bool> = const { Cell::new(false) };
}

/// The code every call answers when the driver cannot be used.
#[inline]
pub fn usable() -> Res {
    if PHASE.load(Ordering::Relaxed) != LIVE {
        return refused();
    }
    if IN_HOST_FUNCTION.get() {
        return Err(code::NOT_PERMITTED);
    }
    Ok(())
}

#[cold]
fn refused() -> Res {
    match PHASE.load(Ordering::Acquire) {
        LIVE => Ok(()),
        EXITING => Err(code::DEINITIALIZED),
        _ => Err(code::NOT_INITIALIZED),
    }
}

/// Whether the process is on its way out, so that stream work must stop.
pub fn exiting() -> bool {
    PHASE.load(Ordering::Acquire) == EXITING
}

/// Runs a host function, during which this thread's calls are refused.
pub fn in_host_function(run: impl FnOnce()) {
    IN_HOST_FUNCTION.set(true);
    run();
    IN_HOST_FUNCTION.set(false);
}

extern "C" fn after_fork_in_child() {
    // A child of an unused driver may initialise it for itself.
    if PHASE.load(Ordering::Relaxed) != UNUSED {
        PHASE.store(FORKED, Ordering::Release);
    }
}

extern "C" fn at_exit() {
    if PHASE.load(Ordering::Acquire) == LIVE {
        PHASE.store(EXITING, Ordering::Release);
        clock::wake_everyone();
        // Work that is being done may use what later exit handlers tear down.
        work::wait_until_quiet(std::time::Duration::from_secs(2));
    }
}

fn init(flags: u32) -> Res {
    match PHASE.load(Ordering::Acquire) {
        EXITING => return Err(code::DEINITIALIZED),
        FORKED => return Err(code::NOT_INITIALIZED),
        _ => {}
    }
    // The knobs are read here at the latest, too late for those that concern this very call.
    let injected = knobs::first_use().then(|| knobs::injected_failure("cuInit"));
    if let Some(Some(code)) = injected {
        return Err(code);
    }
    if flags != 0 {
        return Err(code::INVALID_VALUE);
    }
    if device::count() == 0 {
        return Err(code::NO_DEVICE);
    }
    static HANDLERS: Once = Once::new();
    HANDLERS.call_once(|| {
        // SAFETY: both handlers are functions of this library, which is never unloaded.
        unsafe {
            libc::pthread_atfork(None, None, Some(after_fork_in_child));
            libc::atexit(at_exit);
        }
        let _ = PHASE.compare_exchange(UNUSED, LIVE, Ordering::AcqRel, Ordering::Acquire);
    });
    Ok(())
}

exports! {
    early fn cuInit(flags: u32) => init(flags);
    early fn cuDriverGetVersion(version: crate::call::Out<i32>) => version.put(knobs::driver_version());
}

//! Contexts that end under the pool, and what its own use of them would otherwise change for the program.
//!
//! The pool keeps a reference to each primary context that it has memory in. So the shim counts the
//! program's: when its last one is released the context is reset, as it would be without the pool. After a
//! context has ended the pool is made to notice.

use crate::guard::{UNSAID, guarded};
use crate::hooks::{CuResult, code};
use crate::mode::{self, Mode};
use crate::pool::{self, CURRENT_DEVICE, Pool, Request};
use crate::{info, real};
use core::ffi::c_int;
use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicI64, AtomicU8, AtomicUsize, Ordering::*};

hooks! {
    fn cuDevicePrimaryCtxRetain(context: *mut usize, device: c_int)
        |call| retained(device, guarded(&cuDevicePrimaryCtxRetain::HOOK, device, || UNSAID, call));
    fn cuDevicePrimaryCtxRelease(device: c_int) |call| released(device, call);
    fn cuDevicePrimaryCtxRelease_v2(device: c_int) |call| released(device, call);
    fn cuDevicePrimaryCtxReset(device: c_int) |call| gone(call());
    fn cuDevicePrimaryCtxReset_v2(device: c_int) |call| gone(call());
    fn cuCtxDestroy(context: usize) |call| gone(call());
    fn cuCtxDestroy_v2(context: usize) |call| gone(call());
}

/// Devices and contexts that are kept track of. More contexts than that at a time are noticed later, by the
/// pool's own questions.
const MOST: usize = 64;

/// The program's references to primary contexts.
static REFERENCES: [AtomicI64; MOST] = [const { AtomicI64::new(0) }; MOST];
/// The pool has served in some context of the device, and may have a reference of its own.
static SERVED: [AtomicBool; MOST] = [const { AtomicBool::new(false) }; MOST];
/// Contexts that the pool has served in, and an address of it in each.
static CONTEXTS: [(AtomicUsize, AtomicUsize); MOST] =
    [const { (AtomicUsize::new(0), AtomicUsize::new(0)) }; MOST];
/// A context has ended since the pool last looked.
static UNNOTICED: AtomicBool = AtomicBool::new(false);
static BACKEND_CHOSEN: AtomicU8 = AtomicU8::new(0);

fn per_device<T>(table: &[T; MOST], device: c_int) -> Option<&T> {
    usize::try_from(device).ok().and_then(|at| table.get(at))
}

fn retained(device: c_int, result: CuResult) -> CuResult {
    if result == code::SUCCESS
        && let Some(references) = per_device(&REFERENCES, device)
    {
        references.fetch_add(1, Relaxed);
    }
    result
}

fn released(device: c_int, call: impl Fn() -> CuResult) -> CuResult {
    let served = per_device(&SERVED, device).is_some_and(|served| served.load(Relaxed));
    let Some(references) = per_device(&REFERENCES, device) else { return call() };
    if mode::get() != Mode::Pool || !served {
        let result = call();
        if result == code::SUCCESS {
            references.fetch_sub(1, Relaxed);
        }
        return result;
    }
    // The pool's reference is not the program's to release.
    if references.load(Relaxed) <= 0 {
        return code::INVALID_CONTEXT;
    }
    let result = call();
    if result == code::SUCCESS && references.fetch_sub(1, Relaxed) == 1 && real::is_primary_active(device) {
        real::reset_primary(device);
    }
    gone(result)
}

/// A context has ended, if the result is a success.
fn gone(result: CuResult) -> CuResult {
    if result == code::SUCCESS
        && mode::get() == Mode::Pool
        && let Some(pool) = pool::if_open()
    {
        UNNOTICED.store(true, Relaxed);
        // The question after an address of a lost context makes the pool give its memory back.
        for (context, address) in &CONTEXTS {
            let address = address.load(Relaxed);
            if address != 0 && pool.query(address).is_none() && !real::is_alive(context.load(Relaxed)) {
                context.store(0, Relaxed);
            }
        }
        info::forget_dead(pool);
    }
    result
}

/// Before the pool serves a request in a context.
#[inline]
pub fn prepare(pool: &Pool) {
    if BACKEND_CHOSEN.load(Acquire) != DONE {
        choose_backend(pool);
    }
    if UNNOTICED.load(Relaxed) {
        notice(pool);
    }
}

const DONE: u8 = 2;

/// Memory of the virtual memory calls is open to its own device only. Where devices can reach each other's
/// memory, programs rely on that, and the pool takes its memory by `cuMemAlloc`.
#[cold]
fn choose_backend(pool: &Pool) {
    if BACKEND_CHOSEN.compare_exchange(0, 1, Acquire, Acquire).is_ok() {
        if real::has_peers() && !pool.prefer_malloc() {
            crate::text::say(format_args!(
                "memory of the pool cannot be reached from other devices (CUDAPOOL_CONF=backend:malloc)"
            ));
        }
        BACKEND_CHOSEN.store(DONE, Release);
    }
    while BACKEND_CHOSEN.load(Acquire) != DONE {
        // Another thread is at it.
        // SAFETY: plain.
        unsafe { libc::sched_yield() };
    }
}

/// Stream-ordered requests do not ask whether the context is still the same; one that is device-ordered does.
#[cold]
fn notice(pool: &Pool) {
    if !UNNOTICED.swap(false, Relaxed) {
        return;
    }
    let request = Request {
        struct_size: size_of::<Request>(),
        pool: ptr::null_mut(),
        size: 1,
        alignment: 0,
        device: CURRENT_DEVICE,
        reserved: 0,
        flags: 0,
        stream: 0,
        owner: ptr::null(),
    };
    if let Ok(block) = pool.alloc_with(&request) {
        pool.free(block);
    }
}

/// Remembers where the pool has served.
#[inline]
pub fn note(context: usize, address: usize) {
    match CONTEXTS.first() {
        Some((first, at)) if first.load(Relaxed) == context => at.store(address, Relaxed),
        _ => note_other(context, address),
    }
}

#[cold]
fn note_other(context: usize, address: usize) {
    if context == 0 {
        return;
    }
    for (known, at) in &CONTEXTS {
        let now = match known.compare_exchange(0, context, Relaxed, Relaxed) {
            Ok(_) => {
                if let Some(served) = per_device(&SERVED, real::device_of_context(context)) {
                    served.store(true, Relaxed);
                }
                context
            }
            Err(now) => now,
        };
        if now == context {
            at.store(address, Relaxed);
            return;
        }
    }
}

//! Stream captures: which are under way, so that allocations in them stay the driver's, and so that the pool,
//! which cannot see captures of non-blocking streams by itself, hears of them.

use crate::alloc::per_thread;
use crate::hooks::{CuResult, code};
use crate::mode::{self, Mode};
use crate::{pool, real};
use core::ffi::{c_int, c_void};
use core::sync::atomic::{AtomicIsize, Ordering::*};

hooks! {
    fn cuStreamBeginCapture(stream: usize) |call| begun(stream, call());
    fn cuStreamBeginCapture_ptsz(stream: usize) |call| begun(per_thread(stream), call());
    fn cuStreamBeginCapture_v2(stream: usize, mode: c_int) |call| begun(stream, call());
    fn cuStreamBeginCapture_v2_ptsz(stream: usize, mode: c_int) |call| begun(per_thread(stream), call());
    fn cuStreamBeginCaptureToGraph(
        stream: usize, graph: usize, from: *const usize, edges: *const c_void, count: usize, mode: c_int,
    ) |call| begun(stream, call());
    fn cuStreamBeginCaptureToGraph_ptsz(
        stream: usize, graph: usize, from: *const usize, edges: *const c_void, count: usize, mode: c_int,
    ) |call| begun(per_thread(stream), call());
    fn cuStreamEndCapture(stream: usize, graph: *mut usize) |call| ended(stream, call);
    fn cuStreamEndCapture_ptsz(stream: usize, graph: *mut usize) |call| ended(per_thread(stream), call);
}

/// Captures that have begun and not ended. A stream that is destroyed in its capture leaves the count too
/// high, which costs questions to the driver and nothing else.
static CAPTURES: AtomicIsize = AtomicIsize::new(0);

/// Whether there is any capture.
#[inline]
pub fn is_any() -> bool {
    CAPTURES.load(Relaxed) > 0
}

/// Whether what is submitted to the stream becomes part of a graph.
#[inline]
pub fn is_captured(stream: usize) -> bool {
    is_any() && real::is_capturing(stream)
}

fn begun(stream: usize, result: CuResult) -> CuResult {
    if result == code::SUCCESS {
        CAPTURES.fetch_add(1, Relaxed);
        tell_pool(stream);
    }
    result
}

fn ended(stream: usize, call: impl Fn() -> CuResult) -> CuResult {
    let captured = is_captured(stream);
    let result = call();
    // Some errors end the capture, others do not.
    if captured && !real::is_capturing(stream) {
        let _ = CAPTURES.fetch_update(Relaxed, Relaxed, |count| (count > 0).then_some(count.wrapping_sub(1)));
        tell_pool(stream);
    }
    result
}

/// In guard mode only if there is a pool in use: the question would make one.
fn tell_pool(stream: usize) {
    let pool = match mode::get() {
        Mode::Pool => pool::get(),
        Mode::Guard => pool::get().filter(|pool| pool.idle_and_held().1 > 0),
        _ => None,
    };
    if let Some(pool) = pool {
        pool.use_on_stream(0, stream);
    }
}

/// What the driver would say to an allocation or a free of its own now: a refusal breaks the captures that
/// forbid it, as it would without the shim.
pub fn refusal() -> Option<CuResult> {
    let mut probe = 0;
    match real::alloc(&mut probe, 1) {
        code::SUCCESS => {
            real::free(probe);
            None
        }
        code::OUT_OF_MEMORY => None,
        refused => Some(refused),
    }
}

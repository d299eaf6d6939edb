//! Pool mode: the program's own `cuMemAlloc` and `cuMemAllocAsync` are served by the pool, and frees of pool
//! blocks return to it.
//!
//! Whatever the pool does not serve is the driver's: what is wrong with the request or the context, so that
//! the answer is the driver's own; memory in captures, which belongs to the graph; and everything else that
//! the pool answers but "out of memory".

use crate::guard::{guarded, guarded_on};
use crate::hooks::{CuResult, code};
use crate::pool::{self, CURRENT_DEVICE, Pool, Request};
use crate::real::{self, PER_THREAD};
use crate::text::Line;
use crate::{capture, contexts, info, mode};
use core::ffi::c_int;
use core::fmt::Write;
use core::ptr;

/// Requests of at least this get a driver allocation of their own: only such memory can be shared with other
/// processes, and shared it is in large pieces.
const OWN_FROM: usize = 64 << 20;

hooks! {
    fn cuMemAlloc_v2(out: *mut usize, size: usize)
        |call| match pool::serving() {
            Some(pool) => allocate(pool, out, size, call),
            None => guarded(&cuMemAlloc_v2::HOOK, CURRENT_DEVICE, || size, call),
        };
    fn cuMemAllocAsync(out: *mut usize, size: usize, stream: usize)
        |call| match pool::serving() {
            Some(pool) => allocate_on_stream(pool, out, size, stream, || {
                guarded_on(&cuMemAllocAsync::HOOK, stream, size, call)
            }),
            None => guarded_on(&cuMemAllocAsync::HOOK, stream, size, call),
        };
    fn cuMemAllocAsync_ptsz(out: *mut usize, size: usize, stream: usize)
        |call| match pool::serving() {
            Some(pool) => allocate_on_stream(pool, out, size, per_thread(stream), || {
                guarded_on(&cuMemAllocAsync_ptsz::HOOK, per_thread(stream), size, call)
            }),
            None => guarded_on(&cuMemAllocAsync_ptsz::HOOK, per_thread(stream), size, call),
        };
    fn cuMemFree_v2(ptr: usize)
        |call| match owner_of(ptr) {
            Owner::Pool(pool) => free(pool, ptr),
            Owner::Driver => call(),
            Owner::Nobody => code::NOT_INITIALIZED,
        };
    fn cuMemFreeAsync(ptr: usize, stream: usize)
        |call| match owner_of(ptr) {
            Owner::Pool(pool) => free_on_stream(pool, ptr, stream),
            Owner::Driver => call(),
            Owner::Nobody => code::NOT_INITIALIZED,
        };
    fn cuMemFreeAsync_ptsz(ptr: usize, stream: usize)
        |call| match owner_of(ptr) {
            Owner::Pool(pool) => free_on_stream(pool, ptr, per_thread(stream)),
            Owner::Driver => call(),
            Owner::Nobody => code::NOT_INITIALIZED,
        };
}

/// What NULL means in the per-thread variants.
pub fn per_thread(stream: usize) -> usize {
    if stream == 0 { PER_THREAD } else { stream }
}

/// Whose memory an address is in.
pub enum Owner {
    Pool(&'static Pool),
    Driver,
    /// The process is a child of one that used CUDA: nothing is done with any memory.
    Nobody,
}

/// In pool mode; otherwise all memory is the driver's.
#[inline]
pub fn owner_of(address: usize) -> Owner {
    if address == 0 || mode::get() != mode::Mode::Pool {
        return Owner::Driver;
    }
    let Some(pool) = pool::if_open() else { return Owner::Driver };
    match pool.owns(address) {
        Ok(true) => Owner::Pool(pool),
        Err(pool::ERROR_FORKED) => Owner::Nobody,
        _ => Owner::Driver,
    }
}

/// Device order: the block may be used on any stream at once, as one of the driver's.
fn allocate(pool: &Pool, out: *mut usize, size: usize, call: impl Fn() -> CuResult) -> CuResult {
    mode::note_use();
    let context = real::living_context();
    let servable = !out.is_null() && size > 0 && !capture::is_any();
    let Some(context) = context.filter(|_| servable) else {
        return guarded(&cuMemAlloc_v2::HOOK, CURRENT_DEVICE, || size, call);
    };
    contexts::prepare(pool);
    let owner = Tag::of(context);
    let request = Request {
        struct_size: size_of::<Request>(),
        pool: ptr::null_mut(),
        size,
        alignment: 0,
        device: CURRENT_DEVICE,
        reserved: 0,
        flags: if size >= OWN_FROM { pool::OWN_ALLOCATION } else { 0 },
        stream: 0,
        owner: owner.0.as_c(),
    };
    match pool.alloc_with(&request) {
        Ok(block) => handed_out(out, block, context),
        Err(pool::ERROR_OUT_OF_MEMORY | pool::ERROR_HOST_OUT_OF_MEMORY) => code::OUT_OF_MEMORY,
        Err(_) => guarded(&cuMemAlloc_v2::HOOK, CURRENT_DEVICE, || size, call),
    }
}

/// The stream is one whose NULL is the legacy stream.
fn allocate_on_stream(
    pool: &Pool,
    out: *mut usize,
    size: usize,
    stream: usize,
    by_driver: impl Fn() -> CuResult,
) -> CuResult {
    mode::note_use();
    // The default streams are those of the current context, and without one the driver has its own answer.
    let context = real::living_context();
    let has_context = stream > PER_THREAD || context.is_some();
    if out.is_null() || size == 0 || !has_context || capture::is_captured(stream) {
        return by_driver();
    }
    // The block is of the stream's context, whichever is current.
    let context = if stream > PER_THREAD { real::context_of_stream(stream) } else { context.unwrap_or(0) };
    contexts::prepare(pool);
    match pool.alloc_async(size, stream) {
        Ok(block) => handed_out(out, block, context),
        Err(pool::ERROR_OUT_OF_MEMORY | pool::ERROR_HOST_OUT_OF_MEMORY) => code::OUT_OF_MEMORY,
        Err(_) => by_driver(),
    }
}

fn handed_out(out: *mut usize, block: usize, context: usize) -> CuResult {
    contexts::note(context, block);
    // SAFETY: the caller's place for an address, not NULL.
    unsafe { out.write(block) };
    code::SUCCESS
}

/// The pool keeps the memory until all work that was submitted before has finished: to the program it is as
/// if the free had waited for that, as the driver's does.
fn free(pool: &Pool, ptr: usize) -> CuResult {
    if capture::is_any()
        && let Some(refusal) = capture::refusal()
    {
        return refusal;
    }
    if pool.frees_on_legacy() {
        // A use on a stream that the free does not name makes the block wait for all of them.
        pool.use_on_stream(ptr, PER_THREAD);
    }
    info::forget(ptr);
    answer_of_free(pool.free(ptr))
}

fn free_on_stream(pool: &Pool, ptr: usize, stream: usize) -> CuResult {
    if stream <= PER_THREAD && real::current_context() == 0 {
        return code::INVALID_CONTEXT;
    }
    if capture::is_captured(stream) {
        return real::refusal_of_free(stream);
    }
    info::forget(ptr);
    answer_of_free(pool.free_async(ptr, stream))
}

fn answer_of_free(status: c_int) -> CuResult {
    match status {
        pool::OK => code::SUCCESS,
        pool::ERROR_INVALID_POINTER | pool::ERROR_DOUBLE_FREE | pool::ERROR_CONTEXT_LOST => {
            code::INVALID_VALUE
        }
        pool::ERROR_FORKED => code::NOT_INITIALIZED,
        _ => code::UNKNOWN,
    }
}

/// The owner tag of the program's blocks: it says in the pool's reports whose they are, and in which context
/// the block was allocated, which `info` has to answer.
pub struct Tag(Line);

const TAG: &str = "program ";

impl Tag {
    fn of(context: usize) -> Tag {
        let mut line = Line::new();
        let _ = write!(line, "{TAG}{context:x}");
        Tag(line)
    }

    /// The context that the tag names; 0 if it is none of these.
    pub fn context(text: &str) -> usize {
        text.strip_prefix(TAG).and_then(|hex| usize::from_str_radix(hex, 16).ok()).unwrap_or(0)
    }
}

//! Functions in the prototypes of runtimes that take an allocator as a pair of pointers.
//!
//! Such prototypes have no place for a status. An allocation that fails answers NULL; `pool_last_status` and
//! `pool_last_error` say why on the same thread. A free that fails changes nothing and is logged as an error.
#![allow(clippy::missing_safety_doc)] // The contract stands in prose, for C callers.

use super::convert;
use super::guard::{guard, guard_free};
use super::types::{CUstream_st, pool_t};
use crate::driver::lifecycle::check_running;
use crate::error::{Result, Status, bail, last_error};
use crate::logging::log_line;
use crate::pool::api::{self, ANY_DEVICE};
use crate::pool::graphs::{self, GraphId};
use crate::pool::types::{AllocRequest, PoolId, StreamKey, TAG_SIZE, Tag};
use core::ffi::{c_int, c_void};

const TORCH: Tag = tag("torch");
const CUPY: Tag = tag("cupy");
const ORT: Tag = tag("onnxruntime");

const fn tag(name: &str) -> Tag {
    let mut tag = [0; TAG_SIZE];
    let (name, mut at) = (name.as_bytes(), 0);
    while at < name.len() {
        // Runs when the library is compiled: a name that is too long does not compile.
        #[allow(clippy::indexing_slicing)]
        {
            tag[at] = name[at];
        }
        at += 1;
    }
    tag
}

/// Runs an allocation; NULL where it fails.
fn block(body: impl FnOnce() -> Result<u64>) -> *mut c_void {
    let mut address = 0;
    match guard(|| body().map(|found| address = found)) {
        Status::POOL_OK => address as *mut c_void,
        _ => core::ptr::null_mut(),
    }
}

/// Runs what can only be reported in the log. While the process exits there is nothing to report.
fn told(what: &str, body: impl FnOnce() -> Result<()>) {
    if guard_free(body) == Status::POOL_OK {
        return;
    }
    let _ = guard(|| {
        let mut text = [0; 512];
        let len = last_error(&mut text).min(text.len().saturating_sub(1));
        let text = text.get(..len).unwrap_or_default();
        log_line!(Error, "{what}: {}", text.utf8_chunks().map(|c| c.valid()).next().unwrap_or_default());
        Ok(())
    });
}

fn request(pool: PoolId, size: usize, stream: Option<u64>, owner: Tag) -> AllocRequest {
    let key = stream.map_or(StreamKey::DEVICE, StreamKey::of);
    AllocRequest { pool, owner, ..AllocRequest::plain(size as u64, key) }
}

/// PyTorch, `CUDAPluggableAllocator`: allocates `size` bytes on `device`, ordered by `stream`. The blocks
/// have the owner tag `torch`.
///
/// In the mode of `torch.cuda.MemPool` a NULL reaches the user as `torch.OutOfMemoryError`. As the allocator
/// of the whole process it must not be used bare: there PyTorch takes NULL for the memory of a tensor.
/// `examples/torch/extension.cpp` wraps it so that PyTorch's own error is thrown.
///
/// @return The block; NULL for size 0, and on failure, with `pool_last_status` and `pool_last_error` saying
///         why.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pool_torch_alloc(
    size: usize,
    device: c_int,
    stream: *mut CUstream_st,
) -> *mut c_void {
    block(|| {
        let pool = graphs::pool_for(device, stream as u64)?;
        api::allocate(&request(pool, size, Some(stream as u64), TORCH), device)
    })
}

/// PyTorch: frees a block of `pool_torch_alloc`, ordered by `stream`. `size` and `device` are not looked at:
/// the pool knows them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pool_torch_free(
    ptr: *mut c_void,
    size: usize,
    device: c_int,
    stream: *mut CUstream_st,
) {
    let _ = (size, device);
    told("pool_torch_free", || api::free_on_stream(ptr as u64, stream as u64));
}

/// PyTorch, `set_reset_fn`: what `torch.cuda.empty_cache()` means. Gives all idle memory of the default pool,
/// on every device, back to the driver. While a graph is captured (`pool_torch_begin_allocate_to_pool`) it
/// does nothing.
#[unsafe(no_mangle)]
pub extern "C" fn pool_torch_reset() {
    told("pool_torch_reset", empty_cache);
}

/// PyTorch, `set_record_stream_fn`: what `tensor.record_stream(stream)` means, without which it does nothing.
/// As `pool_use_on_stream`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pool_torch_record_stream(ptr: *mut c_void, stream: *mut CUstream_st) {
    told("pool_torch_record_stream", || {
        if ptr.is_null() { Ok(()) } else { api::use_on_stream(ptr as u64, stream as u64) }
    });
}

/// PyTorch, `set_memory_fraction_fn`: what `torch.cuda.set_per_process_memory_fraction(fraction, device)`
/// means. Sets the option `limit` of the default pool to that share of the device, in whole percent (1 at
/// least; 1.0 lifts a share that was set before). The pool has one limit, so it holds on every device. A
/// fraction that is not between 0 and 1 changes nothing and is logged.
#[unsafe(no_mangle)]
pub extern "C" fn pool_torch_memory_fraction(fraction: f64, device: c_int) {
    let _ = device;
    told("pool_torch_memory_fraction", || {
        if !(0.0..=1.0).contains(&fraction) {
            bail!(POOL_ERROR_INVALID_ARGUMENT, "a memory fraction must be between 0 and 1, not {fraction}");
        }
        api::limit_to_percent(match (fraction * 100.0).round() as u32 {
            0 => 1,
            100.. => 0,
            percent => percent,
        })
    });
}

/// PyTorch, `set_begin_allocate_to_pool`: a CUDA graph is about to be captured (`torch.cuda.graph`). Until
/// `pool_torch_end_allocate_to_pool`, what `pool_torch_alloc` hands out to the calling thread, and on streams
/// that are being captured, comes from a pool of the graph's own. Its memory, idle or not, stays where it is
/// until `pool_torch_release_pool`, because every launch of the graph uses the addresses that were captured.
/// It does not count against the `limit` of the default pool, but has one of its own of the same size. Of
/// several captures on one device at once, each must allocate on the thread that began it.
///
/// PyTorch passes `std::pair<uint64_t, uint64_t>` and `std::function<bool(cudaStream_t)>`, which arrive here
/// as two numbers and a pointer (with the calling conventions of Linux on x86-64 and ARM64).
///
/// @param filter Not looked at.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pool_torch_begin_allocate_to_pool(
    device: c_int,
    id_first: u64,
    id_second: u64,
    filter: *mut c_void,
) {
    let _ = filter;
    told("pool_torch_begin_allocate_to_pool", || {
        graphs::begin(GraphId { device, id: (id_first, id_second) })
    });
}

/// PyTorch, `set_end_allocate_to_pool_fn`: the capture is over.
#[unsafe(no_mangle)]
pub extern "C" fn pool_torch_end_allocate_to_pool(device: c_int, id_first: u64, id_second: u64) {
    told("pool_torch_end_allocate_to_pool", || graphs::end(GraphId { device, id: (id_first, id_second) }));
}

/// PyTorch, `set_release_pool`: a graph that was captured into the pool is gone. With the last one the pool's
/// idle memory serves everybody, and the pool itself goes when its last block is freed. A pool that is not
/// known is none of ours.
#[unsafe(no_mangle)]
pub extern "C" fn pool_torch_release_pool(device: c_int, id_first: u64, id_second: u64) {
    told("pool_torch_release_pool", || graphs::release(GraphId { device, id: (id_first, id_second) }));
}

/// CuPy, `CFunctionAllocator`: allocates `size` bytes on `device`. CuPy names no stream, so the block is
/// ordered as those of `pool_alloc`. The blocks have the owner tag `cupy`. CuPy takes NULL for an array at
/// address 0: `examples/python/cudapool_cupy.py` is the safer way, and frees stream-ordered.
///
/// @param param A pool, or NULL (0 in Python) for the default pool.
/// @return The block; NULL for size 0, and on failure, with `pool_last_status` and `pool_last_error` saying
///         why.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pool_cupy_alloc(param: *mut c_void, size: usize, device: c_int) -> *mut c_void {
    block(|| {
        let pool = convert::pool(param.cast::<pool_t>())?;
        api::allocate(&request(pool, size, api::plain_stream()?, CUPY), device)
    })
}

/// CuPy: frees a block of `pool_cupy_alloc`, as `pool_free` does. `param` and `device` are not looked at.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pool_cupy_free(param: *mut c_void, ptr: *mut c_void, device: c_int) {
    let _ = (param, device);
    told("pool_cupy_free", || api::free_default(ptr as u64));
}

/// ONNX Runtime, provider option `gpu_external_alloc`: allocates `size` bytes on the current device. It names
/// no stream, so the block is ordered as those of `pool_alloc`. The blocks have the owner tag `onnxruntime`.
///
/// @return The block; NULL for size 0, and on failure, which ONNX Runtime turns into an error of its own.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pool_ort_alloc(size: usize) -> *mut c_void {
    block(|| api::allocate(&request(PoolId::DEFAULT, size, api::plain_stream()?, ORT), ANY_DEVICE))
}

/// ONNX Runtime, provider option `gpu_external_free`: frees a block of `pool_ort_alloc`, as `pool_free` does.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pool_ort_free(ptr: *mut c_void) {
    told("pool_ort_free", || api::free_default(ptr as u64));
}

/// ONNX Runtime, provider option `gpu_external_empty_cache`: gives all idle memory of the default pool, on
/// every device, back to the driver.
#[unsafe(no_mangle)]
pub extern "C" fn pool_ort_empty_cache() {
    told("pool_ort_empty_cache", empty_cache);
}

/// Trims every device. A driver that nobody has used yet is left alone.
fn empty_cache() -> Result<()> {
    if crate::driver::loaded().is_none() {
        return Ok(());
    }
    check_running()?;
    if graphs::is_capturing_any() {
        return Ok(());
    }
    graphs::sweep();
    let mut result = Ok(());
    for device in 0..crate::driver::device_count() {
        result = result.and(api::trim(PoolId::DEFAULT, device, 0).map(|_| ()));
    }
    result
}

//! The types of the C ABI, as they stand in `include/cudapool.h`.
//!
//! Every struct that crosses the boundary begins with `struct_size`, so that either side may be
//! older than the other. Numbers come in as integers, never as Rust enums: a C caller can pass any.
#![allow(non_camel_case_types)]

use core::ffi::{c_char, c_int, c_void};

/// A stream of the CUDA driver or runtime: `CUstream` and `cudaStream_t` are pointers to it.
/// NULL and 1 are the legacy default stream, 2 is the calling thread's per-thread default stream.
pub struct CUstream_st {
    _opaque: [u8; 0],
}

/// A pool of `pool_create`. NULL stands for the process's default pool. The handle of a destroyed pool is
/// never given again, and every function answers it with `POOL_ERROR_INVALID_ARGUMENT`.
pub struct pool_t {
    _opaque: [u8; 0],
}

/// A cache of another runtime that can give way: frees up to `wanted` bytes of device memory on `device` if
/// it can, to the driver or to this pool, and returns how many it freed.
///
/// It runs on the thread whose request ran out of memory, with no lock of the pool held, and on several
/// threads at once if several run out. It may use the pool. It must return: to leave it by an exception or a
/// `longjmp` is undefined behaviour.
pub type pool_reclaim_fn =
    Option<unsafe extern "C" fn(user: *mut c_void, device: c_int, wanted: usize) -> usize>;

/// What `pool_alloc_with` asks for. Zero all of it, set `struct_size`, then what differs.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pool_request {
    /// `sizeof(pool_request)` of the caller.
    pub struct_size: usize,
    /// The pool; NULL is the default pool.
    pub pool: *mut pool_t,
    /// Bytes. 0 gives NULL and `POOL_OK`.
    pub size: usize,
    /// Bytes, a power of two up to `POOL_MAX_ALIGNMENT`; 0 is `POOL_DEFAULT_ALIGNMENT`,
    /// and less than that is raised to it.
    pub alignment: usize,
    /// Device ordinal, or `POOL_DEVICE_CURRENT`, which is also what a shorter struct means. A stream other
    /// than the default ones determines device and context itself: if it is on another device, the answer is
    /// `POOL_ERROR_INVALID_ARGUMENT`.
    pub device: i32,
    /// Not used; 0.
    pub reserved: i32,
    /// `POOL_REQUEST_*`, or 0: device-ordered.
    pub flags: u64,
    /// With `POOL_REQUEST_STREAM_ORDERED`: the stream. Ignored otherwise.
    pub stream: *mut CUstream_st,
    /// A short tag that says who asks (copied, cut to `POOL_OWNER_SIZE - 1` bytes); NULL for none.
    pub owner: *const c_char,
}

/// What `pool_query` tells of a block.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pool_block_info {
    /// `sizeof(pool_block_info)` of the caller; no byte beyond it is written.
    pub struct_size: usize,
    /// Start of the block.
    pub base: *mut c_void,
    /// Bytes that were asked for.
    pub requested_size: usize,
    /// Bytes that may be used, from `base` on.
    pub usable_size: usize,
    /// Device ordinal.
    pub device: i32,
    /// `POOL_ORDER_DEVICE` or `POOL_ORDER_STREAM`: how the block was allocated.
    pub order: i32,
    /// The stream that a stream-ordered block was allocated on, as the handle was then; else NULL.
    pub stream: *mut CUstream_st,
    /// The owner tag, terminated; empty for none.
    pub owner: [c_char; 32],
    /// The pool it is from; NULL is the default pool.
    pub pool: *mut pool_t,
}

/// Counters of one pool on one device. Bytes, except where the name says calls, blocks or counts. At every
/// moment `reserved_bytes = live_bytes + cached_bytes + pending_bytes + overhead_bytes`. With several
/// contexts on the device the counters are sums over them; peaks too, so that these may never have been held
/// together.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct pool_stats {
    /// `sizeof(pool_stats)` of the caller; no byte beyond it is written.
    pub struct_size: usize,
    /// Usable sizes of all blocks in callers' hands.
    pub live_bytes: u64,
    /// The largest `live_bytes` so far.
    pub live_bytes_peak: u64,
    /// What callers asked for in these blocks.
    pub requested_bytes: u64,
    /// Idle and ready for the next request (of the same stream, where the memory was freed on one).
    pub cached_bytes: u64,
    /// Freed, but the device may still be using it.
    pub pending_bytes: u64,
    /// Held, but neither in a live block nor free: the unused tails of slabs, and memory that the driver
    /// would not take back after an operation that failed (it is offered again).
    pub overhead_bytes: u64,
    /// Device memory held from the driver.
    pub reserved_bytes: u64,
    /// The largest `reserved_bytes` so far.
    pub reserved_bytes_peak: u64,
    /// Blocks in callers' hands.
    pub live_blocks: u64,
    /// Successful allocations of size > 0.
    pub alloc_count: u64,
    /// Successful frees of a block.
    pub free_count: u64,
    /// Driver calls that create memory: `cuMemCreate`, `cuMemAlloc`.
    pub driver_alloc_calls: u64,
    /// Driver calls that give memory back: `cuMemRelease`, `cuMemFree`.
    pub driver_free_calls: u64,
    /// `cuMemMap` calls.
    pub driver_map_calls: u64,
    /// `cuMemUnmap` calls.
    pub driver_unmap_calls: u64,
    /// Driver calls that wait for the device.
    pub driver_sync_calls: u64,
    /// Out-of-memory answers to callers.
    pub oom_count: u64,
    /// Requests that were refused memory by the driver or the limit, and that the pool served all the same.
    pub oom_recovered_count: u64,
    /// Device memory that the pool leaves free for others at the moment: what they have asked for with
    /// `pool_reclaim`, as far as the option `headroom` allows, halving over time.
    pub headroom_bytes: u64,
    /// The part of `reserved_bytes` that is host memory (option `spill`).
    pub spilled_bytes: u64,
    /// Requests served with host memory.
    pub spill_count: u64,
    /// Requests that waited for other threads' frees (option `oom_wait_ms`).
    pub oom_wait_count: u64,
}

/// Why a request of the calling thread was answered `POOL_ERROR_OUT_OF_MEMORY`. Bytes, as they were when the
/// answer was given. `reserved_bytes = live_bytes + cached_bytes + pending_bytes + overhead_bytes`, and
/// `device_total_bytes = device_free_bytes + pools_bytes + foreign_bytes`.
///
/// Rungs: 1 search, 2 grow, 3 remap, 4 release in other pools, 5 settle, 6 callbacks, 7 empty everything,
/// 8 wait for frees, 9 spill to host memory.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pool_oom_info {
    /// `sizeof(pool_oom_info)` of the caller; no byte beyond it is written.
    pub struct_size: usize,
    /// What was asked for; 0 if the thread has had no such answer.
    pub requested_bytes: u64,
    /// Device ordinal; -1 where the size was too large for any device, and then there are no numbers of one.
    pub device: i32,
    /// `POOL_ADVICE_*`: what would help most, as far as the numbers tell.
    pub advice: i32,
    /// Bit n is set if rung n was tried.
    pub rungs_tried: u64,
    /// Bytes that became idle or went back to the driver in each rung.
    pub rung_bytes: [u64; 11],
    /// Microseconds that each rung took.
    pub rung_micros: [u64; 11],
    /// Usable sizes of the pool's live blocks.
    pub live_bytes: u64,
    /// Idle in the pool.
    pub cached_bytes: u64,
    /// Freed, but the device may still be using it.
    pub pending_bytes: u64,
    /// Held, but neither in a live block nor free; see `pool_stats.overhead_bytes`.
    pub overhead_bytes: u64,
    /// Held by the pool.
    pub reserved_bytes: u64,
    /// The pool's limit on this device; 0 for none.
    pub limit_bytes: u64,
    /// The largest free extent that the request could have had.
    pub largest_free_bytes: u64,
    /// Free, as the driver says.
    pub device_free_bytes: u64,
    /// All of the device, as the driver says.
    pub device_total_bytes: u64,
    /// Held by all pools of this process on the device.
    pub pools_bytes: u64,
    /// Held by anyone else: other libraries, other processes, the driver.
    pub foreign_bytes: u64,
    /// Tags of the owners that hold most, most first; empty where there are fewer.
    pub owners: [[c_char; 32]; 4],
    /// Live bytes of these owners.
    pub owner_bytes: [u64; 4],
}

/// The options. `pool_options_init` fills all of it with the defaults, as the environment variable
/// `CUDAPOOL_CONF` ("key:value,key:value") changes them; the key is the field's name unless said.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct pool_options {
    /// `sizeof(pool_options)` of the caller.
    pub struct_size: usize,
    /// Key `limit`, value in bytes (`512MiB`, `4GiB`): the most device memory a pool holds on one
    /// device. 0: no limit. The smaller of both limits counts.
    pub limit_bytes: u64,
    /// Key `limit`, value in percent (`80%`) of the device's memory. 0: no limit.
    pub limit_percent: u32,
    /// Key `max_idle`, percent (`25%`): once cached bytes exceed this share of the live bytes, idle
    /// chunks are remapped in preference to taking new memory from the driver.
    pub max_idle_percent: u32,
    /// `POOL_BACKEND_*`: `auto`, `vmm` or `malloc`. Fixed once the pool holds memory.
    pub backend: i32,
    /// `POOL_ORDER_*`: `device`, or `stream:legacy`; what `pool_alloc` and `pool_free` mean.
    pub order: i32,
    /// Milliseconds: the longest that one request waits for the device to complete its use of freed memory
    /// before it is answered `POOL_ERROR_OUT_OF_MEMORY`. Drivers before 12.5 can only wait for all work of a
    /// context, without a bound; that is done only for memory that was freed device-ordered or not on a
    /// stream's last call.
    pub settle_ms: u32,
    /// `POOL_LOG_*`: `off`, `error`, `warn`, `info` or `debug`; written to stderr. Process-wide.
    pub log: i32,
    /// Key `headroom`, value in bytes: the most device memory that the pool leaves free for others once
    /// somebody has asked for some with `pool_reclaim`. As much as was asked for is left free, halving every
    /// 30 seconds. The pool moves and releases idle memory before it takes the headroom, but answers no
    /// request with out of memory for its sake. 0: `headroom_percent` counts.
    pub headroom_bytes: u64,
    /// Key `headroom`, value in percent (`5%`) of the device's memory. Both 0: no headroom.
    pub headroom_percent: u32,
    /// Milliseconds that a request for which there is no memory waits for other threads' frees before it is
    /// answered `POOL_ERROR_OUT_OF_MEMORY`; first come, first served. A request of at most a sixteenth of the
    /// size of one that waits does not queue behind it. Requests in a stream capture or inside a reclaim
    /// callback do not wait.
    pub oom_wait_ms: u32,
    /// `POOL_SPILL_*`: `off`, or `host`: a request for which there is no device memory is served with host
    /// memory that the device reaches through its bus, if the driver can (`HOST` or `HOST_NUMA` locations of
    /// `cuMemCreate`, from 12.2). Slow; counted in `pool_stats.spilled_bytes`.
    pub spill: i32,
    /// Not used; 0.
    pub reserved: i32,
}

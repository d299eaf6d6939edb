//! The numbers of the C ABI: version, flags, option values and limits.
//! None is ever reused for another meaning.

/// Version of this header. Compare with `pool_version()` at run time.
pub const POOL_VERSION_MAJOR: u32 = 0;
/// Minor part of the header's version.
pub const POOL_VERSION_MINOR: u32 = 1;
/// Patch part of the header's version.
pub const POOL_VERSION_PATCH: u32 = 0;

/// `pool_request.device`, and the device argument of `pool_trim` and `pool_get_stats`:
/// the device of the calling thread's current context, or device 0 where there is none.
pub const POOL_DEVICE_CURRENT: i32 = -1;

/// `pool_request.flags`: the block is ordered by `pool_request.stream`.
pub const POOL_REQUEST_STREAM_ORDERED: u64 = 1;
/// `pool_request.flags`: the block is one driver allocation of its own (`cuMemAlloc`), as IPC
/// handles and RDMA registration need it. It does not share its memory with other blocks.
pub const POOL_REQUEST_OWN_ALLOCATION: u64 = 2;

/// Alignment in bytes of every block for which no other alignment is asked.
pub const POOL_DEFAULT_ALIGNMENT: usize = 512;
/// Largest alignment in bytes that `pool_request.alignment` takes.
pub const POOL_MAX_ALIGNMENT: usize = 1073741824;
/// Bytes of an owner tag, with its terminating zero.
pub const POOL_OWNER_SIZE: usize = 32;

/// `pool_options.backend`: virtual memory where the device has it, else `cuMemAlloc`.
pub const POOL_BACKEND_AUTO: i32 = 0;
/// `pool_options.backend`: virtual memory calls only; a device without them is an error.
pub const POOL_BACKEND_VMM: i32 = 1;
/// `pool_options.backend`: `cuMemAlloc` chunks only (legacy IPC and RDMA registration need these).
pub const POOL_BACKEND_MALLOC: i32 = 2;

/// `pool_options.order` and `pool_block_info.order`: a freed block waits for all work of the context.
pub const POOL_ORDER_DEVICE: i32 = 0;
/// `pool_options.order`: `pool_alloc` and `pool_free` are ordered by the legacy default stream.
/// `pool_block_info.order`: the block is stream-ordered.
pub const POOL_ORDER_STREAM: i32 = 1;

/// `pool_options.spill`: device memory only.
pub const POOL_SPILL_OFF: i32 = 0;
/// `pool_options.spill`: host memory, mapped to the device, rather than out of memory.
pub const POOL_SPILL_HOST: i32 = 1;

/// `pool_options.log`: nothing is written.
pub const POOL_LOG_OFF: i32 = 0;
/// `pool_options.log`: errors of the driver that no status code carries to a caller.
pub const POOL_LOG_ERROR: i32 = 1;
/// `pool_options.log`: and events that cost speed or memory.
pub const POOL_LOG_WARN: i32 = 2;
/// `pool_options.log`: and one line per arena and per recovered out-of-memory.
pub const POOL_LOG_INFO: i32 = 3;
/// `pool_options.log`: and one line per chunk taken, moved and returned.
pub const POOL_LOG_DEBUG: i32 = 4;

/// Entries of `pool_oom_info.rung_bytes` and `rung_micros`; entry n belongs to rung n, entry 0 is not used.
pub const POOL_OOM_RUNGS: usize = 11;
/// Entries of `pool_oom_info.owners` and `owner_bytes`.
pub const POOL_OOM_OWNERS: usize = 4;

/// `pool_oom_info.advice`: there was no out-of-memory answer.
pub const POOL_ADVICE_NONE: i32 = 0;
/// `pool_oom_info.advice`: the pool's `limit` is in the way.
pub const POOL_ADVICE_RAISE_LIMIT: i32 = 1;
/// `pool_oom_info.advice`: others on the device hold the memory.
pub const POOL_ADVICE_FREE_FOREIGN: i32 = 2;
/// `pool_oom_info.advice`: there is enough, in pieces that could not be moved together. With
/// `backend:malloc`, use `vmm`.
pub const POOL_ADVICE_DEFRAGMENT: i32 = 3;
/// `pool_oom_info.advice`: idle memory could not be moved or waited for in a stream capture.
pub const POOL_ADVICE_END_CAPTURE: i32 = 4;
/// `pool_oom_info.advice`: the program's own live blocks leave too little.
pub const POOL_ADVICE_USE_LESS: i32 = 5;
/// `pool_oom_info.advice`: enough was freed, but the device may still be using it; `settle_ms` was too short
/// for that.
pub const POOL_ADVICE_WAIT: i32 = 6;

//! The mirror of the C ABI: what the shim knows of `cudapool.h`. `tests/shim_abi.rs` compiles this file
//! beside the library's own types and compares the two.

use core::ffi::{c_char, c_int, c_void};

/// `POOL_DEVICE_CURRENT`
pub const CURRENT_DEVICE: c_int = -1;
pub const OK: c_int = 0;
pub const ERROR_INVALID_POINTER: c_int = 101;
pub const ERROR_DOUBLE_FREE: c_int = 102;
pub const ERROR_OUT_OF_MEMORY: c_int = 200;
pub const ERROR_HOST_OUT_OF_MEMORY: c_int = 201;
pub const ERROR_CONTEXT_LOST: c_int = 304;
pub const ERROR_FORKED: c_int = 400;
/// `POOL_REQUEST_OWN_ALLOCATION`
pub const OWN_ALLOCATION: u64 = 2;
/// `POOL_BACKEND_AUTO`, `POOL_BACKEND_MALLOC`
pub const BACKEND_AUTO: i32 = 0;
pub const BACKEND_MALLOC: i32 = 2;
/// `POOL_ORDER_STREAM`
pub const ORDER_STREAM: i32 = 1;
/// `POOL_LOG_INFO`
pub const LOG_INFO: i32 = 3;

/// `pool_request`
#[repr(C)]
pub struct Request {
    pub struct_size: usize,
    pub pool: *mut c_void,
    pub size: usize,
    pub alignment: usize,
    pub device: i32,
    pub reserved: i32,
    pub flags: u64,
    pub stream: usize,
    pub owner: *const c_char,
}

/// `pool_block_info`
#[repr(C)]
pub struct BlockInfo {
    pub struct_size: usize,
    pub base: usize,
    pub requested_size: usize,
    pub usable_size: usize,
    pub device: i32,
    pub order: i32,
    pub stream: usize,
    pub owner: [c_char; 32],
}

/// `pool_stats`, as far as it is read.
#[repr(C)]
pub struct Stats {
    pub struct_size: usize,
    pub live: u64,
    pub live_peak: u64,
    pub requested: u64,
    pub cached: u64,
    pub pending: u64,
    pub overhead: u64,
    pub reserved: u64,
}

/// `pool_options`, and room for what later versions add: all of it goes back as it came.
#[repr(C)]
pub struct Options {
    pub struct_size: usize,
    pub limit_bytes: u64,
    pub limit_percent: u32,
    pub max_idle_percent: u32,
    pub backend: i32,
    pub order: i32,
    pub settle_ms: u32,
    pub log: i32,
    pub rest: [u64; 26],
}

/// Hands the functions to a macro: field, symbol, type.
macro_rules! abi_functions {
    ($with:ident) => {
        $with! {
            alloc_with = pool_alloc_with fn(*mut usize, *const Request) -> c_int;
            alloc_async = pool_alloc_async fn(*mut usize, usize, usize) -> c_int;
            free = pool_free fn(usize) -> c_int;
            free_async = pool_free_async fn(usize, usize) -> c_int;
            use_on_stream = pool_use_on_stream fn(usize, usize) -> c_int;
            query = pool_query fn(usize, *mut BlockInfo) -> c_int;
            owns = pool_owns fn(usize, *mut c_int) -> c_int;
            reclaim = pool_reclaim fn(c_int, usize, *mut usize) -> c_int;
            get_stats = pool_get_stats fn(*mut c_void, c_int, *mut Stats) -> c_int;
            options_init = pool_options_init fn(*mut Options) -> c_int;
            configure = pool_configure fn(*const Options) -> c_int;
            last_error = pool_last_error fn(*mut c_char, usize) -> usize;
        }
    };
}

//! The shim's mirror of the C ABI is as the library's own types are. Checked when this is compiled: each
//! field that the shim reads or writes, each constant, and the size of each argument of each function.
#![allow(non_camel_case_types, dead_code)]

#[macro_use]
#[path = "../preload/src/abi.rs"]
mod abi;
#[macro_use]
#[path = "../preload/src/layout.rs"]
mod layout;

use abi::{BlockInfo, Options, Request, Stats};
use core::ffi::{c_char, c_int, c_void};
use cudapool::error::Status;
use cudapool::ffi::constants::*;
use cudapool::ffi::functions::*;
use cudapool::ffi::types::*;

// The shim hands over its struct as a whole, so it names every field.
same_layout!(whole Request, pool_request:
    struct_size = struct_size, pool = pool, size = size, alignment = alignment, device = device,
    reserved = reserved, flags = flags, stream = stream, owner = owner);
same_layout!(BlockInfo, pool_block_info:
    struct_size = struct_size, base = base, requested_size = requested_size, usable_size = usable_size,
    device = device, order = order, stream = stream, owner = owner);
same_layout!(Stats, pool_stats:
    struct_size = struct_size, live = live_bytes, live_peak = live_bytes_peak, requested = requested_bytes,
    cached = cached_bytes, pending = pending_bytes, overhead = overhead_bytes, reserved = reserved_bytes);
same_layout!(Options, pool_options:
    struct_size = struct_size, limit_bytes = limit_bytes, limit_percent = limit_percent,
    max_idle_percent = max_idle_percent, backend = backend, order = order, settle_ms = settle_ms, log = log);

// The options go through with room for more.
const _: () = assert!(size_of::<Options>() >= size_of::<pool_options>());

const _: () = assert!(
    abi::CURRENT_DEVICE == POOL_DEVICE_CURRENT
        && abi::OK == Status::POOL_OK as c_int
        && abi::ERROR_INVALID_POINTER == Status::POOL_ERROR_INVALID_POINTER as c_int
        && abi::ERROR_DOUBLE_FREE == Status::POOL_ERROR_DOUBLE_FREE as c_int
        && abi::ERROR_OUT_OF_MEMORY == Status::POOL_ERROR_OUT_OF_MEMORY as c_int
        && abi::ERROR_HOST_OUT_OF_MEMORY == Status::POOL_ERROR_HOST_OUT_OF_MEMORY as c_int
        && abi::ERROR_CONTEXT_LOST == Status::POOL_ERROR_CONTEXT_LOST as c_int
        && abi::ERROR_FORKED == Status::POOL_ERROR_FORKED as c_int
        && abi::OWN_ALLOCATION == POOL_REQUEST_OWN_ALLOCATION
        && abi::BACKEND_AUTO == POOL_BACKEND_AUTO
        && abi::BACKEND_MALLOC == POOL_BACKEND_MALLOC
        && abi::ORDER_STREAM == POOL_ORDER_STREAM
        && abi::LOG_INFO == POOL_LOG_INFO,
    "a constant has another value"
);

const fn sizes1<A, R>(_: unsafe extern "C" fn(A) -> R) -> [usize; 2] {
    [size_of::<A>(), size_of::<R>()]
}

const fn sizes2<A, B, R>(_: unsafe extern "C" fn(A, B) -> R) -> [usize; 3] {
    [size_of::<A>(), size_of::<B>(), size_of::<R>()]
}

const fn sizes3<A, B, C, R>(_: unsafe extern "C" fn(A, B, C) -> R) -> [usize; 4] {
    [size_of::<A>(), size_of::<B>(), size_of::<C>(), size_of::<R>()]
}

const fn equal(mirror: &[usize], own: &[usize]) -> bool {
    let mut at = 0;
    while at < mirror.len() && at < own.len() && mirror[at] == own[at] {
        at += 1;
    }
    at == mirror.len() && at == own.len()
}

/// The sizes of a function's arguments and its result; another number of arguments does not compile.
macro_rules! sizes_of {
    ($own:ident, $a:ty) => {
        sizes1($own)
    };
    ($own:ident, $a:ty, $b:ty) => {
        sizes2($own)
    };
    ($own:ident, $a:ty, $b:ty, $c:ty) => {
        sizes3($own)
    };
}

macro_rules! same_functions {
    ($($field:ident = $own:ident fn($($arg:ty),*) -> $result:ty;)*) => {
        $(const _: () = {
            let mirror = [$(size_of::<$arg>(),)* size_of::<$result>()];
            assert!(equal(&mirror, &sizes_of!($own, $($arg),*)), "a function has another type");
        };)*
    };
}

abi_functions!(same_functions);

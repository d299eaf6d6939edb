//! The shim's mirror of the C ABI is as the library's own types are. Checked when this is compiled: place and
//! type of each field that the shim reads or writes, each constant, and the type of each argument and result.
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

/// A type of the mirror that stands for one of the library's.
trait StandsFor<Own> {}

macro_rules! stand_for {
    ($($mirror:ty => $($own:ty),+;)*) => { $($(impl StandsFor<$own> for $mirror {})+)* };
}

// The shim keeps addresses and handles as numbers.
stand_for! {
    u32 => u32;
    u64 => u64;
    i32 => i32, Status;
    usize => usize, *mut c_void, *const c_void, *mut CUstream_st;
    [c_char; 32] => [c_char; 32];
    *const c_char => *const c_char;
    *mut c_char => *mut c_char;
    *mut c_int => *mut c_int;
    *mut usize => *mut usize, *mut *mut c_void;
    *mut c_void => *mut pool_t;
    *const Request => *const pool_request;
    *const Options => *const pool_options;
    *mut Options => *mut pool_options;
    *mut BlockInfo => *mut pool_block_info;
    *mut Stats => *mut pool_stats;
}

const fn same_type<S, F: StandsFor<G>, T, G>(_: fn(&S) -> &F, _: fn(&T) -> &G) {}

macro_rules! same_fields {
    ($mirror:ident, $own:ident: $($field:ident = $name:ident),* $(,)?) => {
        same_layout!($mirror, $own: $($field = $name),*);
        $(const _: () = same_type(|s: &$mirror| &s.$field, |s: &$own| &s.$name);)*
    };
}

same_fields!(Request, pool_request:
    struct_size = struct_size, pool = pool, size = size, alignment = alignment, device = device,
    reserved = reserved, flags = flags, stream = stream, owner = owner);
same_fields!(BlockInfo, pool_block_info:
    struct_size = struct_size, base = base, requested_size = requested_size, usable_size = usable_size,
    device = device, order = order, stream = stream, owner = owner);
same_fields!(Stats, pool_stats:
    struct_size = struct_size, live = live_bytes, live_peak = live_bytes_peak, requested = requested_bytes,
    cached = cached_bytes, pending = pending_bytes, overhead = overhead_bytes, reserved = reserved_bytes);
same_fields!(Options, pool_options:
    struct_size = struct_size, limit_bytes = limit_bytes, limit_percent = limit_percent,
    max_idle_percent = max_idle_percent, backend = backend, order = order, settle_ms = settle_ms, log = log);

// The shim hands over its struct as a whole, so it names every field; the options go through with room for
// more.
const _: () = assert!(size_of::<Request>() == size_of::<pool_request>());
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

const fn same1<A: StandsFor<OwnA>, R: StandsFor<OwnR>, OwnA, OwnR>(_: unsafe extern "C" fn(OwnA) -> OwnR) {}

const fn same2<A, B, R, OwnA, OwnB, OwnR>(_: unsafe extern "C" fn(OwnA, OwnB) -> OwnR)
where
    A: StandsFor<OwnA>,
    B: StandsFor<OwnB>,
    R: StandsFor<OwnR>,
{
}

const fn same3<A, B, C, R, OwnA, OwnB, OwnC, OwnR>(_: unsafe extern "C" fn(OwnA, OwnB, OwnC) -> OwnR)
where
    A: StandsFor<OwnA>,
    B: StandsFor<OwnB>,
    C: StandsFor<OwnC>,
    R: StandsFor<OwnR>,
{
}

/// Another number of arguments does not compile either.
macro_rules! same_function {
    ($own:ident, $a:ty, -> $r:ty) => {
        same1::<$a, $r, _, _>($own)
    };
    ($own:ident, $a:ty, $b:ty, -> $r:ty) => {
        same2::<$a, $b, $r, _, _, _>($own)
    };
    ($own:ident, $a:ty, $b:ty, $c:ty, -> $r:ty) => {
        same3::<$a, $b, $c, $r, _, _, _, _>($own)
    };
}

macro_rules! same_functions {
    ($($field:ident = $own:ident fn($($arg:ty),*) -> $result:ty;)*) => {
        $(const _: () = same_function!($own, $($arg,)* -> $result);)*
    };
}

abi_functions!(same_functions);

//! The preload shim: brings the pool to programs that know nothing of it
//! (`LD_PRELOAD=libcudapool_preload.so`).
//!
//! It stands between a program and the CUDA driver, by whichever way the program reaches it: functions that
//! are linked directly (the exports of the same names, in all modules below), `dlsym` and `dlvsym` (`stub`,
//! `lookup`), and `cuGetProcAddress` (`lookup`). What is wrapped stands in one table (`hooks`), with the
//! driver's own functions beside it.
//!
//! `guard` rescues allocations that fail for memory; `alloc`, `info`, `contexts` and `capture` are pool mode;
//! `mode` reads `CUDAPOOL_PRELOAD`; `pool` opens `libcudapool.so` and knows its C ABI, and nothing else of
//! it; `real` has the driver functions that the shim itself asks; `elf` reads symbol tables.
//!
//! Two rules. The hooks of the loader may run before any constructor, in a program's own `malloc`, or with
//! the loader's lock held: there is no lock, no allocation and no panic in them, unless it is a wrapped
//! function of a driver that is asked for. And what the shim does not know for certain, it passes on
//! untouched.
#![allow(non_snake_case, non_upper_case_globals)] // The exported names are CUDA's.
#![deny(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::unreachable,
    clippy::todo,
    clippy::unimplemented,
    clippy::indexing_slicing,
    clippy::string_slice
)]
#![deny(clippy::undocumented_unsafe_blocks, unsafe_op_in_unsafe_fn)]

#[macro_use]
mod abi;
#[macro_use]
mod hooks;
#[macro_use]
mod layout;
mod alloc;
#[path = "../../src/bytes.rs"]
mod bytes;
mod capture;
mod contexts;
mod elf;
mod guard;
mod info;
mod lookup;
mod mode;
mod pool;
mod real;
mod stub;
mod text;

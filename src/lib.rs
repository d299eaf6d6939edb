//! cudapool: a pooled GPU memory allocator behind a small C ABI.
//!
//! Layers, each of which knows only those below: [`ffi`], [`pool`], {[`heap`], [`vmem`]}, [`driver`], and
//! under all of them `logging`, `sync`, `host_alloc` and [`error`]. `tests/layers.rs` keeps the order. The
//! contract is in `include/cudapool.h`, the reasons in `docs/architecture.md`.
#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::unreachable,
        clippy::todo,
        clippy::unimplemented,
        clippy::indexing_slicing,
        clippy::string_slice
    )
)]
#![deny(clippy::undocumented_unsafe_blocks, unsafe_op_in_unsafe_fn)]

#[cfg(panic = "abort")]
compile_error!("cudapool catches panics at its boundary: build it with panic = \"unwind\"");

mod bytes;
pub mod driver;
pub mod error;
pub mod ffi;
pub mod heap;
mod host_alloc;
mod logging;
pub mod pool;
mod sync;
pub mod vmem;

// The driver loader and the logger abort where the host has no memory, unless they get it from the reserve.
#[global_allocator]
static HOST_MEMORY: host_alloc::HostMemory = host_alloc::HostMemory;

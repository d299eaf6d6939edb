//! The exported functions: with those of `adapters`, the only `extern "C"` in the library.
//!
//! Each one writes its out-parameters first, checks its arguments, and runs the rest inside
//! `guard`, which turns errors and caught panics into a status.
#![allow(clippy::missing_safety_doc)] // The contract stands in prose, for C callers.

use super::guard::{guard, guard_free};
use super::types::{
    CUstream_st, pool_block_info, pool_oom_info, pool_options, pool_reclaim_fn, pool_request, pool_stats,
    pool_t,
};
use super::{convert, text};
use crate::error::pool_status;
use crate::pool::oom::{callbacks, report};
use crate::pool::{api, options, pools};
use core::ffi::{c_char, c_int, c_void};

/// Allocates `size` bytes of device memory on the device of the calling thread's current context
/// (device 0's primary context where none is current, as the CUDA runtime does).
///
/// The block is device-ordered: any stream may use it at once, because all earlier work that used its memory
/// has completed. With the option `order:stream:legacy` it is ordered by the legacy default stream instead.
///
/// @param out Receives the block, or NULL on failure and for size 0. The caller owns it until
///            `pool_free` or `pool_free_async`.
/// @param size Bytes; 0 gives NULL and `POOL_OK`.
///
/// Alignment: `POOL_DEFAULT_ALIGNMENT`. Thread-safe; not async-signal-safe, like every function here.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pool_alloc(out: *mut *mut c_void, size: usize) -> pool_status {
    guard(|| {
        // SAFETY: the caller passes NULL or a place for a pointer.
        let out = unsafe { convert::out_pointer(out) }?;
        *out = api::allocate_default(size)? as *mut c_void;
        Ok(())
    })
}

/// Frees a block, device-ordered: its memory is used again only when all work that was submitted to the
/// context before this call has completed. Returns at once: it never waits for the device and never needs
/// host memory.
///
/// @param ptr A block of any of the allocation functions, from any thread and with any current
///            context, or NULL (nothing happens, `POOL_OK`).
/// @return `POOL_ERROR_INVALID_POINTER` for anything that is not the start of a live block,
///         `POOL_ERROR_DOUBLE_FREE` instead while nothing else has used the block's address since it was
///         freed, `POOL_ERROR_CONTEXT_LOST` for a block whose context is gone.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pool_free(ptr: *mut c_void) -> pool_status {
    guard_free(|| api::free_default(ptr as u64))
}

/// Allocates `size` bytes, stream-ordered: the block may be used by work submitted to `stream` from
/// now on, and on other streams once they are made to wait for this point of `stream`.
///
/// This is the fast path. In a process with one visible device that uses the pool in one context, a request
/// that fitting idle memory of this stream can serve makes no driver call; in other processes the driver is
/// asked which context is meant. The block is on the device of the stream's context; for the default streams
/// that is the current context, or device 0's primary one. A program with several contexts on one device that
/// uses their default streams must first call `pool_alloc` once with each of them current: until the pool has
/// seen a second context it does not ask. For the same reason, stream-ordered calls notice a device reset
/// only when a request cannot be served from idle memory.
///
/// @param out Receives the block, or NULL on failure and for size 0.
/// @param size Bytes.
/// @param stream A stream of the current context, not destroyed. The driver may give a new stream the handle
///               of a destroyed one at once, so wait for a stream's work before you destroy it, if blocks
///               were freed on it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pool_alloc_async(
    out: *mut *mut c_void,
    size: usize,
    stream: *mut CUstream_st,
) -> pool_status {
    guard(|| {
        // SAFETY: the caller passes NULL or a place for a pointer.
        let out = unsafe { convert::out_pointer(out) }?;
        *out = api::allocate_on_stream(size, stream as u64)? as *mut c_void;
        Ok(())
    })
}

/// Frees a block, stream-ordered: the memory may be used again on `stream` at once, and elsewhere
/// only when `stream` has got as far as this call. All uses of the block on other streams must be
/// ordered before this point of `stream`, or have been named with `pool_use_on_stream`.
///
/// As in CUDA, if the block was allocated on another stream, that allocation must be ordered before this
/// point of `stream` too. If `stream` belongs to another context than the block, this call waits for
/// `stream`.
///
/// @param ptr A block, or NULL: nothing is freed, `POOL_OK`. Errors as for `pool_free`.
/// @param stream The stream; it is not touched after this call has returned.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pool_free_async(ptr: *mut c_void, stream: *mut CUstream_st) -> pool_status {
    guard_free(|| api::free_on_stream(ptr as u64, stream as u64))
}

/// Allocates with everything stated explicitly: pool, size, alignment, device, order, owner.
///
/// @param out Receives the block, or NULL on failure and for size 0.
/// @param request What is wanted; see `pool_request`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pool_alloc_with(out: *mut *mut c_void, request: *const pool_request) -> pool_status {
    guard(|| {
        // SAFETY: the caller passes NULL or a place for a pointer.
        let out = unsafe { convert::out_pointer(out) }?;
        // SAFETY: the caller passes NULL or a request of `struct_size` bytes.
        let (request, device) = unsafe { convert::request(request) }?;
        *out = api::allocate(&request, device)? as *mut c_void;
        Ok(())
    })
}

/// Declares that the block is also used on `stream`: once freed, its memory waits for that stream too.
/// Call it before the block is freed; work submitted to `stream` until then is covered.
///
/// Stream capture: while a stream of the context is captured, the pool makes no driver call that would break
/// the capture: none that concerns the whole context, and for a request on the captured stream none that
/// waits, queries events or unmaps. It may therefore have to answer out of memory, and memory that was freed
/// device-ordered stays pending. The pool detects captures of blocking streams by itself. It must be told
/// about the capture of a non-blocking stream: call this function with `ptr` NULL right after the capture of
/// `stream` has begun, and again right after it has ended. The second call also ends the restrictions, which
/// otherwise last ten seconds from the last call that found the stream captured. Memory that the graph uses
/// must stay allocated as long as the graph is launched, and launches must come after the work that was
/// submitted to `stream` before the capture, which may still use that memory.
///
/// The driver has no call that checks for a capture and acts in one step, so a capture that begins while
/// another thread's request is looking for memory may be broken by that request. Keep other threads out of
/// the pool while you begin a capture (for a non-blocking stream, until this function has been called). A
/// capture that is under way is safe from them.
///
/// @param ptr The start of a live block, or NULL: only the stream is looked at.
/// @param stream A stream of the block's context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pool_use_on_stream(ptr: *mut c_void, stream: *mut CUstream_st) -> pool_status {
    guard(|| api::use_on_stream(ptr as u64, stream as u64))
}

/// Tells which live block an address lies in. Addresses inside a block are answered too.
///
/// @param ptr Any address.
/// @param info Receives the answer; its `struct_size` must be set. Zeroed on failure.
/// @return `POOL_ERROR_INVALID_POINTER` where the address lies in no live block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pool_query(ptr: *const c_void, info: *mut pool_block_info) -> pool_status {
    guard(|| {
        // SAFETY: the caller passes NULL or a struct of `struct_size` bytes.
        let out = unsafe { convert::OutStruct::new(info) }?;
        let block = api::query(ptr as u64)?;
        out.write(convert::block_info(&block));
        Ok(())
    })
}

/// Tells whether an address lies in memory that the library manages: in a live block, or in a freed one whose
/// memory has not gone back to the driver. It is meant for code between a program and the driver, which must
/// not pass the driver an address that is not the driver's own.
///
/// @param ptr Any address.
/// @param owned Receives 1 or 0.
/// @return `POOL_OK` for any address; no driver call is made.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pool_owns(ptr: *const c_void, owned: *mut c_int) -> pool_status {
    guard(|| {
        // SAFETY: the caller passes NULL or a place for an integer.
        let owned = unsafe { convert::out_number(owned) }?;
        *owned = c_int::from(api::owns(ptr as u64)?);
        Ok(())
    })
}

/// Gives idle memory back to the driver until at most `keep_bytes` stay cached. Waits (bounded by the
/// option `settle_ms`) for freed memory that the device may still be using; during a stream capture (see
/// `pool_use_on_stream`) it does not wait.
///
/// @param pool The pool; NULL is the default pool.
/// @param device Device ordinal, or `POOL_DEVICE_CURRENT`.
/// @param keep_bytes Bytes that may stay cached.
/// @param released Receives the bytes given back; may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pool_trim(
    pool: *mut pool_t,
    device: c_int,
    keep_bytes: usize,
    released: *mut usize,
) -> pool_status {
    guard(|| {
        // SAFETY: the caller passes NULL or a place for a size.
        let released = unsafe { convert::optional_out(released) };
        let bytes = api::trim(convert::pool(pool)?, device, keep_bytes as u64)?;
        if let Some(released) = released {
            *released = usize::try_from(bytes).unwrap_or(usize::MAX);
        }
        Ok(())
    })
}

/// For foreign allocators, in their own out-of-memory path: tells the pools that somebody needs
/// `wanted_bytes` on this device. Gives at least so many idle bytes of any pool back to the driver, least
/// recently used first. If there are fewer, it waits (bounded by `settle_ms`) for freed memory that the
/// device may still be using, and asks the reclaim callbacks. Try your own allocation again afterwards,
/// whatever was released: together with what was free before it may be enough.
///
/// @param device Device ordinal, or `POOL_DEVICE_CURRENT`.
/// @param wanted_bytes Bytes that somebody needs.
/// @param released Receives the bytes given back by the pools; may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pool_reclaim(
    device: c_int,
    wanted_bytes: usize,
    released: *mut usize,
) -> pool_status {
    guard(|| {
        // SAFETY: the caller passes NULL or a place for a size.
        let released = unsafe { convert::optional_out(released) };
        let bytes = api::reclaim(device, wanted_bytes as u64)?;
        if let Some(released) = released {
            *released = usize::try_from(bytes).unwrap_or(usize::MAX);
        }
        Ok(())
    })
}

/// Registers a cache of the caller's that can give way: `fn` is called before a request is answered with out
/// of memory, and by `pool_reclaim` when idle memory does not suffice.
///
/// @param fn See `pool_reclaim_fn`.
/// @param user Passed to `fn`.
/// @param priority Higher ones are called first.
/// @param id Receives a number for `pool_remove_reclaim_callback`, never given twice; 0 on failure.
/// @return `POOL_ERROR_NOT_SUPPORTED` if there are 64 callbacks already.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pool_add_reclaim_callback(
    r#fn: pool_reclaim_fn,
    user: *mut c_void,
    priority: c_int,
    id: *mut u64,
) -> pool_status {
    guard(|| {
        // SAFETY: the caller passes NULL or a place for a number.
        let id = unsafe { convert::out_number(id) }?;
        let callback = convert::callback(r#fn)?;
        *id = callbacks::add(callback, user, priority)?;
        Ok(())
    })
}

/// Removes a reclaim callback. When this returns, the callback is not running and will not be called again,
/// so that `user` can be freed. Called from inside a callback it returns at once: the callback is not called
/// again, but calls under way, in this or another thread, go on.
///
/// @return `POOL_ERROR_INVALID_ARGUMENT` if there is no such callback (any more).
#[unsafe(no_mangle)]
pub extern "C" fn pool_remove_reclaim_callback(id: u64) -> pool_status {
    guard(|| callbacks::remove(id))
}

/// Creates a pool with memory and options of its own. Pools on a device help each other: before a request is
/// answered with out of memory, idle memory of every other pool is given up for it.
///
/// @param options The pool's options; start from `pool_options_init`. `order` and `log` are process-wide:
///                only `pool_configure` changes them. NULL: the options of the default pool, as they are now.
/// @param out Receives the pool, for `pool_request.pool` and the functions that take one; NULL on failure.
///            The caller destroys it.
/// @return `POOL_ERROR_INVALID_OPTION` for a value out of range, `POOL_ERROR_NOT_SUPPORTED` if there are 256
///         pools already.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pool_create(options: *const pool_options, out: *mut *mut pool_t) -> pool_status {
    guard(|| {
        // SAFETY: the caller passes NULL or a place for a pointer.
        let out = unsafe { convert::out_pool(out) }?;
        // SAFETY: the caller passes NULL or a struct of `struct_size` bytes.
        let options = if options.is_null() { None } else { Some(unsafe { convert::options_in(options) }?) };
        *out = pools::handle_of(pools::create(options)?) as *mut pool_t;
        Ok(())
    })
}

/// Destroys a pool and gives its memory back to the driver. All of its blocks must have been freed. It waits
/// for memory that the device may still be using (bounded by `settle_ms`; not during a stream capture); what
/// is still in use then goes back with a later call of the library.
///
/// @param pool The pool. The default pool, NULL, cannot be destroyed: `POOL_ERROR_INVALID_ARGUMENT`.
/// @return `POOL_ERROR_IN_USE` while the pool has live blocks, while another thread is taking memory for it,
///         or while a captured graph uses it (`pool_torch_begin_allocate_to_pool`); nothing has changed then.
///         A request that is still looking or waiting for memory does not keep its pool alive: it is answered
///         `POOL_ERROR_INVALID_ARGUMENT`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pool_destroy(pool: *mut pool_t) -> pool_status {
    guard(|| pools::destroy(pool as u64))
}

/// Reads the counters of a pool on a device, as one consistent snapshot. The driver is not asked, so memory
/// of a context that is gone counts until a call that allocates, frees or gives back memory notices.
///
/// @param pool The pool; NULL is the default pool.
/// @param device Device ordinal, or `POOL_DEVICE_CURRENT`.
/// @param stats Receives the counters; its `struct_size` must be set. Zeroed on failure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pool_get_stats(
    pool: *mut pool_t,
    device: c_int,
    stats: *mut pool_stats,
) -> pool_status {
    guard(|| {
        // SAFETY: the caller passes NULL or a struct of `struct_size` bytes.
        let out = unsafe { convert::OutStruct::new(stats) }?;
        out.write(convert::stats(&api::stats(convert::pool(pool)?, device)?));
        Ok(())
    })
}

/// Explains the calling thread's most recent `POOL_ERROR_OUT_OF_MEMORY` answer. A later success does not
/// clear it.
///
/// @param info Receives the answer; its `struct_size` must be set. All zero if there was no such request.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pool_get_oom_info(info: *mut pool_oom_info) -> pool_status {
    guard(|| {
        // SAFETY: the caller passes NULL or a struct of `struct_size` bytes.
        let out = unsafe { convert::OutStruct::new(info) }?;
        out.write(convert::oom_info(&report::last()));
        Ok(())
    })
}

/// The calling thread's most recent failure, in a sentence. A call that succeeds does not clear it.
///
/// @param buf Receives the text, cut to `len` and always terminated; may be NULL if `len` is 0.
/// @param len Bytes of `buf`.
/// @return The length of the whole text, without the terminating zero; 0 if nothing has failed yet.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pool_last_error(buf: *mut c_char, len: usize) -> usize {
    // SAFETY: the caller passes NULL or `len` bytes.
    let buf = unsafe { convert::text_buffer(buf, len) };
    crate::error::last_error(buf)
}

/// The status of the calling thread's most recent failure. The adapters have no status to return; after one
/// of them has failed, this tells why. A call that succeeds does not clear it.
///
/// @return `POOL_OK` if nothing has failed yet.
#[unsafe(no_mangle)]
pub extern "C" fn pool_last_status() -> pool_status {
    crate::error::last_status()
}

/// The name of a status code as it stands in this header. Any integer is answered; the text is
/// static and never NULL.
#[unsafe(no_mangle)]
pub extern "C" fn pool_status_name(status: c_int) -> *const c_char {
    text::status_name(status).as_ptr()
}

/// What a status code means, in a few words. Any integer is answered; the text is static and never NULL.
#[unsafe(no_mangle)]
pub extern "C" fn pool_status_message(status: c_int) -> *const c_char {
    text::status_message(status).as_ptr()
}

/// Fills `options` with the values that a new process starts with: the defaults, as changed by
/// `CUDAPOOL_CONF`.
///
/// @param options Its `struct_size` must be set to `sizeof(pool_options)`.
/// @return `POOL_ERROR_INVALID_OPTION` where `CUDAPOOL_CONF` is wrong; `options` then holds the
///         defaults, and `pool_last_error` names the entry. Every allocation fails in the same way
///         until the process is started with a correct one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pool_options_init(options: *mut pool_options) -> pool_status {
    guard(|| {
        // SAFETY: the caller passes NULL or a struct of `struct_size` bytes.
        let out = unsafe { convert::OutStruct::new(options) }?;
        let (values, environment) = options::initial();
        out.write(convert::options_out(&values));
        environment
    })
}

/// Changes the options of the default pool. All or none of them take effect.
///
/// @param options All options; start from `pool_options_init`.
/// @return `POOL_ERROR_INVALID_OPTION` for a value out of range, or for a change of `backend` after
///         the pool has taken memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pool_configure(options: *const pool_options) -> pool_status {
    guard(|| {
        // SAFETY: the caller passes NULL or a struct of `struct_size` bytes.
        let options = unsafe { convert::options_in(options) }?;
        api::configure(options)
    })
}

/// The library's version: `major * 1000000 + minor * 1000 + patch`, to compare with the header's
/// `POOL_VERSION_*`.
#[unsafe(no_mangle)]
pub extern "C" fn pool_version() -> u32 {
    use super::constants::{POOL_VERSION_MAJOR, POOL_VERSION_MINOR, POOL_VERSION_PATCH};
    POOL_VERSION_MAJOR * 1_000_000 + POOL_VERSION_MINOR * 1_000 + POOL_VERSION_PATCH
}

//! Between the structs of the header and those inside: sizes, bounds and unknown tails.

use super::constants::*;
use super::types::*;
use crate::error::{Result, bail};
use crate::pool::api::{ANY_DEVICE, Stats};
use crate::pool::oom::callbacks::Callback;
use crate::pool::oom::report::{Advice, OWNERS, OomInfo, RUNGS};
use crate::pool::options::{Backend, Options, Order, Spill};
use crate::pool::pools;
use crate::pool::types::{AllocRequest, BlockInfo, NO_OWNER, PoolId, StreamKey, TAG_SIZE, Tag};
use core::ffi::{c_char, c_void};
use core::mem::{MaybeUninit, offset_of, size_of};

/// Longest struct taken from a caller. A limit, so that a wild `struct_size` is not read as a length.
const MAX_STRUCT: usize = 4096;

/// Where a block pointer goes; NULL is written at once, so that every failure leaves it so.
///
/// # Safety
/// `out` is NULL or points to a writable pointer.
pub unsafe fn out_pointer<'a>(out: *mut *mut c_void) -> Result<&'a mut *mut c_void> {
    // SAFETY: the caller's promise.
    let Some(out) = (unsafe { out.as_mut() }) else {
        bail!(POOL_ERROR_INVALID_ARGUMENT, "the pointer to where the block's address goes is NULL");
    };
    *out = core::ptr::null_mut();
    Ok(out)
}

/// An optional place for a size; 0 is written at once.
///
/// # Safety
/// `out` is NULL or points to a writable size.
pub unsafe fn optional_out<'a>(out: *mut usize) -> Option<&'a mut usize> {
    // SAFETY: the caller's promise.
    let out = unsafe { out.as_mut() }?;
    *out = 0;
    Some(out)
}

/// Where a number goes; 0 is written at once.
///
/// # Safety
/// `out` is NULL or points to a writable number.
pub unsafe fn out_number<'a, T: Default>(out: *mut T) -> Result<&'a mut T> {
    // SAFETY: the caller's promise.
    let Some(out) = (unsafe { out.as_mut() }) else {
        bail!(POOL_ERROR_INVALID_ARGUMENT, "the pointer to where the number goes is NULL");
    };
    *out = T::default();
    Ok(out)
}

pub fn callback(callback: pool_reclaim_fn) -> Result<Callback> {
    match callback {
        Some(callback) => Ok(callback),
        None => bail!(POOL_ERROR_INVALID_ARGUMENT, "the callback is NULL"),
    }
}

/// A text buffer of the caller.
///
/// # Safety
/// `buf` is NULL or points to `len` writable bytes.
pub unsafe fn text_buffer<'a>(buf: *mut c_char, len: usize) -> &'a mut [u8] {
    if buf.is_null() || len > isize::MAX as usize {
        return &mut [];
    }
    // SAFETY: the caller's promise; the length is in range.
    unsafe { core::slice::from_raw_parts_mut(buf.cast::<u8>(), len) }
}

/// A struct that crosses the boundary: plain data that begins with its size.
///
/// # Safety
/// `repr(C)`, the first field is `struct_size: usize`, every bit pattern is a value, and zero is one.
pub unsafe trait SizePrefixed: Copy {
    const NAME: &'static str;
}

macro_rules! crossing {
    ($($name:ident),*) => {$(
        // SAFETY: integers, raw pointers and arrays of them, in C layout, behind a size.
        unsafe impl SizePrefixed for $name {
            const NAME: &'static str = stringify!($name);
        }
        const _: () = assert!(offset_of!($name, struct_size) == 0 && size_of::<$name>() <= MAX_STRUCT);
    )*};
}
crossing!(pool_request, pool_block_info, pool_stats, pool_options, pool_oom_info);

/// The `struct_size` of a caller's struct, checked.
///
/// # Safety
/// `from` is NULL or points to at least a size.
unsafe fn struct_size<T: SizePrefixed>(from: *const T) -> Result<usize> {
    if from.is_null() {
        bail!(POOL_ERROR_INVALID_ARGUMENT, "the {} is NULL", T::NAME);
    }
    // SAFETY: the caller's promise; a C caller may have aligned it badly.
    let size = unsafe { from.cast::<usize>().read_unaligned() };
    if size <= size_of::<usize>() || size > MAX_STRUCT {
        bail!(POOL_ERROR_INVALID_ARGUMENT, "struct_size is {}, which no version of {} has", size, T::NAME);
    }
    Ok(size)
}

/// Reads a struct of the caller: a shorter one is filled with zeros, a longer one must be zero where we know
/// nothing of it.
///
/// # Safety
/// `from` is NULL or points to as many readable bytes as its `struct_size` says.
unsafe fn in_struct<T: SizePrefixed>(from: *const T) -> Result<T> {
    // SAFETY: the caller's promise.
    let size = unsafe { struct_size(from) }?;
    let known = size.min(size_of::<T>());
    let mut value = MaybeUninit::<T>::zeroed();
    // SAFETY: `known` bytes are readable there and writable here, and the places are distinct.
    unsafe { core::ptr::copy_nonoverlapping(from.cast::<u8>(), value.as_mut_ptr().cast::<u8>(), known) };
    // SAFETY: `size` bytes are readable, and `known` is at most that.
    let tail =
        unsafe { core::slice::from_raw_parts(from.cast::<u8>().add(known), size.saturating_sub(known)) };
    if tail.iter().any(|byte| *byte != 0) {
        bail!(POOL_ERROR_INVALID_ARGUMENT, "the {} uses fields that this version does not know", T::NAME);
    }
    // SAFETY: zeroed, then partly overwritten; every bit pattern is a value.
    Ok(unsafe { value.assume_init() })
}

/// A struct of the caller that receives an answer.
pub struct OutStruct<T> {
    to: *mut T,
    size: usize,
}

impl<T: SizePrefixed> OutStruct<T> {
    /// Zeroes all that the caller has room for, but the size.
    ///
    /// # Safety
    /// `to` is NULL or points to as many writable bytes as its `struct_size` says, and stays so.
    pub unsafe fn new(to: *mut T) -> Result<Self> {
        // SAFETY: the caller's promise.
        let size = unsafe { struct_size(to.cast_const()) }?;
        let out = OutStruct { to, size };
        // SAFETY: zero is a value of every such struct.
        out.write(unsafe { MaybeUninit::<T>::zeroed().assume_init() });
        Ok(out)
    }

    /// Writes as much of the answer as the caller has room for. Its `struct_size` stays.
    pub fn write(&self, value: T) {
        let head = size_of::<usize>();
        let len = self.size.min(size_of::<T>()).saturating_sub(head);
        // SAFETY: at most `size` bytes are written, past the size field; `value` has as many.
        unsafe {
            let from = core::ptr::from_ref(&value).cast::<u8>().add(head);
            core::ptr::copy_nonoverlapping(from, self.to.cast::<u8>().add(head), len);
        }
    }
}

/// A request, with its fields checked, and the device that it names.
///
/// # Safety
/// `from` is NULL or points to as many readable bytes as its `struct_size` says; its owner is NULL or a
/// terminated string.
pub unsafe fn request(from: *const pool_request) -> Result<(AllocRequest, i32)> {
    // SAFETY: the caller's promise.
    let r = unsafe { in_struct(from) }?;
    let pool = pool(r.pool)?;
    let known = POOL_REQUEST_STREAM_ORDERED | POOL_REQUEST_OWN_ALLOCATION;
    if r.flags & !known != 0 {
        bail!(POOL_ERROR_INVALID_ARGUMENT, "{:#x} are unknown flags of a request", r.flags & !known);
    }
    if r.reserved != 0 {
        bail!(POOL_ERROR_INVALID_ARGUMENT, "pool_request.reserved must be 0");
    }
    let align = if r.alignment == 0 { POOL_DEFAULT_ALIGNMENT } else { r.alignment };
    if !align.is_power_of_two() || align > POOL_MAX_ALIGNMENT {
        bail!(
            POOL_ERROR_INVALID_ARGUMENT,
            "an alignment must be a power of two up to {POOL_MAX_ALIGNMENT}, not {align}"
        );
    }
    // A device shorter structs know nothing of reads as 0, which is one; they mean the current one.
    // SAFETY: `in_struct` has checked that the size can be read.
    let size = unsafe { struct_size(from) }?;
    let has_device = size >= offset_of!(pool_request, device) + size_of::<i32>();
    // SAFETY: the caller's promise.
    let owner = unsafe { tag(r.owner) };
    let ordered = r.flags & POOL_REQUEST_STREAM_ORDERED != 0;
    let request = AllocRequest {
        pool,
        size: r.size as u64,
        align: align.max(POOL_DEFAULT_ALIGNMENT) as u64,
        key: if ordered { StreamKey::of(r.stream as u64) } else { StreamKey::DEVICE },
        owner,
        own_allocation: r.flags & POOL_REQUEST_OWN_ALLOCATION != 0,
    };
    Ok((request, if has_device { r.device } else { POOL_DEVICE_CURRENT }))
}

/// # Safety
/// `owner` is NULL or a terminated string.
unsafe fn tag(owner: *const c_char) -> Tag {
    let mut tag = NO_OWNER;
    if owner.is_null() {
        return tag;
    }
    for (i, to) in tag.iter_mut().take(TAG_SIZE - 1).enumerate() {
        // SAFETY: no byte before this one was the terminator.
        match unsafe { *owner.add(i) } {
            0 => break,
            byte => *to = byte as u8,
        }
    }
    tag
}

/// The pool of a handle.
pub fn pool(pool: *mut pool_t) -> Result<PoolId> {
    pools::of_handle(pool as u64)
}

/// Where the handle of a pool goes; NULL is written at once.
///
/// # Safety
/// `out` is NULL or points to a writable pointer.
pub unsafe fn out_pool<'a>(out: *mut *mut pool_t) -> Result<&'a mut *mut pool_t> {
    // SAFETY: the caller's promise.
    let Some(out) = (unsafe { out.as_mut() }) else {
        bail!(POOL_ERROR_INVALID_ARGUMENT, "the pointer to where the pool goes is NULL");
    };
    *out = core::ptr::null_mut();
    Ok(out)
}

const _: () = assert!(POOL_DEVICE_CURRENT == ANY_DEVICE);
const _: () = assert!(POOL_OOM_RUNGS == RUNGS && POOL_OOM_OWNERS == OWNERS && POOL_OWNER_SIZE == TAG_SIZE);

pub fn oom_info(info: &OomInfo) -> pool_oom_info {
    pool_oom_info {
        struct_size: 0,
        requested_bytes: info.requested,
        device: info.device,
        advice: match info.advice {
            Advice::None => POOL_ADVICE_NONE,
            Advice::RaiseLimit => POOL_ADVICE_RAISE_LIMIT,
            Advice::FreeForeign => POOL_ADVICE_FREE_FOREIGN,
            Advice::Defragment => POOL_ADVICE_DEFRAGMENT,
            Advice::EndCapture => POOL_ADVICE_END_CAPTURE,
            Advice::UseLess => POOL_ADVICE_USE_LESS,
            Advice::Wait => POOL_ADVICE_WAIT,
        },
        rungs_tried: u64::from(info.tried),
        rung_bytes: info.gained,
        rung_micros: info.micros,
        live_bytes: info.live,
        cached_bytes: info.cached,
        pending_bytes: info.pending,
        overhead_bytes: info.overhead,
        reserved_bytes: info.reserved,
        limit_bytes: info.limit,
        largest_free_bytes: info.largest_free,
        device_free_bytes: info.device_free,
        device_total_bytes: info.device_total,
        pools_bytes: info.pools,
        foreign_bytes: info.foreign,
        owners: info.owners.map(|(tag, _)| c_tag(&tag)),
        owner_bytes: info.owners.map(|(_, bytes)| bytes),
    }
}

fn c_tag(tag: &Tag) -> [c_char; TAG_SIZE] {
    tag.map(|byte| byte as c_char)
}

pub fn block_info(block: &BlockInfo) -> pool_block_info {
    pool_block_info {
        struct_size: 0,
        base: block.base as *mut c_void,
        requested_size: block.requested as usize,
        usable_size: block.usable as usize,
        device: block.device,
        order: if block.stream_ordered { POOL_ORDER_STREAM } else { POOL_ORDER_DEVICE },
        stream: if block.stream_ordered { block.handle as *mut CUstream_st } else { core::ptr::null_mut() },
        owner: c_tag(&block.owner),
        pool: pools::handle_of(block.pool) as *mut pool_t,
    }
}

pub fn stats(stats: &Stats) -> pool_stats {
    let (b, c) = (&stats.bytes, &stats.counters);
    pool_stats {
        struct_size: 0,
        live_bytes: b.live,
        live_bytes_peak: b.live_peak,
        requested_bytes: b.requested,
        cached_bytes: b.cached,
        pending_bytes: b.pending,
        overhead_bytes: b.overhead,
        reserved_bytes: b.mapped,
        reserved_bytes_peak: b.mapped_peak,
        live_blocks: b.live_blocks,
        alloc_count: c.allocs,
        free_count: c.frees,
        driver_alloc_calls: c.calls.alloc,
        driver_free_calls: c.calls.free,
        driver_map_calls: c.calls.map,
        driver_unmap_calls: c.calls.unmap,
        driver_sync_calls: c.calls.sync,
        oom_count: c.oom,
        oom_recovered_count: c.oom_recovered,
        headroom_bytes: stats.headroom,
        spilled_bytes: stats.spilled,
        spill_count: c.spills,
        oom_wait_count: c.waits,
    }
}

pub fn options_out(options: &Options) -> pool_options {
    pool_options {
        struct_size: 0,
        limit_bytes: options.limit_bytes,
        limit_percent: options.limit_percent,
        max_idle_percent: options.max_idle_percent,
        backend: match options.backend {
            Backend::Auto => POOL_BACKEND_AUTO,
            Backend::Vmm => POOL_BACKEND_VMM,
            Backend::Malloc => POOL_BACKEND_MALLOC,
        },
        order: match options.order {
            Order::Device => POOL_ORDER_DEVICE,
            Order::LegacyStream => POOL_ORDER_STREAM,
        },
        settle_ms: options.settle_ms,
        log: options.log,
        headroom_bytes: options.headroom_bytes,
        headroom_percent: options.headroom_percent,
        oom_wait_ms: options.oom_wait_ms,
        spill: match options.spill {
            Spill::Off => POOL_SPILL_OFF,
            Spill::Host => POOL_SPILL_HOST,
        },
        reserved: 0,
    }
}

/// # Safety
/// `from` is NULL or points to as many readable bytes as its `struct_size` says.
pub unsafe fn options_in(from: *const pool_options) -> Result<Options> {
    // SAFETY: the caller's promise.
    let o = unsafe { in_struct(from) }?;
    if o.reserved != 0 {
        bail!(POOL_ERROR_INVALID_ARGUMENT, "pool_options.reserved must be 0");
    }
    Ok(Options {
        limit_bytes: o.limit_bytes,
        limit_percent: o.limit_percent,
        max_idle_percent: o.max_idle_percent,
        backend: match o.backend {
            POOL_BACKEND_AUTO => Backend::Auto,
            POOL_BACKEND_VMM => Backend::Vmm,
            POOL_BACKEND_MALLOC => Backend::Malloc,
            other => bail!(POOL_ERROR_INVALID_OPTION, "{other} is not a POOL_BACKEND value"),
        },
        order: match o.order {
            POOL_ORDER_DEVICE => Order::Device,
            POOL_ORDER_STREAM => Order::LegacyStream,
            other => bail!(POOL_ERROR_INVALID_OPTION, "{other} is not a POOL_ORDER value"),
        },
        settle_ms: o.settle_ms,
        log: o.log,
        headroom_bytes: o.headroom_bytes,
        headroom_percent: o.headroom_percent,
        oom_wait_ms: o.oom_wait_ms,
        spill: match o.spill {
            POOL_SPILL_OFF => Spill::Off,
            POOL_SPILL_HOST => Spill::Host,
            other => bail!(POOL_ERROR_INVALID_OPTION, "{other} is not a POOL_SPILL value"),
        },
        pinned: false,
    })
}

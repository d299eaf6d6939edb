//! Pool mode: what the driver tells about memory. Blocks of the pool look as if `cuMemAlloc` had given each
//! of them.
//!
//! To the driver an address of the pool is part of something larger: a reservation, a chunk. Where that would
//! show, the answer is replaced. What cannot be had for a part (a handle for another process) is refused: it
//! would be a handle of the whole, and the other process would find the wrong bytes.

use crate::alloc::{Owner, Tag, owner_of};
use crate::hooks::{CuResult, code};
use crate::mode::{self, Mode};
use crate::pool::{self, BlockInfo, Pool};
use crate::real;
use crate::text::of_c;
use core::ffi::{c_int, c_uint, c_void};
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering::*};
use cudarc::driver::sys::CUpointer_attribute as Attribute;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, DefaultHasher};
use std::sync::{Mutex, MutexGuard, PoisonError};

hooks! {
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) |call| memory_info(free, call());
    fn cuMemGetAddressRange_v2(base: *mut usize, size: *mut usize, ptr: usize)
        |call| match place_of(ptr) {
            Place::Block(block) => address_range(base, size, &block),
            Place::Dead if real::current_context() == 0 => code::INVALID_CONTEXT,
            Place::Dead => code::NOT_FOUND,
            Place::Elsewhere => call(),
        };
    fn cuPointerGetAttribute(data: *mut c_void, which: c_int, ptr: usize)
        |call| match place_of(ptr) {
            Place::Block(block) => attribute(data, which, &block, call()),
            Place::Dead => code::INVALID_VALUE,
            Place::Elsewhere => call(),
        };
    fn cuPointerGetAttributes(count: c_uint, which: *mut c_int, data: *mut *mut c_void, ptr: usize)
        |call| match place_of(ptr) {
            Place::Block(block) => attributes(count, which, data, &block, call()),
            Place::Dead => attributes_of_nothing(count, which, data, ptr),
            Place::Elsewhere => call(),
        };
    fn cuIpcGetMemHandle(handle: *mut c_void, ptr: usize) |call| export(place_of(ptr), call);
    fn cuMemGetHandleForAddressRange(handle: *mut c_void, ptr: usize, size: usize, kind: c_int, flags: u64)
        |call| export(place_of(ptr), call);
    fn cuMemRetainAllocationHandle(handle: *mut usize, ptr: usize)
        |call| match place_of(ptr) {
            // As for memory that was not mapped.
            Place::Block(_) | Place::Dead => code::INVALID_VALUE,
            Place::Elsewhere => call(),
        };
}

/// What an address is to the program.
enum Place {
    /// In what it asked for, of a live block of the pool.
    Block(BlockInfo),
    /// Memory of the pool, but nothing of the program's.
    Dead,
    Elsewhere,
}

fn place_of(ptr: usize) -> Place {
    let Owner::Pool(pool) = owner_of(ptr) else { return Place::Elsewhere };
    match pool.query(ptr) {
        Some(block) if ptr.wrapping_sub(block.base) < block.requested_size => Place::Block(block),
        _ => Place::Dead,
    }
}

/// What is idle in the pool is as good as free: the pool gives way.
fn memory_info(free: *mut usize, result: CuResult) -> CuResult {
    if result == code::SUCCESS
        && mode::get() == Mode::Pool
        && let Some(pool) = pool::if_open()
        // SAFETY: NULL or the caller's place, which the driver has just written.
        && let Some(free) = unsafe { free.as_mut() }
    {
        let idle = usize::try_from(pool.idle_and_held().0).unwrap_or(usize::MAX);
        *free = free.saturating_add(idle).min(real::memory_in_sight());
    }
    result
}

fn address_range(base: *mut usize, size: *mut usize, block: &BlockInfo) -> CuResult {
    if real::current_context() == 0 {
        return code::INVALID_CONTEXT;
    }
    // SAFETY: each is NULL or the caller's place.
    unsafe {
        if let Some(base) = base.as_mut() {
            *base = block.base;
        }
        if let Some(size) = size.as_mut() {
            *size = block.requested_size;
        }
    }
    code::SUCCESS
}

/// For other processes: only memory that is one driver allocation.
fn export(place: Place, call: impl Fn() -> CuResult) -> CuResult {
    match place {
        Place::Block(block) if !real::is_one_allocation(block.base, block.usable_size) => code::NOT_SUPPORTED,
        Place::Dead => code::INVALID_VALUE,
        _ => call(),
    }
}

const CONTEXT: c_int = Attribute::CU_POINTER_ATTRIBUTE_CONTEXT as c_int;
const DEVICE_POINTER: c_int = Attribute::CU_POINTER_ATTRIBUTE_DEVICE_POINTER as c_int;
const HOST_POINTER: c_int = Attribute::CU_POINTER_ATTRIBUTE_HOST_POINTER as c_int;
const BUFFER_ID: c_int = Attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID as c_int;
const IS_LEGACY_IPC_CAPABLE: c_int = Attribute::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE as c_int;
const RANGE_START: c_int = Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR as c_int;
const RANGE_SIZE: c_int = Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE as c_int;
const MAPPING_SIZE: c_int = Attribute::CU_POINTER_ATTRIBUTE_MAPPING_SIZE as c_int;
const MAPPING_BASE: c_int = Attribute::CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR as c_int;
const MEMORY_BLOCK_ID: c_int = Attribute::CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID as c_int;

/// Replaces what the driver said of the pool's memory by what is true of the block.
fn attribute(data: *mut c_void, which: c_int, block: &BlockInfo, result: CuResult) -> CuResult {
    if result != code::SUCCESS || data.is_null() {
        return result;
    }
    let wide = match which {
        // As for the driver's own stream-ordered memory, which belongs to no context.
        CONTEXT if block.order == pool::ORDER_STREAM => 0,
        // SAFETY: the library has terminated the text.
        CONTEXT => Tag::context(unsafe { of_c(block.owner.as_ptr()) }),
        RANGE_START | MAPPING_BASE => block.base,
        RANGE_SIZE | MAPPING_SIZE => block.requested_size,
        BUFFER_ID | MEMORY_BLOCK_ID => match id_of(block.base) {
            Some(id) => id as usize,
            None => return result,
        },
        IS_LEGACY_IPC_CAPABLE => {
            let own = real::is_one_allocation(block.base, block.usable_size);
            // SAFETY: the driver has just written this type there.
            let said = unsafe { &mut *data.cast::<c_uint>() };
            *said = if own { *said } else { 0 };
            return result;
        }
        _ => return result,
    };
    // SAFETY: the driver has just written an address or a size there.
    unsafe { data.cast::<usize>().write_unaligned(wide) };
    result
}

fn attributes(
    count: c_uint,
    which: *const c_int,
    data: *const *mut c_void,
    block: &BlockInfo,
    result: CuResult,
) -> CuResult {
    if result == code::SUCCESS {
        for at in 0..count as usize {
            // SAFETY: the driver has just read so many of each.
            let (which, data) = unsafe { (which.add(at).read(), data.add(at).read()) };
            attribute(data, which, block, result);
        }
    }
    result
}

/// What the driver answers for an address that it does not know: asked about an address of the shim, and the
/// address replaced where the answer repeats it.
fn attributes_of_nothing(count: c_uint, which: *mut c_int, data: *mut *mut c_void, ptr: usize) -> CuResult {
    let stranger = IDS_IN_USE.as_ptr() as usize;
    let result = real::pointer_attributes(count, which, data, stranger);
    if result == code::SUCCESS {
        for at in 0..count as usize {
            // SAFETY: the driver has just read so many of each, and written addresses for these two.
            unsafe {
                let (which, data) = (which.add(at).read(), data.add(at).read().cast::<usize>());
                let echoes = matches!(which, DEVICE_POINTER | HOST_POINTER) && !data.is_null();
                if echoes && data.read_unaligned() == stranger {
                    data.write_unaligned(ptr);
                }
            }
        }
    }
    result
}

/// Numbers of blocks, for those who ask: a block's own, where the driver only knows the chunk's, and never
/// used again, where the chunk is.
static IDS: Mutex<Ids> = Mutex::new(HashMap::with_hasher(BuildHasherDefault::new()));
type Ids = HashMap<usize, u64, BuildHasherDefault<DefaultHasher>>;
static IDS_IN_USE: AtomicUsize = AtomicUsize::new(0);
/// Far from the driver's own numbers.
static NEXT_ID: AtomicU64 = AtomicU64::new(1 << 62);

fn ids() -> MutexGuard<'static, Ids> {
    IDS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `None` without host memory.
fn id_of(base: usize) -> Option<u64> {
    let mut ids = ids();
    if let Some(&id) = ids.get(&base) {
        return Some(id);
    }
    ids.try_reserve(1).ok()?;
    let id = NEXT_ID.fetch_add(1, Relaxed);
    ids.insert(base, id);
    IDS_IN_USE.store(ids.len(), Relaxed);
    Some(id)
}

/// The block is about to be freed.
#[inline]
pub fn forget(base: usize) {
    if IDS_IN_USE.load(Relaxed) > 0 {
        let mut ids = ids();
        if ids.remove(&base).is_some() {
            IDS_IN_USE.store(ids.len(), Relaxed);
        }
    }
}

/// Blocks may have gone with their context.
pub fn forget_dead(pool: &Pool) {
    let mut ids = ids();
    ids.retain(|&base, _| pool.query(base).is_some());
    IDS_IN_USE.store(ids.len(), Relaxed);
}

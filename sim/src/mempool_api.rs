//! The exported functions of memory pools.

use crate::call::{In, Out, Res};
use crate::capture::{self, Route};
use crate::graph::NodeWork;
use crate::memory::{self, Kind};
use crate::mempool::{self, Pool, State};
use crate::physical::Place;
use crate::stream::{self, StreamArg};
use crate::sync::lock;
use crate::vmm::{self, AccessRights, FILE_DESCRIPTOR, Location, ON_DEVICE, PINNED};
use crate::{classic, code, device};
use cudarc::driver::sys::{CUmemPool_attribute, CUmemPoolProps};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// `CUmemPoolProps`
#[derive(Clone, Copy)]
#[repr(C)]
pub struct PoolProperties {
    kind: i32,
    handle_types: i32,
    location: Location,
    windows_attributes: usize,
    max_size: usize,
    usage: u16,
    reserved: [u8; 54],
}

same_layout!(whole PoolProperties, CUmemPoolProps:
    kind = allocType, handle_types = handleTypes, location = location,
    windows_attributes = win32SecurityAttributes, max_size = maxSize, usage = usage, reserved = reserved);

const FOLLOW_EVENT: i32 = CUmemPool_attribute::CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES as i32;
const OPPORTUNISTIC: i32 = CUmemPool_attribute::CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC as i32;
const INTERNAL: i32 = CUmemPool_attribute::CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES as i32;
const THRESHOLD: i32 = CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD as i32;
const RESERVED: i32 = CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT as i32;
const RESERVED_PEAK: i32 = CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH as i32;
const USED: i32 = CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT as i32;
const USED_PEAK: i32 = CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH as i32;

fn require(condition: bool) -> Res {
    match condition {
        true => Ok(()),
        false => Err(code::INVALID_VALUE),
    }
}

fn create(out: Out<usize>, properties: In<PoolProperties>) -> Res {
    capture::unsafe_call()?;
    out.check()?;
    let properties = properties.get()?;
    require(properties.kind == PINNED && properties.handle_types & !FILE_DESCRIPTOR == 0)?;
    let place = vmm::place_at(properties.location, properties.handle_types != 0)?;
    let exportable = properties.handle_types != 0;
    let pool = mempool::create(place, false, exportable, properties.max_size as u64)?;
    out.put(pool.handle.load(Ordering::Relaxed))
}

fn destroy(handle: usize) -> Res {
    capture::unsafe_call()?;
    mempool::destroy(handle)
}

/// An attribute's value; the rules are `int`s, all others 64 bits.
fn get_attribute(handle: usize, which: i32, out: Out<u8>) -> Res {
    capture::unsafe_call()?;
    out.check()?;
    let pool = mempool::find(handle)?;
    let state = lock(&pool.state);
    let wide = match which {
        FOLLOW_EVENT => return put_int(out, state.rules.follow_event),
        OPPORTUNISTIC => return put_int(out, state.rules.opportunistic),
        INTERNAL => return put_int(out, state.rules.internal_dependencies),
        THRESHOLD => state.rules.threshold,
        RESERVED => state.reserved,
        RESERVED_PEAK => state.reserved_peak,
        USED => state.used,
        USED_PEAK => state.used_peak,
        _ => return Err(code::INVALID_VALUE),
    };
    // SAFETY: by the C contract the output has the size of the attribute's type.
    unsafe { out.as_ptr().cast::<u64>().write_unaligned(wide) };
    Ok(())
}

fn put_int(out: Out<u8>, value: i32) -> Res {
    // SAFETY: by the C contract the output has the size of the attribute's type.
    unsafe { out.as_ptr().cast::<i32>().write_unaligned(value) };
    Ok(())
}

fn set_attribute(handle: usize, which: i32, value: In<u8>) -> Res {
    capture::unsafe_call()?;
    value.get()?;
    let pool = mempool::find(handle)?;
    let mut state = lock(&pool.state);
    let State { rules, reserved, reserved_peak, used, used_peak, .. } = &mut *state;
    if let FOLLOW_EVENT | OPPORTUNISTIC | INTERNAL = which {
        // SAFETY: by the C contract the input has the size of the attribute's type.
        let flag = unsafe { value.as_ptr().cast::<i32>().read_unaligned() };
        match which {
            FOLLOW_EVENT => rules.follow_event = flag,
            OPPORTUNISTIC => rules.opportunistic = flag,
            _ => rules.internal_dependencies = flag,
        }
        return Ok(());
    }
    require(matches!(which, THRESHOLD | RESERVED_PEAK | USED_PEAK))?;
    // SAFETY: as above.
    let wide = unsafe { value.as_ptr().cast::<u64>().read_unaligned() };
    match which {
        THRESHOLD => rules.threshold = wide,
        // The peaks can only be reset.
        _ if wide != 0 => return Err(code::INVALID_VALUE),
        RESERVED_PEAK => *reserved_peak = *reserved,
        _ => *used_peak = *used,
    }
    Ok(())
}

fn trim(handle: usize, keep: usize) -> Res {
    capture::unsafe_call()?;
    let pool = mempool::find(handle)?;
    let mut state = lock(&pool.state);
    if !pool.exportable {
        pool.settle(&mut state, keep as u64);
    }
    Ok(())
}

fn set_access(handle: usize, rights: In<AccessRights>, count: usize) -> Res {
    capture::unsafe_call()?;
    let pool = mempool::find(handle)?;
    require(count > 0)?;
    let mut changes = Vec::new();
    for right in rights.list(count)? {
        let granted = right.right()?;
        require(right.location.kind == ON_DEVICE)?;
        let ordinal = device::get(right.location.id)?.ordinal;
        if ordinal == pool.device && granted != memory::READ_WRITE {
            return Err(code::INVALID_DEVICE);
        }
        changes.push((ordinal, granted));
    }
    let rights = {
        let mut state = lock(&pool.state);
        for (device, right) in changes {
            state.rights[device] = right;
        }
        state.rights
    };
    let mut memory = memory::writing();
    let own = memory.pool_segments.values_mut();
    own.filter(|segment| Arc::ptr_eq(&segment.pool, &pool)).for_each(|segment| segment.rights = rights);
    Ok(())
}

fn get_access(out: Out<i32>, handle: usize, location: In<Location>) -> Res {
    capture::unsafe_call()?;
    out.check()?;
    let pool = mempool::find(handle)?;
    let location = location.get()?;
    require(location.kind == ON_DEVICE)?;
    let ordinal = device::get(location.id)?.ordinal;
    let right = lock(&pool.state).rights[ordinal];
    out.put(right as i32)
}

fn default_pool(out: Out<usize>, device: i32) -> Res {
    out.check()?;
    let pool = mempool::default_of(device::get(device)?.ordinal)?;
    out.put(pool.handle.load(Ordering::Relaxed))
}

/// The two functions about a device's current pool answer 1 for a bad device.
fn ordinal(device: i32) -> Res<usize> {
    let device = device::get(device).map_err(|_| code::INVALID_VALUE)?;
    Ok(device.ordinal)
}

fn current_pool(out: Out<usize>, device: i32) -> Res {
    out.check()?;
    let pool = mempool::current_of(ordinal(device)?)?;
    out.put(pool.handle.load(Ordering::Relaxed))
}

fn set_current_pool(device: i32, handle: usize) -> Res {
    capture::unsafe_call()?;
    let ordinal = ordinal(device)?;
    let pool = mempool::find(handle)?;
    require(pool.place == Place::Device(ordinal))?;
    mempool::set_current(ordinal, pool)
}

fn allocate(out: Out<u64>, size: usize, pool: Option<usize>, argument: StreamArg) -> Res {
    let stream = stream::usable(argument)?;
    out.check()?;
    let pool: Arc<Pool> = match pool {
        Some(handle) => mempool::find(handle)?,
        None => mempool::current_of(stream.context.device)?,
    };
    if size == 0 {
        return Err(code::INVALID_VALUE);
    }
    if capture::route(&stream)? == Route::Record {
        // Memory of a capture belongs to the graph.
        let address = classic::allocate(stream.context, size as u64, Kind::Graph, 0)?;
        capture::record(&stream, NodeWork::Allocate(address))?;
        return out.put(address);
    }
    mempool::check_access(&pool, stream.context)?;
    out.put(mempool::allocate(&pool, &stream, size as u64)?)
}

fn free(address: u64, argument: StreamArg) -> Res {
    let stream = stream::usable(argument)?;
    require(address != 0)?;
    if capture::route(&stream)? == Route::Record {
        require(capture::owns_allocation(&stream, address))?;
        return capture::record(&stream, NodeWork::Free(address));
    }
    let kind = memory::reading().blocks.get(&address).map(|block| block.kind);
    match kind {
        Some(Kind::Pool(_)) => mempool::free_in_order(address, &stream),
        Some(Kind::Device) => mempool::free_classic_in_order(address, &stream),
        // A graph's memory stays with the graph.
        Some(Kind::Graph) => Ok(()),
        _ => Err(code::INVALID_VALUE),
    }
}

/// Memory does not leave the process.
fn not_shareable(handle: usize) -> Res {
    capture::unsafe_call()?;
    let pool = mempool::find(handle)?;
    match pool.exportable {
        true => Err(code::NOT_SUPPORTED),
        false => Err(code::INVALID_VALUE),
    }
}

exports! {
    fn cuMemPoolCreate(out: Out<usize>, properties: In<PoolProperties>) => create(out, properties);
    fn cuMemPoolDestroy(pool: usize) => destroy(pool);
    fn cuMemPoolGetAttribute(pool: usize, which: i32, out: Out<u8>) => get_attribute(pool, which, out);
    fn cuMemPoolSetAttribute(pool: usize, which: i32, value: In<u8>) => set_attribute(pool, which, value);
    fn cuMemPoolTrimTo(pool: usize, keep: usize) => trim(pool, keep);
    fn cuMemPoolSetAccess(pool: usize, rights: In<AccessRights>, count: usize)
        => set_access(pool, rights, count);
    fn cuMemPoolGetAccess(out: Out<i32>, pool: usize, location: In<Location>)
        => get_access(out, pool, location);
    fn cuMemPoolExportToShareableHandle(_out: usize, pool: usize, _kind: i32, _flags: u64)
        => not_shareable(pool);
    fn cuMemPoolImportFromShareableHandle(_out: usize, _handle: usize, _kind: i32, _flags: u64)
        => capture::unsafe_call().and(Err(code::NOT_SUPPORTED));
    fn cuMemPoolExportPointer(_out: usize, _address: u64)
        => capture::unsafe_call().and(Err(code::INVALID_VALUE));
    fn cuMemPoolImportPointer(_out: usize, _pool: usize, _data: usize)
        => capture::unsafe_call().and(Err(code::INVALID_VALUE));
    fn cuDeviceGetDefaultMemPool(out: Out<usize>, device: i32) => default_pool(out, device);
    fn cuDeviceGetMemPool(out: Out<usize>, device: i32) => current_pool(out, device);
    fn cuDeviceSetMemPool(device: i32, pool: usize) => set_current_pool(device, pool);
    stream fn cuMemAllocAsync, cuMemAllocAsync_ptsz(out: Out<u64>, size: usize; s)
        => allocate(out, size, None, s);
    stream fn cuMemAllocFromPoolAsync, cuMemAllocFromPoolAsync_ptsz(
        out: Out<u64>, size: usize, pool: usize; s)
        => allocate(out, size, Some(pool), s);
    stream fn cuMemFreeAsync, cuMemFreeAsync_ptsz(address: u64; s) => free(address, s);
}

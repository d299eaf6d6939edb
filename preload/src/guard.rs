//! Guard: an allocation that the driver refuses for lack of memory makes the pool give way, and is tried once
//! more.
//!
//! The result of the first try stands if that fails too. Covers what allocates device memory by name, and
//! what needs some on the way: modules, contexts, graphs. In pool mode these stay the driver's as well.

use crate::bytes::Size;
use crate::hooks::{CuResult, Hook, code};
use crate::mode::{self, Mode};
use crate::pool::{self, CURRENT_DEVICE};
use crate::real;
use crate::text::say;
use core::ffi::{c_char, c_int, c_uint, c_void};
use cudarc::driver::sys::{
    CUDA_ARRAY_DESCRIPTOR, CUDA_ARRAY3D_DESCRIPTOR, CUarray_format as Format, CUmemAllocationProp,
    CUmemLocationType,
};

/// The driver takes memory in pages of this size for itself.
const PAGE: usize = 2 << 20;
/// Its own pools take it in larger steps.
const MEMPOOL_STEP: usize = 32 << 20;
/// For calls that do not say how much they need.
pub const UNSAID: usize = 0;
/// What such calls get: more than modules, contexts and graphs take.
const ENOUGH: usize = 1 << 30;

hooks! {
    fn cuMemAllocPitch_v2(out: *mut usize, pitch: *mut usize, width: usize, height: usize, element: c_uint)
        |call| guarded(&cuMemAllocPitch_v2::HOOK, CURRENT_DEVICE, || pitched(width, height), call);
    fn cuMemAllocManaged(out: *mut usize, size: usize, flags: c_uint)
        |call| guarded(&cuMemAllocManaged::HOOK, CURRENT_DEVICE, || size, call);
    fn cuMemAllocFromPoolAsync(out: *mut usize, size: usize, pool: usize, stream: usize)
        |call| guarded_on(&cuMemAllocFromPoolAsync::HOOK, stream, size, call);
    fn cuMemAllocFromPoolAsync_ptsz(out: *mut usize, size: usize, pool: usize, stream: usize)
        |call| guarded_on(&cuMemAllocFromPoolAsync_ptsz::HOOK, stream, size, call);
    fn cuMemCreate(handle: *mut usize, size: usize, properties: *const AllocationProperties, flags: u64)
        |call| match device_of(properties) {
            Some(device) => guarded(&cuMemCreate::HOOK, device, || size, call),
            None => call(),
        };
    fn cuArrayCreate_v2(array: *mut usize, shape: *const ArrayShape)
        |call| guarded(&cuArrayCreate_v2::HOOK, CURRENT_DEVICE, || flat_size(shape), call);
    fn cuArray3DCreate_v2(array: *mut usize, shape: *const ArrayShape3)
        |call| guarded(&cuArray3DCreate_v2::HOOK, CURRENT_DEVICE, || deep_size(shape, 1), call);
    fn cuMipmappedArrayCreate(array: *mut usize, shape: *const ArrayShape3, levels: c_uint)
        |call| guarded(&cuMipmappedArrayCreate::HOOK, CURRENT_DEVICE, || deep_size(shape, levels), call);

    fn cuModuleLoad(module: *mut usize, name: *const c_char)
        |call| guarded(&cuModuleLoad::HOOK, CURRENT_DEVICE, || UNSAID, call);
    fn cuModuleLoadData(module: *mut usize, image: *const c_void)
        |call| guarded(&cuModuleLoadData::HOOK, CURRENT_DEVICE, || UNSAID, call);
    fn cuModuleLoadDataEx(
        module: *mut usize, image: *const c_void, count: c_uint, options: *mut c_int,
        values: *mut *mut c_void,
    ) |call| guarded(&cuModuleLoadDataEx::HOOK, CURRENT_DEVICE, || UNSAID, call);
    fn cuModuleLoadFatBinary(module: *mut usize, binary: *const c_void)
        |call| guarded(&cuModuleLoadFatBinary::HOOK, CURRENT_DEVICE, || UNSAID, call);
    fn cuModuleGetFunction(function: *mut usize, module: usize, name: *const c_char)
        |call| guarded(&cuModuleGetFunction::HOOK, CURRENT_DEVICE, || UNSAID, call);
    fn cuLibraryLoadData(
        library: *mut usize, image: *const c_void,
        options: *mut c_int, values: *mut *mut c_void, count: c_uint,
        library_options: *mut c_int, library_values: *mut *mut c_void, library_count: c_uint,
    ) |call| guarded(&cuLibraryLoadData::HOOK, CURRENT_DEVICE, || UNSAID, call);
    fn cuLibraryLoadFromFile(
        library: *mut usize, name: *const c_char,
        options: *mut c_int, values: *mut *mut c_void, count: c_uint,
        library_options: *mut c_int, library_values: *mut *mut c_void, library_count: c_uint,
    ) |call| guarded(&cuLibraryLoadFromFile::HOOK, CURRENT_DEVICE, || UNSAID, call);
    fn cuLibraryGetModule(module: *mut usize, library: usize)
        |call| guarded(&cuLibraryGetModule::HOOK, CURRENT_DEVICE, || UNSAID, call);
    fn cuKernelGetFunction(function: *mut usize, kernel: usize)
        |call| guarded(&cuKernelGetFunction::HOOK, CURRENT_DEVICE, || UNSAID, call);
    fn cuCtxCreate_v2(context: *mut usize, flags: c_uint, device: c_int)
        |call| guarded(&cuCtxCreate_v2::HOOK, device, || UNSAID, call);
    fn cuCtxCreate_v3(
        context: *mut usize, parameters: *mut c_void, count: c_int, flags: c_uint, device: c_int,
    ) |call| guarded(&cuCtxCreate_v3::HOOK, device, || UNSAID, call);
    fn cuCtxCreate_v4(context: *mut usize, parameters: *mut c_void, flags: c_uint, device: c_int)
        |call| guarded(&cuCtxCreate_v4::HOOK, device, || UNSAID, call);
    fn cuGraphInstantiate(
        executable: *mut usize, graph: usize, node: *mut usize, log: *mut c_char, size: usize,
    ) |call| guarded(&cuGraphInstantiate::HOOK, CURRENT_DEVICE, || UNSAID, call);
    fn cuGraphInstantiate_v2(
        executable: *mut usize, graph: usize, node: *mut usize, log: *mut c_char, size: usize,
    ) |call| guarded(&cuGraphInstantiate_v2::HOOK, CURRENT_DEVICE, || UNSAID, call);
    fn cuGraphInstantiateWithFlags(executable: *mut usize, graph: usize, flags: u64)
        |call| guarded(&cuGraphInstantiateWithFlags::HOOK, CURRENT_DEVICE, || UNSAID, call);
    fn cuGraphInstantiateWithParams(executable: *mut usize, graph: usize, parameters: *mut c_void)
        |call| guarded(&cuGraphInstantiateWithParams::HOOK, CURRENT_DEVICE, || UNSAID, call);
    fn cuGraphInstantiateWithParams_ptsz(executable: *mut usize, graph: usize, parameters: *mut c_void)
        |call| guarded(&cuGraphInstantiateWithParams_ptsz::HOOK, CURRENT_DEVICE, || UNSAID, call);
    fn cuGraphUpload(executable: usize, stream: usize)
        |call| guarded_on(&cuGraphUpload::HOOK, stream, UNSAID, call);
    fn cuGraphUpload_ptsz(executable: usize, stream: usize)
        |call| guarded_on(&cuGraphUpload_ptsz::HOOK, stream, UNSAID, call);
    fn cuGraphLaunch(executable: usize, stream: usize)
        |call| guarded_on(&cuGraphLaunch::HOOK, stream, UNSAID, call);
    fn cuGraphLaunch_ptsz(executable: usize, stream: usize)
        |call| guarded_on(&cuGraphLaunch_ptsz::HOOK, stream, UNSAID, call);
}

/// An address in the driver, null as long as there is none.
pub fn any_original() -> *mut c_void {
    crate::alloc::cuMemAlloc_v2::HOOK.original()
}

/// Calls the driver, and once more if it lacks memory and the pool has given way. -1 is the device of the
/// current context.
#[inline]
pub fn guarded(
    hook: &Hook,
    device: c_int,
    wanted: impl FnOnce() -> usize,
    call: impl Fn() -> CuResult,
) -> CuResult {
    mode::note_use();
    match call() {
        code::OUT_OF_MEMORY => rescue(hook, device, wanted(), &call),
        result => result,
    }
}

/// The same for calls whose memory is of a stream's device and comes from the driver's own pools.
#[inline]
pub fn guarded_on(hook: &Hook, stream: usize, size: usize, call: impl Fn() -> CuResult) -> CuResult {
    mode::note_use();
    match call() {
        code::OUT_OF_MEMORY => {
            rescue(hook, real::device_of_stream(stream), round_up(size, MEMPOOL_STEP), &call)
        }
        result => result,
    }
}

#[cold]
fn rescue(hook: &Hook, device: c_int, wanted: usize, call: &dyn Fn() -> CuResult) -> CuResult {
    if mode::get() == Mode::Off {
        return code::OUT_OF_MEMORY;
    }
    let total = real::total_memory(device);
    let wanted = if wanted == UNSAID { ENOUGH.min(total) } else { wanted };
    // What no device has is not worth giving anything up for.
    let Some(pool) = pool::get().filter(|_| wanted <= total) else { return code::OUT_OF_MEMORY };
    let released = pool.reclaim(device, round_up(wanted, PAGE));
    // Whatever was released: what was free before may be enough with it.
    if call() != code::SUCCESS {
        return code::OUT_OF_MEMORY;
    }
    if pool.logs() {
        let name = hook.name.to_str().unwrap_or("");
        let released = Size(released as u64);
        say(format_args!("{name}, refused for memory, was rescued: the pool gave back {released}"));
    }
    code::SUCCESS
}

/// To a multiple of a power of two, or as far as that goes.
fn round_up(size: usize, step: usize) -> usize {
    let mask = step.saturating_sub(1);
    size.saturating_add(mask) & !mask
}

/// Rows are padded to this.
const PITCH: usize = 512;

fn pitched(width: usize, height: usize) -> usize {
    round_up(width, PITCH).saturating_mul(height)
}

/// `CUmemAllocationProp`, as far as it is read.
#[repr(C)]
pub struct AllocationProperties {
    kind: c_int,
    handle_types: c_int,
    location_kind: c_int,
    location: c_int,
}

same_layout!(AllocationProperties, CUmemAllocationProp:
    kind = type_, handle_types = requestedHandleTypes, location_kind = location.type_,
    location = location.id);

/// The device that the memory is to be on; `None` for memory elsewhere.
fn device_of(properties: *const AllocationProperties) -> Option<c_int> {
    const ON_DEVICE: c_int = CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE as c_int;
    // SAFETY: NULL or the caller's struct.
    let properties = unsafe { properties.as_ref() }?;
    (properties.location_kind == ON_DEVICE).then_some(properties.location)
}

/// `CUDA_ARRAY_DESCRIPTOR`
#[repr(C)]
pub struct ArrayShape {
    width: usize,
    height: usize,
    format: c_uint,
    channels: c_uint,
}

same_layout!(whole ArrayShape, CUDA_ARRAY_DESCRIPTOR:
    width = Width, height = Height, format = Format, channels = NumChannels);

/// `CUDA_ARRAY3D_DESCRIPTOR`
#[repr(C)]
pub struct ArrayShape3 {
    width: usize,
    height: usize,
    depth: usize,
    format: c_uint,
    channels: c_uint,
    flags: c_uint,
}

same_layout!(whole ArrayShape3, CUDA_ARRAY3D_DESCRIPTOR:
    width = Width, height = Height, depth = Depth, format = Format, channels = NumChannels, flags = Flags);

/// Bytes of one channel. The formats that are not listed are block-compressed or planar, and not larger.
fn channel(format: c_uint) -> usize {
    const UNSIGNED_8: c_uint = Format::CU_AD_FORMAT_UNSIGNED_INT8 as c_uint;
    const UNSIGNED_16: c_uint = Format::CU_AD_FORMAT_UNSIGNED_INT16 as c_uint;
    const SIGNED_8: c_uint = Format::CU_AD_FORMAT_SIGNED_INT8 as c_uint;
    const SIGNED_16: c_uint = Format::CU_AD_FORMAT_SIGNED_INT16 as c_uint;
    const HALF: c_uint = Format::CU_AD_FORMAT_HALF as c_uint;
    match format {
        UNSIGNED_8 | SIGNED_8 => 1,
        UNSIGNED_16 | SIGNED_16 | HALF => 2,
        _ => 4,
    }
}

fn flat_size(shape: *const ArrayShape) -> usize {
    // SAFETY: NULL or the caller's struct.
    let Some(shape) = (unsafe { shape.as_ref() }) else { return 0 };
    texels(shape.width, shape.height, 1, shape.format, shape.channels)
}

fn deep_size(shape: *const ArrayShape3, levels: c_uint) -> usize {
    // SAFETY: NULL or the caller's struct.
    let Some(shape) = (unsafe { shape.as_ref() }) else { return 0 };
    let first = texels(shape.width, shape.height, shape.depth, shape.format, shape.channels);
    // Smaller levels add less than the first again.
    if levels > 1 { first.saturating_mul(2) } else { first }
}

fn texels(width: usize, height: usize, depth: usize, format: c_uint, channels: c_uint) -> usize {
    [height.max(1), depth.max(1), channel(format), channels.max(1) as usize]
        .into_iter()
        .fold(width, usize::saturating_mul)
}

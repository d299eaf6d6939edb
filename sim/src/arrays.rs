//! Pitched and managed memory, and arrays: for the simulation, device blocks with a shape.

use crate::call::{In, Out, Res};
use crate::context;
use crate::memory::{self, Kind};
use crate::registry::{Found, Registry};
use crate::{capture, classic, code, knobs, stream};
use cudarc::driver::sys::{
    CUDA_ARRAY_DESCRIPTOR, CUDA_ARRAY3D_DESCRIPTOR, CUarray_format as Format, CUmemAttach_flags,
};
use std::sync::Arc;

const PITCH_STEP: u64 = 512;

/// Where managed memory is visible: to all, or to the host until it is attached.
const ATTACH_GLOBAL: u32 = CUmemAttach_flags::CU_MEM_ATTACH_GLOBAL as u32;
const ATTACH_HOST: u32 = CUmemAttach_flags::CU_MEM_ATTACH_HOST as u32;

fn require(condition: bool) -> Res {
    match condition {
        true => Ok(()),
        false => Err(code::INVALID_VALUE),
    }
}

fn pitched(out: Out<u64>, pitch: Out<usize>, width: usize, height: usize, element: u32) -> Res {
    let context = context::current()?;
    capture::unsafe_call()?;
    out.check()?;
    pitch.check()?;
    require(width > 0 && height > 0 && matches!(element, 4 | 8 | 16))?;
    let row = crate::ranges::round_up(width as u64, PITCH_STEP).ok_or(code::INVALID_VALUE)?;
    let size = row.checked_mul(height as u64).ok_or(code::OUT_OF_MEMORY)?;
    out.put(classic::allocate(context, size, Kind::Device, 0)?)?;
    pitch.put(row as usize)
}

fn managed(out: Out<u64>, size: usize, flags: u32) -> Res {
    let context = context::current()?;
    capture::unsafe_call()?;
    out.check()?;
    require(size > 0 && matches!(flags, ATTACH_GLOBAL | ATTACH_HOST))?;
    out.put(classic::allocate(context, size as u64, Kind::Managed, flags)?)
}

/// `CUDA_ARRAY_DESCRIPTOR`
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Descriptor2 {
    width: usize,
    height: usize,
    format: u32,
    channels: u32,
}

same_layout!(whole Descriptor2, CUDA_ARRAY_DESCRIPTOR:
    width = Width, height = Height, format = Format, channels = NumChannels);

/// `CUDA_ARRAY3D_DESCRIPTOR`
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Descriptor3 {
    width: usize,
    height: usize,
    depth: usize,
    format: u32,
    channels: u32,
    flags: u32,
}

same_layout!(whole Descriptor3, CUDA_ARRAY3D_DESCRIPTOR:
    width = Width, height = Height, depth = Depth, format = Format, channels = NumChannels, flags = Flags);

const UNSIGNED_8: u32 = Format::CU_AD_FORMAT_UNSIGNED_INT8 as u32;
const UNSIGNED_16: u32 = Format::CU_AD_FORMAT_UNSIGNED_INT16 as u32;
const UNSIGNED_32: u32 = Format::CU_AD_FORMAT_UNSIGNED_INT32 as u32;
const SIGNED_8: u32 = Format::CU_AD_FORMAT_SIGNED_INT8 as u32;
const SIGNED_16: u32 = Format::CU_AD_FORMAT_SIGNED_INT16 as u32;
const SIGNED_32: u32 = Format::CU_AD_FORMAT_SIGNED_INT32 as u32;
const HALF: u32 = Format::CU_AD_FORMAT_HALF as u32;
const FLOAT: u32 = Format::CU_AD_FORMAT_FLOAT as u32;

impl Descriptor3 {
    fn of(flat: Descriptor2) -> Descriptor3 {
        Descriptor3 {
            width: flat.width,
            height: flat.height,
            depth: 0,
            format: flat.format,
            channels: flat.channels,
            flags: 0,
        }
    }

    fn element(&self) -> Res<u64> {
        let bytes = match self.format {
            UNSIGNED_8 | SIGNED_8 => 1,
            UNSIGNED_16 | SIGNED_16 | HALF => 2,
            UNSIGNED_32 | SIGNED_32 | FLOAT => 4,
            _ => return Err(code::INVALID_VALUE),
        };
        require(matches!(self.channels, 1 | 2 | 4))?;
        Ok(bytes * self.channels as u64)
    }
}

/// An array, or all levels of a mipmapped one.
pub struct Array {
    pub address: u64,
    pub pitch: u64,
    /// Rows of a slice.
    pub rows: u64,
    shape: Descriptor3,
}

static ARRAYS: Registry<Array> = Registry::new(0x5b00_0000_1000);
static MIPMAPPED: Registry<Array> = Registry::new(0x5b80_0000_1000);

pub fn find(handle: usize) -> Res<Arc<Array>> {
    match ARRAYS.find(handle) {
        Found::Live(array) => Ok(array),
        _ => Err(code::INVALID_HANDLE),
    }
}

fn create_in(registry: &Registry<Array>, out: Out<usize>, shape: Descriptor3, scale: u64) -> Res {
    let context = context::current()?;
    capture::unsafe_call()?;
    out.check()?;
    require(shape.width > 0)?;
    let pitch = (shape.width as u64).checked_mul(shape.element()?).ok_or(code::INVALID_VALUE)?;
    let rows = shape.height.max(1) as u64;
    let size = pitch
        .checked_mul(rows)
        .and_then(|slice| slice.checked_mul(shape.depth.max(1) as u64))
        .and_then(|size| size.checked_mul(scale))
        .ok_or(code::OUT_OF_MEMORY)?;
    let address = classic::allocate(context, size, Kind::Array, 0)?;
    let array = Arc::new(Array { address, pitch, rows, shape });
    match registry.add(|_| array) {
        Some((handle, _)) => out.put(handle),
        None => Err(code::OUT_OF_MEMORY),
    }
}

fn destroy_in(registry: &Registry<Array>, handle: usize) -> Res {
    context::current()?;
    capture::unsafe_call()?;
    let Found::Live(array) = registry.remove(handle) else {
        return Err(code::INVALID_HANDLE);
    };
    let block = |memory: &memory::Memory| {
        let block = memory.blocks.get(&array.address)?;
        Some((block.size, block.context))
    };
    let Some((size, owner)) = block(&memory::reading()) else {
        return Err(code::CONTEXT_IS_DESTROYED);
    };
    if knobs::free_waits() {
        owner.wait();
    }
    stream::check_untouched(array.address, size, "cuArrayDestroy");
    let remains = classic::remove(&mut memory::writing(), array.address);
    drop(remains);
    Ok(())
}

fn descriptor(out: Out<Descriptor2>, handle: usize) -> Res {
    out.check()?;
    let shape = find(handle)?.shape;
    out.put(Descriptor2 {
        width: shape.width,
        height: shape.height,
        format: shape.format,
        channels: shape.channels,
    })
}

fn descriptor_3d(out: Out<Descriptor3>, handle: usize) -> Res {
    out.check()?;
    out.put(find(handle)?.shape)
}

exports! {
    fn cuMemAllocPitch_v2(out: Out<u64>, pitch: Out<usize>, width: usize, height: usize, element: u32)
        => pitched(out, pitch, width, height, element);
    fn cuMemAllocManaged(out: Out<u64>, size: usize, flags: u32) => managed(out, size, flags);
    fn cuArrayCreate_v2(out: Out<usize>, shape: In<Descriptor2>)
        => create_in(&ARRAYS, out, Descriptor3::of(shape.get()?), 1);
    fn cuArray3DCreate_v2(out: Out<usize>, shape: In<Descriptor3>)
        => create_in(&ARRAYS, out, shape.get()?, 1);
    fn cuArrayDestroy(array: usize) => destroy_in(&ARRAYS, array);
    fn cuArrayGetDescriptor_v2(out: Out<Descriptor2>, array: usize) => descriptor(out, array);
    fn cuArray3DGetDescriptor_v2(out: Out<Descriptor3>, array: usize) => descriptor_3d(out, array);
    fn cuMipmappedArrayCreate(out: Out<usize>, shape: In<Descriptor3>, levels: u32)
        // Smaller levels add less than the first again.
        => create_in(&MIPMAPPED, out, shape.get()?, if levels > 1 { 2 } else { 1 });
    fn cuMipmappedArrayDestroy(array: usize) => destroy_in(&MIPMAPPED, array);
}

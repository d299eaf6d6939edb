//! Copies of rectangles and boxes, between host memory, device memory and arrays.

use crate::arrays;
use crate::call::{In, Res};
use crate::code;
use crate::stream::StreamArg;
use crate::transfer::{End, Mode, copy_2d};
use crate::work::Rows;
use cudarc::driver::sys::{CUDA_MEMCPY2D, CUDA_MEMCPY3D, CUDA_MEMCPY3D_PEER, CUmemorytype};

const HOST: u32 = CUmemorytype::CU_MEMORYTYPE_HOST as u32;
const DEVICE: u32 = CUmemorytype::CU_MEMORYTYPE_DEVICE as u32;
const ARRAY: u32 = CUmemorytype::CU_MEMORYTYPE_ARRAY as u32;
const UNIFIED: u32 = CUmemorytype::CU_MEMORYTYPE_UNIFIED as u32;

/// One side of `CUDA_MEMCPY2D`
#[derive(Clone, Copy)]
#[repr(C)]
struct Side2 {
    x: usize,
    y: usize,
    kind: u32,
    host: u64,
    device: u64,
    array: usize,
    pitch: usize,
}

/// `CUDA_MEMCPY2D`
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Copy2 {
    from: Side2,
    to: Side2,
    width: usize,
    height: usize,
}

same_layout!(whole Copy2, CUDA_MEMCPY2D:
    from.x = srcXInBytes, from.y = srcY, from.kind = srcMemoryType, from.host = srcHost,
    from.device = srcDevice, from.array = srcArray, from.pitch = srcPitch,
    to.x = dstXInBytes, to.y = dstY, to.kind = dstMemoryType, to.host = dstHost,
    to.device = dstDevice, to.array = dstArray, to.pitch = dstPitch,
    width = WidthInBytes, height = Height);

/// One side of `CUDA_MEMCPY3D`
#[derive(Clone, Copy)]
#[repr(C)]
struct Side3 {
    x: usize,
    y: usize,
    z: usize,
    level: usize,
    kind: u32,
    host: u64,
    device: u64,
    array: usize,
    /// The context, in peer copies.
    context: usize,
    pitch: usize,
    height: usize,
}

/// `CUDA_MEMCPY3D`, and `CUDA_MEMCPY3D_PEER`, which has the same layout
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Copy3 {
    from: Side3,
    to: Side3,
    width: usize,
    height: usize,
    depth: usize,
}

macro_rules! as_copy3 {
    ($theirs:ty, $from_context:ident, $to_context:ident) => {
        same_layout!(whole Copy3, $theirs:
            from.x = srcXInBytes, from.y = srcY, from.z = srcZ, from.level = srcLOD,
            from.kind = srcMemoryType, from.host = srcHost, from.device = srcDevice, from.array = srcArray,
            from.context = $from_context, from.pitch = srcPitch, from.height = srcHeight,
            to.x = dstXInBytes, to.y = dstY, to.z = dstZ, to.level = dstLOD,
            to.kind = dstMemoryType, to.host = dstHost, to.device = dstDevice, to.array = dstArray,
            to.context = $to_context, to.pitch = dstPitch, to.height = dstHeight,
            width = WidthInBytes, height = Height, depth = Depth);
    };
}

as_copy3!(CUDA_MEMCPY3D, reserved0, reserved1);
as_copy3!(CUDA_MEMCPY3D_PEER, srcContext, dstContext);

/// A side resolved: where it starts, and the distances of its rows and slices.
struct Place {
    start: u64,
    kind: u32,
    pitch: u64,
    slice: u64,
}

impl Side3 {
    fn of(flat: Side2) -> Side3 {
        Side3 {
            x: flat.x,
            y: flat.y,
            z: 0,
            level: 0,
            kind: flat.kind,
            host: flat.host,
            device: flat.device,
            array: flat.array,
            context: 0,
            pitch: flat.pitch,
            height: 0,
        }
    }

    fn resolve(&self, width: usize) -> Res<Place> {
        let (base, pitch, rows) = match self.kind {
            HOST => (self.host, self.pitch as u64, self.height as u64),
            DEVICE | UNIFIED => (self.device, self.pitch as u64, self.height as u64),
            ARRAY => {
                let array = arrays::find(self.array)?;
                (array.address, array.pitch, array.rows)
            }
            _ => return Err(code::INVALID_VALUE),
        };
        // A pitch of 0 means rows without gaps.
        let pitch = if pitch == 0 { width as u64 } else { pitch };
        if (width as u64) > pitch || self.level != 0 {
            return Err(code::INVALID_VALUE);
        }
        let offset = |slice: u64| {
            (self.z as u64)
                .checked_mul(slice)?
                .checked_add((self.y as u64).checked_mul(pitch)?)?
                .checked_add(self.x as u64)
        };
        let slice = pitch.checked_mul(rows).ok_or(code::INVALID_VALUE)?;
        let start = offset(slice).and_then(|offset| base.checked_add(offset));
        Ok(Place { start: start.ok_or(code::INVALID_VALUE)?, kind: self.kind, pitch, slice })
    }
}

impl Place {
    fn end(&self, slice: u64) -> End {
        let address = self.start.wrapping_add(slice.wrapping_mul(self.slice));
        match self.kind {
            HOST => End::Host(address),
            UNIFIED => End::Any(address),
            _ => End::Device(address),
        }
    }
}

fn copy_box(copy: Copy3, stream: StreamArg, mode: Mode) -> Res {
    let (from, to) = (copy.from.resolve(copy.width)?, copy.to.resolve(copy.width)?);
    let rows = Rows { width: copy.width as u64, count: copy.height as u64 };
    for slice in 0..copy.depth as u64 {
        let (to_end, from_end) = (to.end(slice), from.end(slice));
        copy_2d((to_end, to.pitch), (from_end, from.pitch), rows, stream, mode)?;
    }
    Ok(())
}

fn copy_flat(copy: Copy2, stream: StreamArg, mode: Mode) -> Res {
    let copy = Copy3 {
        from: Side3::of(copy.from),
        to: Side3::of(copy.to),
        width: copy.width,
        height: copy.height,
        depth: 1,
    };
    copy_box(copy, stream, mode)
}

/// A linear copy into an array or out of it, from a byte offset on.
fn in_array(array: usize, offset: usize) -> Res<End> {
    let array = arrays::find(array)?;
    let address = array.address.checked_add(offset as u64);
    Ok(End::Device(address.ok_or(code::INVALID_VALUE)?))
}

fn linear(to: Res<End>, from: Res<End>, size: usize, s: StreamArg, mode: Mode) -> Res {
    let rows = Rows::one(size as u64);
    copy_2d((to?, rows.width), (from?, rows.width), rows, s, mode)
}

use End::{Device, Host};
use Mode::{Async, Sync};

exports! {
    implicit fn cuMemcpyHtoA_v2, cuMemcpyHtoA_v2_ptds(to: usize, at: usize, from: u64, size: usize; s)
        => linear(in_array(to, at), Ok(Host(from)), size, s, Sync);
    implicit fn cuMemcpyAtoH_v2, cuMemcpyAtoH_v2_ptds(to: u64, from: usize, at: usize, size: usize; s)
        => linear(Ok(Host(to)), in_array(from, at), size, s, Sync);
    implicit fn cuMemcpyDtoA_v2, cuMemcpyDtoA_v2_ptds(to: usize, at: usize, from: u64, size: usize; s)
        => linear(in_array(to, at), Ok(Device(from)), size, s, Sync);
    implicit fn cuMemcpyAtoD_v2, cuMemcpyAtoD_v2_ptds(to: u64, from: usize, at: usize, size: usize; s)
        => linear(Ok(Device(to)), in_array(from, at), size, s, Sync);
    implicit fn cuMemcpyAtoA_v2, cuMemcpyAtoA_v2_ptds(
        to: usize, to_at: usize, from: usize, from_at: usize, size: usize; s)
        => linear(in_array(to, to_at), in_array(from, from_at), size, s, Sync);
    stream fn cuMemcpyHtoAAsync_v2, cuMemcpyHtoAAsync_v2_ptsz(to: usize, at: usize, from: u64, size: usize; s)
        => linear(in_array(to, at), Ok(Host(from)), size, s, Async);
    stream fn cuMemcpyAtoHAsync_v2, cuMemcpyAtoHAsync_v2_ptsz(to: u64, from: usize, at: usize, size: usize; s)
        => linear(Ok(Host(to)), in_array(from, at), size, s, Async);
    implicit fn cuMemcpy2D_v2, cuMemcpy2D_v2_ptds(copy: In<Copy2>; s) => copy_flat(copy.get()?, s, Sync);
    implicit fn cuMemcpy2DUnaligned_v2, cuMemcpy2DUnaligned_v2_ptds(copy: In<Copy2>; s)
        => copy_flat(copy.get()?, s, Sync);
    stream fn cuMemcpy2DAsync_v2, cuMemcpy2DAsync_v2_ptsz(copy: In<Copy2>; s)
        => copy_flat(copy.get()?, s, Async);
    implicit fn cuMemcpy3D_v2, cuMemcpy3D_v2_ptds(copy: In<Copy3>; s) => copy_box(copy.get()?, s, Sync);
    stream fn cuMemcpy3DAsync_v2, cuMemcpy3DAsync_v2_ptsz(copy: In<Copy3>; s)
        => copy_box(copy.get()?, s, Async);
    implicit fn cuMemcpy3DPeer, cuMemcpy3DPeer_ptds(copy: In<Copy3>; s) => copy_box(copy.get()?, s, Sync);
    stream fn cuMemcpy3DPeerAsync, cuMemcpy3DPeerAsync_ptsz(copy: In<Copy3>; s)
        => copy_box(copy.get()?, s, Async);
}

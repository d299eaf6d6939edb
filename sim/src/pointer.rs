//! What the driver tells about an address: attributes and the allocation around it.

use crate::call::{In, Out, Res};
use crate::memory::{self, Kind, Memory};
use crate::physical::Place;
use crate::{capture, code, context};
use cudarc::driver::sys::{CUmemorytype, CUpointer_attribute as Attribute};

/// One attribute's value, in the type the caller reads it as.
enum Value {
    Word(u64),
    Half(u32),
    /// The attribute means nothing for this address.
    Unset,
}

use Value::{Half, Unset, Word};

const CONTEXT: i32 = Attribute::CU_POINTER_ATTRIBUTE_CONTEXT as i32;
const MEMORY_TYPE: i32 = Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE as i32;
const DEVICE_POINTER: i32 = Attribute::CU_POINTER_ATTRIBUTE_DEVICE_POINTER as i32;
const HOST_POINTER: i32 = Attribute::CU_POINTER_ATTRIBUTE_HOST_POINTER as i32;
const P2P_TOKENS: i32 = Attribute::CU_POINTER_ATTRIBUTE_P2P_TOKENS as i32;
const SYNC_MEMOPS: i32 = Attribute::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS as i32;
const BUFFER_ID: i32 = Attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID as i32;
const IS_MANAGED: i32 = Attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED as i32;
const DEVICE_ORDINAL: i32 = Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL as i32;
const IS_LEGACY_IPC_CAPABLE: i32 = Attribute::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE as i32;
const RANGE_START: i32 = Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR as i32;
const RANGE_SIZE: i32 = Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE as i32;
const MAPPED: i32 = Attribute::CU_POINTER_ATTRIBUTE_MAPPED as i32;
const HANDLE_TYPES: i32 = Attribute::CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES as i32;
const ACCESS_FLAGS: i32 = Attribute::CU_POINTER_ATTRIBUTE_ACCESS_FLAGS as i32;
const POOL_HANDLE: i32 = Attribute::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE as i32;
const MAPPING_SIZE: i32 = Attribute::CU_POINTER_ATTRIBUTE_MAPPING_SIZE as i32;
const MAPPING_BASE: i32 = Attribute::CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR as i32;
const MEMORY_BLOCK_ID: i32 = Attribute::CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID as i32;
const LAST: i32 = Attribute::CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE as i32;

const TYPE_HOST: u32 = CUmemorytype::CU_MEMORYTYPE_HOST as u32;
const TYPE_DEVICE: u32 = CUmemorytype::CU_MEMORYTYPE_DEVICE as u32;

/// The ordinal of memory that the driver does not know: `CU_DEVICE_INVALID`, which cudarc does not have.
const NO_DEVICE: u32 = -2i32 as u32;

impl Value {
    fn put(self, out: Out<u8>) -> Res {
        out.check()?;
        // SAFETY: by the C contract the output has the size of the attribute's type.
        unsafe {
            match self {
                Word(value) => out.as_ptr().cast::<u64>().write_unaligned(value),
                Half(value) => out.as_ptr().cast::<u32>().write_unaligned(value),
                Unset => {}
            }
        }
        Ok(())
    }
}

/// `None`: the driver does not know the address.
fn attribute(memory: &Memory, address: u64, which: i32) -> Option<Value> {
    if let Some((base, block)) = memory.block_at(address) {
        let host = block.kind.is_host();
        let pool = match block.kind {
            Kind::Pool(handle) => handle as u64,
            _ => 0,
        };
        return Some(match which {
            CONTEXT if matches!(block.kind, Kind::Pool(_) | Kind::Graph) => Word(0),
            CONTEXT => Word(block.context.handle as u64),
            MEMORY_TYPE => Half(if host { TYPE_HOST } else { TYPE_DEVICE }),
            DEVICE_POINTER => Word(address),
            HOST_POINTER if host || block.kind == Kind::Managed => Word(address),
            HOST_POINTER => Unset,
            SYNC_MEMOPS => Half(0),
            BUFFER_ID | MEMORY_BLOCK_ID => Word(block.id),
            IS_MANAGED => Half((block.kind == Kind::Managed) as u32),
            DEVICE_ORDINAL => Half(block.device as u32),
            IS_LEGACY_IPC_CAPABLE => Half((block.kind == Kind::Device) as u32),
            RANGE_START | MAPPING_BASE => Word(base),
            RANGE_SIZE | MAPPING_SIZE => Word(block.size),
            MAPPED => Half(1),
            HANDLE_TYPES => Word(0),
            ACCESS_FLAGS => Half(memory::READ_WRITE as u32),
            POOL_HANDLE => Word(pool),
            _ => Half(0),
        });
    }
    let (start, reservation) = memory.reservation_at(address)?;
    let mapping = memory.mapping_at(address);
    let chunk = mapping.map(|(_, mapping)| &mapping.chunk);
    let on_host = chunk.is_some_and(|chunk| chunk.physical.place == Place::Host);
    Some(match which {
        CONTEXT | POOL_HANDLE => Word(0),
        MEMORY_TYPE => Half(if on_host { TYPE_HOST } else { TYPE_DEVICE }),
        DEVICE_POINTER => Word(address),
        HOST_POINTER if on_host => Word(address),
        HOST_POINTER => Unset,
        BUFFER_ID | MEMORY_BLOCK_ID => Word(mapping.map_or(0, |(_, mapping)| mapping.id)),
        DEVICE_ORDINAL => Half(match chunk.map(|chunk| chunk.physical.place) {
            Some(Place::Device(ordinal)) => ordinal as u32,
            _ => NO_DEVICE,
        }),
        RANGE_START => Word(start),
        RANGE_SIZE => Word(reservation.size),
        MAPPED => Half(mapping.is_some() as u32),
        HANDLE_TYPES => Word(chunk.map_or(0, |chunk| chunk.properties.handle_types as u64)),
        ACCESS_FLAGS => Half(mapping.map_or(0, |(base, mapping)| mapping.widest_right(address - base))),
        MAPPING_SIZE => mapping.map_or(Unset, |(_, mapping)| Word(mapping.size)),
        MAPPING_BASE => mapping.map_or(Unset, |(base, _)| Word(base)),
        _ => Half(0),
    })
}

fn known_attribute(which: i32) -> Res {
    match which {
        // The tokens are of an interface that is gone.
        CONTEXT..=LAST if which != P2P_TOKENS => Ok(()),
        _ => Err(code::INVALID_VALUE),
    }
}

fn get(out: Out<u8>, which: i32, address: u64) -> Res {
    out.check()?;
    known_attribute(which)?;
    if which == DEVICE_POINTER && context::top().is_none() {
        return Err(code::INVALID_CONTEXT);
    }
    match attribute(&memory::reading(), address, which) {
        None | Some(Unset) => Err(code::INVALID_VALUE),
        Some(value) => value.put(out),
    }
}

/// The list form answers defaults where the single form fails.
fn get_list(count: u32, which: In<i32>, outputs: In<Out<u8>>, address: u64) -> Res {
    if count == 0 {
        return Err(code::INVALID_VALUE);
    }
    let which = which.list(count as usize)?;
    let outputs = outputs.list(count as usize)?;
    which.iter().try_for_each(|&which| known_attribute(which))?;
    let memory = memory::reading();
    for (which, out) in which.into_iter().zip(outputs) {
        match attribute(&memory, address, which) {
            Some(Unset) if which == HOST_POINTER => Word(0).put(out)?,
            Some(value) => value.put(out)?,
            None => unknown(which, address).put(out)?,
        }
    }
    Ok(())
}

fn unknown(which: i32, address: u64) -> Value {
    match which {
        HOST_POINTER => Word(address),
        DEVICE_ORDINAL => Half(NO_DEVICE),
        RANGE_START | RANGE_SIZE | MAPPING_SIZE | MAPPING_BASE => Unset,
        CONTEXT | DEVICE_POINTER | BUFFER_ID | HANDLE_TYPES | POOL_HANDLE | MEMORY_BLOCK_ID => Word(0),
        _ => Half(0),
    }
}

/// Only synchronous memory operations can be set; all operations that matter are so here already.
fn set(value: In<i32>, which: i32, address: u64) -> Res {
    value.get()?;
    if which != SYNC_MEMOPS || !memory::reading().knows(address) {
        return Err(code::INVALID_VALUE);
    }
    Ok(())
}

fn address_range(base: Out<u64>, size: Out<usize>, address: u64) -> Res {
    context::current()?;
    let memory = memory::reading();
    let (start, length) = match memory.block_at(address) {
        Some((start, block)) => (start, block.size),
        None => {
            memory.mapping_at(address).map(|(start, mapping)| (start, mapping.size)).ok_or(code::NOT_FOUND)?
        }
    };
    base.put_if_wanted(start);
    size.put_if_wanted(length as usize);
    Ok(())
}

/// Advice and prefetching of managed memory change nothing here; the range is checked.
fn managed_range(address: u64, size: usize) -> Res {
    let memory = memory::reading();
    let (base, block) = memory.block_at(address).ok_or(code::INVALID_VALUE)?;
    let fits = size as u64 <= block.size - (address - base);
    match block.kind == Kind::Managed && fits && size > 0 {
        true => Ok(()),
        false => Err(code::INVALID_VALUE),
    }
}

fn advise(address: u64, size: usize) -> Res {
    capture::unsafe_call()?;
    managed_range(address, size)
}

fn prefetch(address: u64, size: usize, s: crate::stream::StreamArg) -> Res {
    let _stream = crate::stream::usable(s)?;
    managed_range(address, size)?;
    crate::stream::launch(s, crate::work::Work::Nothing)
}

/// Attaching managed memory to a stream changes nothing here, but cannot be captured.
fn attach(address: u64, s: crate::stream::StreamArg) -> Res {
    let stream = crate::stream::usable(s)?;
    capture::not_capturable(&stream)?;
    managed_range(address, 1)
}

exports! {
    stream fn cuStreamAttachMemAsync, cuStreamAttachMemAsync_ptsz(; s;
        address: u64, _length: usize, _flags: u32)
        => attach(address, s);
    fn cuPointerGetAttribute(out: Out<u8>, which: i32, address: u64) => get(out, which, address);
    fn cuPointerGetAttributes(count: u32, which: In<i32>, outputs: In<Out<u8>>, address: u64)
        => get_list(count, which, outputs, address);
    fn cuPointerSetAttribute(value: In<i32>, which: i32, address: u64) => set(value, which, address);
    fn cuMemGetAddressRange_v2(base: Out<u64>, size: Out<usize>, address: u64)
        => address_range(base, size, address);
    fn cuMemAdvise(address: u64, size: usize, _advice: i32, _device: i32) => advise(address, size);
    fn cuMemAdvise_v2(address: u64, size: usize, _advice: i32, _location: u64) => advise(address, size);
    stream fn cuMemPrefetchAsync, cuMemPrefetchAsync_ptsz(address: u64, size: usize, _device: i32; s)
        => prefetch(address, size, s);
    stream fn cuMemPrefetchAsync_v2, cuMemPrefetchAsync_v2_ptsz(
        address: u64, size: usize, _location: u64, _flags: u32; s)
        => prefetch(address, size, s);
}

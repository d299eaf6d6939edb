//! Pinned host memory: allocated by the driver or registered with it.

use crate::call::{Out, Res};
use crate::context;
use crate::memory::{self, Backing, Block, Kind, Memory};
use crate::physical::Place;
use crate::{capture, classic, code, stream};
use cudarc::driver::sys;

const ALLOCATION_FLAGS: u32 =
    sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_WRITECOMBINED;
const REFUSED_FLAGS: u32 = sys::CU_MEMHOSTREGISTER_READ_ONLY | sys::CU_MEMHOSTREGISTER_IOMEMORY;
const REGISTRATION_FLAGS: u32 =
    sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP | REFUSED_FLAGS;

/// More pinned memory than the host has is refused; less may still not be there, but is not touched here.
fn host_total() -> u64 {
    // SAFETY: plain queries.
    let (pages, size) = unsafe { (libc::sysconf(libc::_SC_PHYS_PAGES), libc::sysconf(libc::_SC_PAGESIZE)) };
    u64::try_from(pages.saturating_mul(size)).unwrap_or(u64::MAX)
}

fn allocate(out: Out<u64>, size: usize, flags: u32) -> Res {
    let context = context::current()?;
    capture::unsafe_call()?;
    out.check()?;
    if flags & !ALLOCATION_FLAGS != 0 {
        return Err(code::INVALID_VALUE);
    }
    if size == 0 {
        return out.put(0);
    }
    let size = size as u64;
    if size > host_total() {
        return Err(code::OUT_OF_MEMORY);
    }
    let mut memory = memory::writing();
    let (base, mapped, physical) = memory.map_anew(Place::Host, size, 0)?;
    let block = Block {
        size,
        kind: Kind::Pinned,
        device: context.device,
        context,
        id: memory.fresh_id(),
        flags: flags | sys::CU_MEMHOSTALLOC_DEVICEMAP,
        backing: Backing::Own(mapped, physical),
        charged: 0,
        dying: false,
    };
    memory.blocks.insert(base, block);
    out.put(base)
}

fn free(address: u64) -> Res {
    capture::unsafe_call()?;
    if address == 0 {
        return Ok(());
    }
    let (owner, size, id) = {
        let memory = memory::reading();
        let block = memory.blocks.get(&address);
        let pinned = block.filter(|block| block.kind == Kind::Pinned);
        let block = pinned.ok_or(code::INVALID_VALUE)?;
        (block.context, block.size, block.id)
    };
    owner.check_error()?;
    owner.wait();
    // Other contexts may use it too.
    if let Some(context) = context::top().filter(|context| context.id != owner.id) {
        context.wait();
    }
    stream::check_untouched(address, size, "cuMemFreeHost");
    classic::remove_same(address, id)
}

/// The pinned block around an address.
fn pinned_at(memory: &Memory, address: u64) -> Res<&Block> {
    let block = memory.block_at(address).map(|(_, block)| block);
    block.filter(|block| block.kind.is_host()).ok_or(code::INVALID_VALUE)
}

fn device_pointer(out: Out<u64>, address: u64, flags: u32) -> Res {
    context::current()?;
    out.check()?;
    if flags != 0 {
        return Err(code::INVALID_VALUE);
    }
    pinned_at(&memory::reading(), address)?;
    out.put(address)
}

fn get_flags(out: Out<u32>, address: u64) -> Res {
    context::current()?;
    out.check()?;
    let flags = pinned_at(&memory::reading(), address)?.flags;
    out.put(flags)
}

fn register(address: u64, size: usize, flags: u32) -> Res {
    let context = context::current()?;
    capture::unsafe_call()?;
    let size = size as u64;
    let end = address.checked_add(size).ok_or(code::INVALID_VALUE)?;
    if address == 0 || size == 0 || flags & !REGISTRATION_FLAGS != 0 {
        return Err(code::INVALID_VALUE);
    }
    if flags & REFUSED_FLAGS != 0 {
        return Err(code::NOT_SUPPORTED);
    }
    let mut memory = memory::writing();
    let before = memory.blocks.range(..end).next_back();
    if let Some((_, block)) = before.filter(|&(&base, block)| base + block.size > address) {
        return Err(match block.kind.is_host() {
            true => code::HOST_MEMORY_ALREADY_REGISTERED,
            false => code::INVALID_VALUE,
        });
    }
    if memory.knows(address) {
        return Err(code::INVALID_VALUE);
    }
    let block = Block {
        size,
        kind: Kind::Registered,
        device: context.device,
        context,
        id: memory.fresh_id(),
        flags: flags | sys::CU_MEMHOSTREGISTER_DEVICEMAP,
        backing: Backing::Foreign,
        charged: 0,
        dying: false,
    };
    memory.blocks.insert(address, block);
    Ok(())
}

fn unregister(address: u64) -> Res {
    context::current()?;
    capture::unsafe_call()?;
    if address == 0 {
        return Err(code::INVALID_VALUE);
    }
    let (size, owner) = {
        let memory = memory::reading();
        match memory.blocks.get(&address) {
            Some(block) if block.kind == Kind::Registered => (block.size, block.context),
            Some(_) => return Err(code::INVALID_VALUE),
            None => return Err(code::HOST_MEMORY_NOT_REGISTERED),
        }
    };
    owner.wait();
    stream::check_untouched(address, size, "cuMemHostUnregister");
    memory::writing().blocks.remove(&address);
    Ok(())
}

exports! {
    fn cuMemAllocHost_v2(out: Out<u64>, size: usize) => allocate(out, size, 0);
    fn cuMemHostAlloc(out: Out<u64>, size: usize, flags: u32) => allocate(out, size, flags);
    fn cuMemFreeHost(address: u64) => free(address);
    fn cuMemHostGetDevicePointer_v2(out: Out<u64>, address: u64, flags: u32)
        => device_pointer(out, address, flags);
    fn cuMemHostGetFlags(out: Out<u32>, address: u64) => get_flags(out, address);
    fn cuMemHostRegister(address: u64, size: usize, flags: u32) => register(address, size, flags);
    fn cuMemHostRegister_v2(address: u64, size: usize, flags: u32) => register(address, size, flags);
    fn cuMemHostUnregister(address: u64) => unregister(address);
}

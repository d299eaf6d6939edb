//! Classic device memory: `cuMemAlloc` and its kin.
//!
//! What counts as used: the requested size rounded up to 512 bytes. Small requests are packed into parts of 2
//! MiB that a context's small blocks share, at steps of 512 bytes; the unused rest of such a part does not
//! count. Requests from 1 MiB up get addresses and physical memory of their own, at multiples of 2 MiB.

use crate::call::{Out, Res};
use crate::context::{self, Context};
use crate::memory::{self, Backing, Block, Kind, LARGE_PAGE, Memory, SharedBlock};
use crate::physical::{Physical, Place};
use crate::ranges::{FreeRanges, round_up};
use crate::{capture, code, device, knobs, mempool, stream};

const STEP: u64 = 512;
const OWN_FROM: u64 = 1 << 20;

/// What freeing leaves to be dropped once the map is unlocked.
type Remains = Option<Physical>;

/// A block of device memory for this context.
pub fn allocate(context: &'static Context, size: u64, kind: Kind, flags: u32) -> Res<u64> {
    let counted = round_up(size, STEP).ok_or(code::OUT_OF_MEMORY)?;
    let mut memory = memory::writing();
    let (base, backing, charged) = if counted < OWN_FROM {
        let (base, shared) = allocate_shared(&mut memory, context, counted)?;
        (base, Backing::Shared(shared), counted)
    } else {
        let place = Place::Device(context.device);
        let (base, mapped, physical) = memory.map_anew(place, counted, counted)?;
        (base, Backing::Own(mapped, physical), 0)
    };
    let id = memory.fresh_id();
    memory.blocks.insert(
        base,
        Block { size, kind, device: context.device, context, id, flags, backing, charged, dying: false },
    );
    Ok(base)
}

/// Room in one of the context's shared parts, made if there is none.
fn allocate_shared(memory: &mut Memory, context: &Context, size: u64) -> Res<(u64, u64)> {
    let device = device::get(context.device as i32)?;
    device.take(size)?;
    let own = |part: &&mut SharedBlock| part.context == context.id;
    for (&base, part) in memory.shared.iter_mut().filter(|(_, part)| own(part)) {
        if let Some(address) = part.free.take(size, STEP) {
            part.live += 1;
            return Ok((address, base));
        }
    }
    let made = memory.map_anew(Place::Device(context.device), LARGE_PAGE, 0);
    let (base, _, physical) = made.inspect_err(|_| device.give(size))?;
    let mut free = FreeRanges::new(base, LARGE_PAGE);
    let address = free.take(size, STEP).ok_or(code::OUT_OF_MEMORY)?;
    memory.shared.insert(base, SharedBlock { context: context.id, free, live: 1, physical });
    Ok((address, base))
}

/// Takes the block out of the map and gives its address range back.
pub fn remove(memory: &mut Memory, base: u64) -> Remains {
    let block = memory.blocks.remove(&base)?;
    match block.backing {
        Backing::Own(mapped, physical) => {
            memory.unmap_block(base, mapped);
            Some(physical)
        }
        Backing::Shared(part_base) => {
            if let Ok(device) = device::get(block.device as i32) {
                device.give(block.charged);
            }
            let part = memory.shared.get_mut(&part_base)?;
            part.free.give(base, block.charged);
            part.live -= 1;
            if part.live > 0 {
                return None;
            }
            let part = memory.shared.remove(&part_base)?;
            memory.unmap_block(part_base, LARGE_PAGE);
            Some(part.physical)
        }
        Backing::Foreign => None,
    }
}

/// A context ends: so do its blocks.
pub fn free_all_of(context: &Context) {
    let mut remains = Vec::new();
    let mut memory = memory::writing();
    let owned =
        |block: &Block| block.context.id == context.id && !matches!(block.kind, Kind::Pool(_) | Kind::Graph);
    let bases: Vec<u64> =
        memory.blocks.iter().filter_map(|(&base, block)| owned(block).then_some(base)).collect();
    for base in bases {
        remains.push(remove(&mut memory, base));
    }
    drop(memory);
    drop(remains);
}

fn alloc(out: Out<u64>, size: usize) -> Res {
    let context = context::current()?;
    capture::unsafe_call()?;
    out.check()?;
    if size == 0 {
        return Err(code::INVALID_VALUE);
    }
    out.put(allocate(context, size as u64, Kind::Device, 0)?)
}

/// The current context does not matter (there may be none): what counts is the one the block belongs to.
fn free(address: u64) -> Res {
    if address == 0 {
        return context::top().map_or(Ok(()), |context| context.check_error());
    }
    let (kind, owner, size, id) = {
        let memory = memory::reading();
        let block = memory.blocks.get(&address);
        let freeable = |block: &&Block| !block.kind.is_host() && block.kind != Kind::Array && !block.dying;
        let Some(block) = block.filter(freeable) else {
            return Err(refusal(&memory, address));
        };
        (block.kind, block.context, block.size, block.id)
    };
    capture::unsafe_call()?;
    match kind {
        Kind::Pool(_) => return mempool::free_at_once(address, size),
        // A graph's memory stays with the graph.
        Kind::Graph => return Ok(()),
        _ => {}
    }
    owner.check_error()?;
    if knobs::free_waits() {
        owner.wait();
    }
    stream::check_untouched(address, size, "cuMemFree");
    remove_same(address, id)
}

/// Frees the block, unless another thread was faster: then the address may be somebody else's already.
pub fn remove_same(address: u64, id: u64) -> Res {
    let mut memory = memory::writing();
    if memory.blocks.get(&address).is_none_or(|block| block.id != id) {
        return Err(code::INVALID_VALUE);
    }
    let remains = remove(&mut memory, address);
    drop(memory);
    drop(remains);
    Ok(())
}

/// Mapped memory handed to `cuMemFree` is a mistake that deserves more than a code.
fn refusal(memory: &Memory, address: u64) -> i32 {
    if memory.mapping_at(address).is_some() {
        crate::report::misuse(&format!("cuMemFree of {address:#x}, which is mapped by cuMemMap"));
    }
    code::INVALID_VALUE
}

fn get_info(free: Out<usize>, total: Out<usize>) -> Res {
    let device = device::get(context::current()?.device as i32)?;
    free.check()?;
    total.check()?;
    free.put(device.free() as usize)?;
    total.put(device.total() as usize)
}

exports! {
    fn cuMemAlloc_v2(out: Out<u64>, size: usize) => alloc(out, size);
    fn cuMemFree_v2(address: u64) => free(address);
    fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) => get_info(free, total);
}

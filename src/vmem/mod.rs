//! The arena's mechanism: physical chunks and the addresses they are mapped at, through the driver.
//!
//! Every operation is a transaction: what fails is undone in reverse, and the outcome says what is mapped
//! where. Which chunks to make, move and return is decided above; nothing here is called with a lock held.
//!
//! There are two kinds of chunk behind one interface: handles mapped into one reserved range of addresses,
//! and plain `cuMemAlloc` memory wherever the driver puts it. Above, both are offsets;
//! [`address_map::AddressMap`] translates.

pub mod address_map;
mod host;
mod vmm;

use crate::driver::context::Context;
use crate::driver::{Api, check};
use crate::error::Result;

/// What chunks are multiples of, which the driver's granularity must divide.
pub const PAGE: u64 = 2 << 20;

/// Calls of the driver by kind, as the statistics report them.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Calls {
    pub alloc: u64,
    pub free: u64,
    pub map: u64,
    pub unmap: u64,
    pub sync: u64,
    /// Bytes that a failed [`Mapper::place`] held for a moment.
    pub created: u64,
}

impl Calls {
    pub fn add(&mut self, other: Calls) {
        self.alloc = self.alloc.wrapping_add(other.alloc);
        self.free = self.free.wrapping_add(other.free);
        self.map = self.map.wrapping_add(other.map);
        self.unmap = self.unmap.wrapping_add(other.unmap);
        self.sync = self.sync.wrapping_add(other.sync);
    }
}

/// A chunk on its way into a range, or out of one.
#[derive(Clone, Copy, Debug)]
pub struct ChunkOp {
    pub len: u64,
    /// Its handle, 0 for one that is still to be created; for `cuMemAlloc` memory its address.
    pub handle: u64,
    /// Where it is mapped now; 0 for nowhere.
    pub from: u64,
    /// Where it is to be mapped.
    pub to: u64,
    /// What the driver refused to undo.
    pub left: UndoFailure,
    /// It is host memory, in an address range of its own.
    pub host: bool,
}

impl ChunkOp {
    /// A chunk that is still to be created.
    pub fn fresh(len: u64) -> ChunkOp {
        ChunkOp { len, handle: 0, from: 0, to: 0, left: UndoFailure::Nothing, host: false }
    }

    /// A chunk that is mapped at `from`.
    pub fn mapped(len: u64, handle: u64, from: u64) -> ChunkOp {
        ChunkOp { len, handle, from, to: 0, left: UndoFailure::Nothing, host: false }
    }
}

/// What is left of a chunk after an operation that failed, and whose undoing failed too.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum UndoFailure {
    /// As it should be.
    Nothing,
    /// A moved chunk that could not be put back; its memory was returned.
    Unmapped,
    /// It is mapped nowhere, but its memory could not be returned.
    Memory,
    /// It is mapped where it was to go, and could not be unmapped.
    Mapping,
    /// It is mapped where it was, but without access, and could not be unmapped again.
    Stuck,
}

/// Chunks that the driver would neither use nor take back, to be tried again. `from` is where one is mapped.
#[derive(Default)]
pub struct Unreclaimable {
    pub ops: Vec<ChunkOp>,
}

impl Unreclaimable {
    pub fn bytes(&self) -> u64 {
        self.ops.iter().map(|p| p.len).sum()
    }

    /// How much of that is the host's memory.
    pub fn host_bytes(&self) -> u64 {
        self.ops.iter().filter(|p| p.host).map(|p| p.len).sum()
    }
}

/// A range of device addresses, reserved for good: a stale pointer into it can always be told.
#[derive(Clone, Copy, Debug)]
pub struct Range {
    pub base: u64,
    pub len: u64,
}

/// Makes, maps and returns the chunks of one context.
#[derive(Clone)]
pub struct Mapper {
    pub context: Context,
    /// Where handles are mapped; `None` where chunks are `cuMemAlloc` memory.
    pub range: Option<Range>,
    /// Address and bytes of the reservation that the range lies in.
    reserved: (u64, usize),
}

impl Mapper {
    /// A mapper with a reserved range, if the device has virtual memory.
    pub fn with_range(api: &Api, context: Context, device_bytes: u64) -> Result<Mapper> {
        let (range, reserved) = vmm::reserve_range(api, context.device, device_bytes)?;
        Ok(Mapper { context, range: Some(range), reserved })
    }

    /// A mapper of `cuMemAlloc` chunks.
    pub fn with_malloc(context: Context) -> Mapper {
        Mapper { context, range: None, reserved: (0, 0) }
    }

    /// Gives back the range of a mapper that no arena came to use.
    pub fn give_up_range(&self, api: &Api) {
        let (address, bytes) = self.reserved;
        if let Some(free) = api.address_free.filter(|_| bytes > 0) {
            // SAFETY: the range was reserved as these bytes, and nothing was ever mapped in it.
            unsafe { free(address, bytes) };
        }
    }

    /// Takes `len` bytes by `cuMemAlloc`. The address is a multiple of 512 at least.
    pub fn malloc(&self, api: &Api, len: u64, calls: &mut Calls) -> Result<u64> {
        let mut address = 0;
        calls.alloc = calls.alloc.wrapping_add(1);
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        // SAFETY: the pointer is to a local; the context is current meanwhile.
        let result = self.context.with(api, || unsafe { (api.mem_alloc)(&mut address, len) })?;
        check(api, result, "cuMemAlloc")?;
        Ok(address)
    }

    /// Gives `cuMemAlloc` memory back. No work on the device may use it any more.
    pub fn free(&self, api: &Api, address: u64, calls: &mut Calls) -> Result<()> {
        calls.free = calls.free.wrapping_add(1);
        // SAFETY: the address is one that `malloc` was given and that nobody uses.
        let result = self.context.with(api, || unsafe { (api.mem_free)(address) })?;
        check(api, result, "cuMemFree")
    }

    /// Free and total bytes of the device, as the driver tells them.
    pub fn device_memory(&self, api: &Api) -> Result<(u64, u64)> {
        let (mut free, mut total) = (0usize, 0usize);
        // SAFETY: the pointers are to locals; the context is current meanwhile.
        let result = self.context.with(api, || unsafe { (api.mem_info)(&mut free, &mut total) })?;
        check(api, result, "cuMemGetInfo")?;
        Ok((free as u64, total as u64))
    }
}

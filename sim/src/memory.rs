//! The map of all addresses the driver gave out: blocks (one allocation each) and reservations with their
//! mappings.
//!
//! One lock guards it. Who changes mappings holds it for writing; whoever touches device memory holds it for
//! reading while it does, piece by piece, after checking that the range may be touched. So a range can never
//! be unmapped under a running copy, and a bad access is a report and a code, never a crash of the process.

use crate::call::Res;
use crate::code;
use crate::context::Context;
use crate::knobs::MAX_DEVICES;
use crate::mempool::Pool;
use crate::physical::{PAGE, Physical, Place};
use crate::ranges::{FreeRanges, round_up};
use crate::sync::{read, write};
use crate::vmm::Chunk;
use cudarc::driver::sys::CUmemAccess_flags;
use std::collections::BTreeMap;
use std::sync::{Arc, RwLock, RwLockReadGuard, RwLockWriteGuard};

pub const LARGE_PAGE: u64 = 2 << 20;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// `cuMemAlloc`, `cuMemAllocPitch`
    Device,
    /// `cuArrayCreate` and the like: has an address only in here
    Array,
    /// `cuMemAllocManaged`
    Managed,
    /// Allocated in a capture: it belongs to the graph
    Graph,
    /// Memory of the pool with this handle
    Pool(usize),
    /// `cuMemHostAlloc`
    Pinned,
    /// `cuMemHostRegister`
    Registered,
}

impl Kind {
    pub fn is_host(self) -> bool {
        matches!(self, Kind::Pinned | Kind::Registered)
    }
}

/// What stands behind a block.
pub enum Backing {
    /// Part of the shared block with this base.
    Shared(u64),
    /// A mapping of its own, this long.
    Own(u64, #[allow(dead_code)] Physical), // held for its `Drop`
    /// The caller's.
    Foreign,
}

/// One allocation.
pub struct Block {
    pub size: u64,
    pub kind: Kind,
    pub device: usize,
    pub context: &'static Context,
    /// Unique for the life of the process.
    pub id: u64,
    pub flags: u32,
    pub backing: Backing,
    /// What the device's accounts say for it, if the backing does not know.
    pub charged: u64,
    /// A free in stream order was submitted for it.
    pub dying: bool,
}

/// What each device may do, and, last, the host: nothing, or one of the two below.
pub type Rights = [u8; MAX_DEVICES + 1];

pub const READ: u8 = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READ as u8;
pub const READ_WRITE: u8 = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE as u8;

pub const NO_RIGHTS: Rights = [0; MAX_DEVICES + 1];

/// The place of the host's rights.
pub const HOST_RIGHTS: usize = MAX_DEVICES;

/// Equal access rights over a part of a mapping.
#[derive(Clone)]
pub struct Segment {
    pub size: u64,
    pub rights: Rights,
}

/// One `cuMemMap`.
pub struct Mapping {
    pub size: u64,
    pub chunk: Arc<Chunk>,
    pub id: u64,
    pub segments: BTreeMap<u64, Segment>,
}

impl Mapping {
    /// What any device may do there.
    pub fn widest_right(&self, offset: u64) -> u32 {
        let segment = self.segments.range(..=offset).next_back();
        segment.map_or(0, |(_, segment)| segment.rights.iter().fold(0, |all, &right| all | right as u32))
    }
}

/// A part of the device's memory that a pool cuts blocks from.
pub struct PoolSegment {
    pub size: u64,
    pub pool: Arc<Pool>,
    pub rights: Rights,
}

/// One `cuMemAddressReserve`.
pub struct Reservation {
    pub size: u64,
    pub mappings: BTreeMap<u64, Mapping>,
}

/// A part of large pages shared by small blocks of one context.
pub struct SharedBlock {
    pub context: u64,
    pub free: FreeRanges,
    pub live: u64,
    pub physical: Physical,
}

pub struct Memory {
    pub blocks: BTreeMap<u64, Block>,
    pub reservations: BTreeMap<u64, Reservation>,
    pub shared: BTreeMap<u64, SharedBlock>,
    pub pool_segments: BTreeMap<u64, PoolSegment>,
    addresses: FreeRanges,
    next_id: u64,
}

static MEMORY: RwLock<Memory> = RwLock::new(Memory {
    blocks: BTreeMap::new(),
    reservations: BTreeMap::new(),
    shared: BTreeMap::new(),
    pool_segments: BTreeMap::new(),
    addresses: FreeRanges::none(),
    next_id: 1,
});

pub fn reading() -> RwLockReadGuard<'static, Memory> {
    read(&MEMORY)
}

pub fn writing() -> RwLockWriteGuard<'static, Memory> {
    write(&MEMORY)
}

pub fn live_mappings() -> u64 {
    let memory = reading();
    let counts = memory.reservations.values().map(|r| r.mappings.len());
    counts.sum::<usize>() as u64
}

pub fn live_reservations() -> u64 {
    reading().reservations.len() as u64
}

pub fn live_blocks() -> u64 {
    reading().blocks.len() as u64
}

/// How memory is touched.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Access {
    Read,
    Write,
}

impl Memory {
    pub fn fresh_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id - 1
    }

    /// The block that contains this address.
    pub fn block_at(&self, address: u64) -> Option<(u64, &Block)> {
        let (&base, block) = self.blocks.range(..=address).next_back()?;
        (address - base < block.size).then_some((base, block))
    }

    pub fn reservation_at(&self, address: u64) -> Option<(u64, &Reservation)> {
        let (&base, reservation) = self.reservations.range(..=address).next_back()?;
        (address - base < reservation.size).then_some((base, reservation))
    }

    /// The mapping that contains this address.
    pub fn mapping_at(&self, address: u64) -> Option<(u64, &Mapping)> {
        let (_, reservation) = self.reservation_at(address)?;
        let (&base, mapping) = reservation.mappings.range(..=address).next_back()?;
        (address - base < mapping.size).then_some((base, mapping))
    }

    /// Whether the driver knows this address at all (as device memory, pinned memory or reserved range).
    pub fn knows(&self, address: u64) -> bool {
        self.block_at(address).is_some() || self.reservation_at(address).is_some()
    }

    pub fn pool_segment_at(&self, address: u64) -> Option<(u64, &PoolSegment)> {
        let (&base, segment) = self.pool_segments.range(..=address).next_back()?;
        (address - base < segment.size).then_some((base, segment))
    }

    /// What is refused when an operation is submitted. It asks more of pool memory than `permits`: work of
    /// the past may touch what a block is no more.
    pub fn accepts(&self, device: usize, address: u64, size: u64, access: Access) -> bool {
        if self.pool_segment_at(address).is_some() {
            let fits = |(base, block): (u64, &Block)| size <= block.size - (address - base);
            if !self.block_at(address).is_some_and(fits) {
                return false;
            }
        }
        self.permits(device, address, size, access)
    }

    /// Whether `device` may touch all of the range: inside one block, or over mappings that all permit it.
    pub fn permits(&self, device: usize, address: u64, size: u64, access: Access) -> bool {
        let needed = if access == Access::Write { READ_WRITE & !READ } else { READ };
        if let Some((base, segment)) = self.pool_segment_at(address) {
            return size <= segment.size - (address - base) && segment.rights[device] & needed != 0;
        }
        if let Some((base, block)) = self.block_at(address) {
            return size <= block.size - (address - base);
        }
        let Some((_, reservation)) = self.reservation_at(address) else {
            return false;
        };
        let Some(end) = address.checked_add(size) else {
            return false;
        };
        let mut at = address;
        while at < end {
            let Some((&base, mapping)) = reservation.mappings.range(..=at).next_back() else {
                return false;
            };
            let Some((&start, segment)) = mapping.segments.range(..=at - base).next_back() else {
                return false;
            };
            let segment_end = base + start + segment.size;
            if segment_end <= at || segment.rights[device] & needed == 0 {
                return false;
            }
            at = segment_end;
        }
        true
    }

    /// Takes addresses for a block, so that no later mapping of the process can land where a freed block was.
    pub fn take_addresses(&mut self, size: u64) -> Res<u64> {
        let size = round_up(size, LARGE_PAGE).ok_or(code::OUT_OF_MEMORY)?;
        if let Some(base) = self.addresses.take(size, LARGE_PAGE) {
            return Ok(base);
        }
        const ARENA: u64 = 256 << 30;
        let arena = round_up(size, ARENA).ok_or(code::OUT_OF_MEMORY)?;
        let (base, length) = match host::reserve(arena, LARGE_PAGE) {
            Some(base) => (base, arena),
            None => (host::reserve(size, LARGE_PAGE).ok_or(code::OUT_OF_MEMORY)?, size),
        };
        self.addresses.give(base, length);
        self.addresses.take(size, LARGE_PAGE).ok_or(code::OUT_OF_MEMORY)
    }

    pub fn give_addresses(&mut self, base: u64, size: u64) {
        if let Some(size) = round_up(size, LARGE_PAGE) {
            self.addresses.give(base, size);
        }
    }

    /// Fresh memory mapped at fresh addresses.
    pub fn map_anew(&mut self, place: Place, size: u64, counted: u64) -> Res<(u64, u64, Physical)> {
        let mapped = round_up(size, PAGE).ok_or(code::OUT_OF_MEMORY)?;
        let physical = Physical::allocate(place, mapped, counted)?;
        let base = self.take_addresses(mapped)?;
        if let Err(code) = host::map(base, mapped, &physical, host::READ_WRITE) {
            self.give_addresses(base, mapped);
            return Err(code);
        }
        Ok((base, mapped, physical))
    }

    /// Undoes `map_anew`; the physical memory is the caller's to drop.
    pub fn unmap_block(&mut self, base: u64, mapped: u64) {
        host::unmap(base, mapped);
        self.give_addresses(base, mapped);
    }
}

/// Touches device memory on behalf of `device`: `run` gets pointers to pieces of the range, each checked and
/// locked against unmapping. False: some piece could not be touched (those before it were).
pub fn touch(
    device: usize,
    address: u64,
    size: u64,
    access: Access,
    mut run: impl FnMut(*mut u8, u64, u64),
) -> bool {
    let mut done = 0;
    while done < size {
        let piece = (size - done).min(PIECE);
        let memory = reading();
        if !memory.permits(device, address + done, piece, access) {
            return false;
        }
        run((address + done) as *mut u8, done, piece);
        drop(memory);
        done += piece;
    }
    true
}

/// Small enough that nobody waits long for the lock.
pub const PIECE: u64 = 1 << 20;

/// The system calls behind mappings.
pub mod host {
    use super::*;

    pub const NONE: i32 = libc::PROT_NONE;
    pub const READ: i32 = libc::PROT_READ;
    pub const READ_WRITE: i32 = libc::PROT_READ | libc::PROT_WRITE;

    const EMPTY: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;

    /// Addresses without memory. `None`: no range is left.
    pub fn reserve(size: u64, alignment: u64) -> Option<u64> {
        let alignment = alignment.max(PAGE);
        let padded = size.checked_add(alignment - PAGE)?;
        // SAFETY: a new mapping at an address of the kernel's choice; only its own slack is unmapped again.
        unsafe {
            let start = libc::mmap(std::ptr::null_mut(), padded as usize, NONE, EMPTY, -1, 0);
            if start == libc::MAP_FAILED {
                return None;
            }
            let start = start as u64;
            let base = round_up(start, alignment)?;
            if base > start {
                libc::munmap(start as *mut _, (base - start) as usize);
            }
            let (end, padded_end) = (base + size, start + padded);
            if padded_end > end {
                libc::munmap(end as *mut _, (padded_end - end) as usize);
            }
            Some(base)
        }
    }

    /// Gives reserved addresses back to the process.
    pub fn release(base: u64, size: u64) {
        // SAFETY: the range was reserved by `reserve`, and nothing is mapped in it any more.
        unsafe { libc::munmap(base as *mut _, size as usize) };
    }

    /// Maps memory over reserved addresses.
    pub fn map(base: u64, size: u64, physical: &Physical, protection: i32) -> Res {
        // SAFETY: the range lies inside addresses that this library reserved.
        let result = unsafe {
            libc::mmap(
                base as *mut _,
                size as usize,
                protection,
                libc::MAP_SHARED | libc::MAP_FIXED | libc::MAP_NORESERVE,
                physical.descriptor,
                physical.offset as i64,
            )
        };
        checked(result != libc::MAP_FAILED)
    }

    /// Puts empty addresses over a mapping: what touches them faults.
    pub fn unmap(base: u64, size: u64) {
        // SAFETY: the range lies inside addresses that this library reserved.
        let result =
            unsafe { libc::mmap(base as *mut _, size as usize, NONE, EMPTY | libc::MAP_FIXED, -1, 0) };
        let _ = checked(result != libc::MAP_FAILED);
    }

    pub fn protect(base: u64, size: u64, protection: i32) -> Res {
        // SAFETY: the range lies inside mappings made by `map`.
        checked(unsafe { libc::mprotect(base as *mut _, size as usize, protection) } == 0)
    }

    fn checked(worked: bool) -> Res {
        if worked {
            return Ok(());
        }
        crate::report::note(
            "the host refused a mapping (more than vm.max_map_count of them?): answered as out of memory",
        );
        Err(code::OUT_OF_MEMORY)
    }
}

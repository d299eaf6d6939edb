//! Virtual memory management: reserved ranges, physical chunks, mappings and access rights.
//!
//! None of it needs a current context, and memory outlives contexts. Unmapping does not wait for work, as the
//! real driver's does not reliably; doing it under pending work is reported and loses the work's context.

use crate::call::{In, Out, Res};
use crate::knobs;
use crate::memory::{
    self, HOST_RIGHTS, LARGE_PAGE, Mapping, Memory, NO_RIGHTS, Reservation, Rights, Segment, host,
};
use crate::physical::{PAGE, Physical, Place};
use crate::sync::lock;
use crate::{code, device, report, stream};
use cudarc::driver::sys::{
    CUmemAccessDesc, CUmemAllocationGranularity_flags, CUmemAllocationHandleType as HandleType,
    CUmemAllocationProp, CUmemAllocationType, CUmemLocation, CUmemLocationType,
};
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};

/// `CUmemLocation`
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Location {
    pub kind: i32,
    pub id: i32,
}

same_layout!(whole Location, CUmemLocation: kind = type_, id = id);

pub const ON_DEVICE: i32 = CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE as i32;
const ON_HOST: i32 = CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST as i32;
const ON_HOST_NUMA: i32 = CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST_NUMA as i32;

/// `CUmemAllocationProp`
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Properties {
    pub kind: i32,
    pub handle_types: i32,
    pub location: Location,
    pub windows_metadata: usize,
    pub flags: [u8; 8],
}

same_layout!(whole Properties, CUmemAllocationProp:
    kind = type_, handle_types = requestedHandleTypes, location = location,
    windows_metadata = win32HandleMetaData, flags = allocFlags);

/// `CUmemAccessDesc`
#[derive(Clone, Copy)]
#[repr(C)]
pub struct AccessRights {
    pub location: Location,
    flags: i32,
}

same_layout!(whole AccessRights, CUmemAccessDesc: location = location, flags = flags);

impl AccessRights {
    /// What is to be permitted; a number that means nothing is refused.
    pub fn right(&self) -> Res<u8> {
        match u8::try_from(self.flags) {
            Ok(right @ (0 | memory::READ | memory::READ_WRITE)) => Ok(right),
            _ => Err(code::INVALID_VALUE),
        }
    }
}

pub const PINNED: i32 = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED as i32;
pub const FILE_DESCRIPTOR: i32 = HandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR.0 as i32;
const FABRIC: i32 = HandleType::CU_MEM_HANDLE_TYPE_FABRIC.0 as i32;
const WINDOWS: i32 =
    (HandleType::CU_MEM_HANDLE_TYPE_WIN32.0 | HandleType::CU_MEM_HANDLE_TYPE_WIN32_KMT.0) as i32;

/// One `cuMemCreate`: lives as long as it has owners or mappings.
pub struct Chunk {
    pub handle: u64,
    pub properties: Properties,
    pub physical: Physical,
}

impl Chunk {
    pub fn size(&self) -> u64 {
        self.physical.size
    }
}

struct Owned {
    chunk: Arc<Chunk>,
    owners: u64,
}

/// Handles are never given out twice, so that every use of a stale one is noticed.
static HANDLES: Mutex<Option<HashMap<u64, Owned>>> = Mutex::new(None);
static NEXT_HANDLE: Mutex<u64> = Mutex::new(0x5d00_0000_1000);

pub fn live_handles() -> u64 {
    lock(&HANDLES).as_ref().map_or(0, |all| all.len() as u64)
}

pub fn supported() -> Res {
    match knobs::fixed().vmm {
        true => Ok(()),
        false => Err(code::NOT_SUPPORTED),
    }
}

fn require(condition: bool) -> Res {
    match condition {
        true => Ok(()),
        false => Err(code::INVALID_VALUE),
    }
}

fn is_aligned(value: u64) -> bool {
    value.is_multiple_of(LARGE_PAGE)
}

fn granularity(out: Out<usize>, properties: In<Properties>, option: u32) -> Res {
    supported()?;
    out.check()?;
    properties.get()?;
    require(option <= CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED as u32)?;
    out.put(LARGE_PAGE as usize)
}

fn reserve(out: Out<u64>, size: usize, alignment: usize, flags: u64) -> Res {
    supported()?;
    out.check()?;
    let (size, alignment) = (size as u64, alignment as u64);
    require(flags == 0 && size > 0 && is_aligned(size))?;
    require(alignment == 0 || alignment.is_power_of_two())?;
    // The hint is one; it is ignored.
    let base = host::reserve(size, alignment.max(LARGE_PAGE)).ok_or(code::OUT_OF_MEMORY)?;
    memory::writing().reservations.insert(base, Reservation { size, mappings: BTreeMap::new() });
    out.put(base)
}

fn free_addresses(base: u64, size: usize) -> Res {
    supported()?;
    let mut memory = memory::writing();
    let reservation = memory.reservations.get(&base).ok_or(code::INVALID_VALUE)?;
    require(reservation.size == size as u64)?;
    if !reservation.mappings.is_empty() {
        report::misuse(&format!("cuMemAddressFree of {base:#x}, which has mappings in it"));
        return Err(code::INVALID_VALUE);
    }
    memory.reservations.remove(&base);
    host::release(base, size as u64);
    Ok(())
}

fn place_of(properties: &Properties) -> Res<Place> {
    require(properties.kind == PINNED)?;
    require(properties.handle_types & !(FILE_DESCRIPTOR | WINDOWS | FABRIC) == 0)?;
    if properties.handle_types & FABRIC != 0 {
        return Err(code::NOT_SUPPORTED);
    }
    require(properties.handle_types & !FILE_DESCRIPTOR == 0)?;
    place_at(properties.location, properties.handle_types != 0)
}

/// The host has one NUMA node; as a location of its own it came with 13.0.
pub fn place_at(location: Location, shareable: bool) -> Res<Place> {
    match location.kind {
        ON_DEVICE => {
            let device = device::get(location.id).map_err(|_| code::INVALID_VALUE)?;
            Ok(Place::Device(device.ordinal))
        }
        ON_HOST if !shareable && knobs::driver_version() >= 13000 => Ok(Place::Host),
        ON_HOST_NUMA if location.id == 0 => Ok(Place::Host),
        _ => Err(code::INVALID_VALUE),
    }
}

fn create(out: Out<u64>, size: usize, properties: In<Properties>, flags: u64) -> Res {
    supported()?;
    out.check()?;
    let properties = properties.get()?;
    let size = size as u64;
    require(size > 0 && is_aligned(size) && flags == 0)?;
    let place = place_of(&properties)?;
    let physical = Physical::allocate(place, size, size)?;
    let handle = {
        let mut next = lock(&NEXT_HANDLE);
        *next += 256;
        *next
    };
    adopt(Arc::new(Chunk { handle, properties, physical }));
    out.put(handle)
}

/// One owner more.
pub fn adopt(chunk: Arc<Chunk>) {
    let mut handles = lock(&HANDLES);
    let owned =
        handles.get_or_insert_with(HashMap::new).entry(chunk.handle).or_insert(Owned { chunk, owners: 0 });
    owned.owners += 1;
}

/// The chunk of a handle; what was released or never was one is reported.
pub fn chunk_of(handle: u64, call: &str) -> Res<Arc<Chunk>> {
    require(handle != 0)?;
    let handles = lock(&HANDLES);
    let found = handles.as_ref().and_then(|all| all.get(&handle));
    found.map(|owned| owned.chunk.clone()).ok_or_else(|| {
        report::misuse(&format!("{call} with handle {handle:#x}, which was released or never was one"));
        code::INVALID_VALUE
    })
}

fn release(handle: u64) -> Res {
    supported()?;
    let _last = chunk_of(handle, "cuMemRelease")?;
    let mut handles = lock(&HANDLES);
    let all = handles.get_or_insert_with(HashMap::new);
    if let Some(owned) = all.get_mut(&handle) {
        owned.owners -= 1;
        if owned.owners == 0 {
            all.remove(&handle);
        }
    }
    // `_last` is dropped after the lock: returning memory to the host takes time.
    drop(handles);
    Ok(())
}

fn map(base: u64, size: usize, offset: usize, handle: u64, flags: u64) -> Res {
    supported()?;
    let size = size as u64;
    require(offset == 0 && flags == 0 && size > 0)?;
    require(is_aligned(base) && is_aligned(size))?;
    let chunk = chunk_of(handle, "cuMemMap")?;
    require(size <= chunk.size())?;
    let end = base.checked_add(size).ok_or(code::INVALID_VALUE)?;
    let mut memory = memory::writing();
    let id = memory.fresh_id();
    let reservation = reservation_of(&mut memory, base, end)?;
    let before = reservation.mappings.range(..end).next_back();
    require(before.is_none_or(|(&start, mapping)| start + mapping.size <= base))?;
    host::map(base, size, &chunk.physical, host::NONE)?;
    let segment = Segment { size, rights: NO_RIGHTS };
    reservation.mappings.insert(base, Mapping { size, chunk, id, segments: BTreeMap::from([(0, segment)]) });
    Ok(())
}

/// The reservation that holds all of the range.
fn reservation_of(memory: &mut Memory, base: u64, end: u64) -> Res<&mut Reservation> {
    let (&start, reservation) =
        memory.reservations.range_mut(..=base).next_back().ok_or(code::INVALID_VALUE)?;
    require(end <= start + reservation.size)?;
    Ok(reservation)
}

/// Where to start looking for mappings that reach past `base`: the last one that begins at or below it. So a
/// call costs no more the more is mapped elsewhere.
fn first_near(reservation: &Reservation, base: u64) -> u64 {
    reservation.mappings.range(..=base).next_back().map_or(base, |(&start, _)| start)
}

/// The bases of the mappings that make up exactly this range.
fn whole_mappings(reservation: &Reservation, base: u64, end: u64) -> Res<Vec<u64>> {
    let overlapping = |(&start, mapping): (&u64, &Mapping)| {
        (start + mapping.size > base).then_some((start, start + mapping.size))
    };
    let near = reservation.mappings.range(first_near(reservation, base)..end);
    let found: Vec<(u64, u64)> = near.filter_map(overlapping).collect();
    if found.iter().any(|&(start, stop)| start < base || stop > end) {
        report::misuse(&format!(
            "cuMemUnmap of {base:#x} (+{:#x}), which takes only a part of a mapping",
            end - base
        ));
        return Err(code::INVALID_VALUE);
    }
    let covered: u64 = found.iter().map(|&(start, stop)| stop - start).sum();
    require(covered == end - base)?;
    Ok(found.into_iter().map(|(start, _)| start).collect())
}

fn unmap(base: u64, size: usize) -> Res {
    supported()?;
    let size = size as u64;
    let end = base.checked_add(size).ok_or(code::INVALID_VALUE)?;
    require(size > 0)?;
    whole_mappings(reservation_of(&mut memory::writing(), base, end)?, base, end)?;
    stream::check_untouched(base, size, "cuMemUnmap");
    let mut memory = memory::writing();
    let reservation = reservation_of(&mut memory, base, end)?;
    let bases = whole_mappings(reservation, base, end)?;
    host::unmap(base, size);
    let removed: Vec<Option<Mapping>> =
        bases.iter().map(|start| reservation.mappings.remove(start)).collect();
    drop(memory);
    drop(removed);
    Ok(())
}

/// Cuts the segment that spans `at`, so that one begins there.
fn split(mapping: &mut Mapping, at: u64) {
    if at >= mapping.size {
        return;
    }
    let Some((&start, segment)) = mapping.segments.range_mut(..=at).next_back() else {
        return;
    };
    if start == at {
        return;
    }
    let mut rest = segment.clone();
    segment.size = at - start;
    rest.size -= segment.size;
    mapping.segments.insert(at, rest);
}

fn set_access(base: u64, size: usize, rights: In<AccessRights>, count: usize) -> Res {
    supported()?;
    let size = size as u64;
    let end = base.checked_add(size).ok_or(code::INVALID_VALUE)?;
    require(size > 0 && count > 0 && base.is_multiple_of(PAGE) && size.is_multiple_of(PAGE))?;
    let mut changes = Vec::new();
    for right in rights.list(count)? {
        let granted = right.right()?;
        match right.location.kind {
            ON_DEVICE => changes.push((device::get(right.location.id)?.ordinal, granted)),
            ON_HOST | ON_HOST_NUMA => changes.push((HOST_RIGHTS, granted)),
            _ => return Err(code::INVALID_VALUE),
        }
    }
    let mut memory = memory::writing();
    let reservation = reservation_of(&mut memory, base, end)?;
    let first = first_near(reservation, base);
    let covered: u64 = reservation
        .mappings
        .range(first..end)
        .map(|(&start, mapping)| (start + mapping.size).min(end).saturating_sub(start.max(base)))
        .sum();
    if covered != size {
        report::misuse(&format!(
            "cuMemSetAccess of {base:#x} (+{size:#x}), of which only {covered:#x} are mapped"
        ));
        return Err(code::INVALID_VALUE);
    }
    let mut runs: Vec<(u64, u64, i32)> = Vec::new();
    for (&start, mapping) in reservation.mappings.range_mut(first..end) {
        if start + mapping.size <= base {
            continue;
        }
        let (from, to) = (base.saturating_sub(start), (end - start).min(mapping.size));
        split(mapping, from);
        split(mapping, to);
        for (&at, segment) in mapping.segments.range_mut(from..to) {
            for &(device, granted) in &changes {
                segment.rights[device] = granted;
            }
            let protection = protection_of(&segment.rights);
            // Neighbours with equal rights become one system call.
            match runs.last_mut() {
                Some(run) if run.1 == start + at && run.2 == protection => run.1 += segment.size,
                _ => runs.push((start + at, start + at + segment.size, protection)),
            }
        }
        merge(mapping);
    }
    let apply = |(from, to, protection)| host::protect(from, to - from, protection);
    let result = runs.into_iter().try_for_each(apply);
    if result.is_err() {
        // Rights that the host did not grant must not be believed: the whole range has none.
        for (&start, mapping) in reservation.mappings.range_mut(first..end) {
            let inside = |&(&at, _): &(&u64, &mut Segment)| (base..end).contains(&(start + at));
            let segments = mapping.segments.iter_mut().filter(inside);
            segments.for_each(|(_, segment)| segment.rights = NO_RIGHTS);
        }
    }
    result
}

fn protection_of(rights: &Rights) -> i32 {
    match rights.iter().fold(0, |all, right| all | right) {
        0 => host::NONE,
        memory::READ => host::READ,
        _ => host::READ_WRITE,
    }
}

/// Joins neighbouring segments with equal rights.
fn merge(mapping: &mut Mapping) {
    let mut joined: BTreeMap<u64, Segment> = BTreeMap::new();
    for (at, segment) in std::mem::take(&mut mapping.segments) {
        match joined.iter_mut().next_back() {
            Some((_, last)) if last.rights == segment.rights => last.size += segment.size,
            _ => {
                joined.insert(at, segment);
            }
        }
    }
    mapping.segments = joined;
}

fn get_access(out: Out<u64>, location: In<Location>, address: u64) -> Res {
    supported()?;
    out.check()?;
    let location = location.get()?;
    let whose = match location.kind {
        ON_DEVICE => device::get(location.id)?.ordinal,
        ON_HOST | ON_HOST_NUMA => HOST_RIGHTS,
        _ => return Err(code::INVALID_VALUE),
    };
    let memory = memory::reading();
    let (base, mapping) = memory.mapping_at(address).ok_or(code::INVALID_VALUE)?;
    let segment = mapping.segments.range(..=address - base).next_back();
    out.put(segment.map_or(0, |(_, segment)| segment.rights[whose] as u64))
}

fn retain(out: Out<u64>, address: u64) -> Res {
    supported()?;
    out.check()?;
    let chunk = {
        let memory = memory::reading();
        let (_, mapping) = memory.mapping_at(address).ok_or(code::INVALID_VALUE)?;
        mapping.chunk.clone()
    };
    let handle = chunk.handle;
    adopt(chunk);
    out.put(handle)
}

fn properties_of(out: Out<Properties>, handle: u64) -> Res {
    supported()?;
    out.check()?;
    out.put(chunk_of(handle, "cuMemGetAllocationPropertiesFromHandle")?.properties)
}

exports! {
    fn cuMemGetAllocationGranularity(out: Out<usize>, properties: In<Properties>, option: u32)
        => granularity(out, properties, option);
    fn cuMemAddressReserve(out: Out<u64>, size: usize, alignment: usize, _hint: u64, flags: u64)
        => reserve(out, size, alignment, flags);
    fn cuMemAddressFree(base: u64, size: usize) => free_addresses(base, size);
    fn cuMemCreate(out: Out<u64>, size: usize, properties: In<Properties>, flags: u64)
        => create(out, size, properties, flags);
    fn cuMemRelease(handle: u64) => release(handle);
    fn cuMemMap(base: u64, size: usize, offset: usize, handle: u64, flags: u64)
        => map(base, size, offset, handle, flags);
    fn cuMemUnmap(base: u64, size: usize) => unmap(base, size);
    fn cuMemSetAccess(base: u64, size: usize, rights: In<AccessRights>, count: usize)
        => set_access(base, size, rights, count);
    fn cuMemGetAccess(out: Out<u64>, location: In<Location>, address: u64)
        => get_access(out, location, address);
    fn cuMemRetainAllocationHandle(out: Out<u64>, address: u64) => retain(out, address);
    fn cuMemGetAllocationPropertiesFromHandle(out: Out<Properties>, handle: u64)
        => properties_of(out, handle);
}

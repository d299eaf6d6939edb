//! Chunks as handles of the virtual memory calls, mapped into the arena's range.
//!
//! Rules of the driver that this file lives by (`cuda.h`, group CUDA_VA): a handle is mapped whole, at offset
//! 0, and unmapped whole; a mapping has no access until it is set; an unmap does not wait for the device, so
//! nothing may use the range any more; a handle's memory is gone when neither references nor mappings are
//! left. None of them needs a context.

use super::PAGE;
use super::{Calls, ChunkOp, Mapper, Range, UndoFailure, Unreclaimable};
use crate::driver::{Api, CuResult, check, code};
use crate::error::{Result, Status, bail};
use cudarc::driver::sys::{
    CUdevice_attribute, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationHandleType, CUmemAllocationProp,
    CUmemAllocationProp_st__bindgen_ty_1, CUmemAllocationType, CUmemLocation, CUmemLocationType,
};

const ATTRIBUTE_VMM: u32 = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED as u32;
/// Alignment of the range, so that offsets in it are aligned as their addresses are.
const RANGE_ALIGN: u64 = 1 << 30;
/// How much larger than the device the range is, largest first. Remapping uses addresses up faster than
/// memory, and small boards refuse large ranges.
const RANGE_FACTORS: [u64; 3] = [8, 4, 2];

fn location(device: i32) -> CUmemLocation {
    CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device }
}

pub(super) fn properties(location: CUmemLocation) -> CUmemAllocationProp {
    CUmemAllocationProp {
        type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
        location,
        win32HandleMetaData: core::ptr::null_mut(),
        allocFlags: CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: 0,
            usage: 0,
            reserved: [0; 4],
        },
    }
}

/// The right of a device to read and write what is mapped.
pub(super) fn rights(device: i32) -> CUmemAccessDesc {
    CUmemAccessDesc {
        location: location(device),
        flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    }
}

/// Reserves the addresses of an arena, or says why virtual memory cannot be had. Also what is to be freed for
/// the range to go back: address and bytes.
pub fn reserve_range(api: &Api, device: i32, device_bytes: u64) -> Result<(Range, (u64, usize))> {
    let (Some(address_reserve), Some(granularity)) = (api.address_reserve, api.mem_granularity) else {
        bail!(POOL_ERROR_NOT_SUPPORTED, "the CUDA driver has no virtual memory calls");
    };
    let mut supported = 0;
    // SAFETY: the pointer is to a local.
    let result = unsafe { (api.device_attribute)(&mut supported, ATTRIBUTE_VMM, device) };
    if result != code::SUCCESS || supported == 0 {
        bail!(POOL_ERROR_NOT_SUPPORTED, "device {device} has no virtual memory management");
    }
    let mut granule = 0;
    // SAFETY: the pointers are to locals; option 0 asks for the minimum.
    let result = unsafe { granularity(&mut granule, &properties(location(device)), 0) };
    check(api, result, "cuMemGetAllocationGranularity")?;
    if granule == 0 || !PAGE.is_multiple_of(granule as u64) {
        bail!(
            POOL_ERROR_NOT_SUPPORTED,
            "device {device} maps in steps of {granule} bytes, of which {PAGE} is no multiple"
        );
    }
    for factor in RANGE_FACTORS {
        // More than an address can tell is refused like what the driver refuses.
        let len = device_bytes.checked_mul(factor).and_then(|len| len.checked_next_multiple_of(RANGE_ALIGN));
        // Once more the alignment, because a hint of it is all that the call takes.
        let whole = len.and_then(|len| usize::try_from(len.checked_add(RANGE_ALIGN)?).ok());
        let (Some(len), Some(whole)) = (len, whole) else { continue };
        let mut base = 0;
        // SAFETY: the pointer is to a local; address 0 lets the driver choose.
        if unsafe { address_reserve(&mut base, whole, 0, 0, 0) } == code::SUCCESS {
            return Ok((Range { base: base.next_multiple_of(RANGE_ALIGN), len }, (base, whole)));
        }
    }
    bail!(POOL_ERROR_NOT_SUPPORTED, "no range of addresses can be reserved on device {device}");
}

/// The virtual memory calls. A mapper with a range was made from an API that has them.
pub(super) struct Vmm<'a> {
    api: &'a Api,
    device: i32,
    calls: &'a mut Calls,
}

impl Vmm<'_> {
    fn create(&mut self, len: u64) -> (CuResult, u64) {
        let mut handle = 0;
        self.calls.alloc = self.calls.alloc.wrapping_add(1);
        let Some(create) = self.api.mem_create else { return (code::NOT_SUPPORTED, 0) };
        // SAFETY: the pointers are to locals; `len` is a multiple of the granularity.
        (unsafe { create(&mut handle, len as usize, &properties(location(self.device)), 0) }, handle)
    }

    pub(super) fn release(&mut self, handle: u64) -> CuResult {
        self.calls.free = self.calls.free.wrapping_add(1);
        let Some(release) = self.api.mem_release else { return code::NOT_SUPPORTED };
        // SAFETY: the one reference that `create` gave is given back once.
        unsafe { release(handle) }
    }

    pub(super) fn map(&mut self, address: u64, len: u64, handle: u64) -> CuResult {
        self.calls.map = self.calls.map.wrapping_add(1);
        let Some(map) = self.api.mem_map else { return code::NOT_SUPPORTED };
        // SAFETY: the range is inside the reservation and unmapped; nobody else touches it meanwhile.
        unsafe { map(address, len as usize, 0, handle, 0) }
    }

    pub(super) fn unmap(&mut self, address: u64, len: u64) -> CuResult {
        self.calls.unmap = self.calls.unmap.wrapping_add(1);
        let Some(unmap) = self.api.mem_unmap else { return code::NOT_SUPPORTED };
        // SAFETY: the range is made of whole mappings, and no work on the device uses it any more.
        unsafe { unmap(address, len as usize) }
    }

    pub(super) fn allow(&mut self, address: u64, len: u64) -> CuResult {
        let Some(set_access) = self.api.mem_set_access else { return code::NOT_SUPPORTED };
        // SAFETY: the range is mapped; one descriptor is passed.
        unsafe { set_access(address, len as usize, &rights(self.device), 1) }
    }

    /// Puts a chunk back where it was. If that fails too, its memory is returned and the range left unmapped.
    fn restore(&mut self, op: &mut ChunkOp) {
        let mapped = self.map(op.from, op.len, op.handle) == code::SUCCESS;
        if mapped && self.allow(op.from, op.len) == code::SUCCESS {
            return;
        }
        if mapped && self.unmap(op.from, op.len) != code::SUCCESS {
            op.left = UndoFailure::Stuck;
            return;
        }
        self.give_up(op);
        if op.left == UndoFailure::Nothing {
            op.left = UndoFailure::Unmapped;
        }
    }

    /// Returns the memory of a chunk that is mapped nowhere.
    pub(super) fn give_up(&mut self, op: &mut ChunkOp) {
        if self.release(op.handle) != code::SUCCESS {
            op.left = UndoFailure::Memory;
        }
    }
}

impl Mapper {
    pub(super) fn vmm<'a>(&self, api: &'a Api, calls: &'a mut Calls) -> Vmm<'a> {
        Vmm { api, device: self.context.device, calls }
    }

    /// Maps every chunk where it is to go: creates those without a handle, unmaps those that are mapped
    /// elsewhere. All or nothing: on failure new memory is returned and moved chunks are back where they
    /// were. What of that the driver refuses is in [`ChunkOp::left`].
    pub fn place(&self, api: &Api, ops: &mut [ChunkOp], calls: &mut Calls) -> Result<()> {
        let mut vmm = self.vmm(api, calls);
        // Creation first: it is what fails when the device is full, and nothing has been moved yet.
        vmm.create_all(ops)?;
        let failed = match vmm.unmap_all(ops) {
            Ok(()) => vmm.map_all(ops),
            Err(failure) => Some(failure),
        };
        let Some((result, call)) = failed else { return Ok(()) };
        for op in ops.iter_mut().filter(|p| p.from == 0 && p.left == UndoFailure::Nothing) {
            vmm.give_up(op);
        }
        Err(crate::driver::status_of(api, result, call))
    }

    /// Unmaps chunks and gives their memory back. Stops at the first that stays mapped; returns how many do
    /// not.
    pub fn discard(&self, api: &Api, ops: &mut [ChunkOp], calls: &mut Calls) -> (usize, Result<()>) {
        let mut vmm = self.vmm(api, calls);
        let mut gone = 0;
        while let Some(run) = ops.get_mut(gone..).and_then(|rest| runs_mut(rest).next()) {
            let Some(first) = run.first() else { break };
            let len = run.iter().map(|op| op.len).sum();
            let result = vmm.unmap(first.from, len);
            if result != code::SUCCESS {
                return (gone, check(api, result, "cuMemUnmap"));
            }
            for op in run.iter_mut() {
                vmm.give_up(op);
            }
            gone += run.len();
        }
        (gone, Ok(()))
    }

    /// Tries again to be rid of what was left. True when nothing is.
    pub fn clear(&self, api: &Api, kept: &mut Unreclaimable, calls: &mut Calls) -> bool {
        let mut vmm = self.vmm(api, calls);
        kept.ops.retain_mut(|op| {
            if op.from != 0 {
                if vmm.unmap(op.from, op.len) != code::SUCCESS {
                    return true;
                }
                if let Some(free) = api.address_free.filter(|_| op.host) {
                    // SAFETY: the range was reserved for this chunk, and nothing is mapped in it any more.
                    unsafe { free(op.from, op.len as usize) };
                }
                op.from = 0;
            }
            vmm.release(op.handle) != code::SUCCESS
        });
        kept.ops.is_empty()
    }
}

/// Splits chunks into runs that lie side by side where they are mapped: one unmap serves a run.
fn runs(ops: &[ChunkOp]) -> impl Iterator<Item = &[ChunkOp]> {
    ops.chunk_by(|a, b| a.from + a.len == b.from)
}

fn runs_mut(ops: &mut [ChunkOp]) -> impl Iterator<Item = &mut [ChunkOp]> {
    ops.chunk_by_mut(|a, b| a.from + a.len == b.from)
}

impl Vmm<'_> {
    fn create_all(&mut self, ops: &mut [ChunkOp]) -> Result<()> {
        for at in 0..ops.len() {
            let Some(op) = ops.get_mut(at).filter(|p| p.from == 0) else { continue };
            let (result, handle) = self.create(op.len);
            if result != code::SUCCESS {
                let status: Status = crate::driver::status_of(self.api, result, "cuMemCreate");
                for op in ops.iter_mut().take(at).filter(|p| p.from == 0) {
                    self.give_up(op);
                }
                return Err(status);
            }
            op.handle = handle;
            self.calls.created += op.len;
        }
        Ok(())
    }

    /// Unmaps the chunks that are mapped elsewhere; on failure those already unmapped are restored.
    fn unmap_all(&mut self, ops: &mut [ChunkOp]) -> core::result::Result<(), (CuResult, &'static str)> {
        let mut unmapped = 0;
        while let Some(rest) = ops.get_mut(unmapped..) {
            let Some(run) = runs(rest).next() else { break };
            let count = run.len();
            let Some(first) = run.first().copied() else { break };
            if first.from != 0 {
                let len = run.iter().map(|op| op.len).sum();
                let result = self.unmap(first.from, len);
                if result != code::SUCCESS {
                    for op in ops.iter_mut().take(unmapped).filter(|p| p.from != 0) {
                        self.restore(op);
                    }
                    return Err((result, "cuMemUnmap"));
                }
            }
            unmapped += count;
        }
        Ok(())
    }

    /// Maps all chunks where they are to go and allows access; on failure none is mapped there and moved ones
    /// are restored.
    fn map_all(&mut self, ops: &mut [ChunkOp]) -> Option<(CuResult, &'static str)> {
        let mut mapped = 0usize;
        let mut failed = None;
        for op in ops.iter() {
            let result = self.map(op.to, op.len, op.handle);
            if result != code::SUCCESS {
                failed = Some((result, "cuMemMap"));
                break;
            }
            mapped += 1;
        }
        // One call for each run of addresses.
        for run in ops.chunk_by(|a, b| a.to + a.len == b.to) {
            let Some(first) = run.first().filter(|_| failed.is_none()) else { break };
            let len = run.iter().map(|op| op.len).sum();
            let result = self.allow(first.to, len);
            if result != code::SUCCESS {
                failed = Some((result, "cuMemSetAccess"));
            }
        }
        failed?;
        for (at, op) in ops.iter_mut().enumerate() {
            if at < mapped && self.unmap(op.to, op.len) != code::SUCCESS {
                op.left = UndoFailure::Mapping;
            } else if op.from != 0 {
                self.restore(op);
            }
        }
        failed
    }
}

//! Host memory mapped to the device through the virtual memory calls: the last resort of a request, in an
//! address range of its own.
//!
//! `cuMemCreate` takes the location `HOST_NUMA` from 12.2 and `HOST` from 13.0; the device attributes say
//! whether they can be mapped (`cuda.h`, `CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED`
//! and its neighbours).

use super::vmm::properties;
use super::{Calls, ChunkOp, Mapper, UndoFailure};
use crate::driver::{Api, check, code, relaxed};
use crate::error::{Result, bail};
use cudarc::driver::sys::{CUdevice_attribute, CUmemLocation, CUmemLocationType};

const ATTRIBUTE_NUMA_ID: u32 = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID as u32;
const ATTRIBUTE_NUMA_VMM: u32 =
    CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED as u32;
const ATTRIBUTE_HOST_VMM: u32 =
    CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED as u32;
const NUMA_SINCE: i32 = 12020;
const HOST_SINCE: i32 = 13000;

fn attribute(api: &Api, attribute: u32, device: i32) -> Option<i32> {
    let mut value = 0;
    // SAFETY: the pointer is to a local.
    (unsafe { (api.device_attribute)(&mut value, attribute, device) } == code::SUCCESS).then_some(value)
}

/// Where host memory that the device can map is, if the driver has such: near the device rather than
/// anywhere.
fn host_location(api: &Api, device: i32) -> Option<CUmemLocation> {
    let has = |what, since| api.version >= since && attribute(api, what, device).is_some_and(|v| v != 0);
    let node = attribute(api, ATTRIBUTE_NUMA_ID, device).filter(|node| *node >= 0);
    if let Some(id) = node
        && has(ATTRIBUTE_NUMA_VMM, NUMA_SINCE)
    {
        return Some(CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST_NUMA, id });
    }
    has(ATTRIBUTE_HOST_VMM, HOST_SINCE)
        .then_some(CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST, id: 0 })
}

impl Mapper {
    /// Creates a chunk of host memory, its length a multiple of [`super::PAGE`], and maps it for the device
    /// at a multiple of `align`. On failure nothing is left but what [`ChunkOp::left`] says.
    pub fn create_on_host(&self, api: &Api, op: &mut ChunkOp, align: u64, calls: &mut Calls) -> Result<()> {
        let device = self.context.device;
        let Some(at) = host_location(api, device) else {
            bail!(POOL_ERROR_NOT_SUPPORTED, "device {device} cannot map host memory");
        };
        let (Some(reserve), Some(free), Some(create)) =
            (api.address_reserve, api.address_free, api.mem_create)
        else {
            bail!(POOL_ERROR_NOT_SUPPORTED, "the CUDA driver has no virtual memory calls");
        };
        let len = op.len;
        let size = usize::try_from(len).unwrap_or(usize::MAX);
        op.host = true;
        relaxed(api, || {
            calls.alloc = calls.alloc.wrapping_add(1);
            // SAFETY: the pointers are to locals; the size is a multiple of the largest granularity.
            let created = unsafe { create(&mut op.handle, size, &properties(at), 0) };
            check(api, created, "cuMemCreate")?;
            // SAFETY: the pointer is to a local; address 0 lets the driver choose.
            let reserved = unsafe { reserve(&mut op.from, size, align as usize, 0, 0) };
            let mut vmm = self.vmm(api, calls);
            if reserved != code::SUCCESS {
                op.from = 0;
                vmm.give_up(op);
                return check(api, reserved, "cuMemAddressReserve");
            }
            let (mut result, mut call) = (vmm.map(op.from, len, op.handle), "cuMemMap");
            if result == code::SUCCESS {
                (result, call) = (vmm.allow(op.from, len), "cuMemSetAccess");
                if result != code::SUCCESS && vmm.unmap(op.from, len) != code::SUCCESS {
                    op.left = UndoFailure::Mapping;
                    return check(api, result, call);
                }
            }
            if result != code::SUCCESS {
                vmm.give_up(op);
                // SAFETY: the range was reserved above, and nothing is mapped in it.
                unsafe { free(op.from, size) };
                op.from = 0;
            }
            check(api, result, call)
        })
    }

    /// Unmaps such memory and gives it back, addresses and all. No work on the device may use it any more. On
    /// failure it stays mapped.
    pub fn discard_host(&self, api: &Api, op: &mut ChunkOp, calls: &mut Calls) -> Result<()> {
        let mut vmm = self.vmm(api, calls);
        check(api, vmm.unmap(op.from, op.len), "cuMemUnmap")?;
        vmm.give_up(op);
        if let Some(free) = api.address_free {
            // SAFETY: the range was reserved for this chunk, and nothing is mapped in it any more.
            unsafe { free(op.from, op.len as usize) };
        }
        op.from = 0;
        Ok(())
    }
}

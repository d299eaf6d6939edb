//! Devices: how many, what they are, and the exact account of their memory.

use crate::call::{In, Out, Res};
use crate::vmm::FILE_DESCRIPTOR;
use crate::{code, knobs};
use cudarc::driver::sys::{CUdevice_P2PAttribute as PeerAttribute, CUdevice_attribute as Attribute};
use std::ffi::c_char;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

pub struct Device {
    pub ordinal: usize,
    total: AtomicU64,
    used: AtomicU64,
    peak: AtomicU64,
}

impl Device {
    pub fn total(&self) -> u64 {
        self.total.load(Ordering::SeqCst)
    }

    pub fn used(&self) -> u64 {
        self.used.load(Ordering::SeqCst)
    }

    pub fn peak(&self) -> u64 {
        self.peak.load(Ordering::SeqCst)
    }

    pub fn free(&self) -> u64 {
        self.total().saturating_sub(self.used())
    }

    pub fn reset_peak(&self) {
        self.peak.store(self.used(), Ordering::SeqCst);
    }

    pub fn set_total(&self, bytes: u64) {
        self.total.store(bytes, Ordering::SeqCst);
    }

    /// Takes memory from the account; out of memory if there is less.
    pub fn take(&self, bytes: u64) -> Res {
        let enough = |used: u64| used.checked_add(bytes).filter(|&sum| sum <= self.total());
        let before = self
            .used
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, enough)
            .map_err(|_| code::OUT_OF_MEMORY)?;
        self.peak.fetch_max(before + bytes, Ordering::SeqCst);
        Ok(())
    }

    pub fn give(&self, bytes: u64) {
        self.used.fetch_sub(bytes, Ordering::SeqCst);
    }
}

pub fn all() -> &'static [Device] {
    static DEVICES: OnceLock<Vec<Device>> = OnceLock::new();
    DEVICES.get_or_init(|| {
        let fixed = knobs::fixed();
        (0..fixed.devices)
            .map(|ordinal| Device {
                ordinal,
                total: AtomicU64::new(fixed.memory),
                used: AtomicU64::new(0),
                peak: AtomicU64::new(0),
            })
            .collect()
    })
}

pub fn count() -> usize {
    all().len()
}

pub fn get(ordinal: i32) -> Res<&'static Device> {
    usize::try_from(ordinal).ok().and_then(|ordinal| all().get(ordinal)).ok_or(code::INVALID_DEVICE)
}

/// Higher ones are unknown. The number is the simulation's: past `CU_DEVICE_ATTRIBUTE_MAX`, which every
/// version moves.
const LAST_ATTRIBUTE: i32 = 160;

/// Attributes after those of a server board of compute capability 9.0. Those that are not listed but exist
/// are 0.
fn attribute(device: &Device, which: i32) -> Res<i32> {
    let vmm = knobs::fixed().vmm as i32;
    let from_13 = (knobs::driver_version() >= 13000) as i32;
    let listed = [
        (Attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024),
        (Attribute::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X, 1024),
        (Attribute::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y, 1024),
        (Attribute::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z, 64),
        (Attribute::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X, i32::MAX),
        (Attribute::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y, 65535),
        (Attribute::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z, 65535),
        (Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, 49152),
        (Attribute::CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY, 65536),
        (Attribute::CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32),
        (Attribute::CU_DEVICE_ATTRIBUTE_MAX_PITCH, i32::MAX),
        (Attribute::CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK, 65536),
        (Attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE, 1_980_000),
        (Attribute::CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT, 512),
        (Attribute::CU_DEVICE_ATTRIBUTE_GPU_OVERLAP, 1),
        (Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 132),
        (Attribute::CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, 1),
        (Attribute::CU_DEVICE_ATTRIBUTE_SURFACE_ALIGNMENT, 512),
        (Attribute::CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS, 1),
        (Attribute::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, 0x10 + device.ordinal as i32),
        (Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, 2_619_000),
        (Attribute::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, 5120),
        (Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, 52_428_800),
        (Attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, 2048),
        (Attribute::CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 3),
        (Attribute::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1),
        (Attribute::CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT, 32),
        (Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9),
        (Attribute::CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED, 1),
        (Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, 233_472),
        (Attribute::CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR, 65536),
        (Attribute::CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, 1),
        (Attribute::CU_DEVICE_ATTRIBUTE_MULTI_GPU_BOARD_GROUP_ID, device.ordinal as i32),
        (Attribute::CU_DEVICE_ATTRIBUTE_SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO, 2),
        (Attribute::CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS, 1),
        (Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED, 1),
        (Attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, 1),
        (Attribute::CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH, 1),
        (Attribute::CU_DEVICE_ATTRIBUTE_COOPERATIVE_MULTI_DEVICE_LAUNCH, 1),
        (Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 232_448),
        (Attribute::CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 1),
        (Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, vmm),
        (Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, vmm),
        (Attribute::CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR, 32),
        (Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, vmm),
        (Attribute::CU_DEVICE_ATTRIBUTE_TIMELINE_SEMAPHORE_INTEROP_SUPPORTED, 1),
        (Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, 1),
        (Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED, 1),
        (Attribute::CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES, FILE_DESCRIPTOR),
        (Attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, 1),
        (Attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR, 1),
        (Attribute::CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED, 1),
        (Attribute::CU_DEVICE_ATTRIBUTE_NUMA_ID, -1),
        (Attribute::CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, 0),
        (Attribute::CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, vmm),
        (Attribute::CU_DEVICE_ATTRIBUTE_HOST_NUMA_MEMORY_POOLS_SUPPORTED, 1),
        (Attribute::CU_DEVICE_ATTRIBUTE_HOST_MEMORY_POOLS_SUPPORTED, from_13),
        (Attribute::CU_DEVICE_ATTRIBUTE_HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, from_13 * vmm),
    ];
    match listed.iter().find(|(attribute, _)| *attribute as i32 == which) {
        Some(&(_, value)) => Ok(value),
        None if (1..=LAST_ATTRIBUTE).contains(&which) => Ok(0),
        None => Err(code::INVALID_VALUE),
    }
}

fn get_handle(out: Out<i32>, ordinal: i32) -> Res {
    out.check()?;
    out.put(get(ordinal)?.ordinal as i32)
}

fn get_attribute(out: Out<i32>, which: i32, device: i32) -> Res {
    out.check()?;
    out.put(attribute(get(device)?, which)?)
}

fn get_name(out: Out<c_char>, length: i32, device: i32) -> Res {
    out.check()?;
    let name = format!("cudasim device {}", get(device)?.ordinal);
    let room = usize::try_from(length).unwrap_or(0);
    copy_text(out, room, &name);
    Ok(())
}

/// Cuts the text to the room there is, terminator included.
fn copy_text(out: Out<c_char>, room: usize, text: &str) {
    let Some(most) = room.checked_sub(1) else {
        return;
    };
    let length = text.len().min(most);
    // SAFETY: by the C contract the buffer holds `room` characters, of which `length + 1` are written.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr(), out.as_ptr().cast(), length);
        out.as_ptr().add(length).write(0);
    }
}

fn total_memory(out: Out<usize>, device: i32) -> Res {
    out.check()?;
    out.put(get(device)?.total() as usize)
}

fn uuid(out: Out<[u8; 16]>, device: i32) -> Res {
    out.check()?;
    let mut bytes = *b"cudasim-device-\0";
    bytes[15] = b'0' + get(device)?.ordinal as u8;
    out.put(bytes)
}

fn compute_capability(major: Out<i32>, minor: Out<i32>, device: i32) -> Res {
    major.check()?;
    minor.check()?;
    let device = get(device)?;
    major.put(attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as i32)?)?;
    minor.put(attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as i32)?)
}

fn pci_bus_name(ordinal: usize) -> String {
    format!("0000:{:02X}:00.0", 0x10 + ordinal)
}

fn pci_bus_id(out: Out<c_char>, length: i32, device: i32) -> Res {
    out.check()?;
    let name = pci_bus_name(get(device)?.ordinal);
    let room = usize::try_from(length).map_err(|_| code::INVALID_VALUE)?;
    copy_text(out, room, &name);
    Ok(())
}

fn by_pci_bus_id(out: Out<i32>, name: In<c_char>) -> Res {
    out.check()?;
    name.get()?;
    // SAFETY: it is not null, and by the C contract a terminated string.
    let name = unsafe { std::ffi::CStr::from_ptr(name.as_ptr()) }.to_bytes();
    let found = all().iter().find(|device| {
        let full = pci_bus_name(device.ordinal);
        name.eq_ignore_ascii_case(full.as_bytes()) || name.eq_ignore_ascii_case(&full.as_bytes()[5..])
    });
    out.put(found.ok_or(code::INVALID_DEVICE)?.ordinal as i32)
}

fn can_access_peer(out: Out<i32>, device: i32, peer: i32) -> Res {
    out.check()?;
    let (device, peer) = (get(device)?, get(peer)?);
    out.put((device.ordinal != peer.ordinal) as i32)
}

const PEER_RANK: i32 = PeerAttribute::CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK as i32;
const PEER_ACCESS: i32 = PeerAttribute::CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED as i32;
const PEER_ATOMICS: i32 = PeerAttribute::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED as i32;
const PEER_ARRAYS: i32 = PeerAttribute::CU_DEVICE_P2P_ATTRIBUTE_CUDA_ARRAY_ACCESS_SUPPORTED as i32;

fn peer_attribute(out: Out<i32>, which: i32, device: i32, peer: i32) -> Res {
    out.check()?;
    let (device, peer) = (get(device)?, get(peer)?);
    if device.ordinal == peer.ordinal {
        return Err(code::INVALID_DEVICE);
    }
    match which {
        PEER_RANK | PEER_ATOMICS => out.put(0),
        PEER_ACCESS | PEER_ARRAYS => out.put(1),
        _ => Err(code::INVALID_VALUE),
    }
}

exports! {
    fn cuDeviceGet(device: Out<i32>, ordinal: i32) => get_handle(device, ordinal);
    fn cuDeviceGetCount(out: Out<i32>) => out.put(count() as i32);
    fn cuDeviceGetName(name: Out<c_char>, length: i32, device: i32) => get_name(name, length, device);
    fn cuDeviceGetUuid(out: Out<[u8; 16]>, device: i32) => uuid(out, device);
    fn cuDeviceGetUuid_v2(out: Out<[u8; 16]>, device: i32) => uuid(out, device);
    fn cuDeviceTotalMem_v2(out: Out<usize>, device: i32) => total_memory(out, device);
    fn cuDeviceGetAttribute(out: Out<i32>, which: i32, device: i32) => get_attribute(out, which, device);
    fn cuDeviceComputeCapability(major: Out<i32>, minor: Out<i32>, device: i32)
        => compute_capability(major, minor, device);
    fn cuDeviceGetPCIBusId(name: Out<c_char>, length: i32, device: i32) => pci_bus_id(name, length, device);
    fn cuDeviceGetByPCIBusId(device: Out<i32>, name: In<c_char>) => by_pci_bus_id(device, name);
    fn cuDeviceCanAccessPeer(out: Out<i32>, device: i32, peer: i32) => can_access_peer(out, device, peer);
    fn cuDeviceGetP2PAttribute(out: Out<i32>, which: i32, device: i32, peer: i32)
        => peer_attribute(out, which, device, peer);
}

//! Devices: how many, what they are, and the exact account of their memory.

use crate::call::{In, Out, Res};
use crate::{code, knobs};
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

/// Higher ones are unknown.
const LAST_ATTRIBUTE: i32 = 160;

/// Attributes after those of a server board of compute capability 9.0. Those that are not listed but exist
/// are 0.
fn attribute(device: &Device, attribute: i32) -> Res<i32> {
    let vmm = knobs::fixed().vmm as i32;
    let from_13 = (knobs::driver_version() >= 13000) as i32;
    Ok(match attribute {
        1 => 1024,                          // threads per block
        2 | 3 => 1024,                      // block width and height
        4 => 64,                            // block depth
        5 => i32::MAX,                      // grid width
        6 | 7 => 65535,                     // the other grid dimensions
        8 => 49152,                         // shared memory per block
        9 => 65536,                         // constant memory
        10 => 32,                           // warp size
        11 => i32::MAX,                     // largest pitch
        12 => 65536,                        // registers per block
        13 => 1_980_000,                    // clock rate
        14 => 512,                          // texture alignment
        15 => 1,                            // overlap
        16 => 132,                          // multiprocessors
        19 => 1,                            // can map host memory
        30 => 512,                          // surface alignment
        31 => 1,                            // concurrent kernels
        33 => 0x10 + device.ordinal as i32, // PCI bus
        36 => 2_619_000,                    // memory clock rate
        37 => 5120,                         // memory bus width
        38 => 52_428_800,                   // second-level cache
        39 => 2048,                         // threads per multiprocessor
        40 => 3,                            // copy engines
        41 => 1,                            // unified addressing
        51 => 32,                           // texture pitch alignment
        75 => 9,                            // compute capability
        78 => 1,                            // stream priorities
        81 => 233_472,                      // shared memory per multiprocessor
        82 => 65536,                        // registers per multiprocessor
        83 => 1,                            // managed memory
        85 => device.ordinal as i32,        // board group
        87 => 2,                            // single to double performance ratio
        89 => 1,                            // concurrent managed access
        90 => 1,                            // compute preemption
        91 => 1,                            // host pointer usable for registered memory
        95 | 96 => 1,                       // cooperative launches
        97 => 232_448,                      // shared memory per block, opt-in
        99 => 1,                            // host register
        102 | 103 => vmm,                   // virtual memory management, file descriptors
        106 => 32,                          // blocks per multiprocessor
        110 => vmm,                         // RDMA with virtual memory management
        114 => 1,                           // timeline semaphores
        115 => 1,                           // memory pools
        119 => 1,                           // pool handle types: file descriptors
        122 | 123 => 1,                     // stream memory operations
        125 => 1,                           // event IPC
        131 => -1,                          // device NUMA node
        116 => 1,                           // RDMA
        134 => 0,                           // host NUMA node
        141 => vmm,                         // virtual memory management on a host NUMA node
        142 => 1,                           // pools on a host NUMA node
        144 => from_13,                     // pools on the host
        145 => from_13 * vmm,               // virtual memory management on the host
        // Known, and not there.
        _ if (1..=LAST_ATTRIBUTE).contains(&attribute) => 0,
        _ => return Err(code::INVALID_VALUE),
    })
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
    major.put(attribute(device, 75)?)?;
    minor.put(attribute(device, 76)?)
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

fn peer_attribute(out: Out<i32>, which: i32, device: i32, peer: i32) -> Res {
    out.check()?;
    let (device, peer) = (get(device)?, get(peer)?);
    if device.ordinal == peer.ordinal {
        return Err(code::INVALID_DEVICE);
    }
    // 1 performance rank, 2 access, 3 native atomics, 4 array access
    match which {
        1 | 3 => out.put(0),
        2 | 4 => out.put(1),
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

//! Memory and events between processes: what can be exported, and the refusals.
//!
//! Nothing really leaves the process. A chunk's file descriptor can be imported where it was exported; legacy
//! handles can be made, but opening one in its own process is refused, as the real driver does.

use crate::call::{Out, Res};
use crate::memory::{self, Kind};
use crate::vmm::{self, FILE_DESCRIPTOR};
use crate::{code, context, event};
use cudarc::driver::sys;

/// `CUipcMemHandle`, `CUipcEventHandle`
#[derive(Clone, Copy)]
#[repr(C)]
pub struct IpcHandle {
    bytes: [u8; sys::CU_IPC_HANDLE_SIZE as usize],
}

same_layout!(whole IpcHandle, sys::CUipcMemHandle: bytes = reserved);
same_layout!(whole IpcHandle, sys::CUipcEventHandle: bytes = reserved);

const PEER_ACCESS: u32 = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;

impl IpcHandle {
    fn new(value: u64) -> IpcHandle {
        let mut bytes = [0; sys::CU_IPC_HANDLE_SIZE as usize];
        bytes[..8].copy_from_slice(&value.to_le_bytes());
        bytes[8..12].copy_from_slice(&std::process::id().to_le_bytes());
        IpcHandle { bytes }
    }
}

fn memory_handle(out: Out<IpcHandle>, address: u64) -> Res {
    context::current()?;
    out.check()?;
    let base = {
        let memory = memory::reading();
        let (base, block) = memory.block_at(address).ok_or(code::INVALID_VALUE)?;
        match block.kind {
            Kind::Device => base,
            _ => return Err(code::INVALID_VALUE),
        }
    };
    out.put(IpcHandle::new(base))
}

/// Handles only come from this process, where opening them is an error.
fn open(flags: u32) -> Res {
    context::current()?;
    match flags {
        PEER_ACCESS => Err(code::INVALID_CONTEXT),
        _ => Err(code::INVALID_VALUE),
    }
}

fn close() -> Res {
    context::current()?;
    Err(code::INVALID_VALUE)
}

fn event_handle(out: Out<IpcHandle>, handle: usize) -> Res {
    out.check()?;
    let event = event::find(handle)?;
    match event.is_interprocess() {
        true => out.put(IpcHandle::new(handle as u64)),
        false => Err(code::INVALID_HANDLE),
    }
}

fn export(out: Out<i32>, handle: u64, kind: i32, flags: u64) -> Res {
    vmm::supported()?;
    out.check()?;
    let chunk = vmm::chunk_of(handle, "cuMemExportToShareableHandle")?;
    let requested = chunk.properties.handle_types & FILE_DESCRIPTOR != 0;
    if kind != FILE_DESCRIPTOR || flags != 0 || !requested {
        return Err(code::INVALID_VALUE);
    }
    // SAFETY: plain system calls; the bytes written live on the stack.
    unsafe {
        let descriptor = libc::memfd_create(c"cudasim export".as_ptr(), libc::MFD_CLOEXEC);
        let bytes = handle.to_le_bytes();
        if descriptor < 0 || libc::pwrite(descriptor, bytes.as_ptr().cast(), bytes.len(), 0) != 8 {
            return Err(code::OPERATING_SYSTEM);
        }
        out.put(descriptor)
    }
}

/// The descriptor is passed by value in the pointer argument.
fn import(out: Out<u64>, descriptor: usize, kind: i32) -> Res {
    vmm::supported()?;
    out.check()?;
    if kind != FILE_DESCRIPTOR {
        return Err(code::INVALID_VALUE);
    }
    let mut bytes = [0u8; 8];
    // SAFETY: reads into a buffer of that size.
    let read = unsafe { libc::pread(descriptor as i32, bytes.as_mut_ptr().cast(), 8, 0) };
    if read != 8 {
        return Err(code::INVALID_VALUE);
    }
    let handle = u64::from_le_bytes(bytes);
    vmm::adopt(vmm::chunk_of(handle, "cuMemImportFromShareableHandle")?);
    out.put(handle)
}

exports! {
    fn cuIpcGetMemHandle(out: Out<IpcHandle>, address: u64) => memory_handle(out, address);
    fn cuIpcOpenMemHandle(_out: Out<u64>, _handle: IpcHandle, flags: u32) => open(flags);
    fn cuIpcOpenMemHandle_v2(_out: Out<u64>, _handle: IpcHandle, flags: u32) => open(flags);
    fn cuIpcCloseMemHandle(_address: u64) => close();
    fn cuIpcGetEventHandle(out: Out<IpcHandle>, event: usize) => event_handle(out, event);
    fn cuIpcOpenEventHandle(_out: Out<usize>, _handle: IpcHandle) => open(PEER_ACCESS);
    fn cuMemExportToShareableHandle(out: Out<i32>, handle: u64, kind: i32, flags: u64)
        => export(out, handle, kind, flags);
    fn cuMemImportFromShareableHandle(out: Out<u64>, descriptor: usize, kind: i32)
        => import(out, descriptor, kind);
    fn cuMemGetHandleForAddressRange(_out: usize, _address: u64, _size: usize, _kind: i32, _flags: u64)
        => Err(code::NOT_SUPPORTED);
}

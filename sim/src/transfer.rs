//! Sets and copies.
//!
//! The range is checked when the call is made (a copy past the end of an allocation answers 1 at once) and
//! again when the operation runs, because by then the memory may be gone.

use crate::call::Res;
use crate::capture::{self, Route};
use crate::graph::NodeWork;
use crate::memory::{self, Access, Kind};
use crate::stream::{self, Stream, StreamArg};
use crate::work::{self, Rows, Side, Work};
use crate::{code, context};
use std::sync::Arc;

/// Larger pageable sources are copied from where they are, and the call waits for that.
const STAGED_AT_MOST: u64 = 64 << 10;

/// Whether the call waits for its work.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    Sync,
    Async,
}

/// What the program says (or lets the driver find out) about an end of a copy.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum End {
    Device(u64),
    Host(u64),
    Any(u64),
}

/// One end, looked up.
struct Located {
    address: u64,
    known: bool,
    host: bool,
}

fn locate(end: End, device: usize, extent: u64, access: Access) -> Res<Located> {
    let (End::Device(address) | End::Host(address) | End::Any(address)) = end;
    let memory = memory::reading();
    let known = memory.knows(address);
    if known {
        if !memory.accepts(device, address, extent, access) {
            return Err(code::INVALID_VALUE);
        }
    } else if matches!(end, End::Device(_)) || address == 0 {
        return Err(code::INVALID_VALUE);
    }
    let in_host_block = |(_, block): (u64, &memory::Block)| block.kind.is_host();
    Ok(Located { address, known, host: !known || memory.block_at(address).is_some_and(in_host_block) })
}

impl Located {
    fn is_pageable(&self) -> bool {
        !self.known
    }

    fn side(&self) -> Side {
        match self.known {
            true => Side::Known(self.address),
            false => Side::Host(self.address),
        }
    }
}

pub fn copy_2d(
    (to, to_pitch): (End, u64),
    (from, from_pitch): (End, u64),
    rows: Rows,
    stream: StreamArg,
    mode: Mode,
) -> Res {
    let stream = stream::usable(stream)?;
    if rows.is_empty() {
        return Ok(());
    }
    let device = stream.context.device;
    let to = locate(to, device, rows.extent(to_pitch), Access::Write)?;
    let from = locate(from, device, rows.extent(from_pitch), Access::Read)?;
    let mut source = from.side();
    let mut source_pitch = from_pitch;
    let recorded = recorded(&stream, mode)?;
    let waits = match mode {
        Mode::Async if recorded => false,
        // Copies inside device memory may be under way when the call returns.
        Mode::Sync => to.host || from.host,
        Mode::Async if to.is_pageable() => true,
        Mode::Async if from.is_pageable() => {
            let bytes = rows.width * rows.count;
            if bytes <= STAGED_AT_MOST {
                source = stage(&from, rows, from_pitch)?;
                source_pitch = rows.width;
            }
            bytes > STAGED_AT_MOST
        }
        Mode::Async => false,
    };
    if waits && stream.is_idle() {
        // Nothing to wait for: the caller's thread may as well do it.
        return work::copy_rows(device, &to.side(), &source, rows, to_pitch, source_pitch)
            .map_err(|_| code::INVALID_VALUE);
    }
    let work = Work::Copy { to: to.side(), from: source, rows, to_pitch, from_pitch: source_pitch };
    if recorded {
        return capture::record(&stream, NodeWork::Run(work));
    }
    let ticket = stream.submit(work, Vec::new());
    if waits {
        ticket.wait();
        stream.context.check_error()?;
    }
    Ok(())
}

/// Whether the operation belongs to a capture; one whose call waits cannot.
fn recorded(stream: &Arc<Stream>, mode: Mode) -> Res<bool> {
    match (capture::route(stream)?, mode) {
        (Route::Run, _) => Ok(false),
        (Route::Record, Mode::Async) => Ok(true),
        (Route::Record, Mode::Sync) => capture::not_capturable(stream).map(|()| false),
    }
}

fn stage(from: &Located, rows: Rows, pitch: u64) -> Res<Side> {
    let mut bytes = Vec::new();
    let size = (rows.width * rows.count) as usize;
    bytes.try_reserve_exact(size).map_err(|_| code::OUT_OF_MEMORY)?;
    for row in 0..rows.count {
        let start = (from.address + row * pitch) as *const u8;
        // SAFETY: by the C contract the program's source is readable during the call.
        bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(start, rows.width as usize) });
    }
    Ok(Side::Staged(Arc::new(bytes)))
}

fn copy(to: End, from: End, size: usize, stream: StreamArg, mode: Mode) -> Res {
    let rows = Rows::one(size as u64);
    copy_2d((to, rows.width), (from, rows.width), rows, stream, mode)
}

#[allow(clippy::too_many_arguments)] // they are what a fill is
fn fill(
    address: u64,
    pitch: usize,
    value: u32,
    element: u64,
    width: usize,
    height: usize,
    stream: StreamArg,
    mode: Mode,
) -> Res {
    let stream = stream::usable(stream)?;
    let width = (width as u64).checked_mul(element).ok_or(code::INVALID_VALUE)?;
    let rows = Rows { width, count: height as u64 };
    let pitch = if height > 1 { pitch as u64 } else { width };
    if rows.is_empty() {
        return Ok(());
    }
    if width > pitch || !address.is_multiple_of(element) || !pitch.is_multiple_of(element) {
        return Err(code::INVALID_VALUE);
    }
    let device = stream.context.device;
    let to = locate(End::Device(address), device, rows.extent(pitch), Access::Write)?;
    let kind = memory::reading().block_at(address).map(|(_, block)| block.kind);
    let work = Work::Fill { address, value, element, rows, pitch };
    if recorded(&stream, mode)? {
        return capture::record(&stream, NodeWork::Run(work));
    }
    let ticket = stream.submit(work, Vec::new());
    if mode == Mode::Sync && (to.host || kind == Some(Kind::Managed)) {
        ticket.wait();
        stream.context.check_error()?;
    }
    Ok(())
}

use End::{Any, Device, Host};
use Mode::{Async, Sync};

/// Peer copies name contexts, which only have to exist.
fn peer_copy(to: (u64, usize), from: (u64, usize), size: usize, s: StreamArg, mode: Mode) -> Res {
    for handle in [to.1, from.1] {
        if handle == 0 {
            return Err(code::INVALID_CONTEXT);
        }
        context::Context::of(handle)?.check()?;
    }
    copy(Device(to.0), Device(from.0), size, s, mode)
}

exports! {
    implicit fn cuMemsetD8_v2, cuMemsetD8_v2_ptds(to: u64, value: u8, n: usize; s)
        => fill(to, 0, value as u32, 1, n, 1, s, Sync);
    implicit fn cuMemsetD16_v2, cuMemsetD16_v2_ptds(to: u64, value: u16, n: usize; s)
        => fill(to, 0, value as u32, 2, n, 1, s, Sync);
    implicit fn cuMemsetD32_v2, cuMemsetD32_v2_ptds(to: u64, value: u32, n: usize; s)
        => fill(to, 0, value, 4, n, 1, s, Sync);
    stream fn cuMemsetD8Async, cuMemsetD8Async_ptsz(to: u64, value: u8, n: usize; s)
        => fill(to, 0, value as u32, 1, n, 1, s, Async);
    stream fn cuMemsetD16Async, cuMemsetD16Async_ptsz(to: u64, value: u16, n: usize; s)
        => fill(to, 0, value as u32, 2, n, 1, s, Async);
    stream fn cuMemsetD32Async, cuMemsetD32Async_ptsz(to: u64, value: u32, n: usize; s)
        => fill(to, 0, value, 4, n, 1, s, Async);
    implicit fn cuMemsetD2D8_v2, cuMemsetD2D8_v2_ptds(
        to: u64, pitch: usize, value: u8, width: usize, height: usize; s)
        => fill(to, pitch, value as u32, 1, width, height, s, Sync);
    implicit fn cuMemsetD2D16_v2, cuMemsetD2D16_v2_ptds(
        to: u64, pitch: usize, value: u16, width: usize, height: usize; s)
        => fill(to, pitch, value as u32, 2, width, height, s, Sync);
    implicit fn cuMemsetD2D32_v2, cuMemsetD2D32_v2_ptds(
        to: u64, pitch: usize, value: u32, width: usize, height: usize; s)
        => fill(to, pitch, value, 4, width, height, s, Sync);
    stream fn cuMemsetD2D8Async, cuMemsetD2D8Async_ptsz(
        to: u64, pitch: usize, value: u8, width: usize, height: usize; s)
        => fill(to, pitch, value as u32, 1, width, height, s, Async);
    stream fn cuMemsetD2D16Async, cuMemsetD2D16Async_ptsz(
        to: u64, pitch: usize, value: u16, width: usize, height: usize; s)
        => fill(to, pitch, value as u32, 2, width, height, s, Async);
    stream fn cuMemsetD2D32Async, cuMemsetD2D32Async_ptsz(
        to: u64, pitch: usize, value: u32, width: usize, height: usize; s)
        => fill(to, pitch, value, 4, width, height, s, Async);

    implicit fn cuMemcpy, cuMemcpy_ptds(to: u64, from: u64, size: usize; s)
        => copy(Any(to), Any(from), size, s, Sync);
    stream fn cuMemcpyAsync, cuMemcpyAsync_ptsz(to: u64, from: u64, size: usize; s)
        => copy(Any(to), Any(from), size, s, Async);
    implicit fn cuMemcpyHtoD_v2, cuMemcpyHtoD_v2_ptds(to: u64, from: u64, size: usize; s)
        => copy(Device(to), Host(from), size, s, Sync);
    stream fn cuMemcpyHtoDAsync_v2, cuMemcpyHtoDAsync_v2_ptsz(to: u64, from: u64, size: usize; s)
        => copy(Device(to), Host(from), size, s, Async);
    implicit fn cuMemcpyDtoH_v2, cuMemcpyDtoH_v2_ptds(to: u64, from: u64, size: usize; s)
        => copy(Host(to), Device(from), size, s, Sync);
    stream fn cuMemcpyDtoHAsync_v2, cuMemcpyDtoHAsync_v2_ptsz(to: u64, from: u64, size: usize; s)
        => copy(Host(to), Device(from), size, s, Async);
    implicit fn cuMemcpyDtoD_v2, cuMemcpyDtoD_v2_ptds(to: u64, from: u64, size: usize; s)
        => copy(Device(to), Device(from), size, s, Sync);
    stream fn cuMemcpyDtoDAsync_v2, cuMemcpyDtoDAsync_v2_ptsz(to: u64, from: u64, size: usize; s)
        => copy(Device(to), Device(from), size, s, Async);
    implicit fn cuMemcpyPeer, cuMemcpyPeer_ptds(
        to: u64, to_context: usize, from: u64, from_context: usize, size: usize; s)
        => peer_copy((to, to_context), (from, from_context), size, s, Sync);
    stream fn cuMemcpyPeerAsync, cuMemcpyPeerAsync_ptsz(
        to: u64, to_context: usize, from: u64, from_context: usize, size: usize; s)
        => peer_copy((to, to_context), (from, from_context), size, s, Async);
}

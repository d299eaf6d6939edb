//! Rung 9: host memory in place of device memory. Slow, so it serves the one request that asked and goes back
//! to the driver once that block is freed; it is never idle memory for others, and no bytes of the device.

use super::grow::{ROOM_FOR_UNRECLAIMABLE, whole_pages};
use super::state::State;
use super::{Arena, IsCaptured};
use crate::driver::{Api, relaxed};
use crate::error::{Result, Status};
use crate::heap::{PAGE, block_flags};
use crate::logging::{Size, log_line};
use crate::pool::types::AllocRequest;
use crate::vmem::{Calls, ChunkOp, UndoFailure};

impl Arena {
    /// Serves the request with host memory, if the driver has such for the device.
    pub fn spill(&self, api: &Api, request: &AllocRequest) -> Result<Option<u64>> {
        let Some(len) = whole_pages(request) else { return Ok(None) };
        {
            let mut state = self.lock()?;
            state.addresses.reserve(len)?;
            state.spilled.reserve()?;
            state.unreclaimable.try_reserve(ROOM_FOR_UNRECLAIMABLE)?;
        }
        let mut calls = Calls::default();
        let mut op = ChunkOp::fresh(len);
        let made = self.mapper.create_on_host(api, &mut op, request.align.max(PAGE), &mut calls);
        let mut state = self.lock()?;
        state.counters.calls.add(calls);
        if op.left != UndoFailure::Nothing {
            state.keep_one(op, Vec::new());
        }
        match made {
            Ok(()) => {}
            // No such memory, or none left: the answer is that of the device.
            Err(Status::POOL_ERROR_NOT_SUPPORTED | Status::POOL_ERROR_OUT_OF_MEMORY) => return Ok(None),
            Err(status) => return Err(status),
        }
        let booked = if self.is_lost() { Err(self.lost_error()) } else { state.book_spilled(&op, request) };
        drop(state);
        match booked {
            Ok(address) => {
                log_line!(
                    Warn,
                    "device {}: {} were served with host memory (spill:host), which is slow",
                    self.device(),
                    Size(request.size)
                );
                Ok(Some(address))
            }
            Err(status) => {
                let mut calls = Calls::default();
                let gone = relaxed(api, || self.mapper.discard_host(api, &mut op, &mut calls));
                let mut state = self.lock()?;
                state.counters.calls.add(calls);
                if gone.is_err() || op.left != UndoFailure::Nothing {
                    state.keep_one(op, Vec::new());
                }
                Err(status)
            }
        }
    }

    /// Returns what of the host's memory is freed and complete.
    pub(super) fn release_spilled(&self, api: &Api) -> Result<()> {
        if self.lock()?.spilled.bytes > 0 {
            self.release_where(api, u64::MAX, &|state, chunk| state.spilled.has(chunk.off))?;
        }
        Ok(())
    }

    /// The same for a request that looks for memory; and sees to it that a later one can tell whether the
    /// rest is complete.
    pub fn look_after_spilled(&self, api: &Api, is_captured: IsCaptured) -> Result<()> {
        let unsure = {
            let state = self.lock()?;
            state.spilled.bytes > 0 && state.needs_context()
        };
        if unsure && self.fence_context(api, is_captured) {
            self.poll(api);
        }
        self.release_spilled(api)
    }
}

impl State {
    /// Books a chunk of host memory as the block that it was made for. After an error nothing is booked.
    fn book_spilled(&mut self, op: &ChunkOp, request: &AllocRequest) -> Result<u64> {
        let mut meta = self.block_meta(request)?;
        meta.flags |= block_flags::OWN_ALLOCATION;
        // Again, because others may have taken the room that was made before the driver was called.
        self.addresses.reserve(op.len)?;
        self.spilled.reserve()?;
        let off = self.addresses.add(op.from, op.len);
        if let Err(no_memory) = self.heap.add_chunk_region(off, op.len, op.handle, Some(meta)) {
            self.addresses.remove(off);
            return Err(no_memory.into());
        }
        self.spilled.add(off, op.len);
        self.counters.spills = self.counters.spills.wrapping_add(1);
        Ok(self.handed_out(off, request, meta.owner))
    }
}

//! Which chunks of an arena are host memory.

use crate::error::NoHostMemory;

/// The chunks of an arena that are host memory.
#[derive(Default)]
pub struct Spilled {
    /// Their offsets, in order: each chunk that may be given back is looked for here.
    chunks: Vec<u64>,
    /// Theirs, and what of the kind the driver would not take back.
    pub bytes: u64,
}

impl Spilled {
    /// Room for one more chunk.
    pub fn reserve(&mut self) -> core::result::Result<(), NoHostMemory> {
        Ok(self.chunks.try_reserve(1)?)
    }

    /// Adds a chunk, for which room was made.
    pub fn add(&mut self, off: u64, len: u64) {
        let at = self.chunks.partition_point(|chunk| *chunk < off);
        self.chunks.insert(at, off);
        self.bytes += len;
    }

    pub fn has(&self, off: u64) -> bool {
        self.chunks.binary_search(&off).is_ok()
    }

    /// Forgets the chunk at `off`, if it is one.
    pub fn remove(&mut self, off: u64, len: u64) {
        if let Ok(at) = self.chunks.binary_search(&off) {
            self.chunks.remove(at);
            self.bytes -= len;
        }
    }
}

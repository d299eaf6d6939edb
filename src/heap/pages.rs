//! The page table: from an offset to the extent that starts there, and to the chunk behind it.
//!
//! Three levels, each made when first needed and only as far as needed: directories of 1 GiB, pages
//! of 2 MiB, and for pages in which an extent starts, an entry for each quantum.

use super::node::{NIL, NodeId};
use super::size::{PAGE, QUANTUM};
use crate::error::NoHostMemory;

const DIRECTORY: u64 = 1 << 30;
const PAGES: usize = (DIRECTORY / PAGE) as usize;
const QUANTA: usize = (PAGE / QUANTUM) as usize;

struct Directory {
    /// For each page the extents that start in it; empty where none ever has.
    starts: Vec<Vec<NodeId>>,
    /// For each page the chunk mapped there.
    chunks: Vec<u32>,
}

/// See the module.
pub struct PageTable {
    directories: Vec<Option<Directory>>,
}

fn split(off: u64) -> (usize, usize, usize) {
    ((off / DIRECTORY) as usize, (off / PAGE) as usize % PAGES, (off / QUANTUM) as usize % QUANTA)
}

fn filled<T: Clone>(value: T, len: usize) -> Result<Vec<T>, NoHostMemory> {
    let mut vec = Vec::new();
    vec.try_reserve_exact(len)?;
    vec.resize(len, value);
    Ok(vec)
}

impl PageTable {
    pub const fn new() -> Self {
        PageTable { directories: Vec::new() }
    }

    fn directory(&mut self, index: usize) -> Result<&mut Directory, NoHostMemory> {
        if index >= self.directories.len() {
            let more = index + 1 - self.directories.len();
            self.directories.try_reserve(more)?;
            self.directories.resize_with(index + 1, || None);
        }
        let slot = self.directories.get_mut(index).ok_or(NoHostMemory)?;
        if slot.is_none() {
            *slot = Some(Directory { starts: filled(Vec::new(), PAGES)?, chunks: filled(NIL, PAGES)? });
        }
        slot.as_mut().ok_or(NoHostMemory)
    }

    /// Makes sure that an extent may start at `off` without memory being needed then.
    pub fn reserve_start(&mut self, off: u64) -> Result<(), NoHostMemory> {
        let (directory, page, _) = split(off);
        let starts = self.directory(directory)?.starts.get_mut(page).ok_or(NoHostMemory)?;
        if starts.is_empty() {
            *starts = filled(NIL, QUANTA)?;
        }
        Ok(())
    }

    /// Makes sure that chunks may be mapped in the range without memory being needed then.
    pub fn reserve_chunks(&mut self, off: u64, len: u64) -> Result<(), NoHostMemory> {
        let last = off + len - 1;
        for directory in off / DIRECTORY..=last / DIRECTORY {
            self.directory(directory as usize)?;
        }
        Ok(())
    }

    pub fn start(&self, off: u64) -> NodeId {
        let (directory, page, quantum) = split(off);
        match self.directories.get(directory) {
            Some(Some(d)) => d.starts.get(page).and_then(|s| s.get(quantum)).copied().unwrap_or(NIL),
            _ => NIL,
        }
    }

    /// Notes that the extent `id` starts at `off`, or with NIL that none does.
    pub fn set_start(&mut self, off: u64, id: NodeId) {
        let (directory, page, quantum) = split(off);
        let entry = match self.directories.get_mut(directory) {
            Some(Some(d)) => d.starts.get_mut(page).and_then(|s| s.get_mut(quantum)),
            _ => None,
        };
        debug_assert!(entry.is_some() || id == NIL, "an extent starts where none was reserved");
        if let Some(entry) = entry {
            *entry = id;
        }
    }

    /// The extent with the highest start at or below `off`, looking back no further than `floor`.
    pub fn start_at_or_below(&self, off: u64, floor: u64) -> NodeId {
        let mut at = off / QUANTUM * QUANTUM;
        loop {
            let (directory, page, quantum) = split(at);
            let Some(Some(d)) = self.directories.get(directory) else {
                // Nothing starts in this directory; go to the end of the one below.
                match (at / DIRECTORY * DIRECTORY).checked_sub(QUANTUM) {
                    Some(below) if below >= floor => at = below,
                    _ => return NIL,
                }
                continue;
            };
            let found = d.starts.get(page).and_then(|starts| {
                let upto = starts.get(..=quantum)?;
                upto.iter().rev().find(|id| **id != NIL).copied()
            });
            if let Some(id) = found {
                return id;
            }
            match (at / PAGE * PAGE).checked_sub(QUANTUM) {
                Some(below) if below >= floor => at = below,
                _ => return NIL,
            }
        }
    }

    pub fn chunk(&self, off: u64) -> u32 {
        let (directory, page, _) = split(off);
        match self.directories.get(directory) {
            Some(Some(d)) => d.chunks.get(page).copied().unwrap_or(NIL),
            _ => NIL,
        }
    }

    /// Notes that `chunk` is behind every page that the range touches.
    pub fn set_chunk(&mut self, off: u64, len: u64, chunk: u32) {
        let last = (off + len - 1) / PAGE;
        for page in off / PAGE..=last {
            let (directory, page, _) = split(page * PAGE);
            if let Some(Some(d)) = self.directories.get_mut(directory)
                && let Some(entry) = d.chunks.get_mut(page)
            {
                *entry = chunk;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_back_over_pages_and_directories() {
        let mut table = PageTable::new();
        table.reserve_start(8192).unwrap();
        table.set_start(8192, 7);
        assert_eq!(table.start_at_or_below(8192, 0), 7);
        assert_eq!(table.start_at_or_below(5 << 30, 0), 7);
        assert_eq!(table.start_at_or_below(8191, 0), NIL);
        assert_eq!(table.start_at_or_below(5 << 30, 1 << 30), NIL);
        table.reserve_start(3 << 30).unwrap();
        table.set_start(3 << 30, 9);
        assert_eq!(table.start_at_or_below((3 << 30) + 1, 0), 9);
        assert_eq!(table.start_at_or_below((3 << 30) - 1, 0), 7);
    }
}

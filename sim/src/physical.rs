//! Physical memory: sparse files that only exist in memory, one for each device and one for the host.
//!
//! A piece of it is an offset range. Offsets are never scarce (the file is far larger than any device), so
//! there is no fragmentation to simulate; what is scarce is counted by `device`. A freed piece is punched out
//! of the file, so that the host's memory is given back.

use crate::call::Res;
use crate::sync::lock;
use crate::{code, device};
use std::collections::HashMap;
use std::sync::{Mutex, OnceLock};

/// Host mappings and offsets are whole pages of this size.
pub const PAGE: u64 = 4096;
const FILE_SIZE: i64 = 1 << 60;

/// Where memory is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    Device(usize),
    Host,
}

struct File {
    descriptor: i32,
    next: u64,
    /// Freed offsets by size. Reusing them keeps the file's page tree small.
    free: HashMap<u64, Vec<u64>>,
}

impl File {
    fn create() -> Option<File> {
        // SAFETY: plain system calls; the name is a terminated constant.
        let descriptor = unsafe {
            let descriptor = libc::memfd_create(c"cudasim".as_ptr(), libc::MFD_CLOEXEC);
            if descriptor < 0 || libc::ftruncate(descriptor, FILE_SIZE) != 0 {
                return None;
            }
            descriptor
        };
        Some(File { descriptor, next: 0, free: HashMap::new() })
    }
}

fn file(place: Place) -> &'static OnceLock<Option<Mutex<File>>> {
    static FILES: [OnceLock<Option<Mutex<File>>>; crate::knobs::MAX_DEVICES + 1] =
        [const { OnceLock::new() }; crate::knobs::MAX_DEVICES + 1];
    match place {
        Place::Host => &FILES[0],
        Place::Device(ordinal) => &FILES[ordinal + 1],
    }
}

/// A piece of physical memory, freed when dropped.
pub struct Physical {
    pub place: Place,
    pub size: u64,
    pub offset: u64,
    pub descriptor: i32,
    /// What the device's accounts say for it.
    counted: u64,
}

impl Physical {
    /// Takes `counted` bytes of the device's memory (the host's is not counted) and `size` of its file.
    pub fn allocate(place: Place, size: u64, counted: u64) -> Res<Physical> {
        if let Place::Device(ordinal) = place {
            device::get(ordinal as i32)?.take(counted)?;
        }
        let give_back = || {
            if let Place::Device(ordinal) = place
                && let Ok(device) = device::get(ordinal as i32)
            {
                device.give(counted);
            }
            code::OUT_OF_MEMORY
        };
        let file = file(place).get_or_init(|| File::create().map(Mutex::new));
        let mut file = lock(file.as_ref().ok_or_else(give_back)?);
        let size = crate::ranges::round_up(size, PAGE).ok_or_else(give_back)?;
        let offset = match file.free.get_mut(&size).and_then(Vec::pop) {
            Some(offset) => offset,
            None => {
                let offset = file.next;
                file.next =
                    offset.checked_add(size).filter(|&end| end <= FILE_SIZE as u64).ok_or_else(give_back)?;
                offset
            }
        };
        Ok(Physical { place, size, offset, descriptor: file.descriptor, counted })
    }
}

impl Drop for Physical {
    fn drop(&mut self) {
        // SAFETY: punches out this object's own range, which nothing maps any more.
        unsafe {
            libc::fallocate(
                self.descriptor,
                libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
                self.offset as i64,
                self.size as i64,
            );
        }
        if let Some(Some(file)) = file(self.place).get() {
            lock(file).free.entry(self.size).or_default().push(self.offset);
        }
        if let Place::Device(ordinal) = self.place
            && let Ok(device) = device::get(ordinal as i32)
        {
            device.give(self.counted);
        }
    }
}

//! Handles: opaque values for objects, checked at every use.
//!
//! A handle is a value that looks like an address but maps nothing, so a program that dereferences one
//! crashes. A slot is reused last in, first out, as the real driver does, to bring out uses of a stale
//! handle; until it is reused, such a use is told apart from a value that never was a handle.

use crate::sync::lock;
use std::sync::{Arc, Mutex, OnceLock};

const SLOTS_PER_CHUNK: usize = 256;
const CHUNKS: usize = 4096;
const SPACING: usize = 256;

pub enum Found<T> {
    Live(Arc<T>),
    /// Was destroyed, and the handle was not given out again yet.
    Dead,
    /// Its context was destroyed with it.
    Orphaned,
    /// Never was a handle of this kind.
    Unknown,
}

enum Slot<T> {
    Empty,
    Live(Arc<T>),
    Dead,
    Orphaned,
}

type Slots<T> = Box<[Mutex<Slot<T>>]>;

struct Free {
    reusable: Vec<usize>,
    fresh: usize,
    live: u64,
}

pub struct Registry<T> {
    base: usize,
    chunks: [OnceLock<Slots<T>>; CHUNKS],
    free: Mutex<Free>,
}

impl<T> Registry<T> {
    /// `base` is the value below the first handle; registries keep 2^28 apart.
    pub const fn new(base: usize) -> Registry<T> {
        Registry {
            base,
            chunks: [const { OnceLock::new() }; CHUNKS],
            free: Mutex::new(Free { reusable: Vec::new(), fresh: 0, live: 0 }),
        }
    }

    fn slot(&self, handle: usize) -> Option<&Mutex<Slot<T>>> {
        let offset = handle.checked_sub(self.base)?;
        if offset % SPACING != 0 {
            return None;
        }
        let index = offset / SPACING;
        let chunk = self.chunks.get(index / SLOTS_PER_CHUNK)?.get()?;
        Some(&chunk[index % SLOTS_PER_CHUNK])
    }

    /// Makes the object, given its handle. `None`: there are too many.
    pub fn add(&self, make: impl FnOnce(usize) -> Arc<T>) -> Option<(usize, Arc<T>)> {
        let index = {
            let mut free = lock(&self.free);
            let index = match free.reusable.pop() {
                Some(index) => index,
                None if free.fresh < CHUNKS * SLOTS_PER_CHUNK => {
                    free.fresh += 1;
                    free.fresh - 1
                }
                None => return None,
            };
            free.live += 1;
            index
        };
        let chunk = self.chunks[index / SLOTS_PER_CHUNK]
            .get_or_init(|| (0..SLOTS_PER_CHUNK).map(|_| Mutex::new(Slot::Empty)).collect());
        let handle = self.base + index * SPACING;
        let object = make(handle);
        *lock(&chunk[index % SLOTS_PER_CHUNK]) = Slot::Live(object.clone());
        Some((handle, object))
    }

    pub fn find(&self, handle: usize) -> Found<T> {
        match self.slot(handle) {
            None => Found::Unknown,
            Some(slot) => match &*lock(slot) {
                Slot::Empty => Found::Unknown,
                Slot::Live(object) => Found::Live(object.clone()),
                Slot::Dead => Found::Dead,
                Slot::Orphaned => Found::Orphaned,
            },
        }
    }

    /// Takes the object out; its handle may be given out again at once.
    pub fn remove(&self, handle: usize) -> Found<T> {
        self.take(handle, Slot::Dead)
    }

    /// The same for an object that dies with its context.
    pub fn orphan(&self, handle: usize) {
        self.take(handle, Slot::Orphaned);
    }

    fn take(&self, handle: usize, grave: Slot<T>) -> Found<T> {
        let Some(slot) = self.slot(handle) else {
            return Found::Unknown;
        };
        let found = {
            let mut slot = lock(slot);
            match &*slot {
                Slot::Live(_) => match std::mem::replace(&mut *slot, grave) {
                    Slot::Live(object) => Found::Live(object),
                    _ => Found::Unknown,
                },
                Slot::Empty => Found::Unknown,
                Slot::Dead => Found::Dead,
                Slot::Orphaned => Found::Orphaned,
            }
        };
        if matches!(found, Found::Live(_)) {
            let mut free = lock(&self.free);
            free.reusable.push((handle - self.base) / SPACING);
            free.live -= 1;
        }
        found
    }

    /// Every live object.
    pub fn all(&self) -> Vec<Arc<T>> {
        let chunks = self.chunks.iter().map_while(|chunk| chunk.get());
        let live = |slot: &Mutex<Slot<T>>| match &*lock(slot) {
            Slot::Live(object) => Some(object.clone()),
            _ => None,
        };
        chunks.flatten().filter_map(live).collect()
    }

    pub fn live(&self) -> u64 {
        lock(&self.free).live
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_are_reused_last_in_first_out_and_die_visibly() {
        static REGISTRY: Registry<u32> = Registry::new(0x1000);
        let add = |value| REGISTRY.add(|_| Arc::new(value)).unwrap().0;
        let (a, b) = (add(1), add(2));
        assert!(matches!(REGISTRY.find(b), Found::Live(value) if *value == 2));
        assert!(matches!(REGISTRY.remove(a), Found::Live(_)));
        assert!(matches!(REGISTRY.find(a), Found::Dead));
        assert!(matches!(REGISTRY.remove(a), Found::Dead));
        REGISTRY.orphan(b);
        assert!(matches!(REGISTRY.find(b), Found::Orphaned));
        assert_eq!(REGISTRY.live(), 0);
        assert_eq!((add(3), add(4)), (b, a));
        assert!(matches!(REGISTRY.find(a + 1), Found::Unknown));
        assert!(matches!(REGISTRY.find(0), Found::Unknown));
        assert_eq!(REGISTRY.all().len(), 2);
    }

    #[test]
    fn there_is_room_for_many() {
        static REGISTRY: Registry<usize> = Registry::new(0x1000);
        let handles: Vec<usize> = (0..10_000).map(|i| REGISTRY.add(|_| Arc::new(i)).unwrap().0).collect();
        for (i, &handle) in handles.iter().enumerate() {
            assert!(matches!(REGISTRY.find(handle), Found::Live(value) if *value == i));
        }
    }
}

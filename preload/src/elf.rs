//! Symbol tables of loaded objects, read in place.
//!
//! Used where asking the loader would not do: `dlsym` itself is what is looked for, and a question that fails
//! would leave its trace in `dlerror`, or allocate. Takes no lock and no memory.

use core::ffi::{CStr, c_char, c_int, c_void};
use core::mem::offset_of;
use core::ptr;

/// `Elf64_Dyn`
#[repr(C)]
pub struct Dyn {
    tag: i64,
    value: usize,
}

/// `Elf64_Sym`
#[repr(C)]
struct Sym {
    name: u32,
    info: u8,
    other: u8,
    section: u16,
    value: usize,
    size: u64,
}

const DT_NULL: i64 = 0;
const DT_HASH: i64 = 4;
const DT_STRTAB: i64 = 5;
const DT_SYMTAB: i64 = 6;
const DT_GNU_HASH: i64 = 0x6fff_fef5;
const DT_VERSYM: i64 = 0x6fff_fff0;
const STT_FUNC: u8 = 2;
/// A version that only references which name it get.
const HIDDEN: u16 = 0x8000;

/// The tables of one loaded object.
#[derive(Clone, Copy)]
pub struct Object {
    base: usize,
    strings: *const c_char,
    symbols: *const Sym,
    gnu_hash: *const u32,
    hash: *const u32,
    versions: *const u16,
}

impl Object {
    /// # Safety
    /// `dynamic` is the dynamic section of an object that is loaded at `base`.
    unsafe fn new(base: usize, mut dynamic: *const Dyn) -> Option<Object> {
        let mut object = Object {
            base,
            strings: ptr::null(),
            symbols: ptr::null(),
            gnu_hash: ptr::null(),
            hash: ptr::null(),
            versions: ptr::null(),
        };
        if dynamic.is_null() {
            return None;
        }
        loop {
            // SAFETY: the section ends with an entry of tag 0.
            let Dyn { tag, value } = unsafe { dynamic.read() };
            // The loader has relocated these in most objects, but for some (the kernel's) it has not.
            let at = if value < base { base.wrapping_add(value) } else { value };
            match tag {
                DT_NULL => break,
                DT_STRTAB => object.strings = at as *const c_char,
                DT_SYMTAB => object.symbols = at as *const Sym,
                DT_GNU_HASH => object.gnu_hash = at as *const u32,
                DT_HASH => object.hash = at as *const u32,
                DT_VERSYM => object.versions = at as *const u16,
                _ => {}
            }
            dynamic = dynamic.wrapping_add(1);
        }
        let complete = !object.strings.is_null() && !object.symbols.is_null();
        (complete && !(object.gnu_hash.is_null() && object.hash.is_null())).then_some(object)
    }

    /// Whether both are the same object.
    pub fn is(&self, other: &Object) -> bool {
        self.symbols == other.symbols
    }

    /// The object that the address of a function lies in.
    pub fn around(address: *const c_void) -> Option<Object> {
        let header = mapped_at(address)?.dli_fbase as *const libc::Elf64_Ehdr;
        if header.is_null() {
            return None;
        }
        // SAFETY: the loader says that an object is mapped from here, which begins with its header.
        let (offset, count) = unsafe { ((*header).e_phoff as usize, usize::from((*header).e_phnum)) };
        let segments = (header as usize).wrapping_add(offset) as *const libc::Elf64_Phdr;
        // SAFETY: the header says that so many entries are there; the loader keeps them mapped.
        unsafe { Object::of_segments(segments, count, |first| (header as usize).wrapping_sub(first)) }
    }

    /// # Safety
    /// `segments` points to `count` program headers of a loaded object.
    unsafe fn of_segments(
        segments: *const libc::Elf64_Phdr,
        count: usize,
        base_of: impl FnOnce(usize) -> usize,
    ) -> Option<Object> {
        let (mut first, mut dynamic) = (None, None);
        for at in 0..count {
            // SAFETY: by the contract of this function.
            let segment = unsafe { segments.add(at).read() };
            match segment.p_type {
                libc::PT_LOAD if first.is_none() => first = Some(segment.p_vaddr as usize & !0xfff),
                libc::PT_DYNAMIC => dynamic = Some(segment.p_vaddr as usize),
                _ => {}
            }
        }
        let base = base_of(first?);
        // SAFETY: the object's own headers say that its dynamic section is there.
        unsafe { Object::new(base, base.wrapping_add(dynamic?) as *const Dyn) }
    }

    /// The function of this name that the object defines; of several versions the default one.
    pub fn find(&self, name: &CStr) -> Option<*mut c_void> {
        let index = if self.gnu_hash.is_null() { self.in_hash(name) } else { self.in_gnu_hash(name) }?;
        // SAFETY: the index comes from the object's own table.
        let value = unsafe { (*self.symbols.wrapping_add(index)).value };
        Some(self.base.wrapping_add(value) as *mut c_void)
    }

    /// Whether the symbol is a defined function of this name, and whether its version is the default one.
    fn is_match(&self, index: usize, name: &CStr) -> (bool, bool) {
        // SAFETY: the index comes from the object's own table, and the name from its string table.
        unsafe {
            let symbol = &*self.symbols.wrapping_add(index);
            if symbol.section == 0 || symbol.info & 0xf != STT_FUNC {
                return (false, false);
            }
            let own_name = self.strings.wrapping_add(symbol.name as usize);
            let hidden = !self.versions.is_null() && *self.versions.wrapping_add(index) & HIDDEN != 0;
            (CStr::from_ptr(own_name) == name, !hidden)
        }
    }

    fn in_gnu_hash(&self, name: &CStr) -> Option<usize> {
        let wanted = name
            .to_bytes()
            .iter()
            .fold(5381u32, |hash, &byte| hash.wrapping_mul(33).wrapping_add(u32::from(byte)));
        // SAFETY: the layout of the table: four words, `filter` words of the machine, `buckets` words,
        // chains. Every chain ends with an odd word.
        unsafe {
            let [buckets, offset, filter, _] = self.gnu_hash.cast::<[u32; 4]>().read();
            let first_bucket =
                self.gnu_hash.wrapping_add(4).cast::<usize>().wrapping_add(filter as usize).cast::<u32>();
            let chains = first_bucket.wrapping_add(buckets as usize);
            let bucket = wanted.checked_rem(buckets)?;
            let mut index = *first_bucket.wrapping_add(bucket as usize);
            let mut hidden = None;
            while index >= offset && index != 0 {
                let hash = *chains.wrapping_add(index.wrapping_sub(offset) as usize);
                if hash | 1 == wanted | 1 {
                    match self.is_match(index as usize, name) {
                        (true, true) => return Some(index as usize),
                        (true, false) => hidden = Some(index as usize),
                        _ => {}
                    }
                }
                if hash & 1 != 0 {
                    break;
                }
                index = index.wrapping_add(1);
            }
            hidden
        }
    }

    fn in_hash(&self, name: &CStr) -> Option<usize> {
        let wanted = name.to_bytes().iter().fold(0u32, |hash, &byte| {
            let hash = (hash << 4).wrapping_add(u32::from(byte));
            let top = hash & 0xf000_0000;
            (hash ^ (top >> 24)) & !top
        });
        // SAFETY: the layout of the table: the two counts, buckets, chains. Every chain ends with 0.
        unsafe {
            let [buckets, _] = self.hash.cast::<[u32; 2]>().read();
            let first_bucket = self.hash.wrapping_add(2);
            let chains = first_bucket.wrapping_add(buckets as usize);
            let mut index = *first_bucket.wrapping_add(wanted.checked_rem(buckets)? as usize);
            let mut hidden = None;
            while index != 0 {
                match self.is_match(index as usize, name) {
                    (true, true) => return Some(index as usize),
                    (true, false) => hidden = Some(index as usize),
                    _ => {}
                }
                index = *chains.wrapping_add(index as usize);
            }
            hidden
        }
    }
}

/// What the loader knows of the object around an address.
pub fn mapped_at(address: *const c_void) -> Option<libc::Dl_info> {
    // SAFETY: all zero is a valid value of these pointers.
    let mut info = unsafe { core::mem::zeroed::<libc::Dl_info>() };
    // SAFETY: any address is answered; the pointer is to a local.
    (unsafe { libc::dladdr(address, &mut info) } != 0).then_some(info)
}

/// Keeps the library of a function loaded, even if the program closes it: programs open a driver to see
/// whether there is one, and again to use it, and then it may lie elsewhere.
pub fn keep_loaded(address: *const c_void) {
    if let Some(object) = mapped_at(address)
        && !object.dli_fname.is_null()
    {
        // SAFETY: the loader's own name of a library that is loaded.
        unsafe {
            libc::dlopen(object.dli_fname, libc::RTLD_LAZY | libc::RTLD_NOLOAD | libc::RTLD_NODELETE);
        }
    }
}

/// `struct link_map`, the part of it that is public.
#[repr(C)]
struct LinkMap {
    base: usize,
    name: *const c_char,
    dynamic: *const Dyn,
    next: *const LinkMap,
}

/// `struct r_debug`
#[repr(C)]
struct RDebug {
    version: c_int,
    map: *const LinkMap,
}

unsafe extern "C" {
    /// The loader's list of objects, in the order in which they were loaded: for those that the program
    /// started with, the order of the search.
    static _r_debug: RDebug;
    /// The shim's own dynamic section.
    static _DYNAMIC: Dyn;
}

/// The function of this name in the first object after the shim that has it: what `RTLD_NEXT` means here,
/// without asking the loader. Only objects that the program started with are certain to stay in the list, and
/// those come first.
pub fn find_next(name: &CStr) -> Option<*mut c_void> {
    let mut behind = false;
    // SAFETY: the loader has set it up before any other code runs.
    let mut map = unsafe { (&raw const _r_debug.map).read_volatile() };
    while !map.is_null() {
        // SAFETY: an entry of the loader's list.
        let LinkMap { base, dynamic, next, .. } = unsafe { map.read() };
        if behind {
            // SAFETY: what the loader says of the object.
            let found = unsafe { Object::new(base, dynamic) }.and_then(|object| object.find(name));
            if found.is_some() {
                return found;
            }
        }
        behind |= ptr::eq(dynamic, &raw const _DYNAMIC);
        map = next;
    }
    None
}

/// Walks all loaded objects, whoever may search them, until `visit` answers. Holds the loader's lock
/// meanwhile.
pub fn find_object<R>(mut visit: impl FnMut(&Object) -> Option<R>) -> Option<R> {
    struct State<'a, R> {
        visit: &'a mut dyn FnMut(&Object) -> Option<R>,
        answer: Option<R>,
    }
    unsafe extern "C" fn step<R>(info: *mut libc::dl_phdr_info, size: usize, state: *mut c_void) -> c_int {
        const { assert!(offset_of!(libc::dl_phdr_info, dlpi_phnum) < 64) };
        let _ = size;
        // SAFETY: the pointer that was passed below, and an entry that is the loader's.
        let (state, info) = unsafe { (&mut *state.cast::<State<'_, R>>(), &*info) };
        let base = info.dlpi_addr as usize;
        // SAFETY: the object's headers, as the loader tells them.
        let object = unsafe { Object::of_segments(info.dlpi_phdr, usize::from(info.dlpi_phnum), |_| base) };
        state.answer = object.and_then(|object| (state.visit)(&object));
        c_int::from(state.answer.is_some())
    }
    let mut state = State { visit: &mut visit, answer: None };
    // SAFETY: the function gets back the pointer to a local that outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(step::<R>), (&raw mut state).cast()) };
    state.answer
}

/// The shim's own base address, to tell it from others.
pub fn is_own(object: &Object) -> bool {
    mapped_at((&raw const _DYNAMIC).cast()).is_some_and(|own| own.dli_fbase as usize == object.base)
}

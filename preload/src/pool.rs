//! `libcudapool.so`, opened at the first use of CUDA: the types and functions of its C ABI that the shim
//! needs.
//!
//! The library beside the shim is taken, unless the program has one loaded already: there must be one pool.

pub use crate::abi::*;
use crate::mode::{self, Mode};
use crate::text::{Line, Shown, of_c, say};
use crate::{elf, stub};
use core::ffi::{CStr, c_char, c_int, c_void};
use core::fmt::Write;
use core::mem::{size_of, transmute, zeroed};
use core::ptr;
use core::sync::atomic::{AtomicI32, AtomicPtr, AtomicU8, Ordering::*};

macro_rules! functions {
    ($($field:ident = $symbol:ident fn($($arg:ty),*) -> $result:ty;)*) => {
        /// The functions of the C ABI.
        pub struct Pool {
            $($field: unsafe extern "C" fn($($arg),*) -> $result,)*
        }

        impl Pool {
            /// Looks all functions up; `None` if one is missing.
            fn load(library: *mut c_void) -> Option<Pool> {
                Some(Pool {
                    $($field: {
                        let name = concat!(stringify!($symbol), "\0");
                        let found = stub::ask(library, name.as_ptr().cast(), ptr::null());
                        if found.is_null() {
                            return None;
                        }
                        // SAFETY: the type is that of cudapool.h for this name.
                        unsafe { transmute::<*mut c_void, unsafe extern "C" fn($($arg),*) -> $result>(found) }
                    },)*
                })
            }
        }
    };
}

abi_functions!(functions);

static STATE: AtomicU8 = AtomicU8::new(CLOSED);
const CLOSED: u8 = 0;
const OPENING: u8 = 1;
const OPEN: u8 = 2;
const MISSING: u8 = 3;

static POOL: AtomicPtr<Pool> = AtomicPtr::new(ptr::null_mut());
static LOG: AtomicI32 = AtomicI32::new(0);
static ORDER: AtomicI32 = AtomicI32::new(0);

/// The pool's library, opened if it is not yet.
#[inline]
pub fn get() -> Option<&'static Pool> {
    // SAFETY: null, or a table that is never freed.
    let open = unsafe { POOL.load(Acquire).as_ref() };
    if open.is_some() { open } else { open_once() }
}

/// The pool's library, if the shim has opened it.
#[inline]
pub fn if_open() -> Option<&'static Pool> {
    // SAFETY: as for `get`.
    unsafe { POOL.load(Acquire).as_ref() }
}

#[cold]
fn open_once() -> Option<&'static Pool> {
    loop {
        match STATE.compare_exchange(CLOSED, OPENING, Acquire, Acquire) {
            Ok(_) => break,
            Err(OPENING) => {
                // Another thread is at it; it cannot be this one, because nothing in there allocates device
                // memory. SAFETY: plain.
                unsafe { libc::sched_yield() };
            }
            Err(_) => return if_open(),
        }
    }
    let opened = open();
    if let Some(pool) = opened {
        POOL.store(pool, Release);
        STATE.store(OPEN, Release);
        if_open().inspect(|pool| pool.read_options())
    } else {
        STATE.store(MISSING, Release);
        None
    }
}

fn open() -> Option<*mut Pool> {
    let library = open_library();
    if library.is_null() {
        // SAFETY: the text is copied before the next call of the loader.
        let why = unsafe { Shown::of_c(libc::dlerror()) };
        say(format_args!("the pool's library cannot be used: {why}"));
        return None;
    }
    let Some(pool) = Pool::load(library) else {
        say(format_args!("libcudapool.so is of another version than the shim"));
        return None;
    };
    // SAFETY: memory for one table, for good.
    let place = unsafe { libc::malloc(size_of::<Pool>()) }.cast::<Pool>();
    if place.is_null() {
        return None;
    }
    // SAFETY: it is large enough, and malloc aligns for pointers.
    unsafe { place.write(pool) };
    Some(place)
}

/// What it is called where it is installed; a newer number would have other functions under the same names.
const NAME: &CStr = c"libcudapool.so.0";
/// What it is called where it was built.
const BUILT_NAME: &CStr = c"libcudapool.so";

/// The loaded one, whatever path it has; else the one beside the shim; else what the loader finds.
fn open_library() -> *mut c_void {
    let mode = libc::RTLD_NOW | libc::RTLD_LOCAL;
    // SAFETY: opens a library by its terminated name.
    let loaded = unsafe { libc::dlopen(NAME.as_ptr(), mode | libc::RTLD_NOLOAD) };
    if !loaded.is_null() {
        return loaded;
    }
    for name in [NAME, BUILT_NAME] {
        let Some(path) = beside_the_shim(name) else { continue };
        // SAFETY: as above.
        let beside = unsafe { libc::dlopen(path.as_ptr(), mode) };
        if !beside.is_null() {
            return beside;
        }
    }
    // SAFETY: as above.
    unsafe { libc::dlopen(NAME.as_ptr(), mode) }
}

/// The path that the loader has for the shim may be relative to where the program started, but it keeps the
/// folder as it was then.
fn beside_the_shim(name: &CStr) -> Option<[c_char; LONGEST]> {
    const RTLD_DI_ORIGIN: c_int = 6;
    let own = elf::mapped_at(&raw const STATE as *const c_void)?;
    // SAFETY: the shim's own name, as the loader has it; it is loaded, so this only counts one more user.
    let handle = unsafe { libc::dlopen(own.dli_fname, libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    if handle.is_null() {
        return None;
    }
    let mut path = [0 as c_char; LONGEST];
    // SAFETY: paths of the loader are shorter than the buffer.
    if unsafe { libc::dlinfo(handle, RTLD_DI_ORIGIN, path.as_mut_ptr().cast()) } != 0 {
        return None;
    }
    let folder = path.iter().position(|&byte| byte == 0)?;
    let name = [b'/'].into_iter().chain(name.to_bytes_with_nul().iter().copied());
    let mut place = path.get_mut(folder..)?.iter_mut();
    for byte in name {
        *place.next()? = byte as c_char;
    }
    Some(path)
}

/// The longest path, with its end.
const LONGEST: usize = libc::PATH_MAX as usize;

impl Pool {
    /// Reads what the shim has to know; a wrong `CUDAPOOL_CONF` is said once.
    fn read_options(&self) {
        let mut options = new_options();
        // SAFETY: the struct is the caller's own.
        if unsafe { (self.options_init)(&mut options) } != OK {
            let mut why = Line::new();
            self.write_last_error(&mut why);
            say(format_args!("{}", core::str::from_utf8(why.as_bytes()).unwrap_or("")));
        }
        LOG.store(options.log, Relaxed);
        ORDER.store(options.order, Relaxed);
    }

    /// Makes the pool take all memory by `cuMemAlloc`, if the user has not said how, and it has not begun.
    pub fn prefer_malloc(&self) -> bool {
        let mut options = new_options();
        // SAFETY: the structs are the caller's own.
        unsafe {
            if (self.options_init)(&mut options) != OK || options.backend != BACKEND_AUTO {
                return options.backend == BACKEND_MALLOC;
            }
            options.backend = BACKEND_MALLOC;
            (self.configure)(&options) == OK
        }
    }

    /// Whether lines of the level `info` are wanted.
    pub fn logs(&self) -> bool {
        LOG.load(Relaxed) >= LOG_INFO
    }

    /// Whether `pool_free` is ordered by the legacy stream alone.
    pub fn frees_on_legacy(&self) -> bool {
        ORDER.load(Relaxed) == ORDER_STREAM
    }

    /// Where the library was loaded from.
    pub fn path(&self) -> Shown<'static> {
        let object = elf::mapped_at(self.owns as *const c_void);
        // SAFETY: NULL, or the loader's string for a library that stays loaded.
        unsafe { Shown::of_c(object.map_or(ptr::null(), |object| object.dli_fname)) }
    }

    fn write_last_error(&self, line: &mut Line) {
        let mut text = [0 as c_char; 400];
        // SAFETY: the buffer is the caller's own, and is terminated.
        let text = unsafe {
            (self.last_error)(text.as_mut_ptr(), text.len());
            of_c(text.as_ptr())
        };
        let _ = line.write_str(text);
    }

    pub fn alloc_with(&self, request: &Request) -> Result<usize, c_int> {
        let mut block = 0;
        // SAFETY: both are the caller's own.
        match unsafe { (self.alloc_with)(&mut block, request) } {
            OK => Ok(block),
            status => Err(status),
        }
    }

    pub fn alloc_async(&self, size: usize, stream: usize) -> Result<usize, c_int> {
        let mut block = 0;
        // SAFETY: the pointer is to a local; the stream is the caller's own, in this call.
        match unsafe { (self.alloc_async)(&mut block, size, stream) } {
            OK => Ok(block),
            status => Err(status),
        }
    }

    pub fn free(&self, block: usize) -> c_int {
        // SAFETY: any address is answered.
        unsafe { (self.free)(block) }
    }

    pub fn free_async(&self, block: usize, stream: usize) -> c_int {
        // SAFETY: any address is answered; the stream is the caller's own, in this call.
        unsafe { (self.free_async)(block, stream) }
    }

    /// Says that the block is used on the stream; with block 0, that the stream's capture begins or has
    /// ended.
    pub fn use_on_stream(&self, block: usize, stream: usize) -> c_int {
        // SAFETY: any address is answered; the stream is the caller's own, in this call.
        unsafe { (self.use_on_stream)(block, stream) }
    }

    /// Whether the address is in memory of the pool.
    pub fn owns(&self, address: usize) -> Result<bool, c_int> {
        let mut owned = 0;
        // SAFETY: any address is answered; the pointer is to a local.
        match unsafe { (self.owns)(address, &mut owned) } {
            OK => Ok(owned != 0),
            status => Err(status),
        }
    }

    /// The live block around the address.
    pub fn query(&self, address: usize) -> Option<BlockInfo> {
        // SAFETY: all zero is a valid value.
        let mut info = unsafe { zeroed::<BlockInfo>() };
        info.struct_size = size_of::<BlockInfo>();
        // SAFETY: any address is answered; the pointer is to a local.
        (unsafe { (self.query)(address, &mut info) } == OK).then_some(info)
    }

    /// Makes the pool give way. Returns the bytes it gave back.
    pub fn reclaim(&self, device: c_int, wanted: usize) -> usize {
        let mut released = 0;
        // SAFETY: the pointer is to a local.
        unsafe { (self.reclaim)(device, wanted, &mut released) };
        released
    }

    /// Bytes on the current device: idle or about to be, and held in all.
    pub fn idle_and_held(&self) -> (u64, u64) {
        // SAFETY: all zero is a valid value.
        let mut stats = unsafe { zeroed::<Stats>() };
        stats.struct_size = size_of::<Stats>();
        // SAFETY: the pointer is to a local.
        unsafe { (self.get_stats)(ptr::null_mut(), CURRENT_DEVICE, &mut stats) };
        (stats.cached.saturating_add(stats.pending), stats.reserved)
    }
}

fn new_options() -> Options {
    // SAFETY: all zero is a valid value.
    let mut options = unsafe { zeroed::<Options>() };
    options.struct_size = size_of::<Options>();
    options
}

/// Whether the code at this address is the pool's own. Its driver calls are never to be served by itself.
pub fn is_pool(caller: *const c_void) -> bool {
    let Some(object) = elf::mapped_at(caller) else { return false };
    if object.dli_fname.is_null() {
        return false;
    }
    // SAFETY: the loader's string for the object.
    let path = unsafe { CStr::from_ptr(object.dli_fname) }.to_bytes();
    path.rsplit(|&byte| byte == b'/').next().is_some_and(|name| name.starts_with(b"libcudapool.so"))
}

/// The pool, in a process that is to be served by it.
#[inline]
pub fn serving() -> Option<&'static Pool> {
    if mode::get() == Mode::Pool { get() } else { None }
}

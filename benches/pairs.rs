//! Criterion benchmarks of a cached, stream-ordered allocation with its free, through the C functions of the
//! built library, as callers reach them. `pairs --gate` (benches/pairs.cpp) holds the same things to bounds.
//!
//! Runs on the machine's CUDA driver, or where that has no device, on the simulated one. Times are compared,
//! at the end, with two lock/unlock pairs of an uncontended mutex, measured in the same run.

use criterion::Criterion;
use std::cell::{RefCell, UnsafeCell};
use std::ffi::{CStr, CString, c_int, c_uint, c_void};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::sync::Barrier;
use std::time::{Duration, Instant};
use std::{env, ptr, thread};

type Stream = *mut c_void;
type AllocAsync = unsafe extern "C" fn(*mut *mut c_void, usize, Stream) -> c_int;
type FreeAsync = unsafe extern "C" fn(*mut c_void, Stream) -> c_int;

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// A library that stays open.
#[derive(Clone, Copy)]
struct Library(*mut c_void);

impl Library {
    fn open(name: &CStr) -> Option<Self> {
        // SAFETY: the name is terminated; the libraries' constructors are those of well-behaved libraries.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        (!handle.is_null()).then_some(Self(handle))
    }

    /// # Safety
    /// `F` is the type of the function that goes by this name.
    unsafe fn function<F: Copy>(self, name: &CStr) -> F {
        assert_eq!(size_of::<F>(), size_of::<*mut c_void>());
        // SAFETY: the handle is open and the name terminated.
        let address = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        assert!(!address.is_null(), "no symbol {name:?}");
        // SAFETY: the caller says that this is the function's type, and a function pointer is an address.
        unsafe { std::mem::transmute_copy(&address) }
    }
}

/// The folder of the build that this program is part of: `target/release`.
fn build_folder() -> PathBuf {
    let program = env::current_exe().unwrap();
    program.parent().unwrap().parent().unwrap().to_path_buf()
}

/// The driver, if there is one that initialises and has a device.
fn usable_driver() -> Option<Library> {
    let driver = Library::open(c"libcuda.so.1")?;
    let mut count = 0;
    // SAFETY: the types are those of the driver's header.
    unsafe {
        let init: unsafe extern "C" fn(c_uint) -> c_int = driver.function(c"cuInit");
        let devices: unsafe extern "C" fn(*mut c_int) -> c_int = driver.function(c"cuDeviceGetCount");
        (init(0) == 0 && devices(&mut count) == 0 && count > 0).then_some(driver)
    }
}

/// The driver; where the machine has none with a device, this program starts anew with the simulated one.
fn driver() -> Library {
    if let Some(driver) = usable_driver() {
        return driver;
    }
    let simulated = build_folder().join("../sim");
    assert!(
        simulated.join("libcuda.so.1").exists() && env::var_os("CUDAPOOL_SIM").is_none(),
        "no CUDA driver with a device, and no simulated driver: run `make sim`"
    );
    let mut path = simulated.into_os_string();
    if let Some(more) = env::var_os("LD_LIBRARY_PATH").filter(|more| !more.is_empty()) {
        path.push(":");
        path.push(more);
    }
    let error = std::process::Command::new(env::current_exe().unwrap())
        .args(env::args_os().skip(1))
        .env("LD_LIBRARY_PATH", path)
        .env("CUDAPOOL_SIM", "active")
        .exec();
    panic!("cannot start anew: {error}");
}

/// Makes the primary context of device 0 current on the calling thread, as the CUDA runtime does.
fn use_device(driver: Library) {
    let mut context = ptr::null_mut();
    // SAFETY: the types are those of the driver's header, and the pointers are valid during the calls.
    unsafe {
        let retain: unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int =
            driver.function(c"cuDevicePrimaryCtxRetain");
        let set: unsafe extern "C" fn(*mut c_void) -> c_int = driver.function(c"cuCtxSetCurrent");
        assert_eq!(retain(&mut context, 0), 0);
        assert_eq!(set(context), 0);
    }
}

/// Allocates and frees on one stream.
#[derive(Clone, Copy)]
struct Pool {
    driver: Library,
    alloc: AllocAsync,
    free: FreeAsync,
    stream: Stream,
}

// SAFETY: the pool is thread-safe, and a stream may be used from any thread.
unsafe impl Send for Pool {}

impl Pool {
    fn open(driver: Library) -> Self {
        let path = build_folder().join("libcudapool.so");
        let path = CString::new(path.into_os_string().into_encoded_bytes()).unwrap();
        let library = Library::open(&path).expect("no libcudapool.so: run `make lib`");
        let mut pool = Self {
            driver,
            // SAFETY: the types are those of `include/cudapool.h`.
            alloc: unsafe { library.function(c"pool_alloc_async") },
            // SAFETY: as above.
            free: unsafe { library.function(c"pool_free_async") },
            stream: ptr::null_mut(),
        };
        pool.stream = new_stream(driver);
        pool
    }

    fn alloc(&self, size: usize) -> *mut c_void {
        let mut block = ptr::null_mut();
        // SAFETY: `block` is valid, and the stream lives as long as the process.
        let status = unsafe { (self.alloc)(&mut block, size, self.stream) };
        assert_eq!(status, 0, "pool_alloc_async");
        block
    }

    fn free(&self, block: *mut c_void) {
        // SAFETY: the block is one of `alloc`, freed once.
        let status = unsafe { (self.free)(block, self.stream) };
        assert_eq!(status, 0, "pool_free_async");
    }

    fn pair(&self, size: usize) {
        self.free(self.alloc(size));
    }
}

fn new_stream(driver: Library) -> Stream {
    const NON_BLOCKING: c_uint = 1;
    let mut stream = ptr::null_mut();
    // SAFETY: the type is that of the driver's header, and `stream` is valid.
    unsafe {
        let create: unsafe extern "C" fn(*mut Stream, c_uint) -> c_int = driver.function(c"cuStreamCreate");
        assert_eq!(create(&mut stream, NON_BLOCKING), 0);
    }
    stream
}

/// The yardstick: a mutex that nobody else wants, as an allocator behind one lock would have.
struct Mutex(UnsafeCell<libc::pthread_mutex_t>);

impl Mutex {
    fn new() -> Self {
        Self(UnsafeCell::new(libc::PTHREAD_MUTEX_INITIALIZER))
    }

    fn pair(&self) {
        // SAFETY: an initialised mutex, locked and unlocked by the same thread.
        unsafe {
            libc::pthread_mutex_lock(self.0.get());
            libc::pthread_mutex_unlock(self.0.get());
        }
    }
}

/// Sizes from 512 bytes to 64 MiB, spread evenly over the orders of magnitude.
struct Mix(u64);

impl Mix {
    /// A step of xorshift: what is wanted is variety, the same in every run.
    fn random(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn size(&mut self) -> usize {
        let unit = (self.random() >> 11) as f64 / (1u64 << 53) as f64;
        (9.0 + unit * 17.0).exp2() as usize
    }
}

/// The medians of what has been measured, by name, for the comparison at the end.
#[derive(Default)]
struct Medians(RefCell<Vec<(String, Vec<f64>)>>);

impl Medians {
    fn note(&self, name: &str, elapsed: Duration, iterations: u64) -> Duration {
        let mut all = self.0.borrow_mut();
        if all.last().is_none_or(|(last, _)| last != name) {
            all.push((name.to_string(), Vec::new()));
        }
        if let Some((_, times)) = all.last_mut() {
            times.push(elapsed.as_nanos() as f64 / iterations as f64);
        }
        elapsed
    }

    fn print(&self) {
        let mut medians: Vec<(String, f64)> = Vec::new();
        for (name, times) in self.0.borrow_mut().iter_mut() {
            times.sort_by(f64::total_cmp);
            medians.push((name.clone(), times[times.len() / 2]));
        }
        let Some(yardstick) = medians.iter().find(|(name, _)| name == YARDSTICK).map(|entry| entry.1) else {
            return;
        };
        for (name, time) in medians {
            println!("{name:<40} {time:>8.1} ns {:>8.2} x {YARDSTICK}", time / yardstick);
        }
    }
}

const YARDSTICK: &str = "two mutex pairs";

/// Runs `step` as often as Criterion says, and notes the time.
fn bench(criterion: &mut Criterion, medians: &Medians, name: &str, mut step: impl FnMut()) {
    criterion.bench_function(name, |bencher| {
        bencher.iter_custom(|iterations| {
            let start = Instant::now();
            for _ in 0..iterations {
                step();
            }
            medians.note(name, start.elapsed(), iterations)
        });
    });
}

fn bench_two_threads(
    criterion: &mut Criterion,
    medians: &Medians,
    name: &str,
    pools: [Pool; 2],
    size: usize,
) {
    criterion.bench_function(name, |bencher| {
        bencher.iter_custom(|iterations| {
            let barrier = Barrier::new(pools.len());
            let work = |pool: Pool| {
                use_device(pool.driver);
                // The first pair of a thread may have to find the memory.
                pool.pair(size);
                barrier.wait();
                let start = Instant::now();
                for _ in 0..iterations {
                    pool.pair(size);
                }
                start.elapsed()
            };
            let elapsed = thread::scope(|scope| {
                let threads = pools.map(|pool| scope.spawn(move || work(pool)));
                threads.map(|thread| thread.join().unwrap()).into_iter().max().unwrap_or_default()
            });
            medians.note(name, elapsed, iterations)
        });
    });
}

fn main() {
    // SAFETY: this is the only thread so far. A real driver does not read this.
    unsafe { env::set_var("CUDASIM_MEMORY", "141GiB") };
    let driver = driver();
    use_device(driver);
    let pool = Pool::open(driver);
    let mut criterion = Criterion::default()
        .sample_size(30)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1))
        .configure_from_args();
    let medians = Medians::default();

    // glibc's mutexes are cheaper while a process has one thread, which no process with a GPU has.
    thread::spawn(|| {
        loop {
            thread::park();
        }
    });
    let mutex = Mutex::new();
    bench(&mut criterion, &medians, YARDSTICK, || {
        mutex.pair();
        mutex.pair();
    });

    for (label, size) in [("512 B", 512), ("4 KiB", 4 * KIB), ("1 MiB", MIB), ("64 MiB", 64 * MIB)] {
        bench(&mut criterion, &medians, &format!("pair of {label}"), || pool.pair(size));
    }

    let other = Pool { stream: new_stream(driver), ..pool };
    bench_two_threads(&mut criterion, &medians, "pair of 4 KiB on two threads", [pool, other], 4 * KIB);

    let mut mix = Mix(0x9e37_79b9_7f4a_7c15);
    let mut live: Vec<_> = (0..1000).map(|_| pool.alloc(mix.size())).collect();
    let sizes: Vec<_> = (0..1 << 12).map(|_| mix.size()).collect();
    let mut at = 0;
    bench(&mut criterion, &medians, "mixed pair beside 1000 live", || {
        at = (at + 1) % sizes.len();
        pool.pair(sizes[at]);
    });
    bench(&mut criterion, &medians, "one of 1000 live replaced", || {
        let size = mix.size();
        let slot = mix.random() as usize % live.len();
        pool.free(live[slot]);
        live[slot] = pool.alloc(size);
    });
    live.into_iter().for_each(|block| pool.free(block));

    criterion.final_summary();
    medians.print();
}

//! A Rust program with a `malloc` of its own, which finds the C library's by `dlsym(RTLD_NEXT)` at its first
//! call.
use std::ffi::{c_char, c_void};
use std::sync::atomic::{AtomicUsize, Ordering::*};

extern "C" {
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
}

static REAL: AtomicUsize = AtomicUsize::new(0);
static CALLS: AtomicUsize = AtomicUsize::new(0);

#[no_mangle]
pub unsafe extern "C" fn malloc(size: usize) -> *mut c_void {
    CALLS.fetch_add(1, Relaxed);
    let mut real = REAL.load(Relaxed);
    if real == 0 {
        // RTLD_NEXT. Were the answer this very function, the program would not end.
        real = dlsym(-1isize as *mut c_void, c"malloc".as_ptr()) as usize;
        assert!(real != 0 && real != malloc as *const () as usize);
        REAL.store(real, Relaxed);
    }
    std::mem::transmute::<usize, unsafe extern "C" fn(usize) -> *mut c_void>(real)(size)
}

fn main() {
    let threads: Vec<_> = (0..8usize)
        .map(|i| {
            std::thread::spawn(move || (0..10_000).map(|j| vec![i as u8; j % 300 + 1].len()).sum::<usize>())
        })
        .collect();
    let sum: usize = threads.into_iter().map(|thread| thread.join().unwrap()).sum();
    println!("sum {sum}, counted: {}", CALLS.load(Relaxed) > 70_000);
}

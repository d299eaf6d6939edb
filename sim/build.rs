//! Gives the library the name that programs ask the loader for, and keeps it loaded once opened: its worker
//! threads and exit handlers must never lose their code.

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // As the real one: what a preloaded library exports under these names must not get into the lookup.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    println!("cargo:rerun-if-changed=build.rs");
}

//! Names the shim for the loader and keeps it loaded.

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcudapool_preload.so");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // The table of wrappers must hold the shim's own functions, whatever else exports these names.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    println!("cargo:rerun-if-changed=build.rs");
}

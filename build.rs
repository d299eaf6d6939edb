//! Generates the C header from `src/ffi` and names the shared library for the loader.
//!
//! The header goes to `OUT_DIR`, where a test compares it with the committed one; with
//! `CUDAPOOL_WRITE_HEADER` set (`make header`) it is also written to `include/`.
use std::{env, fs, path::PathBuf};

fn main() {
    // rustc sets no soname. The number changes when programs that were built before could no longer run
    // (docs/abi.md); the Makefile and the shim name it, too, and tests/install/run.sh compares.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcudapool.so.0");
    // Thread-local storage of std outlives a dlclose.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo:rerun-if-changed=src/ffi");
    println!("cargo:rerun-if-changed=src/error.rs");
    println!("cargo:rerun-if-changed=cbindgen.toml");
    println!("cargo:rerun-if-env-changed=CUDAPOOL_WRITE_HEADER");

    let root = PathBuf::from(env::var("CARGO_MANIFEST_DIR").unwrap());
    let out = PathBuf::from(env::var("OUT_DIR").unwrap()).join("cudapool.h");
    let config = cbindgen::Config::from_file(root.join("cbindgen.toml")).unwrap();
    let mut builder = cbindgen::Builder::new().with_config(config);
    for file in ["ffi/constants.rs", "error.rs", "ffi/types.rs", "ffi/functions.rs", "ffi/adapters.rs"] {
        builder = builder.with_src(root.join("src").join(file));
    }
    builder.generate().unwrap().write_to_file(&out);
    println!("cargo:rustc-env=CUDAPOOL_GENERATED_HEADER={}", out.display());
    if env::var_os("CUDAPOOL_WRITE_HEADER").is_some() {
        fs::create_dir_all(root.join("include")).unwrap();
        fs::copy(&out, root.join("include/cudapool.h")).unwrap();
    }
}

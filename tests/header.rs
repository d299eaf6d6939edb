//! The committed header is the one that the source gives, and its version is the library's.

use std::fs;

const COMMITTED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/include/cudapool.h");

#[test]
fn the_committed_header_is_current() {
    // The build script has just written this one, from src/ffi.
    let generated = fs::read_to_string(env!("CUDAPOOL_GENERATED_HEADER")).unwrap();
    let committed = fs::read_to_string(COMMITTED).unwrap();
    let differs = generated.lines().zip(committed.lines()).position(|(a, b)| a != b);
    assert!(
        generated == committed,
        "run `make header`; the first difference is at line {:?}",
        differs.map(|at| at + 1)
    );
}

#[test]
fn all_versions_are_one() {
    let header = fs::read_to_string(COMMITTED).unwrap();
    let number = |part: &str| -> u32 {
        let define = format!("#define POOL_VERSION_{part} ");
        let line = header.lines().find_map(|line| line.strip_prefix(&define));
        line.unwrap_or_else(|| panic!("the header has no {define}")).trim().parse().unwrap()
    };
    let [major, minor, patch] = ["MAJOR", "MINOR", "PATCH"].map(number);
    assert_eq!(format!("{major}.{minor}.{patch}"), env!("CARGO_PKG_VERSION"));
    assert_eq!(cudapool::ffi::functions::pool_version(), major * 1_000_000 + minor * 1_000 + patch);
}

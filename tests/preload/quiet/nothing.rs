//! A library that does nothing: what preloading anything made with Rust costs.

#[no_mangle]
pub extern "C" fn does_nothing() -> bool {
    std::panic::catch_unwind(|| {}).is_ok()
}

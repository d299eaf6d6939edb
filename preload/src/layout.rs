//! The check that a struct of ours is laid out as another one is, made when it is compiled. The simulated
//! driver and `tests/shim_abi.rs` compile this file too.
//!
//! Structs that callers hand over hold integers where those of `cudarc` hold enums of Rust: in such a field a
//! number that the enum does not know would be undefined behaviour, and a caller may write any.

/// The size of the field that a closure names.
pub const fn size_of_field<S, F>(_: fn(&S) -> &F) -> usize {
    size_of::<F>()
}

/// `same_layout!(Ours, theirs: field = name, ...)` compares the fields, each of which may be a path, and with
/// `whole` in front the structs' sizes as well.
macro_rules! same_layout {
    (whole $ours:ty, $theirs:ty: $($fields:tt)*) => {
        const _: () = assert!(size_of::<$ours>() == size_of::<$theirs>(), "a struct has another size");
        same_layout!($ours, $theirs: $($fields)*);
    };
    ($ours:ty, $theirs:ty: $($($field:ident).+ = $($name:ident).+),* $(,)?) => {
        $(const _: () = {
            use core::mem::offset_of;
            use $crate::layout::size_of_field;
            assert!(
                offset_of!($ours, $($field).+) == offset_of!($theirs, $($name).+),
                "a field is elsewhere"
            );
            assert!(
                size_of_field(|s: &$ours| &s.$($field).+) == size_of_field(|s: &$theirs| &s.$($name).+),
                "a field has another size"
            );
        };)*
    };
}

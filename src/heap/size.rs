//! Sizes: units, size classes, and the rounding that a request goes through.
//!
//! Every size that gets past [`round_up`] is at most [`MAX_SIZE`], so that sums of a few sizes and
//! offsets cannot wrap anywhere in the heap.
#![deny(clippy::arithmetic_side_effects)]

/// Granularity of blocks in a slab, and the least alignment of every block.
pub const UNIT: u64 = 512;
/// Granularity of extents.
pub const QUANTUM: u64 = 4096;
/// Granularity of chunks: the least that the driver maps (`cuMemGetAllocationGranularity`).
pub const PAGE: u64 = 2 << 20;
/// Largest size served from slabs.
pub const MAX_SMALL: u64 = 4 << 10;
/// Largest size the heap takes at all. Device addresses have fewer than 2^48 bytes.
pub const MAX_SIZE: u64 = 1 << 47;
/// Number of size classes.
pub const CLASSES: usize = 8;
/// Largest number of blocks in a slab.
pub const MAX_SLAB_BLOCKS: u64 = 128;

/// `value` rounded up to a multiple of `to` (a power of two), if the result is at most [`MAX_SIZE`].
pub const fn round_up(value: u64, to: u64) -> Option<u64> {
    let mask = to.wrapping_sub(1);
    match value.checked_add(mask) {
        Some(sum) if sum & !mask <= MAX_SIZE => Some(sum & !mask),
        _ => None,
    }
}

/// The size class of a size in `1..=MAX_SMALL`: one each 512 bytes, the least alignment.
pub const fn class_of(size: u64) -> usize {
    (size.saturating_sub(1) / UNIT) as usize
}

/// Bytes of a block of the class.
pub const fn class_size(class: usize) -> u64 {
    (class as u64).saturating_add(1).saturating_mul(UNIT)
}

/// Blocks in a slab of the class: at least 64 KiB, and as many as make the slab a whole number of quanta, so
/// that it has no tail.
pub const fn slab_blocks(class: usize) -> u64 {
    let size = class_size(class);
    // size / UNIT times the count must be a multiple of QUANTUM / UNIT = 8.
    let zeros = (size / UNIT).trailing_zeros();
    let step = 8_u64 >> if zeros < 3 { zeros } else { 3 };
    (64u64 << 10).div_ceil(size).div_ceil(step).saturating_mul(step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_are_tight_and_monotone() {
        let mut last = 0;
        for size in 1..=MAX_SMALL {
            let class = class_of(size);
            assert!(class < CLASSES && class >= last);
            last = class;
            assert!(class_size(class) >= size, "{size}");
            if class > 0 {
                assert!(class_size(class - 1) < size, "{size} fits a smaller class");
            }
        }
        assert_eq!(class_size(CLASSES - 1), MAX_SMALL);
    }

    #[test]
    fn slabs_have_no_tail() {
        for class in 0..CLASSES {
            let bytes = slab_blocks(class) * class_size(class);
            assert_eq!(bytes % QUANTUM, 0, "class {class}");
            assert!(slab_blocks(class) >= 16 && slab_blocks(class) <= MAX_SLAB_BLOCKS);
            assert!((64 << 10..=96 << 10).contains(&bytes), "class {class}: {bytes}");
        }
    }

    #[test]
    fn rounding_refuses_what_would_wrap() {
        assert_eq!(round_up(0, 512), Some(0));
        assert_eq!(round_up(1, 512), Some(512));
        assert_eq!(round_up(1 << 32, 512), Some(1 << 32));
        assert_eq!(round_up(MAX_SIZE, 4096), Some(MAX_SIZE));
        assert_eq!(round_up(MAX_SIZE + 1, 4096), None);
        for back in 0..=4096 {
            assert_eq!(round_up(u64::MAX - back, 4096), None);
        }
    }
}

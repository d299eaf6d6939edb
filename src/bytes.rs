//! Numbers of bytes as text. The preload shim compiles this file too, so it knows nothing of the library.

use core::fmt::{Display, Formatter};

/// A number of bytes for a reader: in the largest binary unit of which it is one at least, to a tenth.
#[derive(Clone, Copy)]
pub struct Size(pub u64);

impl Display for Size {
    fn fmt(&self, f: &mut Formatter<'_>) -> core::fmt::Result {
        const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
        let shifts = (1u32..).map(|n| 10 * n).zip(UNITS);
        let Some((shift, unit)) = shifts.take_while(|(shift, _)| self.0 >> shift != 0).last() else {
            return write!(f, "{} B", self.0);
        };
        let tenths = (u128::from(self.0) * 10 + (1 << (shift - 1))) >> shift;
        match tenths % 10 {
            0 => write!(f, "{} {unit}", tenths / 10),
            tenth => write!(f, "{}.{tenth} {unit}", tenths / 10),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_well() {
        let of = |bytes: u64| Size(bytes).to_string();
        assert_eq!([of(0), of(1023), of(1024), of(1536)], ["0 B", "1023 B", "1 KiB", "1.5 KiB"]);
        assert_eq!([of(2 << 20), of((1 << 30) - 1), of(139 << 30)], ["2 MiB", "1024 MiB", "139 GiB"]);
        assert_eq!(of(u64::MAX), "16 EiB");
    }
}

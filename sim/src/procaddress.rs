//! Which symbol `cuGetProcAddress` answers for a base name, a CUDA version and flags.
//!
//! Responsible for the table (`procaddress.tsv`, measured on NVIDIA's public libcuda 535, 550 and 555) and
//! for the rules read off those libraries; knows nothing of pointers. Turning an answer into an address, a
//! status and a result is the caller's: v2 answers 0 with a status, v1 answers 500 for both kinds of miss
//! and leaves its output alone.

use cudarc::driver::sys::CUdriverProcAddress_flags;
use std::sync::OnceLock;

/// What a lookup comes to, named after `CUdriverProcAddressQueryResult`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lookup {
    /// Status 0: the exported symbol whose address is the answer.
    Found(&'static str),
    /// Status 1: this driver has no such base name.
    NotFound,
    /// Status 2: the driver has the name, but the version asked for is older than its first form (or than
    /// its first per-thread form).
    VersionNotSufficient,
}

/// The legacy flag means the same as no flag; both together mean per-thread.
const LEGACY: u64 = CUdriverProcAddress_flags::CU_GET_PROC_ADDRESS_LEGACY_STREAM as u64;
const PER_THREAD: u64 = CUdriverProcAddress_flags::CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM as u64;

/// True where the driver answers `CUDA_ERROR_INVALID_VALUE` and writes no output, whatever the name.
///
/// Unknown flags are checked before everything else. A version above the driver's own means "the newest"
/// to drivers up to 12.5, which is measured; drivers from 13.0 refuse it, which is documented in their
/// header and reported, not measured. The drivers between are taken to be like 12.5.
pub fn is_refused(version: i32, flags: u64, driver_version: i32) -> bool {
    flags & !(LEGACY | PER_THREAD) != 0
        || (driver_version >= 13000 && unsigned(version) > unsigned(driver_version))
}

/// The driver compares versions unsigned: a negative one is above all others (measured).
fn unsigned(version: i32) -> u32 {
    version.cast_unsigned()
}

/// Answers for the base `name` as a driver of `driver_version` that exports exactly the symbols for which
/// `exported` is true. The caller has asked [`is_refused`] first.
///
/// The row is chosen before `exported` is asked about it: where the simulated driver lacks the form that
/// the version calls for, the answer is "not found" and never an older form, because the forms of a name
/// take different arguments.
pub fn lookup(
    name: &str,
    version: i32,
    flags: u64,
    driver_version: i32,
    exported: impl Fn(&str) -> bool,
) -> Lookup {
    // A form newer than the driver does not exist for it: its name alone is unknown, not "too new".
    let known = forms_of(name).iter().filter(|row| row.since <= driver_version);
    if !known.clone().any(|row| exported(row.default) || row.per_thread.is_some_and(&exported)) {
        return Lookup::NotFound;
    }
    let per_thread = flags & PER_THREAD != 0;
    // Rows are in ascending order of version, so the last one that holds is the newest. It decides alone:
    // its having no per-thread form is an answer, not a reason to look at older rows.
    match known.rev().find(|row| unsigned(row.since) <= unsigned(version)).map(|row| row.symbol(per_thread)) {
        Some(Some(symbol)) if exported(symbol) => Lookup::Found(symbol),
        Some(Some(_)) => Lookup::NotFound,
        Some(None) | None => Lookup::VersionNotSufficient,
    }
}

/// One form of a function: the symbols it has from version `since` up to the next row of the same name.
struct Row {
    base: &'static str,
    since: i32,
    default: &'static str,
    /// `default` again where the function has no per-thread variant at all; `None` where it has one, but
    /// only from a later version.
    per_thread: Option<&'static str>,
}

impl Row {
    fn symbol(&self, per_thread: bool) -> Option<&'static str> {
        if per_thread { self.per_thread } else { Some(self.default) }
    }
}

/// The version that brought this symbol (with its suffixes); `None` if it is not in the table.
pub fn since(symbol: &str) -> Option<i32> {
    table().iter().find(|row| row.default == symbol || row.per_thread == Some(symbol)).map(|row| row.since)
}

/// The rows of one base name, oldest first; empty where the name is not in the table.
fn forms_of(name: &str) -> &'static [Row] {
    let rows = table();
    let start = rows.partition_point(|row| row.base < name);
    let end = rows.partition_point(|row| row.base <= name);
    rows.get(start..end).unwrap_or_default()
}

/// The whole table, by base name and version. The file is in that order already; a test holds it to it.
fn table() -> &'static [Row] {
    static TABLE: OnceLock<Vec<Row>> = OnceLock::new();
    TABLE.get_or_init(|| data_lines().filter_map(parse).collect())
}

fn data_lines() -> impl Iterator<Item = &'static str> {
    include_str!("procaddress.tsv").lines().filter(|line| !line.starts_with('#'))
}

fn parse(line: &'static str) -> Option<Row> {
    let mut fields = line.split('\t');
    let base = fields.next()?;
    let since = fields.next()?.parse().ok()?;
    let default = fields.next()?;
    let per_thread = match fields.next()? {
        "=" => Some(default),
        "-" => None,
        symbol => Some(symbol),
    };
    fields.next().is_none().then_some(Row { base, since, default, per_thread })
}

#[cfg(test)]
mod tests {
    use super::Lookup::{Found, NotFound, VersionNotSufficient};
    use super::{LEGACY, PER_THREAD, data_lines, forms_of, is_refused, lookup, table};

    const DRIVER: i32 = 12050;

    /// A 12.5 driver that exports everything.
    fn ask(name: &str, version: i32, flags: u64) -> super::Lookup {
        lookup(name, version, flags, DRIVER, |_| true)
    }

    #[test]
    fn every_line_of_the_table_is_read_and_in_order() {
        assert_eq!(table().len(), data_lines().count());
        assert!(table().len() > 600);
        assert!(table().windows(2).all(|pair| (pair[0].base, pair[0].since) < (pair[1].base, pair[1].since)));
        for row in table() {
            assert!(row.default.starts_with(row.base), "{}", row.default);
            let per_thread = row.per_thread.unwrap_or(row.default);
            assert!(per_thread.starts_with(row.default), "{per_thread}");
        }
    }

    #[test]
    fn the_newest_form_that_the_version_covers_is_answered() {
        assert_eq!(ask("cuCtxCreate", 2000, 0), Found("cuCtxCreate"));
        assert_eq!(ask("cuCtxCreate", 3019, 0), Found("cuCtxCreate"));
        assert_eq!(ask("cuCtxCreate", 3020, 0), Found("cuCtxCreate_v2"));
        assert_eq!(ask("cuCtxCreate", 11040, 0), Found("cuCtxCreate_v3"));
        assert_eq!(ask("cuCtxCreate", 12050, 0), Found("cuCtxCreate_v4"));
        assert_eq!(ask("cuStreamGetCtx", 12040, 0), Found("cuStreamGetCtx"));
        assert_eq!(ask("cuStreamGetCtx", 12050, 0), Found("cuStreamGetCtx_v2"));
        assert_eq!(ask("cuGetProcAddress", 11080, 0), Found("cuGetProcAddress"));
        assert_eq!(ask("cuGetProcAddress", 12000, 0), Found("cuGetProcAddress_v2"));
    }

    #[test]
    fn names_are_exact() {
        for name in [
            "",
            " ",
            "cu",
            "cuMemAlloc_v2",
            "cuMemAlloc ",
            "cumemalloc",
            "cuMemAllocAsync_ptsz",
            "cuMemcpy_ptds",
            "cudaMalloc",
            "cuMemAllo",
            "zzz",
        ] {
            assert_eq!(ask(name, DRIVER, 0), NotFound, "{name:?}");
            assert_eq!(ask(name, DRIVER, PER_THREAD), NotFound, "{name:?}");
            assert_eq!(ask(name, 0, 0), NotFound, "{name:?}");
        }
    }

    #[test]
    fn a_known_name_at_too_low_a_version_is_status_two() {
        for version in [0, 2000, 11010] {
            assert_eq!(ask("cuMemAllocAsync", version, 0), VersionNotSufficient);
            assert_eq!(ask("cuMemAllocAsync", version, PER_THREAD), VersionNotSufficient);
        }
        assert_eq!(ask("cuMemAllocAsync", 11020, 0), Found("cuMemAllocAsync"));
        assert_eq!(ask("cuInit", 0, 0), VersionNotSufficient);
    }

    #[test]
    fn the_legacy_flag_means_none_and_both_flags_mean_per_thread() {
        for row in table() {
            for version in [0, row.since - 1, row.since, DRIVER] {
                assert_eq!(ask(row.base, version, 0), ask(row.base, version, LEGACY));
                assert_eq!(ask(row.base, version, PER_THREAD), ask(row.base, version, LEGACY | PER_THREAD));
            }
        }
    }

    #[test]
    fn per_thread_forms_come_after_the_version_suffix() {
        assert_eq!(ask("cuMemcpyDtoH", 7000, PER_THREAD), Found("cuMemcpyDtoH_v2_ptds"));
        assert_eq!(ask("cuMemAllocAsync", 12000, PER_THREAD), Found("cuMemAllocAsync_ptsz"));
        assert_eq!(ask("cuStreamGetCtx", 12050, PER_THREAD), Found("cuStreamGetCtx_v2_ptsz"));
    }

    #[test]
    fn per_thread_falls_back_to_plain_only_where_no_variant_exists_at_all() {
        // Stream and event creation, contexts and the virtual memory calls have none.
        for name in ["cuStreamCreate", "cuEventQuery", "cuCtxSynchronize", "cuMemMap", "cuMemPoolTrimTo"] {
            assert_eq!(ask(name, DRIVER, PER_THREAD), ask(name, DRIVER, 0));
            assert!(matches!(ask(name, DRIVER, PER_THREAD), Found(_)));
        }
        // These have one, from 7.0 only: before, the plain symbol is no substitute.
        for name in ["cuMemcpy", "cuMemcpyHtoD", "cuLaunchKernel", "cuStreamSynchronize", "cuEventRecord"] {
            assert_eq!(ask(name, 6050, PER_THREAD), VersionNotSufficient, "{name}");
            assert!(matches!(ask(name, 6050, 0), Found(_)), "{name}");
            assert!(matches!(ask(name, 7000, PER_THREAD), Found(_)), "{name}");
        }
    }

    #[test]
    fn a_name_newer_than_the_driver_is_unknown_rather_than_too_new() {
        let at = |driver, name, version| lookup(name, version, 0, driver, |_| true);
        assert_eq!(at(12040, "cuCtxRecordEvent", 12040), NotFound);
        assert_eq!(at(12040, "cuCtxRecordEvent", 12050), NotFound);
        assert_eq!(at(12050, "cuCtxRecordEvent", 12040), VersionNotSufficient);
        assert_eq!(at(12050, "cuCtxRecordEvent", 12050), Found("cuCtxRecordEvent"));
    }

    #[test]
    fn a_version_above_the_drivers_means_the_newest_it_has() {
        for version in [12060, 13000, i32::MAX, i32::MIN, -1] {
            assert_eq!(ask("cuCtxSynchronize", version, 0), Found("cuCtxSynchronize"));
            assert_eq!(ask("cuCtxCreate", version, 0), Found("cuCtxCreate_v4"));
            assert_eq!(lookup("cuCtxCreate", version, 0, 12040, |_| true), Found("cuCtxCreate_v3"));
        }
        assert_eq!(lookup("cuCtxSynchronize", 13000, 0, 13000, |_| true), Found("cuCtxSynchronize_v2"));
    }

    #[test]
    fn refusals_depend_on_flags_and_from_13_on_the_version() {
        assert!((0..4).all(|flags| !is_refused(i32::MAX, flags, DRIVER)));
        assert!([4, 5, 8, 1 << 32, u64::MAX].iter().all(|&flags| is_refused(DRIVER, flags, DRIVER)));
        assert!(!is_refused(13000, 0, 13000) && !is_refused(0, 0, 13000));
        assert!(is_refused(13010, 0, 13000) && is_refused(-1, 0, 13000));
    }

    #[test]
    fn what_the_simulated_driver_lacks_is_not_found_and_never_an_older_form() {
        let without = |lacking: &'static [&str], name, version, flags| {
            lookup(name, version, flags, DRIVER, |symbol| !lacking.contains(&symbol))
        };
        assert_eq!(without(&["cuInit"], "cuInit", DRIVER, 0), NotFound);
        assert_eq!(without(&["cuInit"], "cuInit", 0, 0), NotFound);
        // 3 arguments where the caller passes 4, and legacy ordering where it asked for per-thread.
        assert_eq!(without(&["cuCtxCreate_v4"], "cuCtxCreate", DRIVER, 0), NotFound);
        assert_eq!(without(&["cuCtxCreate_v4"], "cuCtxCreate", 12040, 0), Found("cuCtxCreate_v3"));
        assert_eq!(without(&["cuMemcpy_ptds"], "cuMemcpy", DRIVER, PER_THREAD), NotFound);
        assert_eq!(without(&["cuMemcpy_ptds"], "cuMemcpy", DRIVER, 0), Found("cuMemcpy"));
    }

    #[test]
    fn every_answer_belongs_to_the_name_asked_for() {
        for row in table() {
            for version in (2000..=13020).step_by(10) {
                for flags in [0, PER_THREAD] {
                    if let Found(symbol) = lookup(row.base, version, flags, 13020, |_| true) {
                        let own = forms_of(row.base);
                        assert!(own.iter().any(|f| f.default == symbol || f.per_thread == Some(symbol)));
                    }
                }
            }
        }
    }
}

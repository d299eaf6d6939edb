//! Symbol lookup reproduces the real driver's table for every name the library has.

mod common;
use common::*;
use std::ffi::CString;

/// base, version, default symbol, per-thread symbol (`None`: status 2)
fn table() -> impl Iterator<Item = (&'static str, i32, &'static str, Option<&'static str>)> {
    let text = include_str!("../src/procaddress.tsv");
    text.lines().filter(|line| !line.starts_with('#')).map(|line| {
        let mut fields = line.split('\t');
        let (base, since) = (fields.next().unwrap(), fields.next().unwrap().parse().unwrap());
        let default = fields.next().unwrap();
        let per_thread = match fields.next().unwrap() {
            "=" => Some(default),
            "-" => None,
            symbol => Some(symbol),
        };
        (base, since, default, per_thread)
    })
}

fn ask(cu: &Cuda, name: &str, version: i32, flags: u64) -> (usize, i32) {
    let name = CString::new(name).unwrap();
    let (mut address, mut status) = (1, 9);
    ok(cu.cuGetProcAddress_v2(name.as_ptr(), &mut address, version, flags, &mut status));
    (address, status)
}

tests! {
    every_name_it_has_is_found_where_the_real_driver_finds_it ["CUDASIM_DRIVER_VERSION" = "12080"] {
        let cu = Cuda::open();
        let mut found = 0;
        for (base, since, default, per_thread) in table().filter(|row| row.1 <= 12080) {
            let default = Some(default);
            for (flags, symbol) in [(0, default), (1, default), (2, per_thread), (3, per_thread)] {
                let expected = match symbol {
                    None => continue,
                    Some(symbol) => cu.has(symbol),
                };
                let answer = ask(&cu, base, since, flags);
                match expected {
                    Some(address) => {
                        assert_eq!(answer, (address, 0), "{base} {since} {flags}");
                        found += 1;
                    }
                    None => assert_eq!(answer.0, 0, "{base} {since} {flags}: an export it lacks"),
                }
            }
        }
        assert!(found > 600, "only {found} lookups were answered");
    }

    every_per_thread_variant_is_there [] {
        let cu = Cuda::open();
        for (_, since, default, per_thread) in table() {
            let Some(per_thread) = per_thread.filter(|&symbol| symbol != default) else { continue };
            if since <= 12080 && cu.has(default).is_some() {
                assert!(cu.has(per_thread).is_some(), "{per_thread} is missing beside {default}");
            }
        }
    }

    misses_tell_why [] {
        let cu = Cuda::open();
        assert_eq!(ask(&cu, "cuMemAlloc_v2", 12050, 0), (0, 1));
        assert_eq!(ask(&cu, "", 0, 0), (0, 1));
        assert_eq!(ask(&cu, "cuMemAllocAsync", 11010, 0), (0, 2));
        assert_eq!(ask(&cu, "cuMemcpy", 4000, 2), (0, 2));
        let mut address = 7;
        assert_eq!(cu.cuGetProcAddress(c"cuNothing".as_ptr(), &mut address, 12000, 0), 500);
        assert_eq!(cu.cuGetProcAddress(c"cuMemAllocAsync".as_ptr(), &mut address, 11010, 0), 500);
        assert_eq!(cu.cuGetProcAddress(c"cuInit".as_ptr(), &mut address, 12000, 4), 1);
        assert_eq!(address, 7, "untouched");
        ok(cu.cuGetProcAddress(c"cuInit".as_ptr(), &mut address, 12000, 0));
        assert_eq!(Some(address), cu.has("cuInit"));
        ok(cu.cuGetProcAddress_v2(c"cuInit".as_ptr(), &mut address, 12000, 0, std::ptr::null_mut()));
    }

    forms_differ_by_version [] {
        let cu = Cuda::open();
        let symbol = |name| (cu.has(name).unwrap(), 0);
        assert_eq!(ask(&cu, "cuCtxCreate", 11040, 0), symbol("cuCtxCreate_v3"));
        assert_eq!(ask(&cu, "cuCtxCreate", 12050, 0), symbol("cuCtxCreate_v4"));
        assert_eq!(ask(&cu, "cuStreamGetCtx", 12040, 0), symbol("cuStreamGetCtx"));
        assert_eq!(ask(&cu, "cuStreamGetCtx", 12050, 2), symbol("cuStreamGetCtx_v2_ptsz"));
        assert_eq!(ask(&cu, "cuMemcpyDtoH", 12000, 2), symbol("cuMemcpyDtoH_v2_ptds"));
        assert_eq!(ask(&cu, "cuGetProcAddress", 12000, 0), symbol("cuGetProcAddress_v2"));
    }
}

//! `cuGetProcAddress`: from names to the exported functions themselves.

use crate::call::{In, Out, Res};
use crate::procaddress::{Lookup, is_refused, lookup};
use crate::{code, control, knobs};
use cudarc::driver::sys::CUdriverProcAddressQueryResult as Status;
use std::collections::HashMap;
use std::ffi::{CStr, c_char};
use std::sync::OnceLock;

/// The address of each exported symbol.
fn addresses() -> &'static HashMap<&'static str, usize> {
    static ALL: OnceLock<HashMap<&'static str, usize>> = OnceLock::new();
    ALL.get_or_init(|| {
        control::all_exports().map(|entry| (entry.call.name, entry.address.0 as usize)).collect()
    })
}

/// The address (0: none) and the status. A null name crashes the real driver; here it is an error.
fn find(name: In<c_char>, version: i32, flags: u64) -> Res<(usize, Status)> {
    let driver = knobs::driver_version();
    if is_refused(version, flags, driver) {
        return Err(code::INVALID_VALUE);
    }
    name.get()?;
    // SAFETY: it is not null, and by the C contract a terminated string.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) };
    let name = name.to_str().unwrap_or("");
    let exported = |symbol: &str| addresses().contains_key(symbol);
    Ok(match lookup(name, version, flags, driver, exported) {
        Lookup::Found(symbol) => (addresses()[symbol], Status::CU_GET_PROC_ADDRESS_SUCCESS),
        Lookup::NotFound => (0, Status::CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND),
        Lookup::VersionNotSufficient => (0, Status::CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT),
    })
}

/// The first form has no status: what is not there is an error, and the output stays as it was.
fn first_form(name: In<c_char>, out: Out<usize>, version: i32, flags: u64) -> Res {
    match find(name, version, flags)? {
        (0, _) => Err(code::NOT_FOUND),
        (address, _) => out.put(address),
    }
}

fn second_form(name: In<c_char>, out: Out<usize>, version: i32, flags: u64, status: Out<i32>) -> Res {
    let (address, found) = find(name, version, flags)?;
    out.put(address)?;
    status.put_if_wanted(found as i32);
    Ok(())
}

exports! {
    early fn cuGetProcAddress(name: In<c_char>, out: Out<usize>, version: i32, flags: u64)
        => first_form(name, out, version, flags);
    early fn cuGetProcAddress_v2(
        name: In<c_char>, out: Out<usize>, version: i32, flags: u64, status: Out<i32>)
        => second_form(name, out, version, flags, status);
}

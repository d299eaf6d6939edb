//! The layers: no module may name one that stands after it in its crate's list. `docs/architecture.md` says
//! what each is for.

use std::path::Path;
use std::{fs, iter};

/// Lowest first. A module stands for those inside it that have no place of their own, and these may know each
/// other.
const LIBRARY: &[&str] = &[
    "bytes",
    "error",
    "heap",
    "host_alloc",
    "logging",
    "sync",
    "driver",
    "vmem",
    "pool::types",
    "pool::options",
    "pool::settings",
    "pool::waiters",
    "pool::arena::fence",
    "pool::arena::owners",
    "pool::arena::spilled",
    "pool::arena::state",
    "pool::arena",
    "pool::arena::events",
    "pool::arena::grow",
    "pool::arena::spill",
    "pool::arena::release",
    "pool::registry",
    "pool::pools",
    "pool::oom::callbacks",
    "pool::oom::headroom",
    "pool::oom::report",
    "pool::oom::climb",
    "pool::oom::reclaim",
    "pool::oom",
    "pool::api",
    "pool::graphs",
    "pool",
    "ffi",
    "",
];
/// What is hooked calls back into what hooks; only what serves both has an order.
const SHIM: &[&str] = &["text", "elf", ""];
/// Every call of the driver goes through `call`, which knows streams and contexts; only what they stand on
/// has an order.
const SIMULATOR: &[&str] = &["sync", "ranges", "registry", "procaddress", ""];

#[test]
fn each_module_knows_only_those_below() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut wrong = Vec::new();
    for (source, order) in [("src", LIBRARY), ("preload/src", SHIM), ("sim/src", SIMULATOR)] {
        let modules = modules(&root.join(source), "");
        assert!(modules.len() > 5, "no sources in {source}");
        for (module, text) in &modules {
            for path in paths(text).iter().filter_map(|path| resolve(module, path, &modules)) {
                if place(order, &path) > place(order, module) {
                    wrong.push(format!("{source}: `{module}` names `{path}`, which stands above it"));
                }
            }
        }
    }
    wrong.dedup();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// All modules below a folder, with their code.
fn modules(folder: &Path, prefix: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let (path, name) = (entry.path(), entry.file_name().into_string().unwrap());
        let inner = |name: &str| if prefix.is_empty() { name.into() } else { format!("{prefix}::{name}") };
        if path.is_dir() {
            found.extend(modules(&path, &inner(&name)));
        } else if let Some(name) = name.strip_suffix(".rs") {
            let module = if matches!(name, "mod" | "lib") { prefix.to_string() } else { inner(name) };
            found.push((module, code(&fs::read_to_string(path).unwrap())));
        }
    }
    found
}

/// A source without its comments and its tests.
fn code(source: &str) -> String {
    let source = source.split("#[cfg(test)]\nmod tests {").next().unwrap();
    source.lines().map(|line| line.split("//").next().unwrap()).collect::<Vec<_>>().join(" ")
}

/// The paths that `use` declarations name, and those that the code names in full.
fn paths(code: &str) -> Vec<String> {
    let declared = code.split("use ").skip(1).filter_map(|rest| rest.split(';').next()).flat_map(expand);
    let is_path = |c: char| c.is_alphanumeric() || c == ':' || c == '_';
    let is_ours = |p: &&str| p.starts_with("crate::") || p.starts_with("super::");
    // What ends so is the head of a list, which is expanded above.
    let named = code.split(|c| !is_path(c)).filter(|p| is_ours(p) && !p.ends_with("::"));
    declared.chain(named.map(String::from)).collect()
}

/// The paths of `a::{b, c::{d, e}}`.
fn expand(tree: &str) -> Vec<String> {
    let Some((head, list)) = tree.trim().split_once('{') else { return vec![tree.trim().into()] };
    let mut depth = 0;
    let at_comma = |c: char| {
        depth += i32::from(c == '{') - i32::from(c == '}');
        c == ',' && depth == 0
    };
    let list = list.trim_end().strip_suffix('}').unwrap_or(list);
    list.split(at_comma).flat_map(expand).map(|path| format!("{head}{path}")).collect()
}

/// The module of the crate that a path leads into; none if that is the one it stands in, or none of the
/// crate's.
fn resolve(module: &str, path: &str, modules: &[(String, String)]) -> Option<String> {
    let mut at: Vec<&str> = module.split("::").filter(|part| !part.is_empty()).collect();
    let mut parts = path.split("::").map(str::trim).peekable();
    while let Some(head) = parts.next_if(|part| matches!(*part, "crate" | "super" | "self")) {
        match head {
            "crate" => at.clear(),
            "super" => _ = at.pop(),
            _ => {}
        }
    }
    at.extend(parts);
    let known = |path: &String| modules.iter().any(|(name, _)| name == path);
    let found = iter::from_fn(|| {
        let path = at.join("::");
        at.pop().map(|_| path)
    })
    .find(known)?;
    (found != module).then_some(found)
}

/// The place of a module: its own, or that of the one it is in.
fn place(order: &[&str], module: &str) -> usize {
    let within =
        |entry: &str| entry.is_empty() || module == entry || module.starts_with(&format!("{entry}::"));
    let places = order.iter().enumerate().filter(|(_, entry)| within(entry));
    places.max_by_key(|(_, entry)| entry.len()).map(|(at, _)| at).unwrap()
}

#!/usr/bin/env bash
# Installs into an empty folder, and builds and runs the C program of the README with nothing but what is
# there, on the simulated driver. Needs pkg-config; without it the exit code is 77.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
if ! command -v pkg-config >/dev/null; then
    printf 'skipped: pkg-config is not on this machine\n'
    exit 77
fi

prefix=$(mktemp -d)
trap 'rm -rf "$prefix"' EXIT
fail() {
    printf 'FAILED: %s\n' "$1"
    exit 1
}

# Relative links to one file, so that the folder may be moved.
"${MAKE:-make}" -s -C "$root" install PREFIX="$prefix" DESTDIR= >"$prefix/log" 2>&1 || {
    cat "$prefix/log"
    fail 'make install'
}
version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$root/Cargo.toml" | head -n 1)
[[ $(readlink "$prefix/lib/libcudapool.so.0") == "libcudapool.so.$version" ]] || fail 'libcudapool.so.0'
[[ $(readlink "$prefix/lib/libcudapool.so") == libcudapool.so.0 ]] || fail 'libcudapool.so'
[[ -f $prefix/lib/libcudapool.so.$version && ! -L $prefix/lib/libcudapool.so.$version ]] || fail 'the library'
[[ -f $prefix/lib/libcudapool_preload.so ]] || fail 'the shim'

unset CUDAPOOL_CONF LD_PRELOAD CPATH C_INCLUDE_PATH LIBRARY_PATH
export PKG_CONFIG_PATH=$prefix/lib/pkgconfig
[[ $(pkg-config --modversion cudapool) == "$version" ]] || fail 'the version of the pkg-config file'
awk '$0 == "```c" { on = 1; next } $0 == "```" { if (on) exit } on' "$root/README.md" >"$prefix/program.c"
read -ra flags <<<"$(pkg-config --cflags --libs cudapool)"
(cd "$prefix" && "${CC:-cc}" -std=c99 program.c -o program "${flags[@]}") ||
    fail 'the program does not compile'

export LD_LIBRARY_PATH=$prefix/lib:$root/target/sim
# What the loader asks for, and where it finds it.
loaded=$(ldd "$prefix/program")
grep -qF "libcudapool.so.0 => $prefix/lib/libcudapool.so.0 " <<<"$loaded" || fail "ldd: $loaded"
said=$("$prefix/program") || fail "the program: $said"
[[ $said == *'given back: '* ]] || fail "the program: $said"
# The shim, far from where it was built, finds the pool beside it.
said=$(LD_LIBRARY_PATH=$root/target/sim LD_PRELOAD=$prefix/lib/libcudapool_preload.so \
    CUDAPOOL_CONF=log:info python3 - 2>&1 <<'END'
import ctypes

cuda = ctypes.CDLL("libcuda.so.1")
context, block = ctypes.c_void_p(), ctypes.c_uint64()
cuda.cuInit(0)
cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
cuda.cuCtxSetCurrent(context)
raise SystemExit(cuda.cuMemAlloc_v2(ctypes.byref(block), ctypes.c_size_t(1 << 20)))
END
) || fail "a program under the shim: $said"
[[ $said == *"with $prefix/lib/libcudapool.so.0 and "* ]] || fail "the shim: $said"

printf 'ok: installed, linked by pkg-config, loaded as libcudapool.so.0, found by the shim\n'

#!/usr/bin/env bash
# Checks against NVIDIA's real driver library on a machine without a device: what libcudapool answers where
# there is no driver and no device, and whether the simulated driver's lookup is the real one's.
#
# One line per check; "skipped:" lines where the real library cannot be had. Exit code 1 if a check fails,
# 77 if nothing could be checked.
#
# CUDAPOOL_LIBRARY and CUDASIM_LIBRARY name builds in other places.
set -euo pipefail

# Each call that fails should take microseconds.
readonly LIMIT_S=60

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
library=${CUDAPOOL_LIBRARY:-$root/target/release/libcudapool.so}
simulated=${CUDASIM_LIBRARY:-$root/target/sim/libcuda.so.1}
build=$root/target/real

# Nothing of the caller's may choose a driver, options, or a device: with these the real driver finds none
# even where there is one.
unset LD_LIBRARY_PATH LD_PRELOAD CUDAPOOL_CONF RUST_LOG RUST_BACKTRACE
export CUDA_VISIBLE_DEVICES=

failed=0
passed=0

main() {
    mkdir -p "$build"
    require "$library" "make lib"
    require "$simulated" "make sim"
    if ((failed)); then exit 1; fi
    "${CC:-cc}" -std=c99 -Wall -Wextra -Wpedantic -Werror -O1 -I"$root/include" \
        "$here/no_device.c" -o "$build/no_device" -pthread -ldl

    check_without_driver
    check_with_real_drivers

    if ((failed)); then exit 1; fi
    if ((passed == 0)); then exit 77; fi
}

require() {
    if [[ ! -e $1 ]]; then
        printf 'FAILED: %s is not there; build it first (%s)\n' "$1" "$2"
        failed=1
    fi
}

# Runs one check: its name, then a command.
check() {
    local name=$1
    shift
    if "$@"; then
        printf 'ok: %s\n' "$name"
        passed=$((passed + 1))
    else
        printf 'FAILED: %s (exit code %d)\n' "$name" "$?"
        failed=1
    fi
}

# The loader's own search, as the library under test uses it.
system_has_driver() {
    python3 -c '
import ctypes, sys
for name in ("libcuda.so", "libcuda.so.1", "libnvcuda.so", "libnvcuda.so.1"):
    try:
        ctypes.CDLL(name)
    except OSError:
        continue
    sys.exit(0)
sys.exit(1)'
}

check_without_driver() {
    if system_has_driver; then
        printf 'skipped: no driver: this system has one\n'
    else
        check "no driver: every call answers 300, silently" \
            timeout "$LIMIT_S" "$build/no_device" "$library" 300
    fi
}

# Each version of the driver that the archives have: its lookup table grows, and so must the simulated one's.
check_with_real_drivers() {
    local suites answer code path version cu_init
    local seen=" "
    for suites in "" bookworm trixie experimental; do
        code=0
        answer=$(LIBCUDA1_SUITES=$suites "$here/fetch_libcuda1.sh") || code=$?
        if ((code)); then
            if ((code != 77)); then
                printf 'FAILED: fetch_libcuda1.sh (exit code %d)\n' "$code"
                failed=1
            fi
            tail -n 1 <<<"$answer"
            # Without a network the rest would only take time.
            if [[ -z $suites ]]; then return; fi
            continue
        fi
        path=$(tail -n 1 <<<"$answer")
        version=$(<"${path%/lib/*}/version")
        if [[ $seen == *" $version "* ]]; then continue; fi
        seen+="$version "

        cu_init=$(python3 -c 'import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).cuInit(0))' "$path" || true)
        if [[ $cu_init == 100 ]]; then
            check "no device, driver $version: every call answers 301, silently" \
                env LD_LIBRARY_PATH="${path%/*}" timeout "$LIMIT_S" "$build/no_device" "$library" 301
        else
            printf 'skipped: no device, driver %s: cuInit answers %s here\n' "$version" "${cu_init:-nothing}"
        fi
        # It prints its own line.
        if python3 "$here/check_lookup.py" "$simulated" "$path"; then
            passed=$((passed + 1))
        else
            failed=1
        fi
    done
}

main

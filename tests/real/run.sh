#!/usr/bin/env bash
# Checks against NVIDIA's real driver library on a machine without a device: what libcudapool answers where
# there is no driver and no device, and whether the simulated driver's lookup is the real one's.
#
# One line per check, the count last; what the real library cannot be had for is skipped. Exit code 1 if a
# check fails, 77 if nothing could be checked.
#
# CUDAPOOL_LIBRARY and CUDASIM_LIBRARY name builds in other places.
set -uo pipefail

# Each call that fails should take microseconds.
readonly LIMIT_S=60

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
library=${CUDAPOOL_LIBRARY:-$root/target/release/libcudapool.so}
simulated=${CUDASIM_LIBRARY:-$root/target/sim/libcuda.so.1}
build=$root/target/real
# shellcheck source=tests/lib.sh
source "$here/../lib.sh"

# Nothing of the caller's may choose a driver, options, or a device: with these the real driver finds none
# even where there is one.
scrub
unset LD_LIBRARY_PATH
export CUDA_VISIBLE_DEVICES=

main() {
    mkdir -p "$build"
    require "$library" "make lib"
    require "$simulated" "make sim"
    if ((failed)); then finish; fi
    "${CC:-cc}" -std=c99 -Wall -Wextra -Wpedantic -Werror -O1 -I"$root/include" \
        "$here/no_device.c" -o "$build/no_device" -pthread -ldl

    check_without_driver
    check_with_real_drivers
    finish
}

require() {
    if [[ ! -e $1 ]]; then
        verdict FAILED "$1" "it is not there; build it first ($2)"
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
        verdict skipped 'no driver' 'this system has a driver'
    else
        attempt "no driver: every call answers 300, silently" "$LIMIT_S" bash -c 'silently "$@"' - \
            "$build/no_device" "$library" 300
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
            answer=$(tail -n 1 <<<"$answer")
            if ((code == 77)); then
                verdict skipped "NVIDIA's driver${suites:+ of $suites}" "${answer#skipped: }"
            else
                verdict FAILED "NVIDIA's driver${suites:+ of $suites}" "fetch_libcuda1.sh: exit code $code"
            fi
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
            attempt "no device, driver $version: every call answers 301, silently" "$LIMIT_S" \
                bash -c 'silently "$@"' - env LD_LIBRARY_PATH="${path%/*}" "$build/no_device" "$library" 301
        else
            verdict skipped "no device, driver $version" "cuInit answers ${cu_init:-nothing} here"
        fi
        attempt "lookup table of driver $version" "$LIMIT_S" \
            python3 "$here/check_lookup.py" "$simulated" "$path"
    done
}

main

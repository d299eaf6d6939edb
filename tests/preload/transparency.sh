#!/usr/bin/env bash
# Checks that the preload shim changes nothing of what programs find and get from a driver: the lookup
# table, on the simulated driver and on NVIDIA's real ones, and NVIDIA's real runtime library, dynamic and
# static, on these without a device. Usage:
#
#   tests/preload/transparency.sh DIRECTORY SHIM SIMULATED_LIBCUDA
#
# One line per check, the count last. Checks for which NVIDIA's libraries cannot be had are skipped.
set -uo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=tests/lib.sh
source "$here/../lib.sh"

(($# == 3)) || usage
directory=$1
shim=$2
simulated=$3
root=$(cd "$here/../.." && pwd)

readonly LIMIT_S=120

# Nothing of the caller's may choose a mode, options, or a device: with these the real driver finds none
# even where there is one.
scrub
unset LD_LIBRARY_PATH
export CUDA_VISIBLE_DEVICES=

check_lookup() {
    attempt "lookup table of $2, with the shim" "$LIMIT_S" python3 "$here/check_lookup.py" "$1" "$shim"
}

observe() {
    local code=0
    limited "$LIMIT_S" "$@" 2>&1 || code=$?
    printf 'exit code %d\n' "$code"
}

# name, folder of the driver, folder of the runtime library, program
check_runtime() {
    local name=$1 driver=$2 runtime=$3 mode without with
    shift 3
    without=$(observe env LD_LIBRARY_PATH="$driver:$runtime" "$@")
    if [[ $without != *"exit code 0" || $without != *"cudaErrorNoDevice"* ]]; then
        verdict FAILED "$name" 'not what is to be without a device'
        show "$without"
        return
    fi
    for mode in guard pool off; do
        with=$(observe env LD_LIBRARY_PATH="$driver:$runtime" LD_PRELOAD="$shim" \
            CUDAPOOL_PRELOAD="$mode" "$@")
        if [[ $with != "$without" ]]; then
            verdict FAILED "$name" "differs with the shim ($mode)"
            show "$(diff <(printf '%s\n' "$without") <(printf '%s\n' "$with"))"
            return
        fi
    done
    verdict ok "$name, in all modes"
}

# Where the wheel of NVIDIA's runtime library has been unpacked; nothing where it cannot be had.
runtime_folder() {
    local answer python
    answer=$("$root/tests/clients/setup.sh" 2>/dev/null) || return 0
    python=$(tail -n 1 <<<"$answer")
    "$python" -c '
import nvidia.cuda_runtime as runtime
print(list(runtime.__path__)[0] + "/lib")' 2>/dev/null
}

build_runtime_programs() {
    local runtime=$1
    local -a flags=(-std=c99 -Wall -Wextra -O1 -g -D_GNU_SOURCE)
    "${CC:-cc}" "${flags[@]}" -DOPENED "$here/runtime.c" -o "$directory/runtime_opened" -ldl -pthread &&
        "${CC:-cc}" "${flags[@]}" "$here/runtime.c" -o "$directory/runtime_linked" \
            "$runtime"/libcudart.so.1[0-9] -pthread &&
        { [[ ! -e $runtime/libcudart_static.a ]] || "${CC:-cc}" "${flags[@]}" "$here/runtime.c" \
            -o "$directory/runtime_static" "$runtime/libcudart_static.a" -ldl -lrt -pthread; }
}

check_lookup "$simulated" 'the simulated driver'

runtime=$(runtime_folder)
if [[ -z $runtime ]]; then
    verdict skipped "NVIDIA's runtime library" "NVIDIA's runtime library cannot be had"
elif ! build_runtime_programs "$runtime"; then
    verdict FAILED "NVIDIA's runtime library" 'the programs on it cannot be built'
    runtime=
fi

seen=" "
for suites in "" bookworm trixie experimental; do
    answer=$(LIBCUDA1_SUITES=$suites "$root/tests/real/fetch_libcuda1.sh") || {
        answer=$(tail -n 1 <<<"$answer")
        verdict skipped "NVIDIA's driver${suites:+ of $suites}" "${answer#skipped: }"
        # Without a network the rest would only take time.
        if [[ -z $suites ]]; then break; fi
        continue
    }
    path=$(tail -n 1 <<<"$answer")
    version=$(<"${path%/lib/*}/version")
    if [[ $seen == *" $version "* ]]; then continue; fi
    seen+="$version "
    check_lookup "$path" "driver $version"
    if [[ -n $runtime ]]; then
        check_runtime "runtime library, opened, on driver $version" "${path%/*}" "$runtime" \
            "$directory/runtime_opened" "$(echo "$runtime"/libcudart.so.1[0-9])"
        check_runtime "runtime library, linked, on driver $version" "${path%/*}" "$runtime" \
            "$directory/runtime_linked"
        if [[ -e $runtime/libcudart_static.a ]]; then
            check_runtime "runtime library, static, on driver $version" "${path%/*}" "$runtime" \
                "$directory/runtime_static"
        fi
    fi
done
finish

#!/usr/bin/env bash
# Runs the clients of the preload shim, which `make preload-test` has built, on the simulated driver. Usage:
#
#   tests/preload/run.sh DIRECTORY SHIM [PROGRAM...]
#   tests/preload/run.sh --list        # the programs
#
# One line per run, what a failing program printed below its line, and the count last. The loader must find
# the simulated driver and libcudapool.so (LD_LIBRARY_PATH). TEST_WRAPPER is put in front of each program
# (valgrind), TEST_SLOWER multiplies the time limits.
set -uo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=tests/lib.sh
source "$here/../lib.sh"

readonly LIMIT_S=60

# mode of the shim (none: without it) | further environment | program and its arguments (@: a file of the
# directory)
runs='
guard -                               constructor
none  -                               guard dlsym refused
none  -                               guard v2:12000 refused
none  -                               guard_direct direct refused
off   -                               guard dlsym refused
off   -                               guard_direct direct refused
guard -                               guard dlsym rescued
guard -                               guard global rescued
guard -                               guard v1:11040 rescued
guard -                               guard v1:12050 rescued
guard -                               guard v2:11020 rescued
guard -                               guard v2:12000:1 rescued
guard -                               guard v2:12000:2 rescued
guard -                               guard v2:12050:3 rescued
guard -                               guard_direct direct rescued
guard -                               guard_direct v2:12000 rescued
guard CUDAPOOL_CONF=backend:malloc    guard dlsym rescued
guard CUDASIM_DRIVER_VERSION=11040    guard v1:11040 rescued
guard CUDASIM_DEVICES=2               guard dlsym rescued
none  CUDASIM_DEVICES=2               guard dlsym refused
none  -                               two_drivers @fake_driver.so without
guard -                               two_drivers @fake_driver.so wrapped
pool  -                               two_drivers @fake_driver.so wrapped
off   -                               two_drivers @fake_driver.so without
guard -                               plugin_host @guard_plugin.so direct rescued
guard -                               plugin_host @guard_plugin.so scope rescued
guard -                               plugin_host @guard_plugin.so next rescued
pool  -                               plugin_host @serve_plugin.so next pool
none  -                               plugin_host @guard_plugin.so direct refused
pool  -                               plugin_host @serve_plugin.so direct pool
pool  -                               plugin_host @serve_plugin.so scope pool
none  -                               serve dlsym driver
guard -                               serve dlsym driver
pool  -                               serve dlsym pool
pool  -                               serve v2:12000:2 pool
pool  -                               serve v1:11040 pool
pool  -                               serve_direct direct pool
pool  CUDAPOOL_CONF=backend:malloc    serve dlsym pool
pool  CUDAPOOL_CONF=order:stream:legacy serve dlsym pool
pool  CUDASIM_DRIVER_VERSION=11040    serve v1:11040 pool
pool  CUDASIM_DEVICES=2               serve dlsym pool
none  -                               contexts dlsym driver
guard -                               contexts dlsym driver
pool  -                               contexts dlsym pool
pool  -                               contexts_direct direct pool
pool  CUDAPOOL_CONF=backend:malloc    contexts dlsym pool
pool  CUDASIM_DRIVER_VERSION=11040    contexts dlsym pool
none  -                               capture dlsym driver
guard -                               capture dlsym guard
pool  -                               capture dlsym pool
pool  -                               capture v2:12000:2 pool
pool  CUDAPOOL_CONF=backend:malloc    capture dlsym pool
pool  CUDASIM_DRIVER_VERSION=11040    capture dlsym pool
guard -                               race dlsym driver
pool  -                               race dlsym pool
pool  -                               race v2:12000 pool
pool  CUDAPOOL_CONF=backend:malloc    race v1:11040 pool
none  -                               forks dlsym driver
guard -                               forks dlsym driver
pool  -                               forks dlsym pool
pool  CUDAPOOL_CONF=backend:malloc    forks dlsym pool
'

wanted() {
    local each
    ((${#only[@]} == 0)) && return 0
    for each in "${only[@]}"; do
        if [[ $each == "$1" ]]; then return 0; fi
    done
    return 1
}

run() {
    local mode=$1 variant=$2 program=$3 name
    local -a environment=()
    shift 3
    name="$program${*:+ $*}"
    if [[ $mode == none ]]; then
        name+=" (without the shim"
    else
        environment+=("LD_PRELOAD=$shim" "CUDAPOOL_PRELOAD=$mode")
        name+=" ($mode"
    fi
    if [[ $variant != - ]]; then
        environment+=("$variant")
        name+=", $variant"
    fi
    # shellcheck disable=SC2086 # the wrapper is words
    attempt "${name//$directory\//})" "$LIMIT_S" \
        env "${environment[@]}" ${TEST_WRAPPER:-} "$directory/$program" "$@"
}

if [[ ${1:-} == --list ]]; then
    while read -r _ _ program _; do printf '%s\n' "$program"; done <<<"$runs" | awk 'NF && !seen[$0]++'
    exit
fi
(($# >= 2)) || usage
directory=$1
shim=$2
shift 2
only=("$@")
# Nothing of the caller's may choose other options, devices, or a mode.
scrub
need_wrapper
export CUDASIM_MEMORY=8GiB
while read -r mode variant program arguments; do
    if [[ -n $mode ]] && wanted "$program"; then
        # shellcheck disable=SC2086 # the arguments are words
        run "$mode" "$variant" "$program" ${arguments//@/$directory/}
    fi
done <<<"$runs"

finish

#!/usr/bin/env bash
# Checks what the preload shim says, that it finds the pool, and what it does without one. Usage:
#
#   tests/preload/says.sh DIRECTORY SHIM SIMULATED_LIBCUDA
#
# One line per check, the count last.
set -uo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=tests/lib.sh
source "$here/../lib.sh"

(($# == 3)) || usage
directory=$(cd "$1" && pwd)
shim=$2
beside=${shim%/*}
driver=${3%/*}

scrub
unset LD_LIBRARY_PATH
export CUDASIM_MEMORY=8GiB

# name | lines that must be said, in order, as patterns (none: nothing) | environment and command
check() {
    local name=$1 pattern line code=0 good=1
    local -a expected=() said=()
    shift
    while [[ $1 != -- ]]; do
        expected+=("$1")
        shift
    done
    shift
    mapfile -t said < <(env "$@" 2>&1 </dev/null; echo "exit code $?")
    code=${said[-1]}
    unset 'said[-1]'
    [[ $code == "exit code 0" && ${#said[@]} -eq ${#expected[@]} ]] || good=0
    for line in "${!expected[@]}"; do
        pattern=${expected[$line]}
        # shellcheck disable=SC2053 # it is a pattern
        [[ ${said[$line]:-} == $pattern ]] || good=0
    done
    if ((good)); then
        verdict ok "$name"
    else
        verdict FAILED "$name" "$code"
        show "$(printf '%s\n' "${said[@]}")"
    fi
}

alone=$(mktemp -d)
trap 'rm -rf "$alone"' EXIT
cp "$shim" "$alone/libcudapool_preload.so"

on_driver=("LD_LIBRARY_PATH=$driver")
on_shim=("${on_driver[@]}" "LD_PRELOAD=$shim")
check "nothing is said by default" \
    -- "${on_shim[@]}" "$directory/lonely" dlsym 100 0
check "a line at the first use (guard)" \
    "cudapool_preload: guard mode, with $beside/libcudapool.so.0 and $driver/libcuda.so.1" \
    -- "${on_shim[@]}" CUDAPOOL_CONF=log:info "$directory/lonely" dlsym 100 0
check "a line at the first use (pool), and the pool's own" \
    "cudapool_preload: pool mode, with $beside/libcudapool.so.0 and $driver/libcuda.so.1" \
    "*device 0: the pool has begun, on *" \
    -- "${on_shim[@]}" CUDAPOOL_PRELOAD=pool CUDAPOOL_CONF=log:info "$directory/lonely" dlsym 1 0
check "nothing is said in off mode" \
    -- "${on_shim[@]}" CUDAPOOL_PRELOAD=off CUDAPOOL_CONF=log:info "$directory/lonely" dlsym 100 0
check "a mode that is none" \
    'cudapool_preload: CUDAPOOL_PRELOAD is "guards", not guard, pool or off: nothing is done' \
    -- "${on_shim[@]}" CUDAPOOL_PRELOAD=guards CUDAPOOL_CONF=log:info "$directory/lonely" dlsym 100 0
check "a mode that is no text" \
    'cudapool_preload: CUDAPOOL_PRELOAD is "po?ol?", not guard, pool or off: nothing is done' \
    -- "${on_shim[@]}" CUDAPOOL_PRELOAD=$'po\xffol\n' CUDAPOOL_CONF=log:info "$directory/lonely" dlsym 100 0
check "an option that is none" "cudapool_preload: *no_such_option*" \
    -- "${on_shim[@]}" CUDAPOOL_PRELOAD=pool CUDAPOOL_CONF=no_such_option:1 "$directory/lonely" dlsym 100 0
check "preloaded by a relative path" "cudapool_preload: guard mode, with $beside/*libcudapool.so.0 and *" \
    -- -C "$beside" "${on_driver[@]}" LD_PRELOAD=./libcudapool_preload.so CUDAPOOL_CONF=log:info \
    "$directory/lonely" dlsym 100 0
# Folders whose names are no text, or long.
printf -v long '%0200d' 0
for folder in "$alone/"$'lat\xe9' "$alone/$long/$long/$long"; do
    mkdir -p "$folder"
    cp "$shim" "$beside/libcudapool.so" "$folder"
    check "the pool beside the shim, ${#folder} letters" "cudapool_preload: guard mode, with $alone/*" \
        -- "${on_driver[@]}" LD_PRELOAD="$folder/${shim##*/}" CUDAPOOL_CONF=log:info \
        "$directory/lonely" dlsym 100 0
done
check "without the pool's library" "cudapool_preload: the pool's library cannot be used: *libcudapool.so*" \
    -- "${on_driver[@]}" LD_PRELOAD="$alone/libcudapool_preload.so" "$directory/lonely" dlsym 100 0
check "without the pool's library in pool mode" \
    "cudapool_preload: the pool's library cannot be used: *libcudapool.so*" \
    -- "${on_driver[@]}" LD_PRELOAD="$alone/libcudapool_preload.so" CUDAPOOL_PRELOAD=pool \
    "$directory/lonely_direct" direct 100 0
check "the pool's limit holds for the program" \
    -- "${on_shim[@]}" CUDAPOOL_PRELOAD=pool CUDAPOOL_CONF=limit:1GiB "$directory/lonely" dlsym 2048 2
check "and what stays below it is served" \
    -- "${on_shim[@]}" CUDAPOOL_PRELOAD=pool CUDAPOOL_CONF=limit:1GiB "$directory/lonely" v2:12000 1000 0

# One line for each rescue, and one for the first use.
said=$(LD_LIBRARY_PATH="$driver:$beside" LD_PRELOAD="$shim" CUDAPOOL_CONF=log:info \
    "$directory/guard" dlsym rescued 2>&1 |
    grep '^cudapool_preload: ' | sed 's/[0-9]\{4,\}/N/g' | sort | uniq -c | sort -rn)
printed=$(wc -l <<<"$said")
rescues=$(grep -c ' was rescued: ' <<<"$said")
whole=$(grep -c ', refused for memory, was rescued: the pool gave back [0-9.]* [KMG]iB$' <<<"$said")
if ((whole >= 12 && printed == rescues + 1)) &&
    [[ $said == *"1 cudapool_preload: guard mode, with "* ]]; then
    verdict ok "a line for each rescue"
else
    verdict FAILED "a line for each rescue"
    show "$said"
fi
finish

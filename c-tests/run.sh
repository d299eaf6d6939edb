#!/usr/bin/env bash
# Runs the C and C++ consumers, which `make c-tests` has built, each in its variants of the environment. Usage:
#
#   c-tests/run.sh DIRECTORY [PROGRAM...]
#
# One line per run, what a failing program printed below its line, and the count last. The loader must find the
# libraries (LD_LIBRARY_PATH). CTEST_WRAPPER is put in front of each program (valgrind), CTEST_SLOWER multiplies the
# time limits, CTEST_SKIP names programs that the wrapper cannot run. With CTEST_REAL=1, for a real driver, the variants that
# turn knobs of the simulated one are left out. After CTEST_SECONDS nothing more is started; CTEST_MOST bounds each time limit.
# CTEST_THOROUGH=1 has faults and hostoom fail each call, and not a spread of them: minutes.
set -uo pipefail

if (($# == 0)); then
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
    exit 2
fi
directory=$1
shift
only=("$@")

# program | time limit in seconds | variant of the environment
runs='
header_c99       10 -
header_cxx11     10 -
contract         30 -
contract         30 CUDAPOOL_CONF=backend:vmm
contract         30 CUDAPOOL_CONF=backend:malloc
contract         30 CUDASIM_NO_VMM=1
contract         30 CUDASIM_DRIVER_VERSION=11040
bad_input        60 -
bad_input        60 CUDAPOOL_CONF=backend:malloc
ordering        120 -
ordering        120 CUDAPOOL_CONF=backend:malloc
ordering        120 CUDASIM_DRIVER_VERSION=11040
ordering_random 120 -
ordering_random 120 CUDAPOOL_CONF=backend:malloc
ordering_random 120 CUDASIM_DRIVER_VERSION=11040
capture          60 -
capture          60 CUDAPOOL_CONF=backend:malloc
capture          60 CUDASIM_DRIVER_VERSION=11040
oom             120 -
oom             120 CUDAPOOL_CONF=backend:malloc
oom             120 CUDASIM_DRIVER_VERSION=11040
oom_info         60 -
oom_info         60 CUDAPOOL_CONF=backend:malloc
oom_info         60 CUDASIM_DRIVER_VERSION=11040
reclaim          60 -
reclaim          60 CUDAPOOL_CONF=backend:malloc
reclaim          60 CUDASIM_DRIVER_VERSION=11040
pools            90 -
pools            90 CUDAPOOL_CONF=backend:malloc
pools            90 CUDASIM_DRIVER_VERSION=11040
pools_share      90 -
pools_share      90 CUDAPOOL_CONF=backend:malloc
pools_share      90 CUDASIM_DRIVER_VERSION=11040
pools_life       90 -
pools_life       90 CUDAPOOL_CONF=backend:malloc
pools_life       90 CUDASIM_DRIVER_VERSION=11040
rungs            60 -
rungs            60 CUDAPOOL_CONF=backend:malloc
rungs            60 CUDASIM_DRIVER_VERSION=11040
headroom         60 -
headroom         60 CUDAPOOL_CONF=backend:malloc
headroom         60 CUDASIM_DRIVER_VERSION=11040
spill            60 -
spill            60 CUDAPOOL_CONF=backend:malloc
spill            60 CUDASIM_DRIVER_VERSION=11040
spill            60 CUDASIM_DRIVER_VERSION=13000
faults          240 -
faults          240 CUDAPOOL_CONF=backend:malloc
hostoom         240 -
hostoom         240 CUDAPOOL_CONF=backend:malloc
waiting          60 -
waiting          60 CUDAPOOL_CONF=backend:malloc
waiting          60 CUDASIM_DRIVER_VERSION=11040
wait             90 -
wait             90 CUDAPOOL_CONF=backend:malloc
wait             90 CUDASIM_DRIVER_VERSION=11040
wait_minute     120 -
threads         120 -
threads         120 CUDAPOOL_CONF=backend:malloc
exit_atexit      20 -
exit_atexit      20 CUDAPOOL_CONF=backend:malloc
exit_static      20 -
exit_threads     90 -
fork             90 -
dlopen           60 -
context          60 -
context          60 CUDAPOOL_CONF=backend:malloc
context_lost     60 -
context_lost     60 CUDAPOOL_CONF=backend:malloc
context_second   60 -
context_second   60 CUDAPOOL_CONF=backend:malloc
options          90 -
adapters         60 -
adapters         60 CUDAPOOL_CONF=backend:malloc
adapters         60 CUDASIM_DEVICES=2
adapters         60 CUDASIM_DRIVER_VERSION=11040
torch_extension  60 -
torch_graphs     60 -
torch_graphs     60 CUDAPOOL_CONF=backend:malloc
'

passed=0
failed=0
skipped=0

# Whether this program is to be run at all.
wanted() {
    local name
    [[ " ${CTEST_SKIP:-} " == *" $1 "* ]] && return 1
    ((${#only[@]} == 0)) && return 0
    for name in "${only[@]}"; do
        [[ $name == "$1" ]] && return 0
    done
    return 1
}

run() {
    local program=$1 limit=$2 variant=$3
    local label=$program output code start verdict
    local -a assignments=()
    if [[ $variant != - ]]; then
        assignments=("$variant")
        label+=" ($variant)"
    fi
    # Nothing of the caller's may choose other options or devices.
    start=$SECONDS
    output=$(env -u CUDAPOOL_CONF -u CUDASIM_MEMORY -u CUDASIM_DEVICES -u CUDASIM_NO_VMM -u CUDASIM_FAIL \
        -u CUDASIM_LATENCY -u CUDASIM_CLOCK -u CUDASIM_DRIVER_VERSION "${assignments[@]}" \
        timeout --kill-after=5 $((limit * ${CTEST_SLOWER:-1})) ${CTEST_WRAPPER:-} "$directory/$program" 2>&1 </dev/null)
    code=$?
    verdict=FAILED
    case $code in
        0)
            verdict=ok
            # Programs about the end of the process must end without a word.
            if [[ $program == exit_* && -n $output ]]; then
                verdict=FAILED
            fi
            ;;
        77) verdict=skipped ;;
        124 | 137) output+=$'\n'"killed after $((SECONDS - start)) s" ;;
    esac
    case $verdict in
        ok) passed=$((passed + 1)) ;;
        skipped) skipped=$((skipped + 1)) ;;
        *) failed=$((failed + 1)) ;;
    esac
    printf '%-7s %s, %d s' "$verdict" "$label" $((SECONDS - start))
    if [[ $verdict == FAILED ]]; then
        printf ', exit code %d\n' "$code"
        sed 's/^/    /' <<<"$output" | head -n 60
    else
        # Parts that a program skipped are said, so that nobody takes them for tested.
        printf '\n'
        grep '^skipped: ' <<<"$output" | sed 's/^/    /'
    fi
}

while read -r program limit variant; do
    if [[ -z $program ]] || ! wanted "$program" || [[ ${CTEST_REAL:-0} == 1 && $variant == CUDASIM_* ]]; then
        continue
    fi
    if ((SECONDS >= ${CTEST_SECONDS:-1000000})); then
        skipped=$((skipped + 1))
        printf 'skipped %s (%s): no time is left\n' "$program" "$variant"
        continue
    fi
    if ((limit > ${CTEST_MOST:-limit})); then limit=$CTEST_MOST; fi
    run "$program" "$limit" "$variant"
done <<<"$runs"

if ((skipped)); then
    printf '%d skipped\n' "$skipped"
fi
printf '%d passed, %d failed\n' "$passed" "$failed"
((failed == 0 && passed > 0))

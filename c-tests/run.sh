#!/usr/bin/env bash
# Runs the C and C++ consumers, which `make c-tests` has built, each in its variants of the environment.
# Usage:
#
#   c-tests/run.sh DIRECTORY [PROGRAM | PROGRAM.VARIANT]...
#   c-tests/run.sh --list              # all of them, those that take longest first
#
# One line per run, what a failing program printed below its line, and the count last. The loader must find
# the libraries (LD_LIBRARY_PATH). TEST_WRAPPER is put in front of each program (valgrind), TEST_SLOWER
# multiplies the time limits, CTEST_SKIP names programs that the wrapper cannot run. With CTEST_REAL=1, for
# a real driver, the variants that turn knobs of the simulated one are left out. After CTEST_SECONDS nothing
# more is started; CTEST_MOST bounds each time limit. With CTEST_THOROUGH=SECONDS faults and hostoom fail
# each call, and not a spread of them, as far as each gets in that time.
set -uo pipefail

here=$(cd "${BASH_SOURCE[0]%/*}" && pwd)
# shellcheck source=tests/lib.sh
source "$here/../tests/lib.sh"

# Name of a variant | its environment
declare -rA environment_of=(
    [plain]=
    [vmm]=CUDAPOOL_CONF=backend:vmm
    [malloc]=CUDAPOOL_CONF=backend:malloc
    [no_vmm]=CUDASIM_NO_VMM=1
    [cuda11]=CUDASIM_DRIVER_VERSION=11040
    [cuda13]=CUDASIM_DRIVER_VERSION=13000
    [devices]=CUDASIM_DEVICES=2
)

# Program | time limit in seconds | variants. Those that take longest come first: runs side by side then end
# together.
readonly runs='
wait_minute      120 plain
ordering         120 plain malloc cuda11
faults           240 plain malloc
ordering_random  120 plain malloc cuda11
oom              120 plain malloc cuda11
pools_share       90 plain malloc cuda11
hostoom          240 plain malloc
reclaim           60 plain malloc cuda11
waiting           60 plain malloc cuda11
pools             90 plain malloc cuda11
capture           60 plain malloc cuda11
wait              90 plain malloc cuda11
threads          120 plain malloc
oom_info          60 plain malloc cuda11
headroom          60 plain malloc cuda11
header_c99        10 plain
header_cxx11      10 plain
abi_now           10 plain
abi_0_1           30 plain
contract          30 plain vmm malloc no_vmm cuda11
bad_input         60 plain malloc
pools_life        90 plain malloc cuda11
rungs             60 plain malloc cuda11
spill             60 plain malloc cuda11 cuda13
exit_atexit       20 plain malloc
exit_static       20 plain
exit_threads      90 plain
fork              90 plain
dlopen            60 plain
context           60 plain malloc
context_lost      60 plain malloc
context_second    60 plain malloc
context_faults     60 plain malloc
options           90 plain
adapters          60 plain malloc devices cuda11
torch_extension   60 plain
torch_graphs      60 plain malloc
'

# Calls a command with the name, program, limit and variant of each run.
each_run() {
    local program limit variants variant
    while read -r program limit variants; do
        for variant in $variants; do
            "$@" "$program.$variant" "$program" "$limit" "$variant"
        done
    done <<<"$runs"
}

print_name() {
    printf '%s\n' "$1"
}

# Whether this run is asked for at all.
wanted() {
    local name=$1 program=$2 variant=$3 each
    [[ " ${CTEST_SKIP:-} " == *" $program "* ]] && return 1
    [[ ${CTEST_REAL:-0} == 1 && ${environment_of[$variant]} == CUDASIM_* ]] && return 1
    ((${#only[@]} == 0)) && return 0
    for each in "${only[@]}"; do
        if [[ $each == "$program" || $each == "$name" ]]; then return 0; fi
    done
    return 1
}

run() {
    local name=$1 program=$2 limit=$3 variant=$4
    local -a command=(env ${environment_of[$variant]} ${TEST_WRAPPER:-} "$directory/$program")
    wanted "$name" "$program" "$variant" || return 0
    if ((SECONDS >= ${CTEST_SECONDS:-1000000})); then
        verdict skipped "${name%.plain}" 'no time is left'
        return
    fi
    if ((limit > ${CTEST_MOST:-limit})); then limit=$CTEST_MOST; fi
    limit=$((limit + ${CTEST_THOROUGH:-0}))
    # Programs about the end of the process must end without a word.
    if [[ $program == exit_* ]]; then command=(bash -c 'silently "$@"' - "${command[@]}"); fi
    attempt "${name%.plain}" "$limit" "${command[@]}"
}

if [[ ${1:-} == --list ]]; then
    each_run print_name
    exit
fi
(($# > 0)) || usage
directory=$1
shift
only=("$@")
# Nothing of the caller's may choose other options or devices.
scrub
need_wrapper
each_run run
finish

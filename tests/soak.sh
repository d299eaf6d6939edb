#!/usr/bin/env bash
# Runs what takes long, within a budget of time, on what `make soak` has built. Usage:
#
#   tests/soak.sh SECONDS HOST
#
# Each stage gets a share of the time that is left, so what one does not need goes to the next. A run that
# has begun goes on to its end or to its own limit, so that one that hangs is told from one that had no time:
# the last one may pass the budget. What there was no time for is listed as skipped. HOST is the folder of
# the build with AddressSanitizer.
set -uo pipefail

here=$(cd "${BASH_SOURCE[0]%/*}" && pwd)
# shellcheck source=tests/lib.sh
source "$here/lib.sh"

(($# == 2)) || usage
budget=$1
host=$2
cd "$here/.." || exit 2
export TEST_RUN=$PWD/target/test/soak
rm -rf "$TEST_RUN"
mkdir -p "$TEST_RUN"
units=()

# Stage, percent of the time that is left, folders of libraries after the simulated driver's, command. In
# the command, SHARE is what the stage may take; the thorough runs, as many as `thorough` says, divide it.
stage() {
    local name=$1 percent=$2 libraries=$3 share limit
    shift 3
    share=$(((budget - SECONDS) * percent / 100))
    units+=("$name")
    if ((share < 5)); then
        printf 'skipped\t%s\t0\tno time is left\n' "$name" >"$TEST_RUN/${name//\//+}"
        printf 'skipped %s: no time is left\n' "$name"
        return
    fi
    printf -- '---- %s: %d s\n' "$name" "$share"
    # Only for what hangs: a runner ends what it runs itself.
    limit=$((share + 60))
    if [[ ${kind:-runner} == runner ]]; then limit=$((share + 3600)); fi
    if [[ -n ${thorough:-} ]]; then export CTEST_THOROUGH=$((share / thorough)); else unset CTEST_THOROUGH; fi
    LD_LIBRARY_PATH=$PWD/target/sim:$libraries CTEST_SECONDS=$share \
        "$here/unit.sh" "${kind:-runner}" "$name" "$limit" "${@//SHARE/$share}"
}

kind=show stage release/wait_minute 25 "$PWD/target/release" target/c-tests/wait_minute SHARE
thorough=4 TEST_SLOWER=2 stage release/thorough 35 "$PWD/target/release" \
    c-tests/run.sh target/c-tests faults hostoom
# Ranks of locks, overflow and invariants are checked in this build.
CTEST_SKIP=wait_minute TEST_SLOWER=5 stage debug/c-tests 40 "$PWD/target/debug" c-tests/run.sh target/c-tests
# hostoom.c replaces the allocator itself, as AddressSanitizer does.
ASAN_OPTIONS=detect_leaks=0 CTEST_SKIP='wait_minute hostoom' TEST_SLOWER=5 \
    stage asan/c-tests 60 "$PWD/target/asan/$host/release" c-tests/run.sh target/c-tests-asan
# Those that do most with little time; the others take minutes each under valgrind.
TEST_WRAPPER='valgrind -q --error-exitcode=9' TEST_SLOWER=20 \
    stage valgrind/c-tests 100 "$PWD/target/release" c-tests/run.sh target/c-tests \
    contract bad_input capture context options exit_atexit exit_static

printf '\n%d s of %d\n' "$SECONDS" "$budget"
exec "$here/summary.sh" "$TEST_RUN" "${units[@]}"

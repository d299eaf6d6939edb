#!/usr/bin/env bash
# Runs one unit of the test run, and prints what it says whole, however many run beside it. Usage:
#
#   tests/unit.sh check UNIT SECONDS COMMAND...      one check, whose exit code is its verdict
#   tests/unit.sh show UNIT SECONDS COMMAND...       the same; what it prints is shown if it passes, too
#   tests/unit.sh runner UNIT SECONDS COMMAND...     a runner, which gives its verdicts itself (tests/lib.sh)
#
# UNIT is SUITE/NAME. With TEST_RUN, a folder, its results go there, the exit code is 0, and
# tests/summary.sh judges.
set -uo pipefail

# shellcheck source=tests/lib.sh
source "${BASH_SOURCE[0]%/*}/lib.sh"

(($# >= 4)) || usage
kind=$1
unit=$2
seconds=$3
shift 3
if [[ -n ${TEST_RUN:-} ]]; then
    TEST_RESULTS=$TEST_RUN/${unit//\//+}
else
    TEST_RESULTS=$(mktemp)
    trap 'rm -f "$TEST_RESULTS"' EXIT
fi
: >"$TEST_RESULTS"
export TEST_RESULTS TEST_UNIT=$unit TEST_SUITE=${unit%/*}

run() {
    local code=0 start=$SECONDS said
    if [[ $kind != runner ]]; then
        scrub
        attempt "${unit##*/}" "$seconds" "$@"
        code=$?
        if [[ $kind == show ]] && ((code == 0)); then show "$output"; fi
        return
    fi
    said=$(limited "$seconds" "$@" 2>&1) || code=$?
    if [[ -n $said ]]; then printf '%s\n' "$said"; fi
    # A runner that ends early, or without a verdict, has not passed.
    case $code in
        0 | 77) if [[ -s $TEST_RESULTS ]]; then return; fi ;;
        1) if grep -q '^FAILED' "$TEST_RESULTS"; then return; fi ;;
    esac
    took=$((SECONDS - start))
    verdict FAILED "${unit##*/}" "its runner ended with exit code $code"
}

said=$(run "$@")
if [[ -n ${TEST_RUN:-} ]]; then
    # The lock is a file beside the folder of the results.
    (flock 9 && printf '%s\n' "$said") 9>>"$TEST_RUN.lock"
    exit 0
fi
printf '%s\n' "$said"
! grep -q '^FAILED' "$TEST_RESULTS"

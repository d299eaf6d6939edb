# lib.sh: what the runners of tests share: their verdict lines, time limits, environment and counts. Sourced.
#
#   usage                          prints the comment at the head of the runner and ends it with 2
#   scrub                          takes away what a caller's environment would choose for programs under test
#   limited SECONDS COMMAND...     runs a command without input, within that time (124 or 137: it was ended)
#   attempt NAME SECONDS COMMAND.. the same, quietly, and gives its verdict; `output` is what it printed
#   silently COMMAND...            runs a command that must print nothing (exported, for `attempt`)
#   verdict ok|FAILED|skipped NAME [REASON]
#   skip_part NAME REASON          what a run that passed had to leave out
#   need_wrapper                   ends the runner, skipped, where TEST_WRAPPER is not on this machine
#   finish                         prints the counts and ends the runner: 0, 1: a check failed, 77: none ran
#
# Each verdict is one line, and goes as "RESULT TAB NAME TAB SECONDS TAB REASON" to the file that
# TEST_RESULTS names, from which `make test` counts. TEST_SUITE is put in front of names; TEST_UNIT says
# that unit.sh runs the runner. TEST_SLOWER multiplies time limits.

passed=0
failed=0
skipped=0
output=
# Seconds of the command whose verdict comes next.
took=

usage() {
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0" | sed '/^set/d'
    exit 2
}

scrub() {
    unset LD_PRELOAD CUDAPOOL_CONF CUDAPOOL_PRELOAD RUST_LOG RUST_BACKTRACE
    local variable
    for variable in "${!CUDASIM_@}"; do unset "$variable"; done
}

limited() {
    local seconds=$1
    shift
    timeout --kill-after=5 $((seconds * ${TEST_SLOWER:-1})) "$@" </dev/null
}

keep_result() {
    if [[ -n ${TEST_RESULTS:-} ]]; then
        printf '%s\t%s\t%s\t%s\n' \
            "$1" "${TEST_SUITE:+$TEST_SUITE/}${2//$'\t'/ }" "${took:-0}" "${3//$'\t'/ }" >>"$TEST_RESULTS"
    fi
}

verdict() {
    case $1 in
        ok) passed=$((passed + 1)) ;;
        skipped) skipped=$((skipped + 1)) ;;
        *) failed=$((failed + 1)) ;;
    esac
    keep_result "$1" "$2" "${3:-}"
    printf '%-7s %s%s%s\n' "$1" "${TEST_SUITE:+$TEST_SUITE/}$2" "${took:+, $took s}" "${3:+: $3}"
    took=
}

skip_part() {
    skipped=$((skipped + 1))
    keep_result skipped "$1, in part" "$2"
    printf '    skipped: %s\n' "$2"
}

# Beginning and end of what a failing program printed: it may be much.
show() {
    local -a lines
    mapfile -t lines <<<"$1"
    if ((${#lines[@]} <= 120)); then
        printf '    %s\n' "${lines[@]}"
    else
        printf '    %s\n' "${lines[@]:0:60}" "... $((${#lines[@]} - 120)) lines ..." "${lines[@]: -60}"
    fi
}

attempt() {
    local name=$1 seconds=$2 code=0 start=$SECONDS line
    local -a parts=()
    shift 2
    output=$(limited "$seconds" "$@" 2>&1) || code=$?
    took=$((SECONDS - start))
    while read -r line; do
        if [[ $line == 'skipped: '* ]]; then parts+=("${line#skipped: }"); fi
    done <<<"$output"
    case $code in
        0)
            verdict ok "$name"
            for line in ${parts[@]+"${parts[@]}"}; do skip_part "$name" "$line"; done
            ;;
        77)
            # Without a reason it is no skip that anyone could judge.
            verdict skipped "$name" "${parts[*]:-no reason was given}"
            ;;
        *)
            if ((code == 124 || code == 137)); then output+=$'\n'"ended after $took s"; fi
            verdict FAILED "$name" "exit code $code"
            show "$output"
            ;;
    esac
    return "$code"
}

# For programs that must end without a word.
silently() {
    local said code=0
    said=$("$@" 2>&1) || code=$?
    if [[ -n $said ]]; then printf 'not silent: %s\n' "$said" && return 1; fi
    return "$code"
}
export -f silently

need_wrapper() {
    local program=${TEST_WRAPPER:-}
    program=${program%% *}
    if [[ -z $program ]] || command -v "$program" >/dev/null; then return; fi
    verdict skipped "under $program" "$program is not on this machine"
    finish
}

finish() {
    # The results of a unit are counted with all others.
    if [[ -z ${TEST_UNIT:-} ]]; then
        printf '%d passed, %d failed, %d skipped\n' "$passed" "$failed" "$skipped"
    fi
    if ((failed)); then exit 1; fi
    if ((passed == 0)); then exit 77; fi
    exit 0
}

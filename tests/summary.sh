#!/usr/bin/env bash
# Counts what the units of a test run have left in a folder: what was skipped, each with its reason, what
# failed, and the count last. Usage:
#
#   tests/summary.sh DIRECTORY UNIT...
#
# A unit without a result has failed. With STRICT=1, as in continuous integration, so has one that was
# skipped for a reason that tests/allowed_skips does not know. Exit code 1 if anything failed.
set -uo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=tests/lib.sh
source "$here/lib.sh"

(($# >= 2)) || usage
directory=$1
shift
unset TEST_RESULTS

mapfile -t allowed < <(grep -v -e '^#' -e '^$' "$here/allowed_skips")
is_allowed() {
    local pattern
    for pattern in "${allowed[@]}"; do
        # shellcheck disable=SC2053 # it is a pattern
        if [[ $1 == $pattern ]]; then return 0; fi
    done
    return 1
}

skips=()
failures=()
for unit in "$@"; do
    file=$directory/${unit//\//+}
    if [[ ! -s $file ]]; then
        failures+=("$unit: it left no result")
        continue
    fi
    while IFS=$'\t' read -r result name _ reason; do
        case $result in
            ok) passed=$((passed + 1)) ;;
            skipped)
                skips+=("$name: $reason")
                if [[ ${STRICT:-0} == 1 ]] && ! is_allowed "$reason"; then
                    failures+=("$name: skipped, and must not be here: $reason")
                fi
                ;;
            *) failures+=("$name${reason:+: $reason}") ;;
        esac
    done <"$file"
done

if ((${#skips[@]})); then
    printf '\nskipped:\n'
    printf '    %s\n' "${skips[@]}"
fi
if ((${#failures[@]})); then
    printf '\nFAILED:\n'
    printf '    %s\n' "${failures[@]}"
fi
printf '\n%d passed, %d failed, %d skipped\n' "$passed" "${#failures[@]}" "${#skips[@]}"
((${#failures[@]} == 0 && passed > 0))

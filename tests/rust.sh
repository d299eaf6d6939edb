#!/usr/bin/env bash
# Runs the Rust tests of packages, and counts them from what they print. Usage: tests/rust.sh PACKAGE...
#
# The loader must find the simulated driver (LD_LIBRARY_PATH).
set -uo pipefail

# shellcheck source=tests/lib.sh
source "${BASH_SOURCE[0]%/*}/lib.sh"

(($# >= 1)) || usage
name=$1
scrub
said=$("${CARGO:-cargo}" test "${@/#/-p}" 2>&1 </dev/null)
code=$?

# "test result: ok. 12 passed; 0 failed; 1 ignored; ..." of each program.
count() {
    awk -v what="$1" '/^test result: / { for (i = 2; i <= NF; i++) if ($i ~ "^" what) sum += $(i - 1) }
        END { print sum + 0 }' <<<"$said"
}
while IFS= read -r line; do
    verdict skipped "$name: ${line%% ... *}" "${line##*ignored, }"
done < <(sed -n 's/^test \(.* \.\.\. ignored.*\)/\1/p' <<<"$said")
for ((i = $(count passed); i > 0; i--)); do keep_result ok "$name" ""; done
passed=$(count passed)
if ((passed)); then printf 'ok      rust/%s: %d tests\n' "$name" "$passed"; fi
if ((code != 0)); then
    # One line for each that failed, at least one where it was the build or the process that did.
    while IFS= read -r line; do
        verdict FAILED "$name: $line"
    done < <(sed -n 's/^test \(.*\) \.\.\. FAILED$/\1/p' <<<"$said")
    if ((failed == 0)); then verdict FAILED "$name" "cargo test: exit code $code"; fi
    show "$said"
fi
finish

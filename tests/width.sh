#!/usr/bin/env bash
# Checks that no line of the sources is wider than 110 columns. Usage:
#
#   tests/width.sh [FILE...]      # without one: all files of the repository
#
# Tables of Markdown, lines with an address of the web, and the headers of published versions are as wide as
# they are.
set -uo pipefail

readonly MOST=110

cd "${BASH_SOURCE[0]%/*}/.." || exit 2
files=("$@")
if ((${#files[@]} == 0)); then
    # Outside of a repository, as in a source archive, all that is there.
    mapfile -t files < <(git ls-files 2>/dev/null || find . -path ./target -prune -o -type f -printf '%P\n')
fi

wide=0
for file in "${files[@]}"; do
    case $file in
        *c-tests/abi/*/cudapool.h) continue ;;
        *.rs | *.c | *.cpp | *.h | *.hpp | *.sh | *.py | *.md) ;;
        *Makefile | *Makefile.inc | gpu/run | .ci/run) ;;
        *) continue ;;
    esac
    lines=$(LC_ALL=C.UTF-8 grep -nE "^.{$((MOST + 1)),}" "$file" | grep -v 'https\?://')
    if [[ $file == *.md ]]; then lines=$(grep -v '^[0-9]*:|' <<<"$lines"); fi
    while IFS= read -r line; do
        if [[ -n $line ]]; then
            text=${line#*:}
            printf '%s:%s: %d columns\n' "$file" "${line%%:*}" "${#text}"
            wide=1
        fi
    done <<<"$lines"
done
exit "$wide"

#!/usr/bin/env bash
# Compiles and runs the first C program of the README exactly as it is printed there, on the
# simulated driver, so that what a stranger copies from it works.
#
# SPDX-License-Identifier: MIT OR Apache-2.0
set -euo pipefail

cd "$(dirname "$0")/.."
out=target/demo
mkdir -p "$out"
awk '/^```c$/ { on = !done; next } /^```$/ { if (on) done = 1; on = 0 } on' README.md > "$out/readme.c"
grep -q 'int main' "$out/readme.c" || { echo "the README has no C program" >&2; exit 1; }

"${CC:-cc}" -std=c99 -Wall -Wextra -Wpedantic -Werror -Iinclude "$out/readme.c" \
    -o "$out/readme" -Ltarget/release -lcudapool
LD_LIBRARY_PATH="$PWD/target/release:$PWD/target/sim" "$out/readme"
echo "README: its C program compiles and runs"

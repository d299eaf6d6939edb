#!/usr/bin/env bash
# Compares the symbols that a library shows with a list of them. Usage: tests/exports.sh LIBRARY LIST
set -euo pipefail

nm -D --defined-only "$1" | awk '{ print $NF }' | LC_ALL=C sort | diff "$2" -

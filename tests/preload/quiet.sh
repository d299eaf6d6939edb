#!/usr/bin/env bash
# Runs programs that have nothing to do with CUDA with the preload shim and without it: what they print and
# answer must be the same. Usage:
#
#   tests/preload/quiet.sh DIRECTORY SHIM
#
# One line per program, and the count last. "skipped:" lines where a program is not on this machine.
set -uo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=tests/lib.sh
source "$here/../lib.sh"

(($# == 2)) || usage
directory=$1
shim=$2

readonly LIMIT_S=60

scrub

# Output, errors and exit code of a command.
observe() {
    local code=0
    limited "$LIMIT_S" "$@" 2>&1 || code=$?
    printf 'exit code %d\n' "$code"
}

# Whatever the mode says, there is nothing to do: even a wrong one is not mentioned.
same() {
    local name=$1 mode without with
    shift
    without=$(observe "$@")
    for mode in guard pool wrong; do
        with=$(observe env LD_PRELOAD="$shim" CUDAPOOL_PRELOAD="$mode" CUDAPOOL_CONF=log:debug "$@")
        if [[ $with != "$without" ]]; then
            verdict FAILED "$name" "differs with the shim ($mode)"
            show "$(diff <(printf '%s\n' "$without") <(printf '%s\n' "$with"))"
            return
        fi
    done
    if [[ $without != *"exit code 0" ]]; then
        verdict FAILED "$name" "fails by itself"
        show "$without"
        return
    fi
    verdict ok "$name"
}

same_if_there() {
    if command -v "$2" >/dev/null; then
        same "$@"
    else
        verdict skipped "$1" "$2 is not on this machine"
    fi
}

same "a constructor that calls dlsym" "$directory/constructor"
same "a C++ program with its own malloc" "$directory/interposer_cpp"
same "a Rust program with its own malloc" "$directory/interposer_rs"
same "64 threads that load and unload libraries" "$directory/loaders"
same "a forking server" "$directory/server"
same "python3" python3 -c '
import ctypes, hashlib, json, socket, subprocess, threading
libc = ctypes.CDLL(None)
print(libc.strlen(b"four"), hasattr(libc, "cuMemAlloc_v2"), hasattr(libc, "cuInit"))
print(hashlib.sha256(b"x").hexdigest(), json.dumps({"a": [1, 2]}))
print(subprocess.run(["uname"], capture_output=True, text=True).stdout)'
# shellcheck disable=SC2016 # it is the other bash that is to expand this
same "bash" bash -c 'for i in 1 2 3; do (echo "$i" | tr 1-3 a-c); done; printf "%s\n" "$BASH_VERSION"'
same_if_there "git" git --version
if git -C "$directory" rev-parse >/dev/null 2>&1; then
    same "git, with a repository" git -C "$directory" log -1 --format=%H
fi
same_if_there "gdb --version" gdb --version
same_if_there "perl" perl -e 'print join(",", map { $_ * 2 } 1 .. 5), "\n"'
same "cc" "${CC:-cc}" --version

finish

#!/usr/bin/env bash
# Makes the Python environment of the client tests, target/venv, with the pinned packages of
# requirements.txt, and of requirements-numba.txt and requirements-core.txt where these can be had. The
# second run is instant.
#
# The last line on standard output is the path of its interpreter. target/venv/numba.installed exists where
# numba-cuda is there too, target/venv/core.installed where cuda.core is.
# Exit codes: 0 it is there; 77 it cannot be had here, and a line says why; others: a fault in this script.
set -euo pipefail

readonly LIMIT_S=300

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
venv=$root/target/venv
log=$root/target/venv.log
# Not resolved: the interpreter finds its environment by the path it is called by.
python=$venv/bin/python
pip=()

main() {
    mkdir -p "$root/target"
    # One at a time: checks may run side by side, and the second then finds what the first has made.
    exec 9>"$venv.lock"
    flock --wait "$LIMIT_S" 9 || skip "another run holds $venv.lock"

    command -v python3 >/dev/null || skip "there is no python3 here"
    if ! is_installed requirements; then
        : >"$log"
        rm -rf "$venv"
        create
        install requirements || skip "pip cannot install the packages of requirements.txt (see $log)"
    fi
    local extra
    for extra in numba core; do
        if ! is_installed "$extra"; then
            choose_pip
            install "$extra" ||
                printf 'left out: pip cannot install requirements-%s.txt here (see %s)\n' "$extra" "$log"
        fi
    done
    printf '%s\n' "$python"
}

skip() {
    printf 'skipped: no environment for the Python clients: %s\n' "$1"
    exit 77
}

# Python and pip's own environment variables decide what the environment is; a stray one must not.
run() {
    printf '+ %s\n' "$*" >>"$log"
    timeout --kill-after=5 "$LIMIT_S" env -u PYTHONPATH -u PYTHONHOME "$@" >>"$log" 2>&1
}

create() {
    # Distributions may leave ensurepip out; a pip from outside then serves.
    if run python3 -m venv "$venv" && choose_pip; then return; fi
    rm -rf "$venv"
    if run python3 -m venv --without-pip "$venv" && choose_pip; then return; fi
    skip "python3 -m venv fails, or there is no pip to fill it (see $log)"
}

choose_pip() {
    pip=("$python" -m pip)
    if run "${pip[@]}" --version; then return; fi
    pip=(python3 -m pip --python "$python")
    run "${pip[@]}" --version
}

# What a finished installation is known by: its pins, and the interpreter it was made for.
fingerprint() {
    python3 -c 'import sys; print(sys.version)'
    cat "$(list "$1")"
}

list() {
    case $1 in
        requirements) printf '%s' "$here/requirements.txt" ;;
        *) printf '%s' "$here/requirements-$1.txt" ;;
    esac
}

is_installed() {
    [[ -x $python && -e $venv/$1.installed ]] && [[ $(<"$venv/$1.installed") == "$(fingerprint "$1")" ]]
}

# Wheels only: nothing is compiled here. Written last, the fingerprint vouches for the rest.
install() {
    rm -f "$venv/$1.installed"
    run "${pip[@]}" install --disable-pip-version-check --retries 1 --only-binary :all: \
        -r "$(list "$1")" || return 1
    fingerprint "$1" >"$venv/$1.installed"
}

main

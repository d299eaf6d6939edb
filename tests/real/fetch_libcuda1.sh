#!/usr/bin/env bash
# Gets NVIDIA's real driver library (Debian's non-free package libcuda1) for tests on machines without a
# device. Nothing is installed and nothing of the system's changes: apt runs on a configuration, lists and
# archives of its own under target/real, and the package is only unpacked there.
#
# The last line on standard output is the path of libcuda.so.1, with libcuda.so beside it.
# Exit codes: 0 there it is; 77 it cannot be had here, and a line says why; others: a fault in this script.
#
# LIBCUDA1_SUITES="sid" asks for other suites, tried in order (other driver versions); each is kept apart.
set -euo pipefail

readonly LIMIT_S=120

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
base="$root/target/real"
log="$base/fetch.log"
deadline=$((SECONDS + LIMIT_S))

main() {
    local codename archive suite tool
    codename=$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release 2>/dev/null || true)
    local suites=()
    local usual="$codename ${codename:+$codename-updates} bookworm bookworm-updates trixie sid"
    mapfile -t suites < <(tr -s " " "\n" <<<"${LIBCUDA1_SUITES:-$usual}" | awk "NF && !seen[\$0]++")

    mkdir -p "$base"
    # One at a time: checks may run side by side, and the second then finds what the first has fetched.
    exec 9>"$base/lock"
    flock --wait "$LIMIT_S" 9 || skip "another run holds $base/lock"

    for suite in "${suites[@]}"; do
        if report "$suite"; then return; fi
    done
    for tool in apt-get dpkg dpkg-deb timeout; do
        command -v "$tool" >/dev/null || skip "there is no $tool here"
    done

    : >"$log"
    write_configuration "$base/system"
    local archives=()
    mapfile -t archives < <(system_archives)
    ((${#archives[@]})) || skip "apt has no archive configured"
    for suite in "${suites[@]}"; do
        for archive in "${archives[@]}"; do
            ((SECONDS < deadline)) || skip "$LIMIT_S seconds were not enough (see $log)"
            if fetch "$archive" "$suite"; then
                report "$suite"
                return
            fi
        done
    done
    skip "no configured archive has the package in: ${suites[*]} (see $log)"
}

skip() {
    printf 'skipped: the real libcuda.so.1 cannot be had: %s\n' "$1"
    exit 77
}

# Succeeds if the library is there already. The version file is written last, so it vouches for the rest.
report() {
    local dir="$base/$1"
    [[ -s "$dir/version" && -s "$dir/lib/libcuda.so.1" ]] || return 1
    printf 'libcuda1: driver %s from suite %s\n%s\n' "$(<"$dir/version")" "$1" "$dir/lib/libcuda.so.1"
}

# Runs a command within what is left of the time; what it says goes to the log. Once more if it fails.
bounded() {
    local left attempt
    for attempt in 1 2; do
        left=$((deadline - SECONDS))
        ((left > 0)) || return 124
        printf '+ (attempt %d) %s\n' "$attempt" "$*" >>"$log"
        if timeout --kill-after=5 "$left" "$@" >>"$log" 2>&1; then return 0; fi
    done
    return 1
}

# An apt configuration that keeps all it writes in one directory. It is read after the system's own, so
# proxies and the like stay, while what is set here wins.
write_configuration() {
    local dir=$1
    mkdir -p "$dir"/{lists,archives}/partial
    : >"$dir/status"
    cat >"$dir/apt.conf" <<EOF
Dir::State "$dir";
Dir::State::Lists "$dir/lists";
Dir::State::status "$dir/status";
Dir::Cache "$dir";
Dir::Cache::archives "$dir/archives";
Dir::Cache::pkgcache "";
Dir::Cache::srcpkgcache "";
Dir::Log "$dir";
Dir::Etc::preferences "/dev/null";
Dir::Etc::preferencesparts "/dev/null";
Acquire::Languages "none";
Acquire::Retries "0";
Acquire::http::Timeout "20";
Acquire::https::Timeout "20";
APT::Sandbox::User "$(id -un)";
APT::Update::Error-Mode "any";
// Hooks of the system would clean and index the system's directories; other indexes are of no use here.
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
#clear Acquire::IndexTargets::deb::DEP-11;
#clear Acquire::IndexTargets::deb::CNF;
EOF
}

# The archives the system is set up with. apt reads its own sources, so either format will do.
system_archives() {
    apt-get -c "$base/system/apt.conf" update --print-uris 2>>"$log" |
        sed -n "s|^'\(.*\)/dists/[^']*/InRelease'.*|\1|p" | awk '!seen[$0]++'
}

# Unpacks the library from one suite of one archive.
fetch() {
    local archive=$1 suite=$2 options library
    local dir="$base/$suite" keyring=/usr/share/keyrings/debian-archive-keyring.gpg
    options="arch=$(dpkg --print-architecture)"
    if [[ -e $keyring ]]; then options+=" signed-by=$keyring"; fi

    rm -rf "$dir"
    write_configuration "$dir/apt"
    printf 'deb [%s] %s %s non-free\n' "$options" "$archive" "$suite" >"$dir/apt/sources.list"
    cat >>"$dir/apt/apt.conf" <<EOF
Dir::Etc::sourcelist "$dir/apt/sources.list";
Dir::Etc::sourceparts "/dev/null";
EOF
    bounded apt-get -c "$dir/apt/apt.conf" update || return 1
    # "download" writes into the current directory.
    bounded env --chdir="$dir" apt-get -c "$dir/apt/apt.conf" download libcuda1 || return 1
    bounded dpkg-deb -x "$dir"/libcuda1_*.deb "$dir/unpacked" || return 1
    library=$(find "$dir/unpacked" -type f -name 'libcuda.so.[0-9]*.[0-9]*' -print -quit)
    [[ -n $library ]] || return 1

    mkdir -p "$dir/lib"
    cp "$library" "$dir/lib/libcuda.so.1"
    # Loaders differ in which name they try first; both must lead here.
    ln -s libcuda.so.1 "$dir/lib/libcuda.so"
    rm -rf "$dir/unpacked" "$dir/apt" "$dir"/libcuda1_*.deb
    printf '%s\n' "${library##*/libcuda.so.}" >"$dir/version"
}

main

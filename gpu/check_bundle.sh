#!/usr/bin/env bash
# Checks what a bundle must keep: its size, and that its programs run on systems with glibc 2.36. Usage:
# check_bundle.sh BUNDLE
#
# Built on a machine with a newer glibc the programs may need that one; then this says so, and
# GPU_BUNDLE_GLIBC=any lets it pass.
set -euo pipefail

readonly MOST_MIB=40
readonly GLIBC=2.36

bundle=$1

size=$(du -sk "$bundle" | cut -f 1)
if ((size > MOST_MIB * 1024)); then
    printf 'FAILED: %s has %d KiB, more than %d MiB\n' "$bundle" "$size" "$MOST_MIB"
    exit 1
fi

newer=0
for file in "$bundle"/lib/*.so "$bundle"/bin/* "$bundle"/c-tests/*; do
    [[ $file == *.sh ]] && continue
    # Only what it takes from elsewhere: undefined symbols with the version of glibc that they came with.
    for version in $(objdump -T "$file" |
        sed -n 's/.*\*UND\*.*(\{0,1\}GLIBC_\([0-9.]*\)).*/\1/p' | sort -uV); do
        if [[ $(printf '%s\n' "$version" "$GLIBC" | sort -V | tail -n 1) != "$GLIBC" ]]; then
            printf '%s needs glibc %s\n' "$file" "$version"
            newer=1
        fi
    done
done
if ((newer)) && [[ ${GPU_BUNDLE_GLIBC:-} != any ]]; then
    printf 'FAILED: the bundle needs a glibc newer than %s; build it where that one is\n' "$GLIBC"
    exit 1
fi
printf '%s: %d.%d MiB, for glibc %s\n' "$bundle" $((size / 1024)) $((size % 1024 * 10 / 1024)) \
    "$( ((newer)) && printf 'of this machine' || printf '%s and later' "$GLIBC")"

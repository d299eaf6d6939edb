#!/usr/bin/env bash
# Prints what the preload shim costs, on the simulated driver. Usage:
#
#   tests/preload/bench.sh DIRECTORY SHIM [--short]
#
# The loader must find the simulated driver and libcudapool.so (LD_LIBRARY_PATH). --short leaves out what
# has no bound.
set -euo pipefail

# shellcheck source=tests/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

(($# >= 2)) || usage
directory=$1
shim=$2
# As in the demo: about what these take on a real device.
latencies=cuMemAlloc=20us,cuMemFree=20us,cuMemCreate=30us,cuMemRelease=25us
readonly LATENCIES=$latencies,cuMemMap=2us,cuMemSetAccess=40us,cuMemUnmap=35us
scrub
export CUDASIM_MEMORY=8GiB

LD_PRELOAD=$shim CUDAPOOL_PRELOAD=guard "$directory/bench"
[[ ${3:-} != --short ]] || exit 0

printf 'with assumed latencies: %s\n' "$LATENCIES"
LD_PRELOAD=$shim CUDAPOOL_PRELOAD=pool CUDASIM_LATENCY=$LATENCIES "$directory/bench"

# The start of a program: nothing preloaded, a library that does nothing, the shim; in turns, the best of
# each.
python3 - "$shim" "$directory/nothing.so" <<'END'
import os, subprocess, sys, time

kinds = {"nothing preloaded": None, "a library that does nothing": sys.argv[2], "the shim": sys.argv[1]}
times = {kind: [] for kind in kinds}
for _ in range(300):
    for kind, library in kinds.items():
        environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
        if library:
            environment["LD_PRELOAD"] = library
        start = time.perf_counter()
        subprocess.run(["/bin/true"], env=environment, check=True)
        times[kind].append(time.perf_counter() - start)
for kind, all_times in times.items():
    print(f"start of /bin/true with {kind}: {min(all_times) * 1e6:.0f} us")
END

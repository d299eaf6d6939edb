#!/usr/bin/env bash
# Runs real CUDA clients on the simulated driver: NVIDIA's cuda-bindings, and numba-cuda and cuda.core where
# they can be had, these two also with their memory from the pool (examples/python).
#
# One line per check, the count last; what packages cannot be had for is skipped. Exit code 1 if a check
# fails, 77 if nothing could be checked. CUDASIM_LIBRARY names a build of the simulated driver in another
# place, CUDAPOOL_LIBRARY one of the library.
set -uo pipefail

readonly LIMIT_S=120

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
simulated=${CUDASIM_LIBRARY:-$root/target/sim/libcuda.so.1}
export CUDAPOOL_LIBRARY=${CUDAPOOL_LIBRARY:-$root/target/release/libcudapool.so}
shim=${CUDAPOOL_SHIM:-$root/target/release/libcudapool_preload.so}
# shellcheck source=tests/lib.sh
source "$here/../lib.sh"

main() {
    local answer code=0 python
    if [[ ! -e $simulated ]]; then
        verdict FAILED 'real clients' "$simulated is not there; build it first (make sim)"
        finish
    fi
    answer=$("$here/setup.sh") || code=$?
    if ((code)); then
        answer=$(tail -n 1 <<<"$answer")
        if ((code == 77)); then
            verdict skipped 'real clients' "${answer#skipped: }"
        else
            verdict FAILED 'real clients' "setup.sh: exit code $code"
        fi
        finish
    fi
    python=$(tail -n 1 <<<"$answer")

    # The clients must find this driver and no other, as it is by default.
    scrub
    unset CUDA_VISIBLE_DEVICES NUMBA_CUDA_DRIVER NUMBA_CUDA_MEMORY_MANAGER
    export PYTHONPATH=$root/examples/python
    export LD_LIBRARY_PATH=${simulated%/*} EXPECTED_LIBCUDA=$simulated PYTHONDONTWRITEBYTECODE=1

    check "cuda-bindings" "$python" "$here/cuda_bindings_roundtrip.py"
    check "cuda-bindings, per-thread default streams" \
        env CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM=1 "$python" "$here/cuda_bindings_roundtrip.py"
    check_shimmed "cuda-bindings" "$python" "$here/cuda_bindings_roundtrip.py"
    check_shimmed "cuda-bindings, per-thread default streams" \
        env CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM=1 "$python" "$here/cuda_bindings_roundtrip.py"
    check "the ctypes binding" "$python" "$here/binding.py"
    check "stand-ins for CuPy and PyTorch" "$python" "$here/stand_ins.py"
    if [[ -e $root/target/venv/numba.installed ]]; then
        check "numba-cuda" env NUMBA_CUDA_USE_NVIDIA_BINDING=0 "$python" "$here/numba_roundtrip.py"
        check_shimmed "numba-cuda" env NUMBA_CUDA_USE_NVIDIA_BINDING=0 "$python" "$here/numba_roundtrip.py"
        check "numba-cuda on the pool" env NUMBA_CUDA_USE_NVIDIA_BINDING=0 \
            NUMBA_CUDA_MEMORY_MANAGER=cudapool_numba "$python" "$here/numba_plugin.py"
    else
        verdict skipped numba-cuda 'numba-cuda cannot be had'
    fi
    if [[ -e $root/target/venv/core.installed ]]; then
        check "cuda.core on the pool" "$python" "$here/cuda_core_resource.py"
    else
        verdict skipped cuda.core 'cuda.core cannot be had'
    fi
    finish
}

# Runs one client; what it says is shown only if it fails.
check() {
    local name=$1
    shift
    attempt "$name" "$LIMIT_S" "$@"
}

# The same client, unchanged, under the preload shim, whose own first line must be in the output.
check_shimmed() {
    local name=$1 mode
    shift
    for mode in guard pool; do
        check "$name ($mode)" env LD_PRELOAD="$shim" CUDAPOOL_PRELOAD="$mode" CUDAPOOL_CONF=log:info "$@"
        if ! grep -q "^cudapool_preload: $mode mode, with " <<<"$output"; then
            verdict FAILED "$name ($mode)" 'the shim had nothing to do'
        fi
    done
}

main

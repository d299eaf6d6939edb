#!/usr/bin/env bash
# Runs real CUDA clients on the simulated driver: NVIDIA's cuda-bindings, and numba-cuda and cuda.core where they can be
# had, these two also with their memory from the pool (examples/python).
#
# One line per check; "skipped:" lines where packages cannot be had. Exit code 1 if a check fails, 77 if
# nothing could be checked. CUDASIM_LIBRARY names a build of the simulated driver in another place,
# CUDAPOOL_LIBRARY one of the library.
set -euo pipefail

readonly LIMIT_S=120

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
simulated=${CUDASIM_LIBRARY:-$root/target/sim/libcuda.so.1}
export CUDAPOOL_LIBRARY=${CUDAPOOL_LIBRARY:-$root/target/release/libcudapool.so}
shim=${CUDAPOOL_SHIM:-$root/target/release/libcudapool_preload.so}
output=$root/target/clients.log
failed=0

main() {
    local answer code=0 python
    if [[ ! -e $simulated ]]; then
        printf 'FAILED: %s is not there; build it first (make sim)\n' "$simulated"
        exit 1
    fi
    answer=$("$here/setup.sh") || code=$?
    if ((code)); then
        tail -n 1 <<<"$answer"
        if ((code != 77)); then printf 'FAILED: setup.sh (exit code %d)\n' "$code"; fi
        exit "$code"
    fi
    python=$(tail -n 1 <<<"$answer")

    # The clients must find this driver and no other, as it is by default.
    unset LD_PRELOAD CUDA_VISIBLE_DEVICES NUMBA_CUDA_DRIVER NUMBA_CUDA_MEMORY_MANAGER CUDAPOOL_CONF CUDAPOOL_PRELOAD
    export PYTHONPATH=$root/examples/python
    for variable in "${!CUDASIM_@}"; do unset "$variable"; done
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
        check "numba-cuda on the pool" env NUMBA_CUDA_USE_NVIDIA_BINDING=0 NUMBA_CUDA_MEMORY_MANAGER=cudapool_numba \
            "$python" "$here/numba_plugin.py"
    else
        printf 'skipped: numba-cuda cannot be had\n'
    fi
    if [[ -e $root/target/venv/core.installed ]]; then
        check "cuda.core on the pool" "$python" "$here/cuda_core_resource.py"
    else
        printf 'skipped: cuda.core cannot be had\n'
    fi
    exit "$failed"
}

# Runs one client; what it says is shown only if it fails.
check() {
    local name=$1 code=0
    shift
    # `mode` is the caller's, where it has one.
    timeout --kill-after=5 "$LIMIT_S" "$@" >"$output" 2>&1 || code=$?
    if ((code == 0)); then
        printf 'ok: %s%s\n' "$(tail -n 1 "$output")" "${mode:+, under the shim in $mode mode}"
    else
        printf 'FAILED: %s (exit code %d)\n' "$name" "$code"
        tail -n 30 "$output"
        failed=1
    fi
}

# The same client, unchanged, under the preload shim, whose own first line must be in the output.
check_shimmed() {
    local name=$1 mode
    shift
    for mode in guard pool; do
        check "$name ($mode)" env LD_PRELOAD="$shim" CUDAPOOL_PRELOAD="$mode" CUDAPOOL_CONF=log:info "$@"
        if ! grep -q "^cudapool_preload: $mode mode, with " "$output"; then
            printf 'FAILED: %s (%s): the shim had nothing to do\n' "$name" "$mode"
            failed=1
        fi
    done
}

main

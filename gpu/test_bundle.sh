#!/usr/bin/env bash
# Runs a copy of the bundle in its short form, in a bare place and without Rust, on the simulated driver:
# everything must pass there and be as simulated. Usage: test_bundle.sh BUNDLE
# DIRECTORY_OF_THE_SIMULATED_DRIVER
set -euo pipefail

bundle=$1
simulated=$(cd "$2" && pwd)
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

bare=$(mktemp -d)
trap 'rm -rf "$bare"' EXIT
# A place with a blank in its name, which LD_PRELOAD would take for the end of a path.
place="$bare/the bundle"
cp -r "$bundle" "$place"
mkdir "$bare/home"

# The Python of the client tests, where they have made it.
python=python3
if [[ -x $root/target/venv/bin/python ]]; then python=$root/target/venv/bin/python; fi

# The programs that run may use, and no others.
mkdir "$bare/bin"
for program in bash env timeout cat cut diff grep head mkdir rm sed tail wc; do
    ln -s "$(command -v "$program")" "$bare/bin/$program"
done

# Nothing of this environment but these. numba's own binding, because it comes with the client tests.
bare_environment=(env -i PATH="$bare/bin" HOME="$bare/home" PYTHON="$python" NUMBA_CUDA_USE_NVIDIA_BINDING=0)

fail() {
    printf 'FAILED: %s\n' "$1"
    exit 1
}

code=0
(cd "$bare/home" && "${bare_environment[@]}" LD_LIBRARY_PATH="$simulated" \
    "$place/run" --short --out "$bare/out") \
    >"$bare/log" 2>&1 || code=$?
if ((code)); then
    cat "$bare/log"
    fail "run ended with $code"
fi

python3 - "$bare/out/results.json" <<'END' || fail 'results.json is not what it should be'
import json, sys
from collections import Counter

with open(sys.argv[1], encoding="utf-8") as file:
    results = json.load(file)
count = Counter((check["step"], check["result"]) for check in results["checks"])
assert results["short"] is True and results["bad"] == 0 and results["latency"].startswith("cuMemAlloc=")
assert count[1, "ok"] == 1 and count[2, "ok"] >= 10, count
probes = [check for check in results["checks"] if check["step"] == 3]
assert len(probes) >= 40 and all(check["result"] == "as simulated" for check in probes), probes
assert count[4, "ok"] == 1 and count[5, "ok"] == 3 and count[6, "ok"] >= 1, count
result_of = {(check["step"], check["name"]): check["result"] for check in results["checks"]}
assert result_of[6, "a direct allocation"] == result_of[6, "a direct allocation, guard"] == "ok"
# There is no PyTorch on the simulated driver: said, and not passed.
for step, name in ((6, "torch, native"), (7, "torch out of memory, native")):
    assert result_of[step, name] == "skipped", name
names = [figure["name"] for figure in results["figures"]]
assert "cuMemCreate, 512 MiB" in names, names
assert any(name.endswith("pool: reserved / live") for name in names), names
print(f"bundle: {sum(count.values())} checks in {results['seconds']} s, {len(results['figures'])} figures")
END

# The line of times is one that the simulated driver takes.
latency=$(sed -n 's/^ *"latency": "\(.*\)",$/\1/p' "$bare/out/results.json")
"${bare_environment[@]}" LD_LIBRARY_PATH="$simulated" CUDASIM_LATENCY="$latency" \
    "$place/bin/info" >"$bare/log" 2>&1 || {
    cat "$bare/log"
    fail 'the simulated driver does not take the line of times'
}

# A driver that behaves otherwise is noticed.
code=0
"${bare_environment[@]}" LD_LIBRARY_PATH="$simulated" CUDASIM_FREE_WAITS=0 \
    "$place/bin/probe_memory" free_with_work_pending >"$bare/log" 2>&1 || code=$?
if ((code != 1)) || ! grep -q '^differs: ' "$bare/log"; then
    cat "$bare/log"
    fail "a difference was not noticed ($code)"
fi

# A Python that does not work is not one without packages, whatever it prints; and a run that is ended says
# so, and does not wait for what it ran (100 s).
cat >"$bare/python" <<END
#!$(command -v bash)
case \$* in
    *torch*) printf 'no text \xff\xc3( \x1b[0m "quoted\\\n' && exit 3 ;;
    *) exec $(command -v sleep) 100 ;;
esac
END
chmod +x "$bare/python"
(cd "$bare/home" && exec "${bare_environment[@]}" LD_LIBRARY_PATH="$simulated" PYTHON="$bare/python" \
    "$place/run" --short --out "$bare/ended") >"$bare/log" 2>&1 &
run=$!
for _ in {1..3000}; do
    if [[ -e $bare/ended/logs/6-looking_for_cupy.log ]]; then break; fi
    sleep 0.1
done
kill -TERM "$run"
start=$SECONDS code=0
wait "$run" || code=$?
if ((code != 1 || SECONDS - start > 60)) || ! python3 - "$bare/ended/results.json" <<'END'; then
import json, sys

with open(sys.argv[1], encoding="utf-8") as file:
    results = json.load(file)
failed = {check["name"]: check["detail"] for check in results["checks"] if check["result"] == "FAILED"}
assert results["bad"] == 2 and "does not work, exit code 3" in failed["torch, native"], failed
assert failed["the whole run"] == "interrupted", failed
END
    cat "$bare/log"
    fail "a run that was ended ended with $code after $((SECONDS - start)) s"
fi

# And no driver at all is no pass.
if [[ -z $(ldconfig -p 2>/dev/null | grep 'libcuda\.so\.1') ]] &&
    "${bare_environment[@]}" "$place/run" --short --out "$bare/none" >"$bare/log" 2>&1; then
    cat "$bare/log"
    fail 'run passed without a driver'
fi

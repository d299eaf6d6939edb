#!/usr/bin/env python3
"""Compares cuGetProcAddress of the simulated driver with NVIDIA's own, question by question.

usage: check_lookup.py SIMULATED_LIBCUDA REAL_LIBCUDA

Both libraries are asked, without a device and before cuInit, for every name the simulated one exports (as
it is and stripped to its base) at every version where an answer changes and at odd ones, under all flags,
through both forms of the call. Symbols are compared as names: each address must be dlsym's. The simulated
driver may lack a function, and must then not know its name; it may not differ in anything else.

Exit code 0: they agree; 1: they do not, and the differences are listed.
"""

import ctypes
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

FOUND, NOT_FOUND, VERSION_NOT_SUFFICIENT = 0, 1, 2
RESULT_NOT_FOUND = 500
UNTOUCHED = 0x5A5A5A5A
FLAGS = (0, 1, 2, 3, 4, 6, 1 << 32)
MAX_LISTED = 40

TABLE = Path(__file__).resolve().parents[2] / "sim" / "src" / "procaddress.tsv"


class Driver:
    """One library, its exports, and its answers in a form that can be compared."""

    def __init__(self, path):
        # A path of its own keeps the loader from taking one library for the other: they share a soname.
        self.library = ctypes.CDLL(os.path.realpath(path), mode=os.RTLD_LOCAL | os.RTLD_NOW)
        listing = subprocess.run(
            ["nm", "-D", "--defined-only", path], check=True, capture_output=True, text=True
        ).stdout
        names = {line.split()[-1].split("@")[0] for line in listing.splitlines() if line}
        self.exports = {name for name in names if re.match(r"cu[A-Z]", name)}
        self.symbol_at = {}
        self.shared_addresses = []
        for name in sorted(self.exports):
            address = ctypes.cast(getattr(self.library, name), ctypes.c_void_p).value
            if address in self.symbol_at:
                self.shared_addresses.append(f"{name} and {self.symbol_at[address]} are one address")
            self.symbol_at[address] = name
        self.v1 = self._entry(
            "cuGetProcAddress",
            [ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, ctypes.c_uint64],
        )
        self.v2 = self._entry(
            "cuGetProcAddress_v2",
            [
                ctypes.c_char_p,
                ctypes.POINTER(ctypes.c_void_p),
                ctypes.c_int,
                ctypes.c_uint64,
                ctypes.POINTER(ctypes.c_int),
            ],
        )

    def _entry(self, name, argument_types):
        entry = getattr(self.library, name)
        entry.argtypes = argument_types
        entry.restype = ctypes.c_int
        return entry

    def version(self):
        version = ctypes.c_int()
        result = self.library.cuDriverGetVersion(ctypes.byref(version))
        if result != 0:
            raise SystemExit(f"cuDriverGetVersion answers {result} before cuInit")
        return version.value

    def _name(self, address):
        if address == UNTOUCHED:
            return "(untouched)"
        if address is None:
            return "NULL"
        return self.symbol_at.get(address, "(an address that is no exported function's)")

    def ask_v2(self, name, version, flags):
        pointer, status = ctypes.c_void_p(UNTOUCHED), ctypes.c_int(UNTOUCHED)
        result = self.v2(name.encode(), ctypes.byref(pointer), version, flags, ctypes.byref(status))
        return result, status.value, self._name(pointer.value)

    def ask_v2_without_status(self, name, version, flags):
        pointer = ctypes.c_void_p(UNTOUCHED)
        return self.v2(name.encode(), ctypes.byref(pointer), version, flags, None), self._name(pointer.value)

    def ask_v1(self, name, version, flags):
        pointer = ctypes.c_void_p(UNTOUCHED)
        return self.v1(name.encode(), ctypes.byref(pointer), version, flags), self._name(pointer.value)


def base_of(symbol):
    return re.sub(r"(_v\d+)?(_pt[ds][sz])?$", "", symbol)


def read_table():
    """Versions at which any answer changes, and every symbol of any driver."""
    versions, symbols = set(), set()
    for line in TABLE.read_text().splitlines():
        if not line.startswith("#"):
            _, since, default, per_thread = line.split("\t")
            versions.add(int(since))
            symbols.update({default, per_thread} - {"=", "-"})
    return versions, symbols


def expected(answer, knows_name, simulated):
    """What the simulated driver must say where the real one says `answer`."""
    result, status, symbol = answer
    if result != 0:
        return answer
    if not knows_name or (status == FOUND and symbol not in simulated.exports):
        return 0, NOT_FOUND, "NULL"
    return answer


def as_v1(answer):
    result, status, symbol = answer
    if result == 0 and status != FOUND:
        return RESULT_NOT_FOUND, "(untouched)"
    return result, symbol


def compare(simulated, real, versions, names):
    differences = []
    asked = Counter()
    for name in names:
        answers = {(v, f): real.ask_v2(name, v, f) for v in versions for f in FLAGS}
        forms = {symbol for _, status, symbol in answers.values() if status == FOUND}
        knows_name = bool(forms & simulated.exports)
        for (version, flags), real_answer in answers.items():
            wanted = expected(real_answer, knows_name, simulated)
            checks = [
                ("v2", wanted, simulated.ask_v2(name, version, flags)),
                (
                    "v2, no status",
                    (wanted[0], wanted[2]),
                    simulated.ask_v2_without_status(name, version, flags),
                ),
                ("v1", as_v1(wanted), simulated.ask_v1(name, version, flags)),
                # The expectations above rest on how the real driver's forms relate: hold it to that as well.
                ("real v1", as_v1(real_answer), real.ask_v1(name, version, flags)),
            ]
            for form, want, got in checks:
                asked[form] += 1
                if want != got:
                    differences.append(f"{form}: ({name!r}, {version}, {flags}) wants {want}, is {got}")
    return differences, asked


def main():
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    real = Driver(sys.argv[2])
    # The simulated driver takes the place of whichever version the real one has.
    os.environ["CUDASIM_DRIVER_VERSION"] = str(real.version())
    simulated = Driver(sys.argv[1])

    changes, known_symbols = read_table()
    versions = sorted(changes | {v - 1 for v in changes} | {0, 1, 13990, 2**31 - 1, -1, -(2**31)})
    bases = {base_of(name) for name in simulated.exports}
    names = sorted(simulated.exports | bases | {"", "cu", "cuNoSuchName", "cudaMalloc"})

    problems = list(simulated.shared_addresses)
    if simulated.version() != real.version():
        problems.append(f"CUDASIM_DRIVER_VERSION={real.version()} gives version {simulated.version()}")
    problems += [
        f"{name} is exported, but no driver has such a function"
        for name in sorted(simulated.exports - real.exports - known_symbols)
    ]
    differences, asked = compare(simulated, real, versions, names)
    problems += differences

    for line in problems[:MAX_LISTED]:
        print(line)
    if len(problems) > MAX_LISTED:
        print(f"... and {len(problems) - MAX_LISTED} more")
    print(
        f"{'FAILED' if problems else 'ok'}: lookup as in a driver of version {real.version()}:"
        f" {len(names)} names, {len(versions)} versions, {sum(asked.values())} answers compared,"
        f" {len(problems)} problems"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Compares what programs find in a driver with the preload shim and without it.

usage: check_lookup.py LIBCUDA SHIM

Without a device, and before cuInit: every symbol of the lookup table by dlsym, and every base name by both
forms of cuGetProcAddress at every version where its answer changes and at odd ones, under all flags. The shim
may differ in the pointers that it wraps, all of them and no other, and nowhere in a result, a status, or an
untouched output. What cuGetProcAddress finds must be what dlsym finds.

Exit code 0: so it is; 1: it is not, and the differences are listed.
"""

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

TABLE = Path(__file__).resolve().parents[2] / "sim" / "src" / "procaddress.tsv"
FLAGS = (0, 1, 2, 3, 4, 1 << 32)
ODD_VERSIONS = (0, 2000, 12000, 13990, 2**31 - 1, -1)
UNTOUCHED = 0x5A5A5A5A
MAX_LISTED = 40
MODES = ("guard", "pool", "off", "wrong")


class Info(ctypes.Structure):
    _fields_ = [
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    ]


def read_table():
    """For each base name the versions at which its answer changes; and all symbols."""
    bases, symbols = {}, set()
    for line in TABLE.read_text().splitlines():
        if not line.startswith("#"):
            base, since, default, per_thread = line.split("\t")
            bases.setdefault(base, set()).add(int(since))
            symbols.update({default, per_thread} - {"=", "-"})
    return bases, sorted(symbols)


def dump(path):
    """Prints every question with its answer, pointers as object and symbol."""
    process = ctypes.CDLL(None)
    process.dladdr.argtypes = [ctypes.c_void_p, ctypes.POINTER(Info)]
    process.dlsym.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    process.dlsym.restype = ctypes.c_void_p
    library = ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_LOCAL)
    known = {}

    def name(address):
        if address in (None, 0):
            return "NULL"
        if address == UNTOUCHED:
            return "untouched"
        if address not in known:
            info = Info()
            process.dladdr(address, ctypes.byref(info))
            exact = info.address == address
            known[address] = f"{Path(info.file.decode()).name}:{info.symbol.decode() if exact else 'inside'}"
        return known[address]

    bases, symbols = read_table()
    for symbol in symbols + ["cu", "cuNoSuchName", "cudaMalloc", "malloc"]:
        print(f"dlsym {symbol} = {name(process.dlsym(library._handle, symbol.encode()))}")
        # Nobody has made it known to the whole program.
        everywhere = name(process.dlsym(None, symbol.encode())) if symbol != "malloc" else "-"
        print(f"global {symbol} = {everywhere}")
    forms = {}
    for form, symbol in (("v1", "cuGetProcAddress"), ("v2", "cuGetProcAddress_v2")):
        address = process.dlsym(library._handle, symbol.encode())
        if address:
            extra = [ctypes.c_void_p] if form == "v2" else []
            arguments = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64, *extra]
            forms[form] = ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(address)
    names = sorted(bases) + ["", "cu", "cuNoSuchName", "cudaMalloc", "cuMemAlloc_v2", "cuGetProcAddress_v2"]
    for base in names:
        changes = bases.get(base, set())
        for version in sorted(changes | {v - 1 for v in changes} | set(ODD_VERSIONS)):
            for flags in FLAGS:
                for form, function in forms.items():
                    pointer, status = ctypes.c_void_p(UNTOUCHED), ctypes.c_int(UNTOUCHED)
                    for_status = [[], [ctypes.byref(status)], [None]]
                    for extra in for_status[1:] if form == "v2" else for_status[:1]:
                        result = function(base.encode(), ctypes.byref(pointer), version, flags, *extra)
                        answer = f"{result} {status.value} {name(pointer.value)}"
                        print(f"{form} {base} {version} {flags} = {answer}")


def answers(path, shim, mode):
    environment = {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "CUDAPOOL_PRELOAD")}
    if mode:
        environment.update(LD_PRELOAD=shim, CUDAPOOL_PRELOAD=mode)
    run = subprocess.run(
        [sys.executable, __file__, "--dump", path],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode != 0:
        raise SystemExit(
            f"FAILED: the questions ended with {run.returncode} ({mode or 'without the shim'}):"
            f" {run.stderr[-400:]}"
        )
    said = run.stderr.strip()
    expected = "CUDAPOOL_PRELOAD is \"wrong\"" if mode == "wrong" else ""
    if (said == "") != (expected == "") or expected not in said or len(said.splitlines()) > 1:
        raise SystemExit(f"FAILED: on stderr ({mode or 'without the shim'}): {said}")
    return [line.rsplit(" = ", 1) for line in run.stdout.splitlines()]


def wrapped_names(shim):
    listing = subprocess.run(
        ["nm", "-D", "--defined-only", shim], check=True, capture_output=True, text=True
    ).stdout
    names = (line.split()[-1] for line in listing.splitlines())
    return {name for name in names if re.match(r"cu[A-Z]", name)}


def main():
    if sys.argv[1] == "--dump":
        return dump(sys.argv[2])
    path, shim = sys.argv[1:]
    own, wrapped = Path(shim).name, wrapped_names(shim)
    plain = answers(path, shim, None)
    problems, replaced = [], set()
    for mode in MODES:
        under_shim = answers(path, shim, mode)
        if [question for question, _ in plain] != [question for question, _ in under_shim]:
            problems.append(f"{mode}: other questions were asked")
        for (question, without), (_, with_shim) in zip(plain, under_shim):
            head, _, pointer = without.rpartition(" ")
            symbol = pointer.partition(":")[2]
            wanted = without
            if mode in ("guard", "pool") and symbol in wrapped and not question.startswith("global"):
                wanted = f"{head} {own}:{symbol}".strip()
                replaced.add(symbol)
            if with_shim != wanted:
                problems.append(f"{mode}: {question}: wants {wanted}, is {with_shim}")
    for problem in problems[:MAX_LISTED]:
        print(problem)
    if len(problems) > MAX_LISTED:
        print(f"... and {len(problems) - MAX_LISTED} more")
    verdict = "FAILED" if problems or not replaced else "ok"
    print(
        f"{verdict}: lookup of {path}: {len(plain)} answers in {len(MODES)} modes,"
        f" {len(replaced)} functions wrapped, {len(problems)} problems"
    )
    return 1 if problems or not replaced else 0


if __name__ == "__main__":
    sys.exit(main())

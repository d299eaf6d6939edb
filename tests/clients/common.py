"""What the client scripts share: the proof that they run on the intended driver, and checks that speak."""

import os


def require_driver():
    """The library named by EXPECTED_LIBCUDA, and no other libcuda, is in this process."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        mapped = {line.split(maxsplit=5)[5].strip() for line in maps if "/libcuda.so" in line}
    expected = os.environ.get("EXPECTED_LIBCUDA")
    if expected and mapped != {os.path.realpath(expected)}:
        raise SystemExit(f"wrong driver: {sorted(mapped)} is loaded, not {expected}")


def equal(what, got, wanted):
    if got != wanted:
        raise SystemExit(f"{what}: got {shorten(got)}, wanted {shorten(wanted)}")


def true(what, condition):
    if not condition:
        raise SystemExit(f"{what} does not hold")


def shorten(value):
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."

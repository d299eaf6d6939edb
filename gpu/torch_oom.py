#!/usr/bin/env python3
"""A model that grows until there is no memory for it: how far it gets natively, and how far under the pool.

    torch_oom.py native|mempool|global [EXTENSION]

Memory is capped at a few GiB in both cases, so that it takes seconds on any card: natively by PyTorch's
fraction, for the pool by its option `limit`. Prints "name<TAB>value" lines. Checks that running out is
torch.OutOfMemoryError, and that memory is to be had again afterwards.
"""

import contextlib
import sys

from torch_train import import_torch

CAP_GIB = 4


def grow(torch):
    """Layers of growing width, the smaller ones staying live in part. The widest to fit, and the error."""
    kept, width = [], 512
    try:
        while True:
            layer = torch.nn.Linear(width, width, device="cuda")
            inputs = torch.ones(1024, width, device="cuda")
            layer(inputs).sum().backward()
            # Every other layer's weights stay, as those of a model under construction do; the rest is idle
            # from then on.
            kept.append(layer if len(kept) % 2 else None)
            width += width // 8
    except RuntimeError as error:
        # Not the exception itself: its traceback holds the tensors.
        is_full = isinstance(error, torch.OutOfMemoryError)
        return width, type(error).__name__, is_full, str(error).splitlines()[0]


def main(mode, extension=None):
    torch = import_torch()
    total = torch.cuda.get_device_properties(0).total_memory
    pool = None
    if mode == "native":
        torch.cuda.set_per_process_memory_fraction(min(1.0, CAP_GIB * 2**30 / total))
    else:
        import os

        os.environ["CUDAPOOL_CONF"] = f"limit:{CAP_GIB}GiB"
        import cudapool_torch

        if mode == "global":
            cudapool_torch.use_everywhere(extension)
        else:
            pool = cudapool_torch.MemPool()
    with pool.use() if pool else contextlib.nullcontext():
        width, kind, is_out_of_memory, message = grow(torch)
        print(f"widest layer\t{width}")
        print(f"error\t{kind}: {message}")
        if not is_out_of_memory:
            raise SystemExit(f"running out of memory is a {kind}: {message}")
        # What the failed attempt held is free again.
        for _ in range(3):
            tensor = torch.ones(256, 2**20, device="cuda")
            if float(tensor[-1, -1]) != 1.0:
                raise SystemExit("memory after the error does not hold what was written")
            del tensor


if __name__ == "__main__":
    main(*sys.argv[1:])

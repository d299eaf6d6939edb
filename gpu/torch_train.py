#!/usr/bin/env python3
"""Some training steps of a transformer and a CNN with varying shapes, with one of PyTorch's ways to memory.

    torch_train.py native|mempool|global [EXTENSION]

Prints lines "name<TAB>value": the losses (to be equal whatever the allocator), the most memory that the
device gave, the time of a step. `native` is also what runs under the shim and with expandable segments, both
chosen by the environment. Exit code 77 if PyTorch or its GPU is not there.
"""

import contextlib
import os
import sys
import time

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

STEPS = 24
WARM_UP = 8


def main(mode, extension=None):
    torch = import_torch()
    pool = None
    if mode == "global":
        import cudapool_torch

        cudapool_torch.use_everywhere(extension)
    elif mode == "mempool":
        import cudapool_torch

        pool = cudapool_torch.MemPool()
    elif mode != "native":
        raise SystemExit(f"there is no mode {mode}")

    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    free_before = torch.cuda.mem_get_info()[0]
    # Only this thread is served by a MemPool: what a backward pass makes on its own thread is PyTorch's.
    with pool.use() if pool else contextlib.nullcontext():
        for name, train in (("transformer", train_transformer), ("cnn", train_cnn)):
            losses, seconds, least_free = train(torch)
            print(f"{name} losses\t{' '.join(loss.hex() for loss in losses)}")
            print(f"{name} peak MiB\t{(free_before - least_free) / 2**20:.0f}")
            print(f"{name} ms per step\t{seconds * 1000:.2f}")
    if mode != "native":
        check_pool(mode)


def import_torch():
    try:
        import torch
    except ImportError as error:
        print(f"skipped: {error}")
        raise SystemExit(77) from None
    if not torch.cuda.is_available():
        print("skipped: PyTorch sees no GPU")
        raise SystemExit(77)
    return torch


def check_pool(mode):
    import cudapool

    counters = cudapool.stats(device=0)
    print(f"pool blocks allocated\t{counters['alloc_count']}")
    print(f"pool peak MiB\t{counters['reserved_bytes_peak'] / 2**20:.0f}")
    if counters["alloc_count"] == 0:
        raise SystemExit(f"in mode {mode} the pool was never asked")


def steps(torch, model, batches):
    """Trains; losses, seconds per step once warm, and the least memory that was free."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses, least_free, start = [], torch.cuda.mem_get_info()[0], None
    for step, (inputs, targets) in enumerate(batches):
        if step == WARM_UP:
            torch.cuda.synchronize()
            start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        least_free = min(least_free, torch.cuda.mem_get_info()[0])
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / (STEPS - WARM_UP)
    return [loss.item() for loss in losses], seconds, least_free


def train_transformer(torch):
    torch.manual_seed(1)
    width, words = 512, 8192

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Linear(64, width)
            layer = torch.nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
            self.layers = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
            self.head = torch.nn.Linear(width, words)

        def forward(self, inputs):
            return self.head(self.layers(self.embed(inputs))).flatten(0, 1)

    def batches():
        chance = torch.Generator().manual_seed(2)
        for _ in range(STEPS):
            length = int(torch.randint(64, 513, (1,), generator=chance))
            inputs = torch.randn(8, length, 64, generator=chance)
            targets = torch.randint(0, words, (8 * length,), generator=chance)
            yield inputs.cuda(), targets.cuda()

    # The plain attention: the fused ones are not deterministic in the backward pass.
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        return steps(torch, Model().cuda(), batches())


def train_cnn(torch):
    torch.manual_seed(3)
    blocks, channels = [], 3
    for width in (32, 64, 128, 256):
        blocks += [torch.nn.Conv2d(channels, width, 3, padding=1)]
        blocks += [torch.nn.BatchNorm2d(width), torch.nn.ReLU()]
        blocks += [torch.nn.Conv2d(width, width, 3, stride=2, padding=1), torch.nn.ReLU()]
        channels = width
    model = torch.nn.Sequential(*blocks, Mean(torch), torch.nn.Linear(channels, 100))

    def batches():
        chance = torch.Generator().manual_seed(4)
        for _ in range(STEPS):
            height, width = (int(n) * 16 for n in torch.randint(4, 17, (2,), generator=chance))
            inputs = torch.randn(16, 3, height, width, generator=chance)
            yield inputs.cuda(), torch.randint(0, 100, (16,), generator=chance).cuda()

    return steps(torch, model.cuda(), batches())


def Mean(torch):
    """The mean over the image: adaptive pooling has no deterministic backward pass."""

    class Module(torch.nn.Module):
        def forward(self, inputs):
            return inputs.mean(dim=(2, 3))

    return Module()


if __name__ == "__main__":
    main(*sys.argv[1:])

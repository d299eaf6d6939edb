#!/usr/bin/env python3
"""A CUDA graph in PyTorch's global mode: between its launches the program takes and gives back memory, and
empties the cache; the results must stay those without a graph.

    torch_graphs.py EXTENSION
"""

import sys

from torch_train import import_torch


def main(extension):
    torch = import_torch()
    import cudapool
    import cudapool_torch

    cudapool_torch.use_everywhere(extension)
    torch.manual_seed(7)
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(6)]).cuda()
    inputs = torch.zeros(512, 1024, device="cuda")
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                model(inputs)
        torch.cuda.current_stream().wait_stream(side)

        graphs = []
        for _ in range(2):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                outputs = model(inputs)
            graphs.append((graph, outputs))
        for step in range(20):
            # Others use all that is idle: what a graph works in must not be among it.
            shape = (256, 1024 * (1 + step % 5))
            filler = [torch.full(shape, float("nan"), device="cuda") for _ in range(50)]
            del filler
            torch.cuda.empty_cache()
            inputs.normal_()
            wanted = model(inputs)
            for graph, outputs in graphs:
                graph.replay()
                if not torch.allclose(outputs, wanted, atol=1e-4):
                    raise SystemExit(f"step {step}: the graph's results are not those without it")
            if step == 10:
                graphs.pop()[0].reset()
    print(f"pool blocks allocated\t{cudapool.stats(device=0)['alloc_count']}")


if __name__ == "__main__":
    main(*sys.argv[1:])

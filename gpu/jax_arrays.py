#!/usr/bin/env python3
"""JAX, whose memory nothing but the shim can reach; results are compared with NumPy's. Exit code 77 if JAX or
its GPU is not there."""

import os

# Without this JAX takes three quarters of the device at its start.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def main():
    try:
        import jax
        import jax.numpy as jnp
        import numpy

        devices = jax.devices("gpu")
    except (ImportError, RuntimeError) as error:
        print(f"skipped: {error}".splitlines()[0])
        raise SystemExit(77) from None

    @jax.jit
    def step(array):
        return jnp.tanh(array @ array.T) / array.shape[0]

    chance = numpy.random.default_rng(6)
    with jax.default_matmul_precision("highest"):
        for size in (128, 1000, 333, 2048, 64, 1500):
            data = chance.standard_normal((size, size), dtype=numpy.float32)
            result = numpy.asarray(step(jax.device_put(data, devices[0])))
            wanted = numpy.tanh(data @ data.T) / size
            if not numpy.allclose(result, wanted, atol=1e-4):
                raise SystemExit(f"size {size}: JAX and NumPy differ")
    print(f"device\t{devices[0]}")


if __name__ == "__main__":
    main()

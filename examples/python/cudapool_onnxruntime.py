"""ONNX Runtime's CUDA memory from cudapool, by options of its CUDA provider.

    session = onnxruntime.InferenceSession(
        "model.onnx", providers=[("CUDAExecutionProvider", cudapool_onnxruntime.provider_options())]
    )

ONNX Runtime then has no arena of its own on top, and turns a failed allocation into an error of its own. It
names no stream, so memory is used again when all work submitted so far has finished; with
CUDAPOOL_CONF=order:stream:legacy at once, which is right only while all work is on the default stream. Do not
give it a compute stream of yours (user_compute_stream): it refuses both at once.

SPDX-License-Identifier: MIT OR Apache-2.0
"""

import cudapool


def provider_options(**others):
    """The options that route its memory, with `others` beside them."""
    return {
        "gpu_external_alloc": str(cudapool.address_of("pool_ort_alloc")),
        "gpu_external_free": str(cudapool.address_of("pool_ort_free")),
        "gpu_external_empty_cache": str(cudapool.address_of("pool_ort_empty_cache")),
        **others,
    }

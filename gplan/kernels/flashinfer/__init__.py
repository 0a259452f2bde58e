"""The CUDA kernel set: FlashInfer, cuBLAS and Triton. Imported only where it is asked for."""

from gplan.kernels.flashinfer.kernel_set import FlashInferKernels

__all__ = ["FlashInferKernels"]

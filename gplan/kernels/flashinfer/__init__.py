"""The CUDA kernel set: FlashInfer, cuBLAS and Triton. `kernel_set` is imported only where it is asked for."""

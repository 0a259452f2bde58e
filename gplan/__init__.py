"""gplan: plan CUDA graphs, buckets and memory for a language model once; serve the plan."""

__version__ = "0.1.0"

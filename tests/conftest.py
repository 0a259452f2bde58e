"""What holds for every test: no network, one thread, reproducible examples, GPU tests only where there is a GPU."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is first imported; tiny models are slower with more
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "gplan", deadline=None, max_examples=50, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("gplan")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_tests:
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in gpu_tests:
        item.add_marker(pytest.mark.skip(reason="no CUDA device"))

"""The fingerprint of this machine is complete, repeatable and fits into a plan."""

from __future__ import annotations

import platform

import msgspec
import pytest
import torch

from formats.drift import diff
from formats.plan import Fingerprint
from gplan.graphs.machine import device_memory, host_memory, read_fingerprint


def test_a_cpu_is_described() -> None:
    found = read_fingerprint("cpu", "reference")
    assert found.device == "cpu"
    assert found.device_name
    assert found.capability == torch.backends.cpu.get_cpu_capability().lower()
    assert found.num_threads == torch.get_num_threads()
    assert found.torch == torch.__version__
    assert found.python == platform.python_version()
    assert found.kernels_version == ""
    assert (found.device_count, found.tp_size) == (1, 1)
    assert msgspec.json.decode(msgspec.json.encode(found), type=Fingerprint) == found


def test_reading_twice_finds_no_drift() -> None:
    planned, found = read_fingerprint("cpu", "reference"), read_fingerprint(torch.device("cpu"), "reference")
    assert diff(planned, found, needed_bytes=1) == ()


def test_memory_is_free_of_total() -> None:
    total, free = host_memory()
    assert 0 < free <= total
    assert device_memory("cpu")[0] == total


@pytest.mark.gpu
def test_a_gpu_is_described() -> None:
    found = read_fingerprint("cuda", "reference")
    assert found.device == "cuda"
    assert found.device_name == torch.cuda.get_device_name()
    assert found.capability == ".".join(map(str, torch.cuda.get_device_capability()))
    assert found.num_threads == 0
    assert found.driver
    assert found.cuda == torch.version.cuda
    assert 0 < found.free_memory <= found.device_memory

"""What machine this is: the fingerprint that a plan is made for and that serve finds again.

Reads only; grading a difference belongs to `formats.drift`. A value that a machine does not tell is 0 or empty, never
a guess.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from pathlib import Path

import torch

from formats.plan import Fingerprint

_DRIVER_FILE = Path("/proc/driver/nvidia/version")


def read_fingerprint(
    device: torch.device | str, kernels: str, prefill_kernel: str = "", blas_version: str = ""
) -> Fingerprint:
    """Describes the machine as `device` sees it.

    Args:
        device: `cpu`, `cuda` or `cuda:1`. A CUDA device gets its context by being asked.
        kernels: name of the kernel set in use: `reference` or `flashinfer`.
        prefill_kernel, blas_version: as the kernel set tells them.
    """
    device = torch.device(device)
    own = _cuda_fields(device) if device.type == "cuda" else _cpu_fields()
    return _fingerprint(kernels, **own, prefill_kernel=prefill_kernel, blas_version=blas_version)


def device_memory(device: torch.device | str) -> tuple[int, int]:
    """(total, free) bytes of the device, as everything on the machine leaves it now."""
    device = torch.device(device)
    if device.type != "cuda":
        return host_memory()
    free, total = torch.cuda.mem_get_info(device)
    return total, free


def host_memory() -> tuple[int, int]:
    """Bytes of host memory that this process may use, and of these the bytes now free: of the machine, or of the
    control group where that is less."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = _meminfo_bytes("MemAvailable") or total
    limit, used = _cgroup_memory()
    if limit is None or limit >= total:
        return total, min(free, total)
    return limit, max(0, min(free, limit - used))


def _cpu_fields() -> dict[str, object]:
    total, free = host_memory()
    return {
        "device": "cpu",
        "device_name": _cpu_name(),
        "capability": torch.backends.cpu.get_cpu_capability().lower(),
        "device_count": 1,
        "device_memory": total,
        "free_memory": free,
        "num_threads": torch.get_num_threads(),
        "driver": "",
        "clocks_mhz": _cpu_max_mhz(),
    }


def _cuda_fields(device: torch.device) -> dict[str, object]:
    properties = torch.cuda.get_device_properties(device)
    total, free = device_memory(device)
    return {
        "device": "cuda",
        "device_name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "device_count": torch.cuda.device_count(),
        "device_memory": total,
        "free_memory": free,
        "num_threads": 0,
        "driver": _nvidia_driver(),
        "clocks_mhz": int(getattr(properties, "clock_rate", 0)) // 1000,
    }


def _fingerprint(kernels: str, **fields: object) -> Fingerprint:
    """The fields that every device has, around those of one."""
    return Fingerprint(
        **fields,  # type: ignore[arg-type]
        tp_size=1,
        torch=str(torch.__version__),  # a TorchVersion, which compares as one and cannot be encoded
        cuda=torch.version.cuda or "",
        triton=_version("triton"),
        transformers=_version("transformers"),
        kernels_version=_version("flashinfer-python") if kernels == "flashinfer" else "",
        python=platform.python_version(),
        os=" ".join(part for part in (platform.system(), platform.machine(), *platform.libc_ver()) if part),
    )


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _cpu_name() -> str:
    match = re.search(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


def _cpu_max_mhz() -> int:
    khz = _read("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq").strip()
    return int(khz) // 1000 if khz.isdigit() else 0


def _nvidia_driver() -> str:
    match = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)*)", _read(_DRIVER_FILE))
    return match[1] if match else ""


def _meminfo_bytes(field: str) -> int:
    match = re.search(rf"^{field}:\s+(\d+) kB$", _read("/proc/meminfo"), re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def _cgroup_memory() -> tuple[int | None, int]:
    """Limit (None for none) and use of this process's control group: version 2, then version 1."""
    for limit_path, used_path in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        limit = _read(limit_path).strip()
        if limit.isdigit():
            used = _read(used_path).strip()
            return int(limit), int(used) if used.isdigit() else 0
    return None, 0

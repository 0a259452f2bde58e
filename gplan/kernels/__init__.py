"""Kernel sets: `reference` (plain torch) and `flashinfer` (CUDA). One is imported only when it is asked for."""

from __future__ import annotations

from gplan.errors import GplanError
from gplan.kernels.base import Kernels, KernelShape
from gplan.kernels.products import Algorithms

KERNEL_SETS = ("reference", "flashinfer")


def kernels_class(name: str) -> type[Kernels]:
    """The class of a kernel set.

    Raises:
        GplanError: an unknown name, or flashinfer where it is not installed.
    """
    if name == "reference":
        from gplan.kernels.reference import ReferenceKernels

        return ReferenceKernels
    if name == "flashinfer":
        try:
            from gplan.kernels.flashinfer.kernel_set import FlashInferKernels
        except ModuleNotFoundError as error:
            raise GplanError(
                f"flashinfer kernels: {error.name} is not installed", "Install gplan[cuda], or use reference kernels."
            ) from error
        return FlashInferKernels
    raise GplanError(f"unknown kernels {name!r}", f"Use one of {', '.join(KERNEL_SETS)}.")


def make_kernels(name: str, shape: KernelShape, algorithms: Algorithms | None = None) -> Kernels:
    """Builds a kernel set, which allocates its workspace.

    Args:
        algorithms: of products that are left to a library, where its own choice is not to be taken.

    Raises:
        GplanError: as `kernels_class`; or an algorithm that the library refuses.
    """
    kernels = kernels_class(name)
    return kernels(shape, algorithms) if algorithms else kernels(shape)

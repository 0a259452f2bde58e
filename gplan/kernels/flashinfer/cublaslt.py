"""cuBLASLt through ctypes: products by an algorithm that is named, not by the one the library would pick.

The calls, structures and numbers are those of `cublasLt.h`; only what is used is here. The library is the very one that
torch has loaded, so its version is torch's, and the handle and descriptors made here live as long as the process.
Which algorithm is used for what is not decided here.
"""

from __future__ import annotations

import ctypes
import re
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p, sizeof
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from gplan.errors import GplanError
from gplan.kernels.products import LibraryProduct, ProductLibrary, ProductShape

WORKSPACE_BYTES = 32 << 20

_COMPUTE_32F = 68
_NOT_SUPPORTED = 15
_OP_T = 1
_REAL_32F = 0
_DTYPES = {torch.bfloat16: 14, torch.float16: 2}
_DESC_TRANSA = 3
_PREFERENCE_MAX_WORKSPACE_BYTES = 1

_AGAIN = "Plan again here: gplan plan CHECKPOINT -o FILE"


class Algorithm(ctypes.Structure):
    """`cublasLtMatmulAlgo_t`: opaque, and by its documentation valid in another process of the same library version."""

    _fields_ = (("data", c_uint64 * 8),)


class HeuristicResult(ctypes.Structure):
    """`cublasLtMatmulHeuristicResult_t`."""

    _fields_ = (
        ("algorithm", Algorithm),
        ("workspace_bytes", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


_SIGNATURES: dict[str, tuple[type[Any], ...]] = {
    "cublasLtCreate": (c_void_p,),
    "cublasLtMatmulDescCreate": (c_void_p, c_int, c_int),
    "cublasLtMatmulDescSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "cublasLtMatrixLayoutCreate": (c_void_p, c_int, c_uint64, c_uint64, c_int64),
    "cublasLtMatmulPreferenceCreate": (c_void_p,),
    "cublasLtMatmulPreferenceSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    # handle, operation, A, B, C, D; then what is asked and where the answer goes
    "cublasLtMatmulAlgoGetHeuristic": (*[c_void_p] * 7, c_int, c_void_p, c_void_p),
    "cublasLtMatmulAlgoCheck": (*[c_void_p] * 8,),
    # handle, operation, alpha, A and its layout, B and its, beta, C and its, D and its, algorithm, workspace, stream
    "cublasLtMatmul": (*[c_void_p] * 14, c_size_t, c_void_p),
}


def version() -> str:
    """Of the library that torch has loaded, as its one number; empty where there is none."""
    library = _library()
    return "" if library is None else str(library.cublasLtGetVersion())


class CublasLt(ProductLibrary):
    """Products in bfloat16 or float16 on the current CUDA device.

    Raises:
        GplanError: torch has loaded no cuBLASLt.
    """

    workspace_bytes: ClassVar[int] = WORKSPACE_BYTES
    alignment: ClassVar[int] = 256
    """What the library's heuristics take for granted unless told otherwise."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        index = torch.cuda.current_device() if device.index is None else device.index
        with torch.cuda.device(index):
            self._handle = _handle(index)

    def algorithms(self, shape: ProductShape, most: int) -> tuple[str, ...]:
        found, count = (HeuristicResult * most)(), c_int(0)
        asked = (self._handle, *_operands(shape, self.dtype), _preference(), most)
        status = _status("cublasLtMatmulAlgoGetHeuristic", *asked, byref(found), byref(count))
        if status == _NOT_SUPPORTED:
            return ()
        _check("cublasLtMatmulAlgoGetHeuristic", status)
        usable = (each.algorithm for each in found[: count.value] if each.state == 0)
        return tuple(dict.fromkeys(bytes(each).hex() for each in usable if self._why_not(shape, each) is None))

    def product(self, shape: ProductShape, algorithm: str) -> CublasLtProduct:
        what = f"product of {shape.m} rows of {shape.k} columns times {shape.n} results"
        if not re.fullmatch(r"[0-9a-f]{128}", algorithm):
            raise GplanError(f"{what}: {algorithm!r} is not an algorithm of cuBLASLt", _AGAIN)
        described = Algorithm.from_buffer_copy(bytes.fromhex(algorithm))
        problem = self._why_not(shape, described)
        if problem is not None:
            raise GplanError(f"{what}: cuBLASLt {version()} refuses the algorithm ({problem})", _AGAIN)
        return CublasLtProduct(shape, self.dtype, (self._handle, *_operands(shape, self.dtype)), described)

    def _why_not(self, shape: ProductShape, algorithm: Algorithm) -> str | None:
        """Why the library would not multiply so, by its own check; None if it would."""
        result = HeuristicResult()
        asked = (self._handle, *_operands(shape, self.dtype), byref(algorithm))
        status = _status("cublasLtMatmulAlgoCheck", *asked, byref(result))
        if status:
            return f"status {status}"
        if result.workspace_bytes > WORKSPACE_BYTES:
            return f"it wants a workspace of {result.workspace_bytes} bytes"
        return None


class CublasLtProduct(LibraryProduct):
    """Row-major x, weight and out are column-major k x m, k x n and n x m: the weight, transposed, is multiplied with
    x."""

    def __init__(
        self, shape: ProductShape, dtype: torch.dtype, asked: tuple[c_void_p, ...], algorithm: Algorithm
    ) -> None:
        self.shape, self._dtype, self._algorithm = shape, dtype, algorithm
        self._handle, self._operation, self._weight, self._x, self._out, _ = asked
        self._alpha, self._beta = c_float(1.0), c_float(1.0 if shape.adds else 0.0)

    def run(self, x: Tensor, weight: Tensor, out: Tensor, workspace: Tensor) -> None:
        m, n, k, _ = self.shape
        assert (tuple(x.shape), tuple(weight.shape), tuple(out.shape)) == ((m, k), (n, k), (m, n)), "another product"
        for tensor in (x, weight, out):
            assert tensor.dtype is self._dtype, "another dtype"
            assert tensor.is_contiguous(), "an operand with gaps"
            assert tensor.data_ptr() % CublasLt.alignment == 0, "an operand that is not aligned"
        assert workspace.nbytes >= WORKSPACE_BYTES, "a workspace that is too small"
        _call(
            "cublasLtMatmul",
            self._handle,
            self._operation,
            byref(self._alpha),
            weight.data_ptr(),
            self._weight,
            x.data_ptr(),
            self._x,
            byref(self._beta),
            out.data_ptr(),
            self._out,
            out.data_ptr(),
            self._out,
            byref(self._algorithm),
            workspace.data_ptr(),
            WORKSPACE_BYTES,
            torch.cuda.current_stream(out.device).cuda_stream,
        )
        self.num_runs += 1


@cache
def _library() -> ctypes.CDLL | None:
    """By the file that is mapped into this process; where none is yet, a product makes torch load it."""
    path = _mapped_path()
    if path is None and torch.cuda.is_available():
        square = torch.ones((16, 16), dtype=torch.bfloat16, device="cuda")
        torch.mm(square, square)
        path = _mapped_path()
    if path is None:
        return None
    library = ctypes.CDLL(path)
    library.cublasLtGetVersion.argtypes, library.cublasLtGetVersion.restype = (), c_size_t
    for name, types in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, c_int
    return library


def _mapped_path() -> str | None:
    try:
        with open("/proc/self/maps") as maps:
            return next((line.split(maxsplit=5)[5].strip() for line in maps if "/libcublasLt.so" in line), None)
    except OSError:
        return None


def _required_library() -> ctypes.CDLL:
    library = _library()
    if library is None:
        raise GplanError("cuBLASLt: torch has loaded no such library here", "Use a build of torch for CUDA.")
    return library


def _status(name: str, *arguments: Any) -> int:
    status: int = getattr(_required_library(), name)(*arguments)
    return status


def _check(name: str, status: int) -> None:
    if status:
        raise GplanError(f"{name}: status {status}", "What it means is in cublasStatus_t.")


def _call(name: str, *arguments: Any) -> None:
    """
    Raises:
        GplanError: the call failed; names it and its status.
    """
    _check(name, _status(name, *arguments))


@cache
def _handle(device_index: int) -> c_void_p:
    """Of one device, which must be current."""
    handle = c_void_p()
    _call("cublasLtCreate", byref(handle))
    return handle


@cache
def _preference() -> c_void_p:
    preference, nbytes = c_void_p(), c_uint64(WORKSPACE_BYTES)
    _call("cublasLtMatmulPreferenceCreate", byref(preference))
    attribute = (_PREFERENCE_MAX_WORKSPACE_BYTES, byref(nbytes), sizeof(nbytes))
    _call("cublasLtMatmulPreferenceSetAttribute", preference, *attribute)
    return preference


@cache
def _operands(shape: ProductShape, dtype: torch.dtype) -> tuple[c_void_p, ...]:
    """The operation, then layouts of the weight (A), of x (B), and of out as what is added to (C) and as result (D)."""
    operation, transposed = c_void_p(), c_int32(_OP_T)
    _call("cublasLtMatmulDescCreate", byref(operation), _COMPUTE_32F, _REAL_32F)
    _call("cublasLtMatmulDescSetAttribute", operation, _DESC_TRANSA, byref(transposed), sizeof(transposed))
    out = _layout(dtype, shape.n, shape.m)
    return operation, _layout(dtype, shape.k, shape.n), _layout(dtype, shape.k, shape.m), out, out


@cache
def _layout(dtype: torch.dtype, rows: int, columns: int) -> c_void_p:
    """A dense column-major matrix."""
    layout = c_void_p()
    _call("cublasLtMatrixLayoutCreate", byref(layout), _DTYPES[dtype], rows, columns, rows)
    return layout

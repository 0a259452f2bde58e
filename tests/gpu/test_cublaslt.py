"""cuBLASLt by named algorithms: every one that is offered multiplies as torch does, in graphs as outside, within its
workspace; and what a plan names is what runs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from formats.measurements import Timing
from formats.plan import Choice, Plan, ProductChoice
from gplan.core import Phase
from gplan.errors import GplanError
from gplan.graphs.capture.device import CudaGraphDevice
from gplan.graphs.executor import Executor
from gplan.graphs.receipts import check_key, compositions
from gplan.graphs.synthetic import BatchMaker
from gplan.kernels import kernels_class, make_kernels
from gplan.kernels.flashinfer import cublaslt
from gplan.kernels.flashinfer.cublaslt import WORKSPACE_BYTES, CublasLt
from gplan.kernels.products import ProductShape
from gplan.models.base import Projection
from gplan.planning.options import PlanOptions
from gplan.planning.planner import make_plan
from gplan.planning.product_timing import choose_products
from gplan.planning.products import is_better, products_asked
from gplan.planning.profiler import Patience
from gplan.serving.startup import start_executor
from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.gpu.operators import CUDA, randn, relative_error
from tests.gpu.test_graphs import WIDE, executor_of, logits
from tests.graphs.drive import limits_of
from tests.kernels.shapes import make_shape

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]

SHAPES = (
    ProductShape(17, 320, 576, adds=False),
    ProductShape(72, 6144, 4096, adds=False),
    ProductShape(96, 4096, 4096, adds=True),
    ProductShape(129, 40, 1544, adds=True),
    ProductShape(192, 4096, 14336, adds=True),
    ProductShape(512, 1024, 4096, adds=False),
)

TOLERANCE = 6e-3
"""Inputs and results are rounded to 8 bits."""

FENCE = 1 << 16
"""Bytes after what a product may write."""

MARK = 0x5A


class Fenced:
    """Operands of a product, with bytes after results and workspace that nobody may write."""

    def __init__(self, shape: ProductShape, dtype: torch.dtype = torch.bfloat16) -> None:
        m, n, k, adds = shape
        self.adds, self._nbytes = adds, m * n * dtype.itemsize
        self.x, self.weight = randn(m, k, seed=1, dtype=dtype), randn(n, k, seed=2, scale=k**-0.5, dtype=dtype)
        self.before = randn(m, n, seed=3, dtype=dtype)
        self._out_bytes = torch.full((self._nbytes + FENCE,), MARK, dtype=torch.uint8, device=CUDA)
        self.out = self._out_bytes[: self._nbytes].view(dtype).view(m, n)
        self._workspace_bytes = torch.full((WORKSPACE_BYTES + FENCE,), MARK, dtype=torch.uint8, device=CUDA)
        self.workspace = self._workspace_bytes[:WORKSPACE_BYTES]

    def reset(self) -> None:
        self.out.copy_(self.before)

    def expected(self) -> Tensor:
        product = self.x.double() @ self.weight.double().T
        return product + self.before.double() if self.adds else product

    def is_intact(self) -> bool:
        fences = (self._out_bytes[self._nbytes :], self._workspace_bytes[WORKSPACE_BYTES:])
        return all(bool((fence == MARK).all()) for fence in fences)


@pytest.fixture(scope="module")
def library() -> CublasLt:
    return CublasLt(torch.bfloat16, CUDA)


def test_the_version_is_a_number_that_goes_with_torch() -> None:
    assert torch.version.cuda is not None
    assert cublaslt.version().startswith(torch.version.cuda.split(".")[0])
    assert kernels_class("flashinfer").blas_version() == cublaslt.version()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_algorithm_multiplies_right_and_within_its_workspace(shape: ProductShape, dtype: torch.dtype) -> None:
    library, operands = CublasLt(dtype, CUDA), Fenced(shape, dtype)
    expected = operands.expected()
    algorithms = library.algorithms(shape, 12)
    assert algorithms
    assert len(set(algorithms)) == len(algorithms)
    for algorithm in algorithms:
        product = library.product(shape, algorithm)
        operands.reset()
        product.run(operands.x, operands.weight, operands.out, operands.workspace)
        assert relative_error(operands.out, expected) < TOLERANCE, algorithm
        first = operands.out.clone()
        operands.reset()
        product.run(operands.x, operands.weight, operands.out, operands.workspace)
        assert torch.equal(operands.out, first), f"{algorithm} does not repeat"
        assert operands.is_intact(), algorithm
        assert product.num_runs == 2


@pytest.mark.parametrize("shape", SHAPES[1:5])
def test_replays_equal_eager_to_the_bit_and_take_no_memory(library: CublasLt, shape: ProductShape) -> None:
    graphs, operands = CudaGraphDevice(CUDA), Fenced(shape)
    for algorithm in library.algorithms(shape, 12):
        product = library.product(shape, algorithm)
        operands.reset()
        product.run(operands.x, operands.weight, operands.out, operands.workspace)
        eager = operands.out.clone()
        with torch.no_grad(), graphs.session():
            graphs.begin_segment()
            before = torch.cuda.memory_allocated()
            product.run(operands.x, operands.weight, operands.out, operands.workspace)
            assert torch.cuda.memory_allocated() == before
            segment = graphs.end_segment()
            for _ in range(2):
                operands.reset()
                operands.workspace.fill_(MARK)
                segment.replay()
                assert torch.equal(operands.out, eager), algorithm
        assert operands.is_intact()
    graphs.close()


@pytest.mark.parametrize("algorithm", ["", "00", "0f" * 63, "0F" * 64, "xy" * 64])
def test_what_is_no_algorithm_is_refused(library: CublasLt, algorithm: str) -> None:
    with pytest.raises(GplanError, match="is not an algorithm of cuBLASLt"):
        library.product(SHAPES[1], algorithm)


UNKNOWN = """
import torch
from gplan.errors import GplanError
from gplan.kernels.flashinfer.cublaslt import CublasLt
from gplan.kernels.products import ProductShape

try:
    CublasLt(torch.bfloat16, torch.device("cuda")).product(ProductShape(72, 6144, 4096, False), "ff" * 64)
except GplanError as error:
    print(error.message)
"""


def test_an_algorithm_that_the_library_does_not_know_is_refused() -> None:
    """In a process of its own: what the library does with such bytes is its own affair."""
    command = [sys.executable, "-c", UNKNOWN]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)
    assert "refuses the algorithm" in ended.stdout, ended.stderr


def last_algorithms(library: CublasLt, shapes: list[ProductShape]) -> dict[ProductShape, str]:
    """Of each shape the one the library thinks least of: surely not what it would take itself."""
    return {shape: library.algorithms(shape, 6)[-1] for shape in shapes}


def test_kernels_take_what_was_chosen_at_its_very_size_and_nowhere_else(library: CublasLt) -> None:
    k, n, m = 384, 640, 72
    shapes = [ProductShape(m, n, k, adds) for adds in (False, True)]
    shapes.append(ProductShape(m, 2 * n, k, adds=False))
    of_model = make_shape(dtype=torch.bfloat16, device=CUDA, head_dim=64, hidden_size=k)
    chosen = make_kernels("flashinfer", of_model, last_algorithms(library, shapes))
    plain = make_kernels("flashinfer", of_model)
    weight, gain = randn(n, k, seed=1, scale=0.1), randn(k, seed=2).abs()
    gate_up, bias = randn(2 * n, k, seed=3, scale=0.1), randn(n, seed=4)
    for rows in (m - 1, m, m + 1):
        x, residual = randn(rows, k, seed=rows), randn(rows, n, seed=rows + 1)
        out = torch.empty_like(residual)
        before = [chosen.products[shape].num_runs for shape in shapes]
        for kernels in (chosen, plain):
            added = residual.clone()
            kernels.linear_add(x, weight, added)
            found = (
                kernels.linear(x, weight),
                kernels.linear(x, weight, out=out).clone(),
                kernels.norm_linear(x, gain, 1e-5, weight),
                added,
                kernels.norm_gate_up(x, gain, 1e-5, gate_up),
                kernels.linear(x, weight, bias),
            )
            if kernels is chosen:
                ours = found
        for one, other in zip(ours, found, strict=True):
            assert relative_error(one, other) < TOLERANCE
        runs = [chosen.products[shape].num_runs - count for shape, count in zip(shapes, before, strict=True)]
        assert runs == ([3, 1, 1] if rows == m else [0, 0, 0])


def test_an_operand_of_another_shape_is_our_own_bug(library: CublasLt) -> None:
    shape = SHAPES[1]
    operands = Fenced(shape)
    product = library.product(shape, library.algorithms(shape, 1)[0])
    with pytest.raises(AssertionError, match="another product"):
        product.run(operands.x[1:], operands.weight, operands.out[1:], operands.workspace)
    with pytest.raises(AssertionError, match="another dtype"):
        product.run(operands.x.half(), operands.weight, operands.out, operands.workspace)
    with pytest.raises(AssertionError, match="workspace"):
        product.run(operands.x, operands.weight, operands.out, operands.workspace[1:])


# Whole models ---------------------------------------------------------------------------------------------------------

LIMITS = limits_of(page_size=16, max_batch=32)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("products"), "LlamaForCausalLM", dtype=torch.bfloat16, **WIDE)


def made_products(executor: Executor, library: CublasLt, sizes: tuple[int, ...]) -> tuple[ProductChoice, ...]:
    """For every product that is left to the library; times are made up."""
    asked = products_asked(executor.parts.model.projections(), kernels_class("flashinfer"), sizes)
    algorithms = last_algorithms(library, [each.shape for each in asked])
    times = {name: Timing(median_us=us, spread_us=0.1, runs=5) for name, us in (("chosen", 9.0), ("default", 10.0))}
    return tuple(ProductChoice(**shape._asdict(), algorithm=text, **times) for shape, text in algorithms.items())


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Iterator[Executor]:
    executor = executor_of(checkpoint, limits=LIMITS, decode_ladder=(8, 32))
    yield executor
    executor.close()


@pytest.fixture(scope="module")
def products(plain: Executor, library: CublasLt) -> tuple[ProductChoice, ...]:
    return made_products(plain, library, (8, 32, 64, 128))


def test_graphs_hold_the_chosen_products_and_equal_eager_to_the_bit(
    checkpoint: Path, plain: Executor, products: tuple[ProductChoice, ...]
) -> None:
    assert {each.m for each in products} == {32, 64, 128}
    executor = executor_of(checkpoint, limits=LIMITS, decode_ladder=(8, 32), products=products)
    table = executor.parts.kernels.products
    assert all(product.num_runs for product in table.values()), "warming up and capturing run each of them"
    batches = BatchMaker(LIMITS, executor.parts.kv_pool.num_pages, VOCAB_SIZE)
    for key in executor.keys:
        assert check_key(executor, key, compositions(executor, key, batches)).bitwise
    for batch in (batches.prefill(64), batches.prefill(128), batches.decode(32, 0)):
        assert relative_error(logits(executor, batch), logits(plain, batch)) < 0.2, batch.size
    executor.close()


def test_a_plan_carries_its_products_to_where_it_is_served(
    checkpoint: Path, products: tuple[ProductChoice, ...]
) -> None:
    options = PlanOptions(
        checkpoint=str(checkpoint),
        device="cuda",
        dtype="bfloat16",
        memory="8GiB",
        max_batch=32,
        max_len=256,
        chunk=128,
        decode_buckets=(8, 32),
        prefill_buckets=(32, 64, 128),
        decode_backend="full",
        prefill_backend="breakable",
        decode_variants=(),
    )
    plan = make_plan(options, lambda *_: None, Patience(2, 4, 0.01))
    assert plan.fingerprint.blas_version == cublaslt.version()
    (choice,) = (choice for choice in plan.choices if choice.field == "products")
    assert choice.value == str(len(plan.products))
    assert f"of {len(products)} shapes" in choice.reason
    assert all(is_better(each.chosen, each.default) for each in plan.products)
    serve_and_check(plan, checkpoint)
    serve_and_check(msgspec.structs.replace(plan, products=products, choices=without_products(plan)), checkpoint)
    broken = (msgspec.structs.replace(products[0], algorithm="0f" * 63), *products[1:])
    with pytest.raises(GplanError, match="is not an algorithm of cuBLASLt"):
        start_executor(msgspec.structs.replace(plan, products=broken), str(checkpoint), lambda *_: None)


def without_products(plan: Plan) -> tuple[Choice, ...]:
    return tuple(choice for choice in plan.choices if choice.field != "products")


def serve_and_check(plan: Plan, checkpoint: Path) -> None:
    """Starting compares graphs with eager execution; every product that the plan names has run by then."""
    executor = start_executor(plan, str(checkpoint), lambda *_: None).executor
    table = executor.parts.kernels.products
    assert set(table) == {ProductShape(each.m, each.n, each.k, each.adds) for each in plan.products}
    assert all(product.num_runs for product in table.values())
    assert {key.phase for key in executor.keys} == set(Phase)
    executor.close()


def test_products_of_a_large_model_are_timed_and_what_is_chosen_is_right(library: CublasLt) -> None:
    weights = tuple(randn(4096, 14336, seed=seed, scale=0.01) for seed in range(3))
    projections = (Projection(weights, adds=True), Projection(tuple(w.view(14336, 4096) for w in weights)))
    asked = products_asked(projections, kernels_class("flashinfer"), (24, 96, 192, 256, 512))
    graphs, told = CudaGraphDevice(CUDA), []
    with torch.no_grad():
        found = choose_products(asked, library, graphs, Patience(), lambda *stage: told.append(stage))
    graphs.close()
    assert (found.num_timed, told[-1]) == (10, ("products", 10, 10))
    for choice in found.choices:
        shape = ProductShape(choice.m, choice.n, choice.k, choice.adds)
        assert 1.0 < choice.chosen.median_us < choice.default.median_us < 1e4
        operands = Fenced(shape)
        operands.reset()
        library.product(shape, choice.algorithm).run(operands.x, operands.weight, operands.out, operands.workspace)
        assert relative_error(operands.out, operands.expected()) < TOLERANCE

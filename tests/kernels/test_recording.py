"""What a recorder sees: one call per attention, no value read on the host, and replays that follow the metadata."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gplan.kernels import make_kernels
from gplan.kernels.base import KernelShape, QKNorm, SamplingInputs
from tests.kernels.shapes import PagedRequests, make_shape


class Recorder(TorchDispatchMode):
    """Keeps calls with the tensors they gave, and runs them again into those tensors."""

    FORBIDDEN = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "_to_copy.cpu")

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in self.FORBIDDEN, f"{func} reads a value on the host"
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        for func, args, kwargs, result in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    def names(self) -> list[str]:
        return [str(func) for func, *_ in self.calls]


def _record(run: Callable[[], Any]) -> Recorder:
    with torch.inference_mode(), Recorder() as recorder:
        run()
    return recorder


@pytest.mark.parametrize("decode", [True, False])
def test_attention_is_one_call_that_reads_its_metadata_when_it_runs(decode: bool) -> None:
    queries = (1, 1, 1) if decode else (4, 1, 7)
    first = PagedRequests.make((9, 5, 30), queries, seed=1)
    second = PagedRequests.make((17, 33, 8), queries, seed=2)
    kernels = make_kernels("reference", first.shape)
    if decode:
        attention = kernels.decode_attention(3, in_graph=True)
    else:
        attention = kernels.prefill_attention(12, 3, in_graph=True)
    q, k, v, out = first.q.clone(), first.k_cache.clone(), first.v_cache.clone(), torch.zeros_like(first.q)
    attention.prepare(first.batch)
    recorder = _record(lambda: attention.run(q, k, v, out))
    kind = "decode" if decode else "prefill"
    assert recorder.names() == [f"gplan.paged_{kind}_attention.default"]
    torch.testing.assert_close(out.double(), first.expected(), rtol=1e-5, atol=1e-5)

    for buffer, value in ((q, second.q), (k, second.k_cache), (v, second.v_cache)):
        buffer.copy_(value)
    attention.prepare(second.batch)
    recorder.replay()
    torch.testing.assert_close(out.double(), second.expected(), rtol=1e-5, atol=1e-5)


def test_a_replay_without_prepare_would_be_wrong() -> None:
    """The negative control: with the metadata of another step the same replay gives something else."""
    first, second = PagedRequests.make((9,), (1,), seed=1), PagedRequests.make((30,), (1,), seed=2)
    attention = make_kernels("reference", first.shape).decode_attention(1, in_graph=True)
    k, v, out = first.k_cache.nan_to_num(), first.v_cache.nan_to_num(), torch.zeros_like(first.q)
    attention.prepare(first.batch)
    recorder = _record(lambda: attention.run(first.q, k, v, out))
    k.copy_(second.k_cache.nan_to_num())
    recorder.replay()
    assert not torch.allclose(out.double(), second.expected(), rtol=1e-3)


def _operators(shape: KernelShape) -> dict[str, Callable[[], Any]]:
    kernels, n = make_kernels("reference", shape), 5
    hidden, width = shape.hidden_size, shape.head_dim * (shape.num_qo_heads + 2 * shape.num_kv_heads)
    x, residual, norm = torch.randn(n, hidden), torch.randn(n, hidden), torch.randn(hidden)
    weight, bias = torch.randn(width, hidden), torch.randn(width)
    qkv, q = torch.randn(n, width), torch.zeros(n, shape.num_qo_heads, shape.head_dim)
    cache = torch.zeros(2, shape.num_pages, shape.page_size, shape.num_kv_heads, shape.head_dim)
    positions, slots = torch.arange(n), torch.arange(n) + 4
    table = torch.randn(shape.max_len, shape.head_dim)
    qk_norm = QKNorm(torch.randn(shape.head_dim), torch.randn(shape.head_dim), 1e-6)
    gate_up, logits = torch.randn(2 * hidden, hidden), torch.randn(n, shape.vocab_size)
    counts = torch.zeros(n, shape.vocab_size, dtype=torch.int32)
    ones = torch.ones(n)
    inputs = SamplingInputs(ones, ones.int() * 9, ones, ones * 0, positions, positions)
    return {
        "linear": lambda: kernels.linear(x, weight, bias),
        "linear out": lambda: kernels.linear(x, weight, out=qkv),
        "linear_add": lambda: kernels.linear_add(x, gate_up[:hidden], residual, norm),
        "norm_linear": lambda: kernels.norm_linear(x, norm, 1e-6, weight, bias),
        "norm_gate_up": lambda: kernels.norm_gate_up(x, norm, 1e-6, gate_up),
        "add_rms_norm": lambda: kernels.add_rms_norm(x, residual, norm, 1e-6),
        "rope_append": lambda: kernels.rope_append(qkv, q, positions, table, cache[0], cache[1], slots),
        "rope_append normed": lambda: kernels.rope_append(qkv, q, positions, table, cache[0], cache[1], slots, qk_norm),
        "sample": lambda: kernels.sample(logits, inputs),
        "penalties": lambda: kernels.apply_penalties(logits, counts, counts > 0, ones, ones, ones),
    }


@pytest.mark.parametrize("name", _operators(make_shape()))
def test_operators_read_no_value_on_the_host(name: str) -> None:
    assert _record(_operators(make_shape())[name]).calls


def test_the_recorder_would_notice() -> None:
    with pytest.raises(AssertionError, match="reads a value"):
        _record(lambda: torch.ones(3).sum().item())


def test_a_layer_is_few_calls() -> None:
    """Calls are what a replay pays for: views aside, a layer of the decoder makes no more than these."""
    names = []
    for name in ("norm_linear", "rope_append", "norm_gate_up", "linear_add"):
        names += _record(_operators(make_shape())[name]).names()
    views = ("view", "slice", "select", "t.default", "unsqueeze", "flatten", "aten.to.dtype")
    kernels = [name for name in names if not any(view in name for view in views)]
    assert len(kernels) <= 16, kernels


def test_operators_know_their_results_without_data() -> None:
    """What a compiler traces: the same operators on tensors that have no storage."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    shape = make_shape()
    with FakeTensorMode():
        kernels = make_kernels("reference", shape)
        q = torch.empty(3, shape.num_qo_heads, shape.head_dim)
        cache = torch.empty(shape.num_pages, shape.page_size, shape.num_kv_heads, shape.head_dim)
        kernels.decode_attention(3, in_graph=True).run(q, cache, cache, torch.empty_like(q))
        kernels.prefill_attention(3, 2, in_graph=True).run(q, cache, cache, torch.empty_like(q))
        ones = torch.ones(3)
        inputs = SamplingInputs(ones, ones.int(), ones, ones, ones.long(), ones.long())
        assert kernels.sample(torch.empty(3, shape.vocab_size), inputs).shape == (3,)


def test_operators_write_what_their_schemas_say() -> None:
    requests = PagedRequests.make((9, 5), (1, 1))
    batch, out = requests.batch, torch.zeros_like(requests.q)
    caches = requests.k_cache.nan_to_num(), requests.v_cache.nan_to_num()
    lists = [torch.from_numpy(values) for values in (batch.kv_indptr, batch.kv_indices, batch.kv_last_page_len)]
    ones, ids = torch.ones(2), torch.arange(2)
    for name, args in {
        "paged_decode_attention": (requests.q, *caches, *lists, out),
        "paged_prefill_attention": (requests.q, *caches, torch.from_numpy(batch.qo_indptr), *lists, out),
        "sample_tokens": (torch.randn(2, 9), ones, ids.int() + 3, ones, ones * 0, ids, ids, torch.zeros_like(ids)),
    }.items():
        operator = getattr(torch.ops.gplan, name).default
        torch.library.opcheck(operator, args, test_utils=("test_schema", "test_faketensor"))


def test_page_lists_are_copied_not_kept() -> None:
    requests = PagedRequests.make((9, 5), (1, 1))
    attention = make_kernels("reference", requests.shape).decode_attention(2, in_graph=True)
    attention.prepare(requests.batch)
    requests.batch.kv_indices[:] = np.int32(0)
    out = torch.zeros_like(requests.q)
    attention.run(requests.q, requests.k_cache, requests.v_cache, out)
    torch.testing.assert_close(out.double(), requests.expected(), rtol=1e-5, atol=1e-5)

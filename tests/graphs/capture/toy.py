"""A small decoder with what makes captures hard: a cache written in place, an attention operator that reads lengths
from memory, views, in-place updates, reductions; over static buffers that all sizes share. Runs on CPU and CUDA."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gplan.core import Phase, ShapeKey
from gplan.graphs.buffers import StaticBuffers
from gplan.graphs.capture.base import CaptureBackend
from gplan.graphs.capture.breakable import graph_break
from gplan.graphs.padding import Sentinel, Stale, Zero
from gplan.graphs.slots import Slot

MAX, HIDDEN, HEADS, VOCAB, LENGTH, LAYERS = 16, 32, 4, 50, 8, 3
DUMMY = 0

_library = torch.library.Library("toy", "DEF")
_library.define("attend(Tensor q, Tensor cache, Tensor rows, Tensor lengths, Tensor(a!) out) -> ()")


def _attend(q: Tensor, cache: Tensor, rows: Tensor, lengths: Tensor, out: Tensor) -> None:
    """Query i attends over the first lengths[i] places of cache row rows[i]."""
    keys = cache[rows].view(len(rows), LENGTH, HEADS, -1)
    scores = torch.einsum("nhd,nlhd->nhl", q.reshape(len(rows), HEADS, -1), keys)
    outside = torch.arange(LENGTH, device=q.device) >= lengths[:, None]
    scores.masked_fill_(outside[:, None], float("-inf"))
    out.copy_(torch.einsum("nhl,nlhd->nhd", scores.softmax(-1), keys).flatten(1))


_library.impl("attend", _attend, "CompositeExplicitAutograd")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)])
        self.qk = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.gate_up = nn.Linear(HIDDEN, 4 * HIDDEN, bias=False)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)


@dataclass(frozen=True)
class Step:
    """One decode step: tokens, cache rows (never the dummy) and lengths, each [n]."""

    ids: Tensor
    rows: Tensor
    lengths: Tensor

    @property
    def size(self) -> int:
        return len(self.ids)


def make_step(seed: int, size: int) -> Step:
    generator = torch.Generator().manual_seed(seed)
    return Step(
        ids=torch.randint(VOCAB, (size,), generator=generator),
        rows=1 + torch.randperm(MAX, generator=generator)[:size],
        lengths=torch.randint(1, LENGTH + 1, (size,), generator=generator, dtype=torch.int32),
    )


class Toy(nn.Module):
    """The model with its buffers and cache. `num_forwards` counts how often its Python ran."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(0)
        written_first = Stale("every row is written before it is read")
        slots = (
            Slot("ids", (MAX,), torch.int64, Zero()),
            Slot("rows", (MAX,), torch.int64, Zero()),
            Slot("lengths", (MAX,), torch.int32, Sentinel(1)),
            Slot("hidden", (MAX, HIDDEN), torch.float32, written_first),
            Slot("queries", (MAX, HIDDEN), torch.float32, written_first),
            Slot("attended", (MAX, HIDDEN), torch.float32, written_first),
            Slot("logits", (MAX, VOCAB), torch.float32, written_first),
        )
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])
        self.to(device)
        self.buffers_ = StaticBuffers(slots, device)
        self.cache = torch.randn(LAYERS, MAX + 1, LENGTH, HIDDEN).to(device)
        self.num_forwards = self.num_attends = 0

    def load(self, step: Step, padded: int) -> None:
        values = {"ids": step.ids.numpy(), "rows": step.rows.numpy(), "lengths": step.lengths.numpy()}
        self.buffers_.fill(values, real=step.size, padded=padded)

    def forward_of(self, size: int) -> Callable[[], tuple[Tensor, ...]]:
        """The forward over the first `size` rows: logits, in a static buffer, and a result that it allocates."""
        view = {name: self.buffers_.view(name, size) for name in self.buffers_}
        attend = graph_break(self._attend)
        return lambda: self(view, attend)

    def _attend(self, q: Tensor, cache: Tensor, rows: Tensor, lengths: Tensor, out: Tensor) -> None:
        self.num_attends += 1
        torch.ops.toy.attend(q, cache, rows, lengths, out)

    def forward(self, view: dict[str, Tensor], attend: Callable[..., None]) -> tuple[Tensor, ...]:
        self.num_forwards += 1
        x, rows, lengths, attended = view["hidden"], view["rows"], view["lengths"], view["attended"]
        x.copy_(self.embedding(view["ids"]))
        slots = rows * LENGTH + (lengths - 1)
        for layer, cache in zip(self.layers, self.cache, strict=True):
            q, k = layer.qk(layer.norms[0](x)).split(HIDDEN, dim=-1)
            cache.view(-1, HIDDEN).index_copy_(0, slots, k)
            view["queries"].copy_(q)
            attend(view["queries"], cache, rows, lengths, attended)
            x += layer.out(attended)
            gate, up = layer.gate_up(layer.norms[1](x)).chunk(2, dim=-1)
            x.add_(layer.down(F.silu(gate) * up))
        torch.mm(x, self.embedding.weight.t(), out=view["logits"])
        return view["logits"], x.square().mean(dim=-1)

    def result(self, outputs: tuple[Tensor, ...], size: int) -> list[Tensor]:
        """Copies of everything a step leaves behind: results of the real rows, and the cache but for its dummy row."""
        return [output[:size].clone() for output in outputs] + [self.cache[:, 1:].clone()]


def key_of(size: int) -> ShapeKey:
    return ShapeKey(Phase.DECODE, size)


def capture_all(toy: Toy, backend: CaptureBackend, sizes: Iterable[int], num_breaks: int = LAYERS) -> None:
    """Captures the sizes in the given order, on padding alone, in the session that is open."""
    with torch.no_grad():
        for size in sizes:
            toy.load(make_step(0, 0), size)
            toy.forward_of(size)()
            backend.capture(key_of(size), toy.forward_of(size), num_breaks)


def check_replay(toy: Toy, backend: CaptureBackend, size: int, step: Step) -> None:
    """Asserts that a replay leaves to the bit what the same forward leaves when run eagerly, at the same padded size
    and with poisoned buffers, and that no cache row but those of the step changes."""
    before = toy.cache.clone()
    toy.buffers_.poison()
    toy.load(step, size)
    with torch.no_grad():
        expected = toy.result(toy.forward_of(size)(), step.size)
    toy.cache.copy_(before)
    toy.buffers_.poison()
    toy.load(step, size)
    found = toy.result(backend.replay(key_of(size)), step.size)
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(one, other), f"replay of {size} differs from eager in part {index}"
    others = [row for row in range(1, MAX + 1) if row not in step.rows.tolist()]
    assert torch.equal(toy.cache[:, others], before[:, others]), "padded rows changed the cache of another request"

"""The arena: blocks that never overlap, come back when the last view dies, and are used again."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gplan.graphs.capture.arena import ALIGNMENT, POISON, Arena, Block


def take(arena: Arena, nbytes: int) -> Tensor:
    return arena.tensor_like(torch.empty(nbytes, dtype=torch.uint8))


@given(st.lists(st.one_of(st.integers(0, 3000), st.tuples(st.just("free"), st.integers(0, 20))), max_size=60))
def test_live_blocks_keep_their_contents(steps: list[int | tuple[str, int]]) -> None:
    arena = Arena(chunk_nbytes=4096, on_free=lambda block: block.memory.fill(POISON))
    live: list[tuple[int, Tensor]] = []
    for number, step in enumerate(steps):
        if isinstance(step, int):
            live.append((number, take(arena, step).fill_(number)))
        elif live:
            live.pop(step[1] % len(live))
        assert all(tensor.eq(value).all() for value, tensor in live)
        assert all(tensor.data_ptr() % ALIGNMENT == 0 for _, tensor in live)
        assert sum(tensor.nbytes for _, tensor in live) <= arena.live_nbytes <= arena.nbytes
    live.clear()
    assert arena.live_nbytes == 0


@given(st.lists(st.integers(1, 900), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_freed_neighbours_join(sizes: list[int], chance: object) -> None:
    arena = Arena(chunk_nbytes=4096)
    live = [take(arena, size) for size in sizes]
    chance.shuffle(live)
    while live:
        live.pop()
    whole = take(arena, 4096)
    assert arena.nbytes == 4096 == whole.nbytes


def test_freed_memory_is_used_again_where_it_fits_best() -> None:
    arena = Arena(chunk_nbytes=1024)
    large, small = take(arena, 1024), take(arena, 256)
    wall = take(arena, 64)
    addresses = large.data_ptr(), small.data_ptr()
    del large, small
    assert take(arena, 200).data_ptr() == addresses[1]
    assert take(arena, 1000).data_ptr() == addresses[0]
    assert wall is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_a_block_takes_the_layout_of_its_source(dtype: torch.dtype) -> None:
    arena = Arena()
    source = torch.ones(6, 4, 5).to(dtype).permute(2, 0, 1)[:, ::2]
    tensor = arena.tensor_like(source)
    assert (tensor.shape, tensor.stride(), tensor.dtype) == (source.shape, source.stride(), dtype)
    assert tensor.copy_(source).equal(source)


def test_a_source_that_repeats_elements_becomes_contiguous() -> None:
    tensor = Arena().tensor_like(torch.ones(1, 4).expand(3, 4))
    assert tensor.shape == (3, 4)
    assert tensor.is_contiguous()


def test_views_hold_the_block_and_aliases_do_not() -> None:
    freed: list[Block] = []
    arena = Arena(on_free=freed.append)
    tensor = arena.tensor_like(torch.empty(4, 4))
    view = tensor.t()[1:].view(torch.int32)
    alias = arena.alias(view)
    assert alias is not None
    assert (alias.data_ptr(), alias.shape, alias.stride()) == (view.data_ptr(), view.shape, view.stride())
    del tensor
    gc.collect()
    assert not freed
    del view
    gc.collect()
    assert len(freed) == 1
    assert arena.live_nbytes == 0
    alias.fill_(3)  # the chunk is still there


def test_other_tensors_have_no_alias() -> None:
    arena = Arena()
    held = take(arena, 64)
    assert arena.alias(torch.ones(4)) is None
    assert arena.alias(torch.empty(0)) is None
    assert arena.alias(held) is not None


def test_tensors_may_outlive_a_closed_arena() -> None:
    arena = Arena()
    tensor = take(arena, 64).fill_(7)
    arena.close()
    assert arena.nbytes == 0
    assert tensor.eq(7).all()
    del tensor
    gc.collect()

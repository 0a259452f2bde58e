"""Device storage of keys and values, in pages. Who holds which page is the scheduler's business, not this module's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """Shape of one page over all layers."""

    num_layers: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def bytes_per_page(self) -> int:
        return self.bytes_per_token * self.page_size


class KVPool:
    """Pages of keys and values. Page 0 is the dummy page: padded rows write and read only there.

    Zeroed at start, so that what lies past a request's last token is finite until a request has written it.

    Args:
        num_pages: pages in all, the dummy page included.
    """

    def __init__(self, layout: KVLayout, num_pages: int, device: torch.device) -> None:
        assert num_pages >= 2, "a pool needs the dummy page and one more"
        self.layout = layout
        self.num_pages = num_pages
        # [num_layers, 2, num_pages, page_size, num_kv_heads, head_dim]
        self.data = torch.zeros(
            (layout.num_layers, 2, num_pages, layout.page_size, layout.num_kv_heads, layout.head_dim),
            dtype=layout.dtype,
            device=device,
        )
        self.layers: tuple[tuple[Tensor, Tensor], ...] = tuple(
            (self.data[layer, 0], self.data[layer, 1]) for layer in range(layout.num_layers)
        )

    def fill_with_noise(self) -> None:
        """Puts other numbers at every place, as serving does. For what is measured or proven without serving first:
        reading zeros takes a device less power, so less time, and a wrong page of zeros looks like the right one."""
        self.data.normal_()

    @staticmethod
    def nbytes(layout: KVLayout, num_pages: int) -> int:
        return layout.bytes_per_page * num_pages

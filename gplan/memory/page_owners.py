"""Who wrote each page last, and whether every step reads only what its requests may. For checks; nothing depends on it.

A page belongs to whoever wrote its first token last, and nobody else goes on writing it. Who reads a page that another
wrote must begin with the same tokens. Who read a page once must read it as it was then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from gplan.core import Batch, Chunk, Request
from gplan.errors import KVError

_HINT = "Keys and values of requests are mixed up: this is a fault of gplan; report it with the plan."


@dataclass(frozen=True, slots=True, eq=False)
class _Owner:
    """Attributes:
    index: which of the request's pages it is.
    preemptions: of the request, when it began to write.
    """

    request: Request
    preemptions: int
    index: int

    def is_for(self, chunk: Chunk, index: int) -> bool:
        request = chunk.request
        return self.request is request and self.preemptions == request.num_preemptions and self.index == index


class PageOwners:
    """Owners of all pages, by the steps that were launched."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._owners: dict[int, _Owner] = {}
        self._read: dict[Request, tuple[int, list[_Owner]]] = {}
        """Of each request: how often it was preempted, and the owners of its full pages since."""

    def follow(self, batch: Batch) -> None:
        """Takes a step for launched.

        Raises:
            KVError: a request reads or writes a page that is another's by now.
        """
        for chunk in batch.chunks:
            self._write(chunk)
        for chunk in batch.chunks:
            self._check_read(chunk)
        for chunk in batch.chunks:
            request = chunk.request
            owners = [self._owners[page] for page in chunk.pages[: chunk.end // self._page_size]]
            self._read[request] = (request.num_preemptions, owners)
        if len(self._read) > 2 * len(batch.chunks) + 64:
            self._read = {request: read for request, read in self._read.items() if request.finish_reason is None}

    def _write(self, chunk: Chunk) -> None:
        first = chunk.start // self._page_size
        for index in range(first, len(chunk.pages)):
            page = chunk.pages[index]
            if index * self._page_size < chunk.start:
                owner = self._owners.get(page)
                if owner is None or not owner.is_for(chunk, index):
                    _refuse(chunk, f"goes on writing page {page}", owner)
            else:
                self._owners[page] = _Owner(chunk.request, chunk.request.num_preemptions, index)

    def _check_read(self, chunk: Chunk) -> None:
        request, full = chunk.request, chunk.start // self._page_size
        preemptions, seen = self._read.get(request, (-1, []))
        if preemptions != request.num_preemptions:
            seen = []
        for index in range(full - 1, -1, -1):
            page = chunk.pages[index]
            owner = self._owners.get(page)
            if index < len(seen):
                if owner is not seen[index]:
                    _refuse(chunk, f"reads page {page}, which was freed and written again", owner)
            elif owner is None or not (owner.is_for(chunk, index) or self._begins_alike(owner, request, index)):
                _refuse(chunk, f"reads page {page}, whose tokens are others", owner)

    def _begins_alike(self, owner: _Owner, request: Request, index: int) -> bool:
        end = (index + 1) * self._page_size
        known = owner.request.tokens[:end]
        return owner.index == index and len(known) == end and known == request.tokens[:end]


def _refuse(chunk: Chunk, what: str, owner: _Owner | None) -> NoReturn:
    whose = "nobody wrote it" if owner is None else f"request {owner.request.id} wrote it as its page {owner.index}"
    raise KVError(f"freed page: request {chunk.request.id} {what}: {whose}", _HINT)

"""Which requests run in the next step: continuous batching with chunked prefill over pages. No torch, no clock.

Owns the waiting requests, request rows, pages and every `Request` handed to it. Does not own the KV pool's bytes, the
choice of a captured graph, or tokens' values.

Policy, in this order at every step:

1. Every request past its prompt decodes one token. Nothing is ever put before a decode.
2. What is left of `limits.chunk` tokens goes to prompts, strictly in the order in which they were let in: a prompt
   gets a token only when all before it are finished in this step. So the running requests are always some that decode
   and then, younger than all of them, some that prefill.
3. The next waiting request, by the turns among clients that `WaitingQueue` keeps, is let in when a row is free and the
   pages of all its tokens are, beside one page for each running request, itself included, that has yet to grow. It then
   holds those pages from its first chunk on, so that prompts under way never compete for pages. Its first tokens need
   not be computed where the prefix cache knows their pages.
4. With a `Packer`, and while nobody waits, the last prompt of a step that would be padded far is cut at a bucket below,
   where that ends it sooner. The next step computes its rest and lets nobody in.

When a decode finds no free page, the youngest running request gives all of its pages back, waits at the head of the
queue, and later computes its tokens again (preemption by recomputation). Who was let in first never yields and any
request fits the pool alone, so every request finishes.

Steps may be scheduled before the results of earlier ones are read (`update` lags behind `schedule`). Lengths advance
when a step is scheduled; a request whose last token is under way is not scheduled again, and gives its row and pages
back at the next `schedule`. Rows and pages may change hands while an older step that uses them is still running,
because steps run on the device in the order in which they were scheduled: whatever the old owner's step reads and
writes there is done before the new owner's begins, and the new owner reads no token or location that it did not write.

Pages are shared only when they are full, so nobody writes to them again, and only once a step that fills them is
decided on. Who shares them reads them in a later step, which runs later, or in that very step: each layer stores keys
and values of all tokens of a step before it attends to any.

The rule of decoding first, and yielding by the youngest, is that of vLLM's scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence

from formats.plan import Limits
from gplan.core import Batch, Chunk, FinishReason, Phase, Request
from gplan.scheduling.advance import Advance
from gplan.scheduling.entry import Decoders, Entry
from gplan.scheduling.holdings import Holdings, PrefixCounts, check_limits
from gplan.scheduling.packing import Packer
from gplan.scheduling.times import prompt_pairs
from gplan.scheduling.waiting import WaitingQueue


class Scheduler:
    """Continuous batching over `num_pages` pages.

    A batch that `schedule` returned must be launched before any other call: a launch reads its requests' rows.

    Args:
        limits: `chunk` bounds the tokens of a step, `max_batch` its requests, `max_len` prompt and output of one.
        num_pages: pages of the KV pool, the dummy page included.
        packer: moves cuts of prompts to buckets; None leaves them where the chunk ends.

    Raises:
        FitError: the pages do not hold one request of `max_len`.
        GplanError: `chunk` is below `max_batch`, so that a step could not decode every request.
    """

    def __init__(self, limits: Limits, num_pages: int, packer: Packer | None = None) -> None:
        self.limits = limits
        self._packer = packer
        self._holdings = Holdings(limits, num_pages)
        check_limits(limits, self._holdings.num_pages)
        self._entries: dict[str, Entry] = {}
        self._waiting = WaitingQueue()
        self._prefilling: list[Entry] = []
        self._decoders = Decoders(limits.page_size)
        self._complete: list[Entry] = []
        """Whose last token is under way; they still hold their rows and pages."""
        self._repeatable = False
        self._is_cut = False
        """The last step left a part of a prompt to the next, which takes nobody in."""
        self.num_preemptions = 0
        self.max_running = limits.max_batch
        """Requests that may run at once; those that run already are left alone."""

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished, those that only await a result included."""
        return bool(self._entries)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._decoders) + len(self._prefilling) + len(self._complete)

    @property
    def num_pages(self) -> int:
        """Pages that can be given out: all but the dummy."""
        return self._holdings.num_pages

    @property
    def num_free_pages(self) -> int:
        """Pages that can be given out, cached ones included that no request uses."""
        return self._holdings.num_free

    @property
    def num_held_pages(self) -> int:
        return self._holdings.num_held

    @property
    def prefix_counts(self) -> PrefixCounts:
        return self._holdings.prefix_counts

    def add(self, request: Request) -> None:
        """Queues a request. The caller has checked that its prompt is not empty and leaves room for one token."""
        assert request.id not in self._entries, f"request {request.id} is being served already"
        assert 1 <= request.prompt_len == len(request.tokens) < self.limits.max_len, request.prompt_len
        assert request.params.max_tokens >= 1
        assert request.finish_reason is None
        end = min(request.prompt_len + request.params.max_tokens, self.limits.max_len)
        entry = self._entries[request.id] = Entry(request, end)
        self._repeatable = False
        self._waiting.join(entry)

    def abort(self, request_id: str) -> None:
        """Ends a request now; its pages and row are free at once. One that is unknown or finished is left alone."""
        entry = self._entries.get(request_id)
        if entry is not None:
            self._finish(entry, FinishReason.ABORT)

    def schedule(self) -> Batch | None:
        """The next step, or None when nothing can run before a result is read or a request arrives."""
        self._release_complete()
        self._make_room_for_decodes()
        prompts = self._fill(self.limits.chunk - len(self._decoders))
        if not prompts and not self._decoders:
            return None
        chunks = [self._advance(entry, 1) for entry in self._decoders.entries]
        self._complete = self._decoders.step()
        for entry, length in prompts:
            chunk = self._advance(entry, length)
            chunks.append(chunk)
            if chunk.samples:
                self._end_prompt(entry)
        return Batch(Phase.PREFILL if prompts else Phase.DECODE, tuple(chunks))

    def update(self, batch: Batch, tokens: Sequence[int]) -> list[Request]:
        """Takes a step's results in. Steps come back in the order in which they were scheduled.

        Args:
            tokens: one per chunk that samples, in the order of the batch. Tokens of requests that finished meanwhile
                are dropped; a stop token ends its request and is not appended.

        Returns:
            The requests that finished in this step, in the order of the batch.
        """
        finished = []
        sampled = [chunk for chunk in batch.chunks if chunk.samples]
        for chunk, token in zip(sampled, tokens, strict=True):
            request = chunk.request
            if request.finish_reason is not None:
                continue
            assert len(request.tokens) == chunk.end, "results came back out of order"
            reason = self._take(request, token)
            if reason is not None:
                self._finish(self._entries[request.id], reason)
                finished.append(request)
        return finished

    def take_back(self, batch: Batch) -> list[Request]:
        """Undoes a step that could not be run, once the results of all before it were read: its requests give their
        pages back and wait, in the same order, to be computed again.

        Returns:
            Those of its requests that are unfinished.
        """
        put_back = []
        for chunk in reversed(batch.chunks):
            if chunk.request.finish_reason is None:
                chunk.request.num_pending -= chunk.samples
                assert chunk.request.num_pending == 0, "a result before the step is unread"
                put_back.append(self._put_back(self._entries[chunk.request.id], 0))
        # Pages that the step was to fill could be shared from when it was decided on; nobody uses them any more.
        self._holdings.forget_idle()
        return put_back[::-1]

    def advance(self) -> Advance | None:
        """Decides the next step exactly as `schedule` does and takes its results for read, with tokens that end
        nothing: for simulations. No batch is built, tokens are counted and not kept. Not to be mixed with `schedule`.
        """
        self._release_complete()
        preempted = self._make_room_for_decodes()
        num_decodes, cached_tokens = len(self._decoders), self._decoders.cached_tokens
        prompts = self._fill(self.limits.chunk - num_decodes)
        self._repeatable = not prompts
        if not prompts and not num_decodes:
            return None
        self._complete = self._decoders.step()
        size, pairs, ended = num_decodes, 0, []
        for entry, length in prompts:
            request = entry.request
            size += length
            pairs += prompt_pairs(request.cached_len, length)
            request.cached_len += length
            if request.cached_len == len(request.tokens):
                request.tokens.append(0)
                ended.append(request)
                self._end_prompt(entry)
        complete = self._completed() if self._complete else []
        return Advance(
            phase=Phase.PREFILL if prompts else Phase.DECODE,
            size=size,
            num_requests=num_decodes + len(prompts),
            num_decodes=num_decodes,
            pages=self._holdings.num_held,
            cached_tokens=cached_tokens,
            pairs=pairs,
            prompts=ended,
            complete=complete,
            preempted=preempted,
        )

    def repeat(self) -> tuple[int, list[Request]] | None:
        """Takes one more step like the one that `advance` just took, if that is what `advance` would do: a step of the
        same decodes alone. Returns how many pages it gave out and whom it completes, or None where only `advance` can
        tell what comes next.

        Who could not be admitted before that step cannot be now: rows are the same, and each page that a decode takes
        was kept for it.
        """
        if not self._repeatable or self._complete:
            return None
        short = self._decoders.short()
        more_pages = len(short)
        if more_pages:
            if more_pages > self._holdings.num_free:
                return None
            self._holdings.grow(short)
        self._complete = self._decoders.step()
        return more_pages, self._completed() if self._complete else []

    def check(self) -> None:
        """Pages and rows add up: none lost, none shared, none of the dummies given out. Looks at all: for tests."""
        self._holdings.check([*self._decoders.entries, *self._prefilling, *self._complete], self._waiting)
        self._waiting.check()
        lengths = [self._decoders.cached_len(entry) for entry in self._decoders.entries]
        assert self._decoders.cached_tokens == sum(lengths)

    def _completed(self) -> list[Request]:
        """Those whose last token was taken for read."""
        for entry in self._complete:
            # Those that `advance` only counted.
            entry.request.tokens += [0] * (entry.end - len(entry.request.tokens))
            self._waiting.settle(entry, entry.end)
            del self._entries[entry.request.id]
        return [entry.request for entry in self._complete]

    # Pages ------------------------------------------------------------------------------------------------------

    def _make_room_for_decodes(self) -> list[Request]:
        """Gives each decode the page it needs; the youngest yield while there are too few. Returns those that did."""
        preempted = []
        while len(self._decoders.short()) > self._holdings.num_free:
            preempted.append(self._preempt_youngest())
        self._holdings.grow(self._decoders.short())
        return preempted

    def _preempt_youngest(self) -> Request:
        if self._prefilling:
            entry = self._prefilling[-1]
            cached = entry.request.cached_len
        else:
            entry = self._decoders.entries[-1]
            cached = self._decoders.cached_len(entry)
            # Those that `advance` only counted.
            entry.request.tokens += [0] * (cached - entry.request.cached_len)
        return self._put_back(entry, cached)

    def _put_back(self, entry: Entry, num_cached: int) -> Request:
        """Takes row and pages from a running request, which waits from now on to be computed again."""
        self._withdraw(entry, num_cached, is_over=False)
        request = entry.request
        request.cached_len = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.put_back(entry)
        entry.waiting = True
        return request

    def _release_complete(self) -> None:
        for entry in self._complete:
            self._holdings.release(entry, entry.end - 1, is_over=True)
        self._complete = []

    # Prompts ----------------------------------------------------------------------------------------------------

    def _fill(self, budget: int) -> list[tuple[Entry, int]]:
        """Shares `budget` tokens out among prompts: (entry, tokens) in order of arrival."""
        parts: list[tuple[Entry, int]] = []
        for entry in self._prefilling:
            if budget == 0:
                break
            parts.append((entry, min(budget, entry.num_uncomputed)))
            budget -= parts[-1][1]
        num_lent, is_cut, self._is_cut = 0, self._is_cut and bool(parts), False
        while budget > 0 and self._waiting and not is_cut:
            num_lent = self._lend(parts, num_lent)
            if not self._can_admit():
                break
            entry = self._admit()
            parts.append((entry, min(budget, entry.num_uncomputed)))
            budget -= parts[-1][1]
        if self._packer is not None and parts and not self._waiting:
            self._cut_to_bucket(self._packer, parts)
        self._lend(parts, num_lent)
        return parts

    def _lend(self, parts: list[tuple[Entry, int]], start: int) -> int:
        """As soon as all of a prompt is in a step, its pages can be shared. Returns how many parts were looked at."""
        for entry, length in parts[start:]:
            if length == entry.num_uncomputed:
                self._holdings.lend(entry, entry.request.num_tokens)
        return len(parts)

    def _cut_to_bucket(self, packer: Packer, parts: list[tuple[Entry, int]]) -> None:
        """Leaves a part of the last prompt to the next step where it then ends sooner."""
        entry, length = parts[-1]
        if length == entry.num_uncomputed:
            size = len(self._decoders) + sum(part[1] for part in parts)
            leave = packer.tokens_to_leave(size, length, len(self._decoders) + len(parts) - 1)
            parts[-1] = (entry, length - leave)
            self._is_cut = leave > 0

    def _can_admit(self) -> bool:
        entry = self._waiting.next
        if entry is None or entry.request.num_pending or self.num_running >= self.max_running:
            return False
        return self._holdings.fits(entry)

    def _admit(self) -> Entry:
        entry = self._waiting.let_in()
        entry.waiting = False
        self._holdings.settle(entry)
        self._prefilling.append(entry)
        return entry

    # Steps and results ------------------------------------------------------------------------------------------

    def _advance(self, entry: Entry, length: int) -> Chunk:
        """Moves a request's lengths past a chunk, as if the step were done."""
        request = entry.request
        start = request.cached_len
        end = request.cached_len = start + length
        samples = end == len(request.tokens) + request.num_pending
        if samples:
            request.num_pending += 1
            if entry.pages is None:
                entry.pages = tuple(request.pages)
            return Chunk(request, start, length, entry.pages, True)
        return Chunk(request, start, length, tuple(request.pages[: self._holdings.pages_of(end)]), False)

    def _end_prompt(self, entry: Entry) -> None:
        """Files the oldest request that prefills under what comes next: decodes, or nothing more."""
        assert self._prefilling[0] is entry
        del self._prefilling[0]
        if entry.request.cached_len + 1 == entry.end:
            self._complete.append(entry)
        else:
            self._decoders.join(entry)

    def _take(self, request: Request, token: int) -> FinishReason | None:
        request.num_pending -= 1
        if token in request.params.stop_token_ids:
            return FinishReason.STOP
        request.tokens.append(token)
        return FinishReason.LENGTH if len(request.tokens) == self._entries[request.id].end else None

    def _withdraw(self, entry: Entry, num_cached: int, *, is_over: bool) -> None:
        """Takes a running request out of its group, and its row and pages from it, as `Holdings.release` does."""
        if entry.base is not None:
            self._decoders.leave(entry)
        else:
            queue = self._complete if entry in self._complete else self._prefilling
            queue.remove(entry)
        self._holdings.release(entry, num_cached, is_over=is_over)

    def _finish(self, entry: Entry, reason: FinishReason) -> None:
        """Ends a request wherever it is. Tokens of it that are still under way will be dropped."""
        if entry.waiting:
            self._waiting.give_up(entry)
        elif entry.request.is_running:
            self._withdraw(entry, entry.request.cached_len, is_over=True)
        entry.request.num_pending = 0
        entry.request.finish_reason = reason
        self._waiting.settle(entry, len(entry.request.tokens))
        del self._entries[entry.request.id]
        self._repeatable = False

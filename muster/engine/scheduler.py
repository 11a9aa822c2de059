"""Which tokens are computed in the next step: continuous batching, chunked prefill, preemption. No torch.

Requests are admitted first come, first served, but for one whose beginning a running prompt is just computing: it
waits until it finds those pages in the cache, so the answers to one prompt share its computation. One that has only its
newest token to compute always goes ahead; what is left of the token budget goes to prompts in chunks, half of it to the
oldest and half to the shortest, so that no long prompt holds up short ones and none starves. When pages run out the
youngest running request gives its own back and waits at the head of the queue; its tokens are kept and computed again
later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from muster.engine.pages import PagePool
from muster.engine.request import Request


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens `[start, end)` of one request, to be computed in this step."""

    request: Request
    start: int
    end: int

    @property
    def completes(self) -> bool:
        """Whether no known token is left after it, so that the next one can be chosen."""
        return self.end == len(self.request.tokens)


def shares(pending: Sequence[int], budget: int) -> list[int]:
    """How many of a step's `budget` tokens each prompt gets, oldest first, given how many it has left."""
    if not pending:
        return []
    given = [0] * len(pending)
    given[0] = min(pending[0], budget - min(sum(pending[1:]), budget // 2))
    budget -= given[0]
    for index in sorted(range(1, len(pending)), key=pending.__getitem__):
        given[index] = min(pending[index], budget)
        budget -= given[index]
    return given


def _room(prompts: Sequence[Request], budget: int) -> bool:
    """Whether another prompt would get a share beside these."""
    left = [request.pending for request in prompts]
    return sum(left) < budget or sum(left[1:]) < budget // 2


class Scheduler:
    """The queue, the running requests and the pages they hold.

    Args:
        pool: the pages.
        max_batch: most requests that run at once.
        token_budget: most tokens in one step.

    Attributes:
        waiting: oldest first.
        running: in the order of their admission.
        preemptions: how often a request had to give its pages back.
    """

    def __init__(self, pool: PagePool, max_batch: int, token_budget: int) -> None:
        self.pool = pool
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = 0
        self._max_batch = max_batch
        self._token_budget = token_budget

    def __iter__(self) -> Iterator[Request]:
        yield from self.running
        yield from self.waiting

    def schedule(self) -> list[Work]:
        """The next step's work: the newest tokens of answers, then prompts; empty when nothing is left to do."""
        singles = self._singles()
        budget = self._token_budget - len(singles)
        prompts = [request for request in self.running if request.pending > 1]
        for request in tuple(self.waiting):
            if len(self.running) == self._max_batch or not _room(prompts, budget):
                break
            if any(self._precedes(prompt, request) for prompt in prompts):
                continue
            if not self._admit(request):
                break
            self.waiting.remove(request)
            self.running.append(request)
            prompts.append(request)
        parts = zip(prompts, shares([request.pending for request in prompts], budget), strict=True)
        return singles + [Work(one, one.computed, one.computed + part) for one, part in parts if part]

    def commit(self, work: list[Work]) -> None:
        """The work is in the cache now."""
        for item in work:
            request = item.request
            assert request.table is not None
            request.computed = item.end
            self.pool.commit(request.table, request.tokens, item.end)

    def remove(self, request: Request, *, forget: bool = False) -> None:
        """Drops a request and frees its pages at once; with `forget` they are not reused for their content."""
        if request.table is not None:
            self.pool.release(request.table, forget=forget)
            request.table = None
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def restart(self) -> None:
        """Trusts nothing in the cache: every running request goes back to the head of the queue, every page is free."""
        self.pool = PagePool(self.pool.count, self.pool.page_size)
        # An interrupted step may have left a request in both places, never in none.
        self.waiting = deque(dict.fromkeys(request for request in self if request.finish_reason is None))
        self.running = []
        for request in self.waiting:
            request.rewind()

    def check_integrity(self) -> None:
        """Asserts that every page is accounted for and every running request holds what it has computed."""
        assert all(request.table is None and request.computed == 0 for request in self.waiting)
        tables = [request.table for request in self.running if request.table is not None]
        assert len(tables) == len(self.running)
        assert all(r.computed <= len(t.pages) * self.pool.page_size for r, t in zip(self.running, tables, strict=True))
        self.pool.check_integrity(tables)

    def _singles(self) -> list[Work]:
        """The newest token of every answer for which there are pages, oldest first, within the budget."""
        work: list[Work] = []
        for request in tuple(self.running):
            if request.pending != 1 or len(work) == self._token_budget:
                continue
            # An older one may have taken its pages just now.
            if request.table is not None and self._make_room(request, request.computed + 1):
                work.append(Work(request, request.computed, request.computed + 1))
        return work

    def _precedes(self, prompt: Request, request: Request) -> bool:
        """Whether the next page that `prompt` fills is one that `request` begins with, too."""
        size = self.pool.page_size
        end = (prompt.computed // size + 1) * size
        # Two long prompts nearly always differ in one page if they differ at all: the whole is compared last.
        return (
            end < len(request.tokens)
            and prompt.tokens[end - size : end] == request.tokens[end - size : end]
            and prompt.tokens[:end] == request.tokens[:end]
        )

    def _admit(self, request: Request) -> bool:
        """Gives a waiting request pages for all its known tokens, so that only its answer can run out of them."""
        table = self.pool.begin(request.tokens)
        if not self.pool.reserve(table, len(request.tokens)):
            self.pool.release(table)
            return False
        request.table = table
        request.computed = table.found * self.pool.page_size
        if request.cached_prompt is None:
            request.cached_prompt = request.computed
        return True

    def _make_room(self, request: Request, length: int) -> bool:
        """Preempts the youngest until the request has pages for `length` tokens; False if that was itself."""
        assert request.table is not None
        while not self.pool.reserve(request.table, length):
            victim = self.running[-1]
            assert victim.table is not None
            self.pool.release(victim.table)
            victim.table, victim.computed = None, 0
            self.waiting.appendleft(victim)
            self.running.pop()
            self.preemptions += 1
            if victim is request:
                return False
        return True

"""Pages of the key-value cache: who holds which, and which can serve another sequence with the same start. No torch.

Full pages whose tokens are known stand in a trie: a node is one page, its path from the root spells all tokens up to
its end. A sequence finds its longest cached prefix by walking it, so tokens are compared, never only their hashes.
Pages that no sequence holds stay in the trie until they are needed; the one used longest ago goes first.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class _Node:
    """One full page in the trie; `parent` is None for the root and for a node that was taken out."""

    page: int
    tokens: tuple[int, ...]
    parent: _Node | None
    children: dict[tuple[int, ...], _Node] = field(default_factory=dict)

    def subtree(self) -> Iterator[_Node]:
        stack = [self]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node


@dataclass(eq=False, slots=True)
class PageTable:
    """The pages of one sequence, in order; `found` of them came from the cache."""

    pages: array[int] = field(default_factory=lambda: array("i"))
    found: int = 0
    _nodes: list[_Node] = field(default_factory=list)


class PagePool:
    """All pages of the cache.

    Args:
        count: P, pages.
        page_size: S, tokens per page.
    """

    def __init__(self, count: int, page_size: int) -> None:
        self.count = count
        self.page_size = page_size
        self._free = dict.fromkeys(range(count - 1, -1, -1))
        self._idle: dict[int, None] = {}
        self._holders = [0] * count
        self._nodes: dict[int, _Node] = {}
        self._root = _Node(-1, (), None)

    @property
    def available(self) -> int:
        """Pages that no sequence holds."""
        return len(self._free) + len(self._idle)

    def begin(self, tokens: Sequence[int]) -> PageTable:
        """A table that holds the longest cached prefix of `tokens`, short of their last one, which must be computed."""
        table = PageTable()
        node = self._root
        for end in range(self.page_size, len(tokens), self.page_size):
            child = node.children.get(tuple(tokens[end - self.page_size : end]))
            if child is None:
                break
            node = child
            self._hold(node.page)
            table.pages.append(node.page)
            table._nodes.append(node)
        table.found = len(table.pages)
        return table

    def reserve(self, table: PageTable, length: int) -> bool:
        """Gives the table pages for `length` tokens; False, and nothing changes, if there are not enough."""
        missing = -(-length // self.page_size) - len(table.pages)
        if missing > self.available:
            return False
        while len(self._free) < missing:
            self._forget(self._nodes[next(iter(self._idle))])
        for _ in range(missing):
            page = self._take(table.pages[-1] + 1 if table.pages else None)
            self._holders[page] = 1
            table.pages.append(page)
        return True

    def commit(self, table: PageTable, tokens: Sequence[int], length: int) -> None:
        """Lets others find the pages that the first `length` tokens, now computed, have filled."""
        nodes = table._nodes
        for index in range(len(nodes), length // self.page_size):
            parent = nodes[-1] if nodes else self._root
            if parent.parent is None and parent is not self._root:
                return
            key = tuple(tokens[index * self.page_size : (index + 1) * self.page_size])
            node = parent.children.get(key)
            if node is None:
                node = _Node(table.pages[index], key, parent)
                parent.children[key] = self._nodes[node.page] = node
            nodes.append(node)

    def release(self, table: PageTable, *, forget: bool = False) -> None:
        """Takes the table's pages back; with `forget`, what this sequence computed is never found again."""
        if forget and len(table._nodes) > table.found:
            self._forget(table._nodes[table.found])
        # The end of a sequence goes first when room is needed: its beginning is more likely to be shared.
        for page in reversed(table.pages):
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if page in self._nodes:
                    self._idle[page] = None
                else:
                    self._free[page] = None
        table.pages = array("i")
        table._nodes = []

    def check_integrity(self, tables: Iterable[PageTable]) -> None:
        """Asserts that the live `tables`, the free list, the idle pages and the trie account for every page once."""
        held = Counter(page for table in tables for page in table.pages)
        assert [held[page] for page in range(self.count)] == self._holders, "holders differ from the tables"
        parts = Counter([*self._free, *self._idle, *held.keys()])
        assert parts == Counter(range(self.count)), "a page is lost or counted twice"
        assert self._idle.keys() <= self._nodes.keys(), "an idle page cannot be found"
        assert not self._free.keys() & self._nodes.keys(), "a free page can be found"
        reachable = {node.page: node for node in self._root.subtree() if node is not self._root}
        assert reachable == self._nodes, "the trie and its index differ"
        for node in reachable.values():
            assert len(node.tokens) == self.page_size
            assert node.parent is not None
            assert node.parent.children[node.tokens] is node

    def _take(self, wanted: int | None) -> int:
        """A free page: the wanted one if it can be had, since attention reads consecutive pages in place."""
        if wanted in self._free:
            del self._free[wanted]
            return wanted
        return self._free.popitem()[0]

    def _hold(self, page: int) -> None:
        if self._holders[page] == 0:
            del self._idle[page]
        self._holders[page] += 1

    def _forget(self, node: _Node) -> None:
        """Takes a node and all that continues it out of the trie; pages among them that nobody holds become free."""
        if node.parent is None:
            return
        del node.parent.children[node.tokens]
        for lost in node.subtree():
            lost.parent = None
            del self._nodes[lost.page]
            if lost.page in self._idle:
                del self._idle[lost.page]
                self._free[lost.page] = None

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from muster.engine.pages import PagePool

SIZE = 4


def filled(pool, tokens):
    """A table whose tokens are all computed."""
    table = pool.begin(tokens)
    assert pool.reserve(table, len(tokens))
    pool.commit(table, tokens, len(tokens))
    return table


def test_a_prefix_is_found_up_to_the_last_full_page_that_leaves_a_token_to_compute():
    pool = PagePool(8, SIZE)
    tokens = list(range(12))
    table = filled(pool, tokens)
    assert pool.begin([*tokens, 99]).pages.tolist() == table.pages.tolist()
    assert pool.begin(tokens).found == 2
    assert pool.begin(tokens[:11]).found == 2
    assert pool.begin([*tokens[:4], 77, *tokens[5:]]).found == 1
    assert pool.begin([77, *tokens[1:]]).found == 0


def test_the_same_page_of_tokens_after_another_prefix_is_not_found():
    pool = PagePool(8, SIZE)
    filled(pool, [1, 1, 1, 1, 5, 5, 5, 5])
    filled(pool, [2, 2, 2, 2, 6, 6, 6, 6])
    assert pool.begin([2, 2, 2, 2, 5, 5, 5, 5, 0]).found == 1


def test_tokens_with_equal_hashes_are_told_apart():
    class Same(int):
        def __hash__(self):
            return 1

    pool = PagePool(8, SIZE)
    filled(pool, [Same(token) for token in (1, 2, 3, 4)])
    assert pool.begin([Same(token) for token in (1, 2, 3, 4, 9)]).found == 1
    assert pool.begin([Same(token) for token in (1, 2, 3, 5, 9)]).found == 0


def test_the_page_used_longest_ago_is_evicted_first_and_ends_before_beginnings():
    pool = PagePool(4, SIZE)
    old, new = [1] * 8, [2] * 8
    for tokens in (old, new):
        pool.release(filled(pool, tokens))
    pool.release(pool.begin([*old, 0]))
    table = pool.begin([3] * 4)
    assert pool.reserve(table, 4)
    found = {first: pool.begin([first] * 8 + [0]).found for first in (1, 2)}
    assert found == {1: 2, 2: 1}


def test_a_held_page_is_never_evicted():
    pool = PagePool(3, SIZE)
    held = filled(pool, [1] * 8)
    other = pool.begin([2])
    assert pool.reserve(other, 4)
    assert not pool.reserve(other, 5)
    assert set(other.pages).isdisjoint(held.pages)
    pool.check_integrity([held, other])


def test_a_refused_reservation_changes_nothing():
    pool = PagePool(3, SIZE)
    table = pool.begin([1])
    assert pool.reserve(table, 4)
    before = table.pages.tolist()
    assert not pool.reserve(table, 17)
    assert table.pages.tolist() == before
    assert pool.available == 2


def test_forgotten_pages_are_not_found_but_the_shared_beginning_is():
    pool = PagePool(8, SIZE)
    pool.release(filled(pool, [1] * 4))
    table = filled(pool, [1] * 4 + [2] * 4)
    pool.release(table, forget=True)
    assert pool.begin([1] * 4 + [2] * 4 + [0]).found == 1


def test_a_lone_sequence_gets_consecutive_pages_again_and_again():
    pool = PagePool(16, SIZE)
    for first in range(3):
        table = filled(pool, [first] * 20)
        assert table.pages.tolist() == list(range(table.pages[0], table.pages[0] + 5))
        pool.release(table, forget=True)


class PoolMachine(RuleBasedStateMachine):
    """Sequences over a two-letter alphabet share, split, evict and forget pages in any order."""

    def __init__(self):
        super().__init__()
        self.pool = PagePool(9, 2)
        self.live = []

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12))
    def begin(self, tokens):
        table = self.pool.begin(tokens)
        assert table.found * 2 < len(tokens)
        self.live.append((table, tokens, table.found * 2))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), extra=st.lists(st.integers(0, 1), max_size=5))
    def compute(self, data, extra):
        index = data.draw(st.integers(0, len(self.live) - 1))
        table, tokens, _ = self.live[index]
        tokens = tokens + extra
        pages, available = len(table.pages), self.pool.available
        needed = -(-len(tokens) // 2) - pages
        assert self.pool.reserve(table, len(tokens)) == (needed <= available)
        if needed <= available:
            self.pool.commit(table, tokens, len(tokens))
            self.live[index] = (table, tokens, len(tokens))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), forget=st.booleans())
    def release(self, data, forget):
        table, _, _ = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.pool.release(table, forget=forget)

    @invariant()
    def accounts_for_every_page(self):
        self.pool.check_integrity([table for table, _, _ in self.live])
        assert self.pool.available == self.pool.count - len({page for t, _, _ in self.live for page in t.pages})

    @invariant()
    def a_page_of_two_sequences_holds_the_same_prefix_in_both(self):
        meaning = {}
        for table, tokens, length in self.live:
            for index, page in enumerate(table.pages[: length // 2]):
                prefix = tokens[: (index + 1) * 2]
                assert meaning.setdefault(page, prefix) == prefix

    def teardown(self):
        for table, _, _ in self.live:
            self.pool.release(table)
        self.pool.check_integrity([])
        assert self.pool.available == self.pool.count


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestPoolMachine = PoolMachine.TestCase

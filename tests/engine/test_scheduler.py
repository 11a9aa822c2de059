"""The scheduler against a model that is only counted: which tokens are computed when, and who holds which pages."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.engine.pages import PagePool
from muster.engine.request import Request, SamplingParams
from muster.engine.scheduler import Scheduler, shares
from muster.engine.text import TextStream

SIZE = 4


def request(prompt, answer=8):
    return Request(
        prompt=tuple(prompt),
        params=SamplingParams(),
        limit=len(prompt) + answer,
        stop_ids=frozenset(),
        seed=0,
        text=TextStream(None),
    )


def scheduler(requests, pages=64, max_batch=8, token_budget=16):
    made = Scheduler(PagePool(pages, SIZE), max_batch, token_budget)
    made.waiting.extend(requests)
    return made


def next_token(request):
    """Depends on everything before it, so that a wrong prefix would show."""
    return hash(tuple(request.tokens)) % 1000


def step(scheduler):
    """One step: every known token is computed in order and once."""
    work = scheduler.schedule()
    scheduler.check_integrity()
    for item in work:
        assert item.start == item.request.computed
        assert item.end <= len(item.request.table.pages) * SIZE
    ready = [item.request for item in work if item.completes]
    scheduler.commit(work)
    for one in ready:
        one.append(next_token(one), None)
        if one.finish_reason:
            scheduler.remove(one)
    scheduler.check_integrity()
    return work


def run(scheduler):
    steps = 0
    while list(scheduler):
        assert step(scheduler), "nothing was scheduled while requests live"
        steps += 1
        assert steps < 10_000
    return steps


def test_a_prompt_is_computed_in_chunks_of_the_budget():
    only = request(range(10), answer=1)
    made = scheduler([only], token_budget=4)
    spans = []
    while not only.finish_reason:
        spans += [(item.start, item.end) for item in step(made)]
    assert spans == [(0, 4), (4, 8), (8, 10)]


def test_a_request_that_answers_goes_ahead_of_a_prompt_and_the_prompt_takes_the_rest():
    answering, prompt = request([1, 2]), request(range(10, 40))
    made = scheduler([answering], token_budget=5)
    step(made)
    made.waiting.append(prompt)
    work = step(made)
    assert [(item.request, item.end - item.start) for item in work] == [(answering, 1), (prompt, 4)]


def test_requests_are_admitted_first_come_first_served_even_if_a_later_one_would_fit():
    big, small = request(range(12)), request([1])
    holder = request(range(100, 108), answer=4)
    made = scheduler([holder, big, small], pages=4)
    step(made)
    assert made.running == [holder]
    assert list(made.waiting) == [big, small]


def test_the_youngest_gives_its_pages_back_and_is_the_first_to_resume():
    old, young, last = request(range(4), answer=8), request(range(10, 14), answer=8), request([7])
    made = scheduler([old, young, last], pages=4, max_batch=2)
    while not made.preemptions:
        step(made)
    assert made.running == [old]
    assert next(iter(made.waiting)) is young
    assert (young.table, young.computed) == (None, 0)
    run(made)
    assert made.pool.available == 4


def test_a_preempted_request_resumes_from_what_is_still_cached():
    old, young = request(range(4), answer=12), request(range(10, 22), answer=12)
    made = scheduler([old, young], pages=6)
    while not made.preemptions:
        step(made)
    while young.table is None:
        step(made)
    assert young.table.found > 0
    assert young.cached_prompt == 0


def test_the_answers_to_one_prompt_compute_its_full_pages_once_and_hold_up_nobody():
    same = [request(range(18)) for _ in range(3)]
    other = request(range(100, 103))
    made = scheduler([*same, other], token_budget=8)
    first = step(made)
    assert [item.request for item in first] == [same[0], other]
    works = [*first, *step(made), *step(made), *step(made)]
    computed = [sum(item.end - item.start for item in works if item.request is one and item.start < 18) for one in same]
    assert computed == [18, 2, 2]
    run(made)
    assert {tuple(one.answer) for one in same} == {tuple(same[0].answer)}


def test_a_request_that_waits_for_pages_goes_on_when_the_one_that_computes_them_is_gone():
    first, second = request(range(18)), request(range(18))
    made = scheduler([first, second], token_budget=8)
    step(made)
    assert second.table is None
    made.remove(first)
    assert [item.request for item in step(made)] == [second]


def test_max_batch_bounds_the_running_requests():
    made = scheduler([request([index]) for index in range(9)], max_batch=3)
    step(made)
    assert (len(made.running), len(made.waiting)) == (3, 6)


def test_removing_a_request_frees_its_pages_at_once_wherever_it_is():
    running, waiting = request(range(8)), request(range(20))
    made = scheduler([running, waiting], pages=5)
    step(made)
    made.remove(running)
    made.remove(waiting)
    made.remove(waiting)
    assert list(made) == []
    made.check_integrity()
    assert made.pool.available == 5


def test_a_restart_keeps_every_living_request_once_and_in_order():
    requests = [request([index] * 3) for index in range(4)]
    made = scheduler(requests, max_batch=2)
    step(made)
    made.running.append(made.waiting[0])
    made.restart()
    assert list(made) == requests
    made.check_integrity()
    run(made)


@given(pending=st.lists(st.integers(1, 50), max_size=8), budget=st.integers(0, 40))
def test_the_oldest_prompt_gets_half_of_the_budget_or_all_it_needs_and_nothing_is_wasted(pending, budget):
    given = shares(pending, budget)
    assert sum(given) == min(sum(pending), budget)
    assert all(0 <= part <= left for part, left in zip(given, pending, strict=True))
    if pending:
        assert given[0] >= min(pending[0], budget - budget // 2)


def test_a_short_prompt_overtakes_a_long_one_that_goes_on():
    long, short = request(range(100, 200), answer=1), request([1, 2, 3], answer=1)
    made = scheduler([long], token_budget=8)
    step(made)
    made.waiting.append(short)
    assert [(item.request, item.end - item.start) for item in step(made)] == [(long, 5), (short, 3)]
    assert short.finish_reason == "length"


@pytest.mark.parametrize("token_budget", [2, 5, 8])
def test_a_long_prompt_is_computed_however_many_short_ones_keep_coming(token_budget):
    long = request(range(1000, 1040), answer=1)
    made = scheduler([long], token_budget=token_budget, max_batch=2)
    for number in range(100):
        made.waiting.append(request([number, number, number], answer=1))
        step(made)
        if long.finish_reason:
            break
    # Every step gives it half of what the last token of the other one leaves, at least.
    assert number <= 40 / (token_budget // 2) + 1


@settings(max_examples=150, deadline=None)
@given(
    shapes=st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=14), st.integers(1, 12)), min_size=1, max_size=7
    ),
    pages=st.integers(7, 20),
    max_batch=st.integers(1, 5),
    token_budget=st.integers(1, 20),
    chance=st.randoms(use_true_random=False),
)
def test_every_request_ends_with_its_own_tokens_whatever_the_limits(shapes, pages, max_batch, token_budget, chance):
    requests = [request(prompt, answer) for prompt, answer in shapes]
    alone = [request(one.prompt, one.limit - len(one.prompt)) for one in requests]
    for one in alone:
        run(scheduler([one]))

    made = scheduler([], pages, max_batch, token_budget)
    arrivals = list(requests)
    aborted = []
    while arrivals or list(made):
        while arrivals and chance.random() < 0.5:
            made.waiting.append(arrivals.pop(0))
        if list(made) and chance.random() < 0.03:
            aborted.append(chance.choice(list(made)))
            made.remove(aborted[-1])
        step(made)
    for one, expected in zip(requests, alone, strict=True):
        assert one in aborted or one.tokens == expected.tokens
    assert made.pool.available == pages


@pytest.mark.parametrize("token_budget", [1, 2])
def test_a_budget_below_the_number_of_answering_requests_starves_nobody(token_budget):
    requests = [request([index], answer=3) for index in range(5)]
    run(scheduler(requests, token_budget=token_budget))
    assert all(one.finish_reason == "length" for one in requests)

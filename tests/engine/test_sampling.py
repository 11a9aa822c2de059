"""Sampling against a slow implementation in plain Python that sorts, sums and draws one token at a time."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.engine.request import Request, SamplingParams
from muster.engine.sampling import Sampled, best, draw, penalise, sample, uniform
from muster.engine.text import TextStream
from muster.errors import NumericsError

INF = float("inf")


def request(params, prompt=(0,), answer=(), seed=0):
    made = Request(
        prompt=tuple(prompt), params=params, limit=1000, stop_ids=frozenset(), seed=seed, text=TextStream(None)
    )
    made.tokens += answer
    return made


def slow_penalties(logits, tokens, prompt_length, params):
    out = list(logits)
    for token in set(tokens):
        out[token] = (
            out[token] / params.repetition_penalty if out[token] > 0 else out[token] * params.repetition_penalty
        )
    for token, count in Counter(tokens[prompt_length:]).items():
        out[token] -= params.presence_penalty + params.frequency_penalty * count
    return out


def slow_distribution(logits, params):
    """Kept ids in the order in which they are drawn from, with their probabilities."""
    top = max(logits)
    weights = [math.exp((value - top) / params.temperature) for value in logits]
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    kept = order[: params.top_k or None]
    total = sum(weights[token] for token in kept)
    if params.top_p < 1:
        mass, nucleus = 0.0, []
        for token in kept:
            if mass >= params.top_p:
                break
            nucleus.append(token)
            mass += weights[token] / total
        kept = nucleus
    if params.top_p >= 1 and not params.top_k:
        kept = sorted(kept)
    kept = [token for token in kept if weights[token] >= params.min_p]
    total = sum(weights[token] for token in kept)
    return [(token, weights[token] / total) for token in kept if weights[token] > 0]


def slow_draw(logits, params, number):
    mass = 0.0
    for token, probability in slow_distribution(logits, params):
        mass += probability
        if number < mass:
            return token
    return None


OPTIONS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.05, 0.7, 1.0, 1.9]),
        "top_k": st.sampled_from([0, 1, 2, 5, 300, 10_000]),
        "top_p": st.sampled_from([1.0, 0.999, 0.9, 0.31, 1e-9]),
        "min_p": st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    }
)


@settings(max_examples=300, deadline=None)
@given(options=OPTIONS, vocab=st.sampled_from([1, 2, 7, 400, 3000]), seed=st.integers(0, 2**32), ties=st.booleans())
def test_every_mix_of_options_draws_what_the_slow_implementation_draws(options, vocab, seed, ties):
    params = SamplingParams(**options)
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 3
    if ties:
        logits = logits.round()
    logits[seed % vocab] = -INF if vocab > 1 else 0.0
    distribution = slow_distribution(logits.tolist(), params)
    edges = torch.tensor([p for _, p in distribution]).double().cumsum(0).tolist()
    for step in range(8):
        number = uniform(seed, step)
        if min(abs(number - edge) for edge in edges) > 1e-9:
            assert draw(logits, params, number) == slow_draw(logits.tolist(), params, number)


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.3}, {"temperature": 3.0}])
def test_frequencies_follow_the_distribution(options):
    params = SamplingParams(**{"temperature": 1.0, **options})
    logits = torch.tensor([0.0, 2.0, 1.0, -1.0, 1.5])
    draws = 4000
    counts = Counter(draw(logits, params, uniform(5, position)) for position in range(draws))
    expected = dict(slow_distribution(logits.tolist(), params))
    assert set(counts) <= set(expected)
    for token, probability in expected.items():
        assert abs(counts[token] / draws - probability) < 4 * math.sqrt(probability * (1 - probability) / draws) + 1e-9


@settings(max_examples=200, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 9), min_size=1, max_size=20),
    split=st.integers(1, 20),
    repetition=st.sampled_from([1.0, 1.3, 0.7]),
    presence=st.sampled_from([0.0, 0.5, -2.0]),
    frequency=st.sampled_from([0.0, 0.25, -1.0]),
    seed=st.integers(0, 1000),
)
def test_penalties_equal_the_slow_implementation(tokens, split, repetition, presence, frequency, seed):
    params = SamplingParams(repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency)
    logits = torch.randn(10, generator=torch.Generator().manual_seed(seed))
    before = logits.clone()
    split = min(split, len(tokens))
    expected = slow_penalties(logits.tolist(), tokens, split, params)
    assert penalise(logits, tokens, split, params).tolist() == pytest.approx(expected, rel=1e-12)
    assert torch.equal(logits, before)


def test_greedy_takes_the_lowest_id_among_equals():
    logits = torch.full((3, 70_000), -1.0)
    logits[:, [69_999, 40_000, 123]] = 5.0
    assert [one.token_id for one in sample(logits, [request(SamplingParams())] * 3)] == [123] * 3


def test_greedy_with_penalties_takes_the_largest_penalised_logit():
    logits = torch.tensor([[3.0, 2.0, 1.0]])
    params = SamplingParams(frequency_penalty=1.5)
    assert sample(logits, [request(params, answer=[0])])[0].token_id == 1
    assert sample(logits, [request(params, answer=[0, 0, 1])])[0].token_id == 2


def test_best_breaks_ties_by_lowest_id_at_every_count():
    logits = torch.tensor([1.0, 2.0, 2.0, 0.0, 2.0, 1.0])
    for count in range(1, 8):
        assert best(logits, count).tolist() == [1, 2, 4, 0, 5, 3][:count]


def test_a_row_does_not_depend_on_its_neighbours_or_its_place():
    logits = torch.randn(4, 500, generator=torch.Generator().manual_seed(0))
    params = [SamplingParams(temperature=1.0, top_p=0.9), SamplingParams(), SamplingParams(temperature=0.5, top_k=9)]
    params.append(SamplingParams(temperature=1.0, min_p=0.1, repetition_penalty=1.2))
    requests = [request(one, seed=index) for index, one in enumerate(params)]
    together = sample(logits, requests)
    order = [2, 0, 3, 1]
    assert sample(logits[order], [requests[index] for index in order]) == [together[index] for index in order]
    for index in range(4):
        assert sample(logits[index : index + 1], [requests[index]]) == [together[index]]


def test_randomness_depends_on_seed_and_position_only_and_is_uniform():
    numbers = [uniform(seed, position) for seed in range(40) for position in range(100)]
    assert len(set(numbers)) == len(numbers)
    assert all(0 <= number < 1 for number in numbers)
    for quantile in (0.1, 0.5, 0.9):
        assert abs(sum(number < quantile for number in numbers) / len(numbers) - quantile) < 0.03
    assert uniform(7, 3) == uniform(7, 3)
    assert uniform((1 << 64) - 1, 0) < 1


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"repetition_penalty": 2.0}, {"logprobs": 2}])
@pytest.mark.parametrize(
    ("values", "found"),
    [([0.0, float("nan"), 1.0], "1 NaN of 3"), ([0.0, INF, 1.0], "1 +inf of 3"), ([-INF] * 3, "3 -inf of 3")],
)
def test_a_row_that_is_no_distribution_is_an_error_of_its_own_request_alone(options, values, found):
    params = SamplingParams(**options)
    logits = torch.tensor([[0.0, 4.0, 1.0], values, [9.0, -INF, -INF]])
    good, bad, masked = sample(logits, [request(params, prompt=[0]) for _ in range(3)])
    assert isinstance(bad, NumericsError)
    assert bad.found == found
    assert isinstance(good, Sampled)
    assert isinstance(masked, Sampled)
    assert masked.token_id == 0


def test_logprobs_are_those_of_the_raw_logits():
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(temperature=0.3, top_k=2, repetition_penalty=1.5, logprobs=3)
    [result] = sample(logits, [request(params)])
    raw = torch.log_softmax(logits[0].double(), 0)
    assert result.logprob.token_id == result.token_id
    assert result.logprob.logprob == pytest.approx(float(raw[result.token_id]), abs=1e-12)
    values, ids = raw.topk(3)
    assert [token for token, _ in result.logprob.best] == ids.tolist()
    assert [value for _, value in result.logprob.best] == pytest.approx(values.tolist(), abs=1e-12)


def test_every_position_draws_its_own_number():
    params = SamplingParams(temperature=1.0)
    answers = [[0] * length for length in range(30)]
    drawn = sample(torch.zeros(30, 1000), [request(params, answer=answer, seed=9) for answer in answers])
    assert len({one.token_id for one in drawn}) > 25


def test_presence_and_frequency_penalties_leave_the_prompt_alone():
    params = SamplingParams(presence_penalty=5.0, frequency_penalty=5.0)
    logits = torch.tensor([[3.0, 2.0]])
    assert sample(logits, [request(params, prompt=[0, 0])])[0].token_id == 0
    assert sample(logits, [request(params, prompt=[1], answer=[0])])[0].token_id == 1


def test_the_smallest_number_does_not_draw_an_impossible_token():
    assert draw(torch.tensor([-INF, 1.0, 2.0]), SamplingParams(temperature=1.0), 0.0) == 1


def test_no_rows_need_no_tokens():
    assert sample(torch.empty(0, 10), []) == []


@pytest.mark.parametrize("temperature", [1e-300, 1e-5, 1e6])
def test_extreme_temperatures_stay_finite(temperature):
    token = draw(torch.tensor([1.0, 3.0, 2.0]), SamplingParams(temperature=temperature), 0.5)
    assert token == 1

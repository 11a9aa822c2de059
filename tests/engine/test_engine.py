"""The engine on real tiny checkpoints: what a request gets depends on nothing but the request."""

import pytest
import torch

from engine import tiny
from muster import LLM, SamplingParams
from muster.errors import RequestError, UsageError

PROMPTS = [
    [5, 9, 200, 31],
    [7] * 13,
    list(range(40, 65)),
    [1],
    [5, 9, 200, 31, 88, 17, 3, 100, 101, 102, 103, 104, 9],
    list(range(90, 60, -1)),
]
PARAMS = [
    SamplingParams(max_tokens=20, ignore_eos=True),
    SamplingParams(max_tokens=18, ignore_eos=True, temperature=1.0, seed=11),
    SamplingParams(max_tokens=25, ignore_eos=True, temperature=0.8, top_p=0.9, seed=3),
    SamplingParams(max_tokens=30, ignore_eos=True, repetition_penalty=1.2),
    SamplingParams(max_tokens=16, ignore_eos=True, temperature=1.3, top_k=20, min_p=0.02, seed=5),
    SamplingParams(max_tokens=12, ignore_eos=True, presence_penalty=0.5, frequency_penalty=0.2),
]


def open_llm(directory, **options):
    return LLM(directory, **{"page_size": tiny.PAGE, "threads": 1, "unproven": True, **options})


def tokens_of(outputs):
    return [output.token_ids for output in outputs]


@pytest.fixture(scope="module")
def alone(pair):
    """Each request on an engine of its own."""
    return tokens_of(
        open_llm(pair[1]).generate([prompt], params)[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)
    )


def check_at_rest(llm):
    llm.engine.check_integrity()
    assert llm.engine.idle


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"token_budget": 1},
        {"token_budget": 3},
        {"token_budget": 16},
        {"max_batch": 2},
        {"page_size": 1},
        {"page_size": 32},
    ],
    ids=str,
)
def test_a_request_gets_the_same_tokens_in_a_mixed_batch_whatever_the_limits(pair, alone, options):
    llm = open_llm(pair[1], **options)
    assert tokens_of(llm.generate(PROMPTS, PARAMS)) == alone
    check_at_rest(llm)


@pytest.mark.parametrize("pages", [13, 20])
def test_a_request_gets_the_same_tokens_when_it_is_preempted(pair, alone, pages):
    llm = open_llm(pair[1], kv_bytes=pages * tiny.PAGE_BYTES)
    assert tokens_of(llm.generate(PROMPTS, PARAMS)) == alone
    assert llm.stats.preemptions > 0
    check_at_rest(llm)


def test_a_request_gets_the_same_tokens_with_a_prefix_hit_and_skips_its_computation(pair, alone):
    llm = open_llm(pair[1])
    for run in range(2):
        before = llm.stats
        outputs = llm.generate(PROMPTS, PARAMS)
        used = llm.stats.since(before)
        assert tokens_of(outputs) == alone
        cached = [output.usage.cached_tokens for output in outputs]
        if run:
            assert cached == [(len(prompt) - 1) // tiny.PAGE * tiny.PAGE for prompt in PROMPTS]
        assert used.cached_tokens == sum(cached)
        # The last token of an answer is not computed.
        answered = sum(output.usage.completion_tokens - 1 for output in outputs)
        assert used.prefill_tokens + used.decode_tokens == sum(map(len, PROMPTS)) - sum(cached) + answered
    check_at_rest(llm)


def test_greedy_equals_transformers_token_for_token(pair):
    model, directory = pair
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    for prompt, output in zip(PROMPTS, open_llm(directory).generate(PROMPTS, params), strict=True):
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=60, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert list(output.token_ids) == expected[0, len(prompt) :].tolist()


def test_logprobs_are_the_log_softmax_of_transformers_logits(pair):
    model, directory = pair
    prompt = PROMPTS[2]
    params = SamplingParams(max_tokens=10, ignore_eos=True, temperature=1.5, seed=4, top_k=30, logprobs=4)
    [output] = open_llm(directory, token_budget=7).generate([prompt], params)
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *output.token_ids]])).logits[0, len(prompt) - 1 : -1]
    expected = torch.log_softmax(logits.double(), -1)
    for row, token_id, found in zip(expected, output.token_ids, output.logprobs, strict=True):
        assert found.token_id == token_id
        assert found.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
        values, ids = row.topk(4)
        assert [token for token, _ in found.best] == ids.tolist()
        assert [value for _, value in found.best] == pytest.approx(values.tolist(), abs=1e-4)


def test_seeds_are_reproducible_and_differ(llm):
    def answer(seed):
        params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=1.0, seed=seed)
        return llm.generate([PROMPTS[0]], params)[0].token_ids

    assert answer(1) == answer(1)
    assert len({answer(seed) for seed in range(5)}) == 5
    assert answer(None) != answer(None)


def test_logprobs_do_not_change_the_tokens_and_are_absent_unless_asked_for(llm):
    plain, counted = (
        llm.generate([PROMPTS[0]], SamplingParams(max_tokens=5, logprobs=logprobs))[0] for logprobs in (None, 0)
    )
    assert plain.logprobs is None
    assert [one.token_id for one in counted.logprobs] == list(plain.token_ids)
    assert all(one.best == () for one in counted.logprobs)


def test_a_nan_in_one_tokens_embedding_fails_only_the_requests_that_contain_it(tmp_path):
    model, poison = tiny.mixtral(), 78
    clean = open_llm(tiny.save(model, tmp_path / "clean")).generate(PROMPTS, PARAMS)
    assert not any(poison in (*prompt, *one.token_ids) for prompt, one in zip(PROMPTS[:2], clean[:2], strict=True))
    with torch.no_grad():
        model.model.embed_tokens.weight[poison] = float("nan")
    llm = open_llm(tiny.save(model, tmp_path / "poisoned"), kv_bytes=24 * tiny.PAGE_BYTES)
    for _ in range(2):
        outputs = llm.generate([PROMPTS[0], [poison], PROMPTS[1], [1, 2, 3, 4, 5, poison, 6]], PARAMS[:4])
        assert [output.finish_reason for output in outputs] == ["length", "error", "length", "error"]
        assert tokens_of([outputs[0], outputs[2]]) == tokens_of(
            open_llm(tmp_path / "clean").generate([PROMPTS[0], PROMPTS[1]], [PARAMS[0], PARAMS[2]])
        )
        for output in (outputs[1], outputs[3]):
            assert output.token_ids == ()
            assert "NaN" in output.error
            assert output.usage.cached_tokens == 0
    check_at_rest(llm)


@pytest.mark.parametrize("eos", [tiny.EOS, tiny.EOS_OF_GENERATION])
def test_every_end_of_sequence_id_of_either_config_ends_an_answer(eos, tmp_path):
    model = tiny.mixtral()
    prompt = PROMPTS[0]
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0, -1]
        best = int(logits.argmax())
        model.lm_head.weight[eos] = model.lm_head.weight[best] * 1.01 * (1 if logits[best] > 0 else -1)
    llm = open_llm(tiny.save(model, tmp_path))
    [output] = llm.generate([prompt], SamplingParams(max_tokens=5))
    assert (output.token_ids, output.finish_reason, output.stopped_by) == ((eos,), "stop", eos)
    assert output.text == ""
    [output] = llm.generate([prompt], SamplingParams(max_tokens=5, ignore_eos=True))
    assert output.token_ids[0] == eos
    assert len(output.token_ids) == 5


def test_a_stop_id_of_the_request_ends_it_even_if_eos_is_ignored(llm):
    [free] = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=10, ignore_eos=True))
    stop = free.token_ids[4]
    [output] = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=10, ignore_eos=True, stop_token_ids=[stop]))
    assert output.finish_reason == "stop"
    assert output.stopped_by == stop
    assert output.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert output.text == llm.tokenizer.decode(output.token_ids[:-1])


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers_before_anything_is_queued(llm):
    with pytest.raises(RequestError) as caught:
        llm.generate([[1], [1] * tiny.CONTEXT, []])
    text = str(caught.value)
    assert f"found {tiny.CONTEXT} tokens, expected at most {tiny.CONTEXT - 1}" in text
    assert "prompt 1" in text
    assert "prompt 2" in text
    assert "prompt 0" not in text
    assert llm.engine.idle


def test_a_prompt_that_the_cache_can_never_hold_is_refused_with_both_numbers(directory):
    llm = open_llm(directory, kv_bytes=3 * tiny.PAGE_BYTES)
    with pytest.raises(RequestError, match=r"found 12 tokens, expected at most 11: the key-value cache holds 12"):
        llm.generate([[1] * 12])
    [output] = llm.generate([[1] * 11], SamplingParams(max_tokens=50, ignore_eos=True))
    assert (len(output.token_ids), output.finish_reason) == (1, "length")
    check_at_rest(llm)


def test_the_context_ends_an_answer_with_reason_length(llm):
    [output] = llm.generate([[3] * (tiny.CONTEXT - 7)], SamplingParams(max_tokens=1000, ignore_eos=True))
    assert (len(output.token_ids), output.finish_reason) == (7, "length")


@pytest.mark.parametrize("prompt", [[], [-1], [260], [5, 10_000]])
def test_a_prompt_without_tokens_or_with_foreign_ones_is_refused(llm, prompt):
    with pytest.raises(RequestError, match="prompt"):
        llm.generate([prompt])


def test_every_bad_engine_argument_is_reported_at_once(directory):
    with pytest.raises(UsageError) as caught:
        open_llm(directory, page_size=0, max_batch=0, token_budget=0, max_context=tiny.CONTEXT + 1)
    assert [reason.thing for reason in caught.value.reasons] == ["context", "page_size", "max_batch", "token_budget"]


def test_a_cache_smaller_than_a_page_is_refused_with_both_numbers(directory):
    with pytest.raises(UsageError, match=rf"found 100, expected at least {tiny.PAGE_BYTES:,}"):
        open_llm(directory, kv_bytes=100)


def test_params_must_be_one_or_one_per_prompt(llm):
    with pytest.raises(RequestError, match="one per prompt"):
        llm.generate([[1], [2], [3]], [SamplingParams()] * 2)


def test_an_aborted_request_frees_its_pages_at_once_and_the_others_go_on(llm):
    engine = llm.engine
    [expected] = llm.generate([PROMPTS[0]], PARAMS[0])
    requests = [engine.request(prompt, PARAMS[0]) for prompt in PROMPTS[:3]]
    for request in requests:
        engine.add(request)
    for _ in range(3):
        engine.step()
    free = engine.free_pages
    engine.abort(requests[1])
    assert engine.free_pages > free
    engine.abort(requests[1])
    engine.check_integrity()
    while not engine.idle:
        engine.step()
    assert [request.finish_reason for request in requests] == ["length", "abort", "length"]
    assert requests[0].output().token_ids == expected.token_ids
    assert engine.step() == []

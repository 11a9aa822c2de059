import random
import sys

import pytest

from engine import tiny
from muster import LLM, SamplingParams
from muster.engine.engine import Engine
from muster.engine.tokenizer import Tokenizer
from muster.errors import CheckpointError, RequestError
from muster.plan import Role

PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
MESSAGES = [{"role": "user", "content": "hello"}]


def test_a_streamed_answer_is_the_generated_one_in_pieces(llm):
    [expected] = llm.generate("some text", PARAMS)
    pieces = list(llm.stream("some text", PARAMS))
    assert "".join(piece.text for piece in pieces) == expected.text
    assert [piece.output for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert len(pieces) > 3
    last = pieces[-1].output
    assert (last.text, last.token_ids, last.finish_reason) == (expected.text, expected.token_ids, "length")


def test_text_is_the_tokenizers_decoding_of_the_answer(llm):
    [output] = llm.generate("some text", PARAMS)
    assert output.text == llm.tokenizer.decode(output.token_ids)
    assert output.usage.prompt_tokens == len("some text")
    assert output.usage.completion_tokens == len(output.token_ids) == 24


def test_a_text_and_its_token_ids_are_the_same_prompt(llm):
    assert llm.generate("abc", PARAMS)[0].token_ids == llm.generate([llm.tokenizer.encode("abc")], PARAMS)[0].token_ids


def test_a_stop_string_ends_the_answer_across_tokens_and_is_not_part_of_it(llm):
    [free] = llm.generate("some text", PARAMS)
    start = next(i for i in range(4, len(free.text) - 3) if "\ufffd" not in free.text[i : i + 3])
    stop = free.text[start : start + 3]
    params = SamplingParams(max_tokens=24, ignore_eos=True, stop=["never there", stop])
    pieces = list(llm.stream("some text", params))
    output = pieces[-1].output
    assert (output.finish_reason, output.stopped_by) == ("stop", stop)
    assert output.text == "".join(piece.text for piece in pieces) == free.text[: free.text.index(stop)]
    assert output.token_ids == free.token_ids[: len(output.token_ids)]
    assert len(output.token_ids) < 24


def test_chat_answers_in_the_checkpoints_template(llm):
    ids = llm.tokenizer.encode("<s>user:hello<s>assistant:")
    assert llm.tokenizer.chat(MESSAGES) == ids
    output = llm.chat(MESSAGES, PARAMS)
    assert output.token_ids == llm.generate([ids], PARAMS)[0].token_ids
    assert "".join(piece.text for piece in llm.stream_chat(MESSAGES, PARAMS)) == output.text


def test_messages_that_the_template_cannot_take_are_refused(tmp_path):
    template = "{{ raise_exception('roles must alternate') }}"
    llm = LLM(tiny.save(tiny.mixtral(), tmp_path, chat_template=template), unproven=True)
    with pytest.raises(RequestError, match="roles must alternate"):
        llm.chat(MESSAGES)


def test_a_checkpoint_without_a_chat_template_says_so_and_still_completes(tmp_path):
    llm = LLM(tiny.save(tiny.mixtral(), tmp_path, chat_template=None), unproven=True)
    with pytest.raises(CheckpointError, match="chat template"):
        llm.chat(MESSAGES)
    assert llm.generate("hello", PARAMS)[0].finish_reason == "length"


def test_a_checkpoint_without_a_tokenizer_takes_token_ids_and_refuses_text(tmp_path):
    llm = LLM(tiny.save(tiny.mixtral(), tmp_path, tokenizer=False), unproven=True)
    [output] = llm.generate([[1, 2, 3]], PARAMS)
    assert (output.text, len(output.token_ids)) == ("", 24)
    with pytest.raises(CheckpointError, match=r"tokenizer in .*: found none, expected one of tokenizer\.json"):
        llm.generate("hello")
    with pytest.raises(RequestError, match="stop strings"):
        llm.generate([[1]], SamplingParams(stop="x"))


def test_a_broken_tokenizer_file_is_a_checkpoint_error(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="tokenizer"):
        Tokenizer.open(tmp_path)


def test_stats_count_what_one_call_did(llm):
    before = llm.stats
    llm.generate("some text", PARAMS)
    used = llm.stats.since(before)
    assert (used.prompt_tokens, used.prefill_tokens, used.generated_tokens, used.decode_tokens) == (9, 9, 24, 23)
    assert (used.steps, used.cached_tokens, used.preemptions) == (24, 0, 0)
    assert used.prefill_seconds > 0
    assert used.decode_rate == pytest.approx(23 / used.decode_seconds)
    assert used.backends == llm.decoder.plan.backends(Role.EXPERTS) != ()
    assert 0 < used.weight_bytes_per_token < llm.decoder.weight_bytes


def test_closing_a_stream_aborts_it_and_frees_its_pages(llm):
    free = llm.engine.free_pages
    stream = llm.stream("some text", PARAMS)
    next(stream)
    assert llm.engine.free_pages < free
    stream.close()
    assert llm.engine.idle
    assert llm.engine.free_pages == free


def test_a_stream_that_is_never_read_holds_nothing(llm):
    llm.stream("some text", PARAMS)
    assert llm.engine.idle


def test_a_bad_streamed_request_is_refused_before_it_is_read(llm):
    with pytest.raises(RequestError):
        llm.stream([])


def test_streams_read_in_turn_do_not_mix_and_need_no_order(llm):
    prompts = ["some text", "other", "a third one"]
    expected = [output.text for output in llm.generate(prompts, PARAMS)]
    streams = [llm.stream(prompt, PARAMS) for prompt in prompts]
    texts = [""] * 3
    chance = random.Random(0)
    while any(streams):
        index = chance.choice([i for i, stream in enumerate(streams) if stream])
        piece = next(streams[index])
        texts[index] += piece.text
        if piece.output:
            assert piece.output.text == texts[index]
            streams[index] = None
    assert texts == expected


def test_an_interrupt_inside_the_model_leaves_the_engine_consistent(llm, monkeypatch):
    [expected] = llm.generate("some text", PARAMS)
    forward, calls = llm.decoder.forward, []

    def interrupted(*args):
        logits = forward(*args)
        calls.append(len(args[0]))
        if len(calls) == 6:
            raise KeyboardInterrupt
        return logits

    monkeypatch.setattr(llm.decoder, "forward", interrupted)
    other = llm.stream("other", PARAMS)
    first = next(other)
    with pytest.raises(KeyboardInterrupt):
        for _ in llm.stream("some text", PARAMS):
            pass
    llm.engine.check_integrity()
    rest = list(other)
    assert first.text + "".join(piece.text for piece in rest) == llm.generate("other", PARAMS)[0].text
    assert llm.generate("some text", PARAMS)[0].token_ids == expected.token_ids


def test_an_interrupt_at_any_line_of_a_step_changes_no_answer(llm):
    """Three requests, one of them about to be preempted, one to end; the nth line that the engine executes raises."""

    def fresh():
        engine = Engine(llm.decoder, llm.tokenizer, page_size=tiny.PAGE, kv_bytes=5 * tiny.PAGE_BYTES)
        params = [SamplingParams(max_tokens=count, ignore_eos=True, logprobs=1) for count in (9, 7, 4)]
        requests = [engine.request([count] * 5, one) for count, one in enumerate(params)]
        for request in requests:
            engine.add(request)
        return engine, requests

    def finish(engine, requests):
        while not engine.idle:
            engine.step()
        engine.check_integrity()
        return [request.output() for request in requests]

    def told(outputs):
        return [(one.text, one.token_ids, one.finish_reason, len(one.logprobs)) for one in outputs]

    engine, requests = fresh()
    expected = told(finish(engine, requests))
    assert engine.stats.preemptions > 0
    interrupts = 0
    for target in range(1, 100_000, 29):
        engine, requests = fresh()
        try:
            with Lines(target):
                while not engine.idle:
                    engine.step()
            break
        except KeyboardInterrupt:
            interrupts += 1
        assert told(finish(engine, requests)) == expected
    assert interrupts > 100


class Lines:
    """While it is entered, the line of the engine's files that is executed as number `target` is interrupted."""

    def __init__(self, target):
        self._left = target

    def __enter__(self):
        self._before = sys.gettrace()
        sys.settrace(self._trace)

    def __exit__(self, *_):
        sys.settrace(self._before)

    def _trace(self, frame, event, _):
        if "muster/engine/" not in frame.f_code.co_filename:
            return None
        if event == "line":
            self._left -= 1
            if self._left == 0:
                raise KeyboardInterrupt
        return self._trace

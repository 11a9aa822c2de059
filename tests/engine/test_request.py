import subprocess
import sys

import pytest

from muster.engine.request import SamplingParams
from muster.errors import RequestError


def test_every_bad_option_is_reported_at_once():
    with pytest.raises(RequestError) as caught:
        SamplingParams(max_tokens=0, temperature=-1.0, top_p=0.0, min_p=2.0, stop=("",), seed=-1, logprobs=True)
    things = [reason.thing for reason in caught.value.reasons]
    assert things == ["max_tokens", "temperature", "top_p", "min_p", "seed", "logprobs", "stop"]
    assert "max_tokens: found 0, expected a whole number of at least 1" in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": "1"},
        {"max_tokens": 1.5},
        {"max_tokens": True},
        {"top_k": -1},
        {"top_p": 1.01},
        {"repetition_penalty": 0.0},
        {"presence_penalty": float("inf")},
        {"seed": 1 << 64},
        {"stop": 5},
        {"stop": [5]},
        {"stop_token_ids": 5},
        {"stop_token_ids": [-1]},
        {"ignore_eos": 1},
    ],
)
def test_a_bad_option_is_refused(options):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**options)
    assert [reason.thing for reason in caught.value.reasons] == list(options)


def test_an_unknown_option_is_a_type_error():
    with pytest.raises(TypeError):
        SamplingParams(temprature=1.0)


def test_one_stop_string_and_lists_become_tuples():
    params = SamplingParams(stop="END", stop_token_ids=[7, 8])
    assert params.stop == ("END",)
    assert params.stop_token_ids == (7, 8)
    assert hash(params) == hash(SamplingParams(stop=["END"], stop_token_ids=(7, 8)))


def test_importing_muster_its_requests_pages_scheduler_and_text_imports_no_torch():
    modules = "muster, muster.engine.request, muster.engine.pages, muster.engine.scheduler, muster.engine.text"
    code = f"import sys, {modules}; muster.SamplingParams; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

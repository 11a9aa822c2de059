"""The canary: a sound model passes, and every way of computing wrongly stops the engine with what was seen."""

import pytest
import torch

from muster.engine import canary
from muster.engine.engine import Engine
from muster.errors import NumericsError
from muster.model.families import load

from . import tiny


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny.save(tiny.mixtral(), tmp_path_factory.mktemp("mixtral"))


@pytest.fixture
def decoder(checkpoint):
    return load(checkpoint)


def last_experts(decoder):
    return list(decoder.expert_layers.values())[-1]


def test_a_sound_model_passes(decoder):
    canary.sing(decoder)


@pytest.mark.parametrize(
    "spoil", [lambda out: out.mul_(1.02), lambda out: out[1:2].fill_(torch.nan), lambda out: out.copy_(out.flip(0))]
)
def test_a_backend_that_computes_wrongly_is_named(decoder, monkeypatch, spoil):
    [*_, experts] = last_experts(decoder)._bound.values()
    right = experts.run

    def wrong(x_TD, routed, out_TD, workspace):
        right(x_TD, routed, out_TD, workspace)
        spoil(out_TD)

    monkeypatch.setattr(experts, "run", wrong)
    with pytest.raises(NumericsError, match=f"experts of layer {tiny.LAYERS - 1} by {experts.name}"):
        canary.sing(decoder)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda logits: logits.fill_(3.0), "the same for every token"),
        (lambda logits: logits.copy_(logits[:1].expand_as(logits).clone()), "the same after every token"),
        (lambda logits: logits[-1:, 5:6].fill_(torch.nan), "NaN or infinite"),
    ],
)
def test_logits_that_say_nothing_are_refused(decoder, monkeypatch, spoil, words):
    right = decoder._head

    def wrong(x_TD):
        logits = right(x_TD)
        spoil(logits)
        return logits

    monkeypatch.setattr(decoder, "_head", wrong)
    with pytest.raises(NumericsError, match=words):
        canary.sing(decoder)


def test_a_cache_that_decode_reads_otherwise_than_prefill_wrote_is_refused(decoder, monkeypatch):
    right = decoder.forward

    def forgetful(tokens_T, batch, cache, rows_R):
        if len(tokens_T) == 1:
            for pages in cache:
                pages.key_PSMH.zero_()
        return right(tokens_T, batch, cache, rows_R)

    monkeypatch.setattr(decoder, "forward", forgetful)
    with pytest.raises(NumericsError, match="between prefill and decode"):
        canary.sing(decoder)


def test_an_engine_whose_canary_fails_does_not_exist(decoder, monkeypatch):
    monkeypatch.setattr(decoder, "_head", lambda x_TD: torch.full((len(x_TD), tiny._SHAPE["vocab_size"]), torch.nan))
    with pytest.raises(NumericsError, match="the engine is not ready"):
        Engine(decoder)

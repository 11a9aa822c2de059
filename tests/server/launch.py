"""`muster serve` with a fault in its engine: launch.py FAULT MODEL [OPTIONS]. A prompt with token 255 sets it off."""

import sys
import time

import torch

from muster import cli
from muster.engine import canary
from muster.engine.executor import Executor
from muster.errors import NumericsError

TRIGGER = 255
"""A byte that no UTF-8 text has, so that only token ids can say it."""

run = Executor.run


def triggered(batch):
    return TRIGGER in batch.tokens_T.tolist()


def nan(self, batch):
    """NaN logits for the requests that say it."""
    logits_RV = run(self, batch)
    starts = batch.attention.query_starts
    for row, last in enumerate(batch.rows_R.tolist()):
        start = max(start for start in starts if start <= last)
        if TRIGGER in batch.tokens_T[start : last + 1].tolist():
            logits_RV[row] = torch.nan
    return logits_RV


def hang(self, batch):
    """No end."""
    if triggered(batch):
        time.sleep(3600)
    return run(self, batch)


def nap(self, batch):
    """An end, but late."""
    if triggered(batch):
        time.sleep(1.5)
    return run(self, batch)


def fatal(self, batch):
    """A failure of the engine, not of a request."""
    if triggered(batch):
        raise RuntimeError("the device is gone")
    return run(self, batch)


def slow(self, batch):
    """Every step takes a while, so that requests live long enough to be watched."""
    time.sleep(0.03)
    return run(self, batch)


def late(decoder, sing=canary.sing):
    """Ready, but not at once, so that loading can be watched."""
    time.sleep(2)
    sing(decoder)


def refuse(decoder):
    raise NumericsError("logits", found="the same after every token", expected="various")


if __name__ == "__main__":
    fault = sys.argv.pop(1)
    if fault in ("canary", "late"):
        canary.sing = {"canary": refuse, "late": late}[fault]
    else:
        Executor.run = globals()[fault]
    sys.argv.insert(1, "serve")
    cli.main()

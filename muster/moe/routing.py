"""The reference router in float32: the sole owner of what a routing rule means. Every fast router is held against it.

Rules: softmax over all experts (Mixtral, OLMoE, Qwen3), softmax over the chosen K (gpt-oss), sigmoid with a bias for
the choice only and grouped experts (DeepSeek-V3, arXiv 2412.19437 section 2.1.2; GLM, Kimi, MiniMax), sqrt(softplus).

A NaN logit never picks the experts of another token and never raises: it makes a weight of its own token NaN, so that
it ends as the error of that request alone. Ids stay defined (NaN sorts above every number).
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from muster.errors import UsageError
from muster.moe.backend import Routed
from muster.moe.problem import RoutingRule


def route(logits_TE: Tensor, rule: RoutingRule, selection_bias_E: Tensor | None = None) -> Routed:
    """The K experts of each token, best first (equal scores: lowest id first), and their weights.

    Args:
        logits_TE: `[T, E]`, any float dtype; computed on in float32.
        rule: the rule.
        selection_bias_E: float32 `[E]`, given exactly when the rule has a selection bias.

    Raises:
        UsageError: the rule does not fit E, or the bias is missing, unwanted, of another shape, or not float32 (it
            would have been rounded).
    """
    check_rule(rule, logits_TE.shape[-1], selection_bias_E)
    logits_TE = logits_TE.float()
    scores_TE = _scores(logits_TE, rule)
    ids_TK = _choose(logits_TE, scores_TE, rule, selection_bias_E)
    return Routed(ids_TK, _weights(scores_TE.gather(1, ids_TK), rule))


def _scores(logits_TE: Tensor, rule: RoutingRule) -> Tensor:
    if rule.softmax_after_top_k:
        return logits_TE
    if rule.scoring == "softmax":
        return logits_TE.softmax(-1)
    if rule.scoring == "sigmoid":
        return logits_TE.sigmoid()
    return functional.softplus(logits_TE).sqrt()


def _choose(logits_TE: Tensor, scores_TE: Tensor, rule: RoutingRule, bias_E: Tensor | None) -> Tensor:
    if bias_E is not None:
        scores_TE = scores_TE + bias_E
    if rule.groups > 1:
        return _choose_in_groups(scores_TE, rule)
    # Every score grows with its logit, but float32 scores saturate: logits still tell such experts apart.
    return _best(scores_TE if bias_E is not None else logits_TE, rule.top_k)


def _choose_in_groups(scores_TE: Tensor, rule: RoutingRule) -> Tensor:
    """Chooses among the members of the kept groups only, so that no score, however low, brings back another group."""
    tokens, experts = scores_TE.shape
    size = experts // rule.groups
    group_scores = scores_TE.view(tokens, rule.groups, size).topk(2, dim=-1).values.sum(-1)
    kept = _best(group_scores, rule.groups_kept).sort(-1).values
    members = (kept[:, :, None] * size + torch.arange(size, device=kept.device)).flatten(1)
    return members.gather(1, _best(scores_TE.gather(1, members), rule.top_k))


def _best(scores: Tensor, count: int) -> Tensor:
    """Columns of the `count` largest scores; a stable sort, because topk promises nothing about ties."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count].contiguous()


def _weights(chosen_TK: Tensor, rule: RoutingRule) -> Tensor:
    if rule.softmax_after_top_k:
        chosen_TK = chosen_TK.softmax(-1)
    elif rule.renormalise:
        chosen_TK = chosen_TK / (chosen_TK.sum(-1, keepdim=True) + rule.epsilon)
    return chosen_TK * rule.scaling_factor if rule.scaling_factor != 1.0 else chosen_TK


def check_rule(rule: RoutingRule, experts: int, selection_bias_E: Tensor | None = None) -> None:
    """Raises what `route` would raise for that rule, that many experts and that bias."""
    _check_shape(rule, experts)
    if selection_bias_E is not None or rule.selection_bias:
        _check_bias(rule, experts, selection_bias_E)


@lru_cache
def _check_shape(rule: RoutingRule, experts: int) -> None:
    size = experts // max(rule.groups, 1)
    limits = {
        "top_k": (rule.top_k, 1, experts),
        "groups": (rule.groups, 1, experts),
        "groups_kept": (rule.groups_kept, 1, rule.groups),
    }
    problems = [
        UsageError(name, found=str(found), expected=f"{low} to {high}")
        for name, (found, low, high) in limits.items()
        if not low <= found <= high
    ]
    if rule.scoring not in ("softmax", "sigmoid", "sqrt-softplus"):
        problems.append(UsageError("scoring", found=rule.scoring, expected="softmax, sigmoid or sqrt-softplus"))
    if rule.softmax_after_top_k and rule.scoring != "softmax":
        problems.append(UsageError("softmax_after_top_k", found=f"with {rule.scoring}", expected="softmax scoring"))
    if rule.groups > 1 and (experts % rule.groups or size < 2):
        problems.append(
            UsageError("groups", found=f"{rule.groups} of {experts} experts", expected="equal groups of at least 2")
        )
    elif rule.top_k > size * rule.groups_kept:
        problems.append(
            UsageError("top_k", found=str(rule.top_k), expected=f"at most {size * rule.groups_kept} in the kept groups")
        )
    error = UsageError.gather(f"routing rule over {experts} experts", problems)
    if error is not None:
        raise error


def _check_bias(rule: RoutingRule, experts: int, bias_E: Tensor | None) -> None:
    wanted = f"float32 [{experts}]" if rule.selection_bias else "none"
    found = "none" if bias_E is None else f"{bias_E.dtype} {list(bias_E.shape)}".removeprefix("torch.")
    if found != wanted:
        raise UsageError("selection bias", found=found, expected=wanted)

"""The small parts of a decoder: norm, rotary and token embedding, dense feed-forward.

The residual stream and what these parts compute are float32 on every device; a linear takes it to its own dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from muster.checkpoint.spec import RopeSpec, YarnSpec

Projection = Callable[[Tensor], Tensor]
"""A linear map of rows: `[T, K]` to `[T, N]`, newly allocated."""


class RMSNorm:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis.

    Computed as `x / hypot(|x|, sqrt(D eps)) * (sqrt(D) weight)`: four operations, which take half the time of torch's
    own norm when there is one token.

    Args:
        weight: `[D]`, or `[heads, D]` to norm each head of `[T, heads, D]`; any float dtype.
        eps: epsilon.
        zero_centred: the stored weight is the distance from one.
    """

    def __init__(self, weight: Tensor, eps: float, *, zero_centred: bool = False) -> None:
        width = weight.shape[-1]
        gain = weight.float() + 1.0 if zero_centred else weight.float()
        self._gain = gain * math.sqrt(width)
        self._floor = torch.tensor(math.sqrt(width * eps), device=weight.device)

    @property
    def nbytes(self) -> int:
        """Bytes it keeps."""
        return self._gain.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """The norm of `x`, float32 and newly allocated."""
        x = x.float()
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x.div(length.hypot(self._floor)).mul_(self._gain)


@dataclass(frozen=True, eq=False)
class Rotation:
    """The turn of each token: `cos_T1W` and `sin_T1W`, the sine negative where the partner is subtracted."""

    cos_T1W: Tensor
    sin_T1W: Tensor


class Rope:
    """Rotary position embedding (Su et al. 2021) of the first `width` entries of each head.

    Angles are the float32 product of position and frequency, the precision models are trained and published with.
    """

    def __init__(self, spec: RopeSpec, device: torch.device) -> None:
        self._width = spec.width
        self._interleaved = spec.interleaved
        self._amplitude = 1.0 if spec.yarn is None else spec.yarn.attention_factor
        self._frequencies = frequencies(spec).to(device)

    def at(self, positions_T: Tensor) -> Rotation:
        """The rotation of tokens at these positions, good for every layer of a step."""
        angles = positions_T[:, None, None] * self._frequencies
        cos, sin = angles.cos().mul_(self._amplitude), angles.sin().mul_(self._amplitude)
        if self._interleaved:
            return Rotation(cos.repeat_interleave(2, -1), torch.stack((-sin, sin), -1).flatten(-2))
        return Rotation(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))

    def turn(self, x_TNH: Tensor, rotation: Rotation) -> Tensor:
        """Queries or keys, rotated; newly allocated."""
        if self._width == x_TNH.shape[-1]:
            return self._turn_whole(x_TNH, rotation)
        turned = self._turn_whole(x_TNH[..., : self._width], rotation)
        return torch.cat((turned, x_TNH[..., self._width :]), -1)

    def _turn_whole(self, x_TNW: Tensor, rotation: Rotation) -> Tensor:
        if self._interleaved:
            partner = x_TNW.view(*x_TNW.shape[:2], -1, 2).flip(-1).flatten(-2)
        else:
            partner = x_TNW.roll(self._width // 2, -1)
        return torch.addcmul(x_TNW * rotation.cos_T1W, partner, rotation.sin_T1W)


def frequencies(spec: RopeSpec) -> Tensor:
    """Radians per position of each pair, float32 `[width / 2]`: theta^(-2j / width), stretched where YaRN is on."""
    exponents = torch.arange(0, spec.width, 2, dtype=torch.float32) / spec.width
    plain = 1.0 / spec.theta**exponents
    return plain if spec.yarn is None else _stretch(plain, spec.theta, spec.width, spec.yarn)


def _stretch(plain: Tensor, theta: float, width: int, yarn: YarnSpec) -> Tensor:
    """YaRN (Peng et al. 2023): fast pairs as trained, slow ones divided by the factor, a ramp between them."""

    def pair_that_turns(times: float) -> float:
        return width * math.log(yarn.original_context / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_that_turns(yarn.beta_fast), pair_that_turns(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(width // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain * (1 - ramp) + plain / yarn.factor * ramp


class Embedding:
    """Rows of the token table `[V, D]`, kept in its stored dtype."""

    def __init__(self, table_VD: Tensor) -> None:
        self._table_VD = table_VD

    def __call__(self, tokens_T: Tensor) -> Tensor:
        """`[T, D]` float32, newly allocated."""
        return self._table_VD.index_select(0, tokens_T).float()


class SideBySide:
    """Projections of the same rows, their outputs joined: what cannot be fused into one matrix."""

    def __init__(self, parts: tuple[Projection, ...]) -> None:
        self._parts = parts

    def __call__(self, x_TK: Tensor) -> Tensor:
        """`[T, N of all parts]`."""
        return torch.cat([part(x_TK) for part in self._parts], -1)


class GatedMLP:
    """A dense feed-forward layer: down(act(gate x) * up x)."""

    def __init__(self, gate_up: Projection, down: Projection, activation: str) -> None:
        self._gate_up = gate_up
        self._down = down
        self._activation = _ACTIVATIONS[activation]

    def __call__(self, x_TD: Tensor) -> Tensor:
        """`[T, D]` to `[T, D]`."""
        gate_TF, up_TF = self._gate_up(x_TD).chunk(2, -1)
        return self._down(self._activation(gate_TF.float()).mul_(up_TF))


def _gelu(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": functional.silu, "gelu": _gelu}

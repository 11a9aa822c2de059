"""Which tensors a checkpoint has when its config tells the truth: names, dtypes and shapes, without any file."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from muster.checkpoint import shapes
from muster.checkpoint.claimcheck import names_single_experts
from muster.checkpoint.claimed import Claims
from muster.checkpoint.names import Names
from muster.checkpoint.shapes import Parameter
from muster.checkpoint.spec import Activations, GroupedAttention, ModelSpec, QuantClaim
from muster.formats.dialects import Dialect, Part, disk_shape
from muster.formats.spec import FORMATS, Format, int4

_EXPERT = ".*."

_ALWAYS_FLOAT32 = ("*.e_score_correction_bias",)
_DELTA_FLOAT32 = ("*.linear_attn.A_log", "*.linear_attn.norm.weight")


@dataclass(frozen=True)
class Layout:
    """What a config does not say of its checkpoint's tensors.

    Attributes:
        stacked_experts: a decoder layer's experts are one tensor per projection.
        stacked_draft: a draft layer's are.
        draft_layers: draft (MTP) layers stored.
        input_scales: scales of inputs are stored even where the scheme leaves inputs as they are.
        kv_scales: each attention of the decoder has a scale for keys and one for values.
        dtypes: safetensors dtypes of tensors, by glob over their names; the first that matches counts.
    """

    stacked_experts: bool = False
    stacked_draft: bool = False
    draft_layers: int = 0
    input_scales: bool = False
    kv_scales: bool = False
    dtypes: tuple[tuple[str, str], ...] = ()

    @classmethod
    def usual(cls, spec: ModelSpec) -> Layout:
        """The layout of most releases of a family.

        Qwen3.5 stacks experts that are not quantised; gpt-oss always does. MiniMax-M2's declared draft modules have
        no published names and engines skip them; they are not counted.
        """
        hybrid = spec.family.startswith("qwen3_5")
        float32 = (*_ALWAYS_FLOAT32, *(_DELTA_FLOAT32 if spec.quant is None or spec.quant.method == "fp8" else ()))
        dtypes = [(pattern, "F32") for pattern in float32]
        if hybrid:
            dtypes.append(("*.weight_scale_inv", "BF16"))
        return cls(
            stacked_experts=spec.family == "gpt_oss" or (hybrid and spec.quant is None),
            draft_layers=0 if spec.family == "minimax_m2" else spec.draft_layers,
            dtypes=tuple(dtypes),
        )


class TensorHeader(NamedTuple):
    """What a safetensors file says of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Expected(NamedTuple):
    """How one parameter is stored; names hold `*` where the parameter's do.

    Attributes:
        parameter: what is stored.
        dialect, format: how; None for what is no linear layer's matrix.
        activations: what the scheme does to inputs.
        tensors: the tensors of one of `parameter.count`.
    """

    parameter: Parameter
    dialect: Dialect | None
    format: Format | None
    activations: Activations
    tensors: tuple[TensorHeader, ...]


def expected(spec: ModelSpec, layout: Layout) -> Iterator[Expected]:
    """Every parameter of a checkpoint as its config claims it to be stored.

    Raises:
        ConfigError: a `re:` pattern of the claim that is no regular expression.
    """
    recipe = _Recipe(spec, layout)
    for parameter in _parameters(Names(spec), layout):
        yield from recipe.expected(parameter)


def headers(spec: ModelSpec, layout: Layout) -> Iterator[TensorHeader]:
    """Every tensor of a checkpoint as its config claims it to be stored; errors as `expected`."""
    for one in expected(spec, layout):
        if _EXPERT not in one.parameter.module:
            yield from one.tensors
            continue
        for expert in range(one.parameter.count):
            number = f".{expert}."
            yield from (header._replace(name=header.name.replace(_EXPERT, number, 1)) for header in one.tensors)


def _parameters(names: Names, layout: Layout) -> Iterator[Parameter]:
    spec = names.spec
    yield from shapes.model(names)
    for number, layer in enumerate(spec.layers):
        yield from shapes.decoder_layer(names, number, stacked=layout.stacked_experts)
        if layout.kv_scales and isinstance(layer.attention, GroupedAttention):
            root = f"{names.layer(number)}.self_attn"
            yield Parameter(f"{root}.k_proj", "k_scale", ())
            yield Parameter(f"{root}.v_proj", "v_scale", ())
    for number in range(layout.draft_layers):
        yield from shapes.draft(names, number, stacked=layout.stacked_draft)
    if spec.vision is not None:
        yield from shapes.vision(spec.vision)


class _Recipe:
    """From parameters to stored tensors."""

    def __init__(self, spec: ModelSpec, layout: Layout) -> None:
        self._claim = spec.quant
        self._claims = Claims(spec.quant) if spec.quant is not None else None
        self._apart = spec.quant is not None and names_single_experts(spec.quant)
        self._input_scales = layout.input_scales
        self._plain = spec.dtype.upper()
        dtypes = (*layout.dtypes, ("*.[kv]_scale", "F32"))
        self._dtypes = [(re.compile(fnmatch.translate(glob)), dtype) for glob, dtype in dtypes]

    def expected(self, parameter: Parameter) -> Iterator[Expected]:
        """One parameter; experts one by one where the claim tells them apart."""
        if parameter.count > 1 and self._apart:
            for expert in range(parameter.count):
                module = parameter.module.replace(_EXPERT, f".{expert}.", 1)
                yield self._one(replace(parameter, module=module, count=1))
        else:
            yield self._one(parameter)

    def _one(self, parameter: Parameter) -> Expected:
        module = parameter.module
        plain = f"{module}.{parameter.part}" if parameter.part else module
        header = TensorHeader(plain, self._dtype(plain, self._plain), parameter.shape)
        if len(parameter.shape) < 2 or not (parameter.linear or parameter.part == "weight"):
            return Expected(parameter, None, None, "none", (header,))
        format, activations = self._claimed(module.replace(_EXPERT, ".0.", 1)) if parameter.linear else (None, "none")
        if format is None or self._claim is None:
            return Expected(parameter, Dialect.PLAIN, FORMATS[header.dtype.lower()], "none", (header,))
        dialect = _dialect(self._claim, format, len(parameter.shape) > 2)
        inputs = activations == "static" or self._input_scales
        parts = [part for part in dialect.parts if part.required or _optional(dialect, part, inputs)]
        tensors = tuple(self._tensor(dialect, part, parameter, format) for part in parts)
        return Expected(parameter, dialect, format, activations, tensors)

    def _claimed(self, module: str) -> tuple[Format | None, Activations]:
        if self._claims is None or self._claims.left_alone(module):
            return None, "none"
        claimed = self._claims.of(module)
        return (None if claimed.format is None else _format(claimed.format)), claimed.activations

    def _tensor(self, dialect: Dialect, part: Part, parameter: Parameter, format: Format) -> TensorHeader:
        name = dialect.tensor_name(parameter.module, part.name)
        shape = disk_shape(dialect, part, parameter.shape, format)
        return TensorHeader(name, self._dtype(name, part.dtypes[0]), shape)

    def _dtype(self, tensor: str, usual: str) -> str:
        return next((dtype for pattern, dtype in self._dtypes if pattern.match(tensor)), usual)


def _optional(dialect: Dialect, part: Part, inputs: bool) -> bool:
    """Whether a tensor that the dialect can do without is usually there: GPTQ writes its order always."""
    if part.holds == "input_scale":
        return inputs
    return part.holds == "order" and dialect is Dialect.GPTQ


def _format(name: str) -> Format:
    return FORMATS[name] if name in FORMATS else int4(int(name.removeprefix("int4-g")))


def _dialect(claim: QuantClaim, format: Format, stacked: bool) -> Dialect:
    """How a quantiser spells a format."""
    family = format.name.partition("-")[0]
    if claim.method == "compressed-tensors":
        return _COMPRESSED[family]
    if family == "fp8":
        return Dialect.FP8_BLOCK if (claim.method, format.name) == ("fp8", "fp8-block") else Dialect.MODELOPT_FP8
    if family == "mxfp4":
        return Dialect.GPT_OSS_MXFP4 if stacked else Dialect.CT_MXFP4
    if family == "nvfp4":
        return Dialect.MODELOPT_NVFP4
    return Dialect.AWQ if claim.method == "awq" else Dialect.GPTQ


_COMPRESSED = {
    "nvfp4": Dialect.CT_NVFP4,
    "mxfp4": Dialect.CT_MXFP4,
    "fp8": Dialect.CT_FP8,
    "int4": Dialect.CT_INT4,
}

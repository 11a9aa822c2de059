"""The dialects of `quantization_config`: one function for each `quant_method`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from muster.checkpoint.fields import Fields, show
from muster.checkpoint.spec import Activations

_EVERY_LINEAR = "Linear"
"""compressed-tensors' and modelopt's target for every linear layer."""

_MODELOPT: Mapping[str, tuple[str, Activations]] = {
    "NVFP4": ("nvfp4", "static"),
    "W4A16_NVFP4": ("nvfp4", "none"),
    "FP8": ("fp8-tensor", "static"),
    "FP8_PER_CHANNEL_PER_TOKEN": ("fp8-channel", "dynamic"),
    "FP8_PB_WO": ("fp8-block", "none"),
}
_MIXED = "MIXED_PRECISION"

_COMPRESSED_FP4: Mapping[str, str] = {"nvfp4-pack-quantized": "nvfp4", "mxfp4-pack-quantized": "mxfp4"}
_COMPRESSED_FP8: Mapping[str, str] = {"tensor": "fp8-tensor", "channel": "fp8-channel", "block": "fp8-block"}
_COMPRESSED_KNOWN = (
    "nvfp4-pack-quantized, mxfp4-pack-quantized, pack-quantized (4-bit integers in groups) "
    "or float-quantized (8-bit by tensor, channel or 128x128 block)"
)


@dataclass(frozen=True)
class Body:
    """A claim without its method and source; the fields are those of QuantClaim."""

    algorithm: str | None
    ignore: tuple[str, ...] = ()
    layers: tuple[tuple[str, str], ...] = ()
    activations: tuple[tuple[str, Activations], ...] = ()
    kv_cache: str | None = None
    packing: str | None = None


def _fp8(c: Fields) -> Body:
    c.same("fmt", "e4m3", "float8_e4m3fn")
    block = c.numbers("weight_block_size")
    c.check(block in (None, (128, 128)), ("weight_block_size",), "weight_block_size", show(block), "[128, 128]")
    scheme: Activations = "static" if c.text("activation_scheme") == "static" else "dynamic"
    algorithm = "fp8-tensor" if block is None else "fp8-block"
    return Body(algorithm, _unconverted(c, "ignored_layers"), activations=(("", scheme),))


def _mxfp4(c: Fields) -> Body:
    return Body("mxfp4", _unconverted(c))


def _unconverted(c: Fields, *others: str) -> tuple[str, ...]:
    return c.names("modules_to_not_convert", *others) or ()


def modelopt(c: Fields) -> Body:
    """Modelopt's claim, in config.json or hf_quant_config.json."""
    if c.has_object("quantization"):
        c = c.under("quantization")
    return replace(_modelopt_weights(c), ignore=c.names("ignore", "exclude_modules") or (), kv_cache=_kv_cache(c))


def _modelopt_weights(c: Fields) -> Body:
    name = c.text("quant_algo")
    if name is None:
        return _groups(c, _float_scheme)
    c.waive("config_groups", "group_size")
    if name.upper() != _MIXED:
        algorithm, scheme = _modelopt_algorithm(c)
        return Body(algorithm, activations=(("", scheme),))
    modules = c.entries("quantized_layers")
    c.check(bool(modules), ("quantized_layers",), "quantized_layers", "nothing", f"the layers of {_MIXED}")
    schemes = {module: _modelopt_algorithm(c.under("quantized_layers", module)) for module in modules}
    layers = tuple((module, format) for module, (format, _) in schemes.items())
    return Body(None, layers=layers, activations=tuple((module, inputs) for module, (_, inputs) in schemes.items()))


def _modelopt_algorithm(c: Fields) -> tuple[str, Activations]:
    """The format that `quant_algo` names, and what it does to inputs."""
    name = c.text("quant_algo") or ""
    algorithm, inputs = _MODELOPT.get(name.upper(), ("", "none"))
    known = f"one of {', '.join((*_MODELOPT, _MIXED))}"
    hint = "its tensors could not be decoded; use a release in one of these formats"
    c.check(bool(algorithm), ("quant_algo",), "quant_algo", show(name), known, hint)
    group = c.maybe_whole("group_size")
    c.check(algorithm != "nvfp4" or group in (None, 16), ("group_size",), "group_size", show(group), "16 for NVFP4")
    return algorithm or "nvfp4", inputs


def _kv_cache(c: Fields) -> str | None:
    """The format claimed for the key-value cache."""
    name = (c.text("kv_cache_quant_algo") or "none").lower()
    bits, element = c.maybe_whole("kv_cache_scheme.num_bits"), c.text("kv_cache_scheme.type")
    c.waive(*(f"kv_cache_scheme.{key}" for key in c.entries("kv_cache_scheme")))
    scheme = {(8, "float"): "fp8", (4, "float"): "fp4"}.get((bits or 0, element or ""))
    keys = ("kv_cache_scheme.num_bits", "kv_cache_scheme.type")
    found = f"{bits} bits of type {element}"
    c.check(bits is None or scheme is not None, keys, "kv_cache_scheme", found, "8 or 4 bits of type float")
    return scheme if name == "none" else name


def _compressed_tensors(c: Fields) -> Body:
    c.same("transform_config", {})
    c.same("sparsity_config.format", "dense")
    c.waive("sparsity_config", *(f"sparsity_config.{key}" for key in c.entries("sparsity_config")))
    body = _groups(c, partial(_compressed_scheme, default=c.text("format") or ""))
    return replace(body, ignore=c.names("ignore") or (), kv_cache=_kv_cache(c))


def _groups(c: Fields, scheme: Callable[[Fields], str]) -> Body:
    """`config_groups`: a format for each group of targets; the target Linear is the whole model."""
    names = c.entries("config_groups")
    c.check(bool(names), ("config_groups",), "config_groups", "nothing", "one group or more")
    claims: list[tuple[str, str]] = []
    inputs: dict[str, Activations] = {}
    for name in names:
        group = c.under("config_groups", name)
        algorithm = scheme(group)
        targets = group.names("targets") or (_EVERY_LINEAR,)
        claims += [(target, algorithm) for target in targets]
        inputs |= dict.fromkeys(("" if target == _EVERY_LINEAR else target for target in targets), _inputs(group))
    whole = sorted({algorithm for target, algorithm in claims if target == _EVERY_LINEAR})
    found = f"{' and '.join(whole)} for {_EVERY_LINEAR}"
    c.check(len(whole) <= 1, ("config_groups",), "config_groups", found, "one format for it")
    layers = tuple(claim for claim in claims if claim[0] != _EVERY_LINEAR)
    return Body(whole[0] if whole else None, layers=layers, activations=tuple(inputs.items()))


def _inputs(group: Fields) -> Activations:
    """What a group does to inputs; "local" scales blocks as they come, beside one stored scale for the tensor."""
    if not group.has_object("input_activations"):
        return "none"
    return "dynamic" if group.raw("input_activations.dynamic") is True else "static"


def _float_scheme(group: Fields) -> str:
    """Modelopt's description of a group: the element alone tells the format."""
    bits, element = group.whole("weights.num_bits"), group.text("weights.type")
    group.waive("input_activations", *(f"weights.{key}" for key in group.entries("weights")))
    algorithm = {(4, "float"): "nvfp4", (8, "float"): "fp8-tensor"}.get((bits, element or ""))
    found = f"{bits} bits of type {element}"
    keys = ("weights.num_bits", "weights.type")
    group.check(algorithm is not None, keys, "weights", found, "4 or 8 bits of type float")
    return algorithm or "nvfp4"


def _compressed_scheme(group: Fields, default: str) -> str:
    """compressed-tensors' description of a group: compression format, element, strategy."""
    packing = group.text("format") or default
    bits, element = group.whole("weights.num_bits"), group.text("weights.type") or "int"
    strategy = group.text("weights.strategy") or "tensor"
    size = group.maybe_whole("weights.group_size", least=-1) or 0
    block = group.numbers("weights.block_structure")
    group.waive("input_activations", "output_activations", *(f"weights.{key}" for key in group.entries("weights")))
    algorithm: str | None = None
    if element == "float" and packing in ("float-quantized", "naive-quantized") and bits == 8:
        algorithm = _COMPRESSED_FP8.get(strategy) if block in (None, (128, 128)) else None
    elif element == "float" and bits == 4:
        algorithm = _COMPRESSED_FP4.get(packing)
    elif packing == "pack-quantized" and bits == 4 and size > 0:
        algorithm = f"int4-g{size}"
    found = f"format {packing or 'unstated'}, {bits} bits of type {element}, strategy {strategy}, group {size}"
    keys = ("weights.num_bits", "weights.type")
    group.check(algorithm is not None, keys, "weights", found, _COMPRESSED_KNOWN)
    return algorithm or "nvfp4"


def _gptq(c: Fields) -> Body:
    c.same("is_marlin_format", False)
    c.same("pack_dtype", "int32")
    ignore = [] if c.flag("lm_head", default=False) else ["lm_head"]
    for pattern in c.entries("dynamic"):
        skipped = pattern.startswith("-:")
        found = f"other settings for {pattern}"
        c.check(skipped, (), "dynamic", found, "one setting for all quantised layers")
        c.under("dynamic", pattern).waive_all()
        ignore += ["re:" + pattern.removeprefix("-:")] if skipped else []
    packing = c.word("checkpoint_format", choices=("gptq", "gptq_v2"), default="gptq")
    return Body(_int4(c, "group_size"), (*ignore, *_unconverted(c)), packing=packing)


def _awq(c: Fields) -> Body:
    c.same("version", "gemm", "GEMM")
    return Body(_int4(c, "group_size", "q_group_size"), ("lm_head", *_unconverted(c)))


def _auto_round(c: Fields) -> Body:
    c.same("packing_format", "auto_round:auto_gptq", "auto_round:auto_awq")
    c.same("data_type", "int")
    ignore = []
    for module in c.entries("extra_config"):
        settings = c.under("extra_config", module)
        bits = settings.maybe_whole("bits") or 4
        settings.check(bits == 4 or bits >= 16, ("bits",), "bits", str(bits), "4, or 16 (unquantised)")
        settings.waive_all()
        ignore += [module] if bits >= 16 else []
    return Body(_int4(c, "group_size"), tuple(ignore))


def _int4(c: Fields, *group_keys: str) -> str:
    bits = c.whole("bits", "w_bit")
    c.check(bits == 4, ("bits", "w_bit"), "bits", str(bits), "4")
    return f"int4-g{c.whole(*group_keys)}"


METHODS: Mapping[str, Callable[[Fields], Body]] = {
    "modelopt": modelopt,
    "modelopt_fp4": modelopt,
    "modelopt_mixed": modelopt,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "gptq": _gptq,
    "awq": _awq,
    "auto-round": _auto_round,
}
"""The functions by `quant_method`."""

"""From the tensors of a dialect to a QuantMatrix and back; `dialects.read` and `dialects.write` are the front door."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from muster.errors import FormatError
from muster.formats import int4
from muster.formats.codec import block_amax, decode_codes, decode_scale
from muster.formats.dialects import Dialect, Header, Part, disk_shape, format_of
from muster.formats.matrix import Meaning, QuantMatrix, Scale
from muster.formats.spec import FP8_TENSOR, Element, Format

_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_SCALE_ELEMENTS = {
    "BF16": Element.BF16,
    "F16": Element.F16,
    "F32": Element.F32,
    "F8_E4M3": Element.E4M3,
    "F8_E8M0": Element.E8M0,
    "U8": Element.E8M0,
}
_FAMILIES = {
    Dialect.PLAIN: ("bf16", "f16", "f32"),
    Dialect.MODELOPT_NVFP4: ("nvfp4",),
    Dialect.CT_NVFP4: ("nvfp4",),
    Dialect.GPT_OSS_MXFP4: ("mxfp4",),
    Dialect.CT_MXFP4: ("mxfp4",),
    Dialect.FP8_BLOCK: ("fp8-block",),
    Dialect.MODELOPT_FP8: ("fp8-tensor", "fp8-channel", "fp8-block"),
    Dialect.CT_FP8: ("fp8-tensor", "fp8-channel", "fp8-block"),
    Dialect.CT_INT4: ("int4",),
    Dialect.GPTQ: ("int4",),
    Dialect.GPTQ_V2: ("int4",),
    Dialect.AWQ: ("int4",),
}


@dataclass(frozen=True)
class TensorHeader:
    """What a safetensors file would say of a tensor."""

    dtype: str
    shape: tuple[int, ...]


def header(tensor: Tensor) -> TensorHeader:
    """The safetensors dtype name and shape of a tensor."""
    return TensorHeader(_NAMES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))


def read(dialect: Dialect, parts: Mapping[str, Tensor], shape: tuple[int, ...], name: str) -> QuantMatrix:
    """See `dialects.read`."""
    headers = {part: header(tensor) for part, tensor in parts.items()}
    _raise(name, _part_problems(dialect, headers, name))
    format = format_of(dialect, headers)
    _raise(name, _shape_problems(dialect, headers, shape, format, name))

    present: dict[str, Part] = {part.holds: part for part in dialect.parts if part.name in parts}
    fields: dict[str, Tensor] = {
        holds: parts[part.name].reshape(disk_shape(dialect, part, shape, format)) for holds, part in present.items()
    }
    if format.family == "int4":
        _raise(name, _int4_problems(fields, shape, format, name))
        fields = int4.unpack(dialect, fields, rows=shape[-2])
    scales = {
        holds: _scale(fields[holds].reshape(_scale_shape(holds, shape, format)), part, dialect)
        for holds, part in present.items()
        if part.is_scale
    }
    matrix = QuantMatrix(
        format,
        shape,
        codes=fields["codes"].reshape(*shape[:-1], shape[-1] // format.codes_per_byte),
        scale=scales.get("scale"),
        global_scale=scales.get("global_scale"),
        zero=fields.get("zero"),
        order=fields.get("order"),
        input_scale=scales.get("input_scale"),
    )
    _raise(name, _scale_problems(matrix, {holds: dialect.tensor_name(name, p.name) for holds, p in present.items()}))
    return matrix


def write(matrix: QuantMatrix, dialect: Dialect) -> dict[str, Tensor]:
    """See `dialects.write`."""
    _check_writable(matrix, dialect)
    fields: dict[str, Tensor] = dict(matrix.tensors)
    for part in dialect.parts:
        if part.holds in matrix.scales:
            fields[part.holds] = _payload(matrix.scales[part.holds], part)
    if matrix.format.family == "int4":
        fields = int4.pack(dialect, fields) | {"shape": torch.tensor(matrix.shape[-2:])}
    return {
        part.name: fields[part.holds].reshape(disk_shape(dialect, part, matrix.shape, matrix.format)).contiguous()
        for part in dialect.parts
        if part.holds in fields
    }


def _scale_shape(holds: str, shape: tuple[int, ...], format: Format) -> tuple[int, ...]:
    """The shape of a scale in a QuantMatrix of one row piece."""
    *lead, rows, columns = shape
    return (*lead, *format.scale_shape(rows, columns)) if holds == "scale" else (*lead, 1)


def _scale(value: Tensor, part: Part, dialect: Dialect) -> Scale:
    element = _SCALE_ELEMENTS[_NAMES[value.dtype]]
    payload = value.view(torch.uint8) if element is Element.E8M0 else value
    return Scale(payload, element, Meaning.DIVIDES if part.divides else Meaning.MULTIPLIES, dialect.value)


def _payload(scale: Scale, part: Part) -> Tensor:
    """A scale as the part of a dialect: its own bits where the dialect takes them."""
    if (scale.meaning is Meaning.DIVIDES) != part.divides:
        return decode_scale(scale).reciprocal()
    if _NAMES[scale.value.dtype] in part.dtypes:
        return scale.value
    if scale.element is Element.E8M0 and "F8_E8M0" in part.dtypes:
        return scale.value.view(torch.float8_e8m0fnu)
    return decode_scale(scale).to(_DTYPES[part.dtypes[0]])


def _check_writable(matrix: QuantMatrix, dialect: Dialect) -> None:
    what = f"{matrix.format.name} matrix {matrix.shape} as {dialect.value}"
    problems = []
    if matrix.format.family not in _FAMILIES[dialect]:
        problems.append(FormatError("format", found=matrix.format.name, expected=" or ".join(_FAMILIES[dialect])))
    tensor_scale = matrix.scale if matrix.format is FP8_TENSOR else matrix.global_scale
    if tensor_scale is not None and tensor_scale.value.numel() != math.prod(matrix.shape[:-2]):
        problems.append(
            FormatError(
                "tensor scales",
                found="one per row piece",
                expected="one",
                hint="write each piece as a matrix of its own",
            )
        )
    if matrix.order is not None and dialect is Dialect.AWQ:
        problems.append(FormatError("column order", found="act-order", expected="none: AWQ has no g_idx"))
    if matrix.format.family == "int4" and (
        matrix.shape[-1] % 8 or (matrix.shape[-2] % 8 and dialect is not Dialect.CT_INT4)
    ):
        problems.append(FormatError("shape", found=str(matrix.shape[-2:]), expected="multiples of 8"))
    _raise(what, problems)


def _part_problems(dialect: Dialect, headers: Mapping[str, Header], name: str) -> list[FormatError]:
    """Parts missing, unknown, or of a dtype the dialect does not use."""
    known = {part.name: part for part in dialect.parts}
    problems = [
        FormatError(
            dialect.tensor_name(name, part.name), found="nothing", expected=f"a tensor: {dialect.value} needs it"
        )
        for part in dialect.parts
        if part.required and part.name not in headers
    ]
    for part_name, header in headers.items():
        tensor = dialect.tensor_name(name, part_name)
        if part_name not in known:
            problems.append(
                FormatError(tensor, found="a tensor", expected=f"none: {dialect.value} has {', '.join(known)}")
            )
        elif header.dtype not in known[part_name].dtypes:
            problems.append(FormatError(tensor, found=header.dtype, expected=" or ".join(known[part_name].dtypes)))
    return problems


def _shape_problems(
    dialect: Dialect, headers: Mapping[str, Header], shape: tuple[int, ...], format: Format, name: str
) -> list[FormatError]:
    """Parts whose shape, axes of length 1 aside, is not what the logical shape asks for."""
    problems = []
    if shape[-1] % (8 if format.family == "int4" else format.codes_per_byte):
        problems.append(FormatError(name, found=f"{shape[-1]} columns", expected="whole bytes or words of 4-bit codes"))
    for part in dialect.parts:
        if part.name in headers:
            found, expected = headers[part.name].shape, disk_shape(dialect, part, shape, format)
            if [extent for extent in found if extent != 1] != [extent for extent in expected if extent != 1]:
                problems.append(
                    FormatError(
                        dialect.tensor_name(name, part.name),
                        found=f"shape {list(found)}",
                        expected=f"{list(expected)} for a {list(shape)} {format.name} matrix",
                    )
                )
    return problems


def _int4_problems(
    fields: Mapping[str, Tensor], shape: tuple[int, ...], format: Format, name: str
) -> list[FormatError]:
    problems = []
    if "shape" in fields and tuple(fields["shape"].tolist()) != shape[-2:]:
        problems.append(
            FormatError(f"{name}.weight_shape", found=str(fields["shape"].tolist()), expected=str(list(shape[-2:])))
        )
    _, groups = format.scale_shape(*shape[-2:])
    if "order" in fields and not 0 <= int(fields["order"].min()) <= int(fields["order"].max()) < groups:
        low, high = fields["order"].aminmax()
        problems.append(FormatError(f"{name}: g_idx", found=f"groups {low} to {high}", expected=f"0 to {groups - 1}"))
    return problems


def _scale_problems(matrix: QuantMatrix, names: Mapping[str, str]) -> list[FormatError]:
    """What is wrong with the weight's scales; activation scales are not looked at."""
    problems: list[FormatError] = []
    if matrix.scale is not None:
        values = decode_scale(matrix.scale)
        zero = values == 0
        if bool(zero.any()) and matrix.format is not FP8_TENSOR and matrix.order is None:
            assert matrix.format.block is not None
            zero &= block_amax(decode_codes(matrix, torch.float32), matrix.format.block) > 0
        problems += _bad_values(names["scale"], values, zero, matrix.shape)
    if matrix.global_scale is not None:
        values = decode_scale(matrix.global_scale)
        problems += _bad_values(names["global_scale"], values, values == 0, matrix.shape)
    return problems


def _bad_values(name: str, values: Tensor, zero: Tensor, shape: tuple[int, ...]) -> list[FormatError]:
    kinds = {"NaN": values.isnan(), "infinite": values.isinf(), "negative": values < 0, "zero": zero}
    return [
        FormatError(
            name,
            found=f"{int(bad.sum())} {kind} of {bad.numel()} scales{_where(bad, shape)}",
            expected="positive finite numbers",
            hint="the checkpoint is damaged or was calibrated wrongly: fetch it again or report it to its publisher",
        )
        for kind, bad in kinds.items()
        if bool(bad.any())
    ]


def _where(bad: Tensor, shape: tuple[int, ...]) -> str:
    if len(shape) > 2:
        experts = bad.flatten(1).any(1).nonzero().flatten().tolist()
        return f" in experts {', '.join(map(str, experts))}"
    return f", the first at {bad.nonzero()[0].tolist()}"


def _raise(thing: str, problems: Sequence[FormatError]) -> None:
    error = FormatError.gather(thing, problems)
    if error is not None:
        raise error

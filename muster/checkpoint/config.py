"""config.json and its neighbours, in any dialect, as one frozen ModelSpec."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from muster.checkpoint.claimed import Claims
from muster.checkpoint.claims import HF_QUANT_CONFIG, read_claims
from muster.checkpoint.families import FAMILIES, MOST_LAYERS, Family, read_dtype
from muster.checkpoint.fields import Fields, Place, load_object, plural, show
from muster.checkpoint.keys import NEUTRAL, WAIVED
from muster.checkpoint.names import shown
from muster.checkpoint.spec import ModelSpec, QuantClaim, VisionSpec
from muster.errors import ConfigError, MusterError

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True)
class Reading:
    """A model's spec, and what a reader should know about how it was read (one line each, for printing)."""

    spec: ModelSpec
    notes: tuple[str, ...]


def read_spec(directory: Path) -> ModelSpec:
    """The spec of the checkpoint in a directory; see `read_config`."""
    return read_config(directory).spec


def read_config(path: Path) -> Reading:
    """Reads config.json with hf_quant_config.json and generation_config.json beside it.

    `path` is the directory, or the config file itself: `<prefix>config.json` has its neighbours under its prefix.

    Raises:
        ConfigError: files that cannot be read, an unknown architecture, or everything that is missing, of the wrong
            type, contradictory or not implemented, all at once.
    """
    try:
        file = _config_file(path)
        neighbours = (HF_QUANT_CONFIG, GENERATION_CONFIG) if file.name.endswith(CONFIG) else ()
        beside = {name: file.with_name(file.name.removesuffix(CONFIG) + name) for name in neighbours}
        present = {name: place for name, place in beside.items() if place.exists()}
    except OSError as error:
        found = error.strerror or str(error)
        raise ConfigError(shown(str(path)), found=found, expected="a checkpoint directory that can be read") from error
    values: dict[str, dict[str, object]] = {}
    problems: list[ConfigError] = []
    for name, place in {CONFIG: file, **present}.items():
        try:
            values[name] = load_object(place)
        except ConfigError as error:
            problems.append(error)
    unreadable = ConfigError.only_or_all(f"{path}: config files", problems)
    if unreadable is not None:
        raise unreadable
    return interpret(values[CONFIG], values.get(HF_QUANT_CONFIG), values.get(GENERATION_CONFIG), where=str(path))


def _config_file(path: Path) -> Path:
    """The config that `path` is or holds.

    Raises:
        ConfigError: there is none.
    """
    if path.is_file():
        return path
    if not path.is_dir():
        found = "a special file" if path.exists() else "nothing there"
        raise ConfigError(str(path), found=found, expected="a checkpoint directory")
    names = sorted(entry.name for entry in path.iterdir())
    if CONFIG not in names:
        found = f"no {CONFIG} among {len(names)} files" if names else "an empty directory"
        hint = "give the directory that holds config.json and the safetensors files"
        raise ConfigError(str(path), found=found, expected=f"a {CONFIG}", hint=hint)
    return path / CONFIG


def interpret(
    config: Mapping[str, object],
    hf_quant: Mapping[str, object] | None = None,
    generation: Mapping[str, object] | None = None,
    *,
    where: str = "the configuration",
) -> Reading:
    """The reading of parsed files; `where` names them in errors.

    Raises:
        ConfigError: as `read_config`.
    """
    top = Fields.of(config, CONFIG)
    family = _family(top, where)
    top.ledger.family = family.name
    text = top.under("text_config") if family.nested else top
    notes: list[str] = []
    quant, quant_notes, quant_problems = read_claims(top, hf_quant)
    special = Fields.of(generation or {}, GENERATION_CONFIG)
    vision, vision_notes = _vision(family, config)
    spec = replace(_spec(family, text, special, quant), vision=vision)
    _refuse_unimplemented(top)
    problems = [*top.ledger.problems, *quant_problems, *special.ledger.problems, *_pattern_problems(quant)]
    error = ConfigError.gather(f"{where} ({family.name})", problems)
    if error is not None:
        raise error
    if not any(text.stated(key) for key in _DTYPE):
        notes.append(f"{CONFIG}: dtype is not stated; bf16 is assumed for activations")
    outside = [token for token in (*spec.bos_ids, *spec.eos_ids) if token >= spec.vocab]
    if outside:
        notes.append(f"{CONFIG}: special token {outside[0]} is outside the vocabulary of {spec.vocab}")
    return Reading(spec, (*notes, *vision_notes, *quant_notes, *top.unknown()))


_DTYPE = ("dtype", "torch_dtype", "/dtype", "/torch_dtype")


def _family(top: Fields, where: str) -> Family:
    """The family that `model_type` and `architectures` name together.

    Raises:
        ConfigError: unknown, or the two disagree; nothing else can be read then.
    """
    named = top.names("architectures") or ()
    model_type = top.text("model_type")
    supported = f"one of {', '.join(f'{family.architectures[0]} ({family.name})' for family in FAMILIES)}"
    error = ConfigError.gather(where, top.ledger.problems)
    if error is not None:
        raise error
    by_architecture = [family for family in FAMILIES if named and named[0] in family.architectures]
    by_type = [family for family in FAMILIES if family.name == model_type]
    if len(named) > 1 or (named and not by_architecture) or (not named and model_type is None):
        found = show(named[0]) if len(named) == 1 else show(list(named))
        raise ConfigError(f"{where}: architectures", found=found, expected=supported, hint=_recognised(top))
    if model_type is not None and not by_type:
        raise ConfigError(f"{where}: model_type", found=show(model_type), expected=supported, hint=_recognised(top))
    both = [family for family in by_architecture or by_type if not by_type or family in by_type]
    if not both:
        found = f"{named[0]}, while model_type is {model_type}"
        raise ConfigError(f"{where}: architectures", found=found, expected=f"{by_type[0].architectures[0]} for it")
    return both[0]


_LISTED = 12
"""Keys that a message names before it counts the rest."""


def _recognised(top: Fields) -> str:
    """Which keys of a config of no known family some family reads, and which none does."""
    nested = isinstance(top.root.get("text_config"), Mapping)
    unread: set[Place] | None = None
    for family in FAMILIES:
        if bool(family.nested) == nested:
            c = Fields.of(top.root, CONFIG)
            c.waive("architectures", "model_type", "quantization_config")
            _spec(family, c.under("text_config") if nested else c, Fields.of({}, GENERATION_CONFIG), None)
            _refuse_unimplemented(c)
            left = {place for place, value in c.unread() if value is not None}
            unread = left if unread is None else unread & left
    unknown = sorted(".".join(place) for place in unread or ())
    inner = top.root.get("text_config")
    known = len(top.root) + (len(inner) - 1 if isinstance(inner, Mapping) else 0) - len(unknown)
    if not unknown:
        return f"all {plural(known, 'key')} of it are known from other families; what it computes need not be theirs"
    listed = ", ".join(shown(name) for name in unknown[:_LISTED])
    more = f" and {len(unknown) - _LISTED} more" if len(unknown) > _LISTED else ""
    return f"{plural(known, 'key')} of it are known from other families; not known: {listed}{more}"


def _spec(family: Family, text: Fields, special: Fields, quant: QuantClaim | None) -> ModelSpec:
    if family.nested:
        text.word("model_type", choices=family.nested)
        text.waive("architectures")
    eos = (*_tokens(text, "eos_token_id"), *(special.numbers("eos_token_id") or ()))
    bos = (*_tokens(text, "bos_token_id"), *(special.numbers("bos_token_id") or ()))
    return ModelSpec(
        family=family.name,
        architecture=(text.names("/architectures") or family.architectures)[0],
        hidden=text.whole("hidden_size"),
        vocab=text.whole("vocab_size"),
        layers=family.layers(text),
        context=text.whole("max_position_embeddings"),
        norm_eps=text.number("rms_norm_eps"),
        norm_zero_centred=family.norm_zero_centred,
        tied_embeddings=text.flag("tie_word_embeddings", "/tie_word_embeddings", default=False),
        dtype=read_dtype(text, *_DTYPE, default="bfloat16"),
        prefix=family.prefix,
        draft_layers=family.drafts(text) if family.drafts else 0,
        bos_ids=tuple(dict.fromkeys(bos)),
        eos_ids=tuple(dict.fromkeys(eos)),
        quant=quant,
    )


def _pattern_problems(quant: QuantClaim | None) -> tuple[MusterError, ...]:
    """Patterns of the claim that are no regular expressions."""
    try:
        Claims(quant or QuantClaim("none", None, None, ()))
    except ConfigError as error:
        return error.reasons
    return ()


def _vision(family: Family, config: Mapping[str, object]) -> tuple[VisionSpec | None, list[str]]:
    """The vision tower and notes; text needs none of it, so what is wrong there is a note."""
    tower = config.get("vision_config")
    if not isinstance(tower, Mapping):
        return None, []
    if family.name != "qwen3_5_moe":
        return None, [f"the vision tower is not counted: its shapes are not known for {family.name}"]
    c = Fields.of(tower, f"{CONFIG}: vision_config")
    c.same("deepstack_visual_indexes", [])
    spec = VisionSpec(
        depth=c.whole("depth", most=MOST_LAYERS),
        hidden=c.whole("hidden_size"),
        inner=c.whole("intermediate_size"),
        channels=c.whole("in_channels"),
        patch=c.whole("patch_size"),
        temporal_patch=c.whole("temporal_patch_size"),
        merge=c.whole("spatial_merge_size"),
        positions=c.whole("num_position_embeddings"),
        out=c.whole("out_hidden_size"),
    )
    if c.ledger.problems:
        return None, [f"the vision tower's shapes are not known: {c.ledger.problems[0]}"]
    return spec, []


def _tokens(text: Fields, key: str) -> tuple[int, ...]:
    """Special tokens, a union over the text model's keys and the file's."""
    return (*(text.numbers(key) or ()), *(text.numbers("/" + key) or ()))


def _refuse_unimplemented(top: Fields) -> None:
    """Refuses keys that change the computation in some family and that this one's reader did not look at."""
    for place in [place for place, _ in top.unread()]:
        neutral = NEUTRAL.get(place[-1])
        if neutral is not None and len(place) <= 2:
            Fields(top.root, top.ledger, place[:-1]).same(place[-1], *neutral)
        elif place[-1] in WAIVED and (len(place) == 1 or place[0] == "text_config"):
            top.waive("/" + ".".join(place))

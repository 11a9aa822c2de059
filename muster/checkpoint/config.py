"""config.json and its neighbours, in any dialect, as one frozen ModelSpec."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from muster.checkpoint.claims import HF_QUANT_CONFIG, read_claims
from muster.checkpoint.families import FAMILIES, Family, read_dtype
from muster.checkpoint.fields import Fields, load_object, show
from muster.checkpoint.keys import NEUTRAL, WAIVED
from muster.checkpoint.spec import ModelSpec, QuantClaim
from muster.errors import ConfigError

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
    """Reads config.json with hf_quant_config.json and generation_config.json beside it, or a lone config file.

    Raises:
        ConfigError: files that cannot be read, an unknown architecture, or everything that is missing, of the wrong
            type, contradictory or not implemented, all at once.
    """
    if path.is_file():
        return interpret(load_object(path), where=str(path))
    if not path.is_dir():
        found = "a special file" if path.exists() else "nothing there"
        raise ConfigError(str(path), found=found, expected="a checkpoint directory")
    if not (path / CONFIG).exists():
        names = sorted(entry.name for entry in path.iterdir())
        found = f"no {CONFIG} among {len(names)} files" if names else "an empty directory"
        hint = "give the directory that holds config.json and the safetensors files"
        raise ConfigError(str(path), found=found, expected=f"a {CONFIG}", hint=hint)
    files = {name: load_object(path / name) for name in (HF_QUANT_CONFIG, GENERATION_CONFIG) if (path / name).exists()}
    config = load_object(path / CONFIG)
    return interpret(config, files.get(HF_QUANT_CONFIG), files.get(GENERATION_CONFIG), where=str(path))


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
    spec = _spec(family, text, special, quant)
    _refuse_unimplemented(top)
    problems = [*top.ledger.problems, *quant_problems, *special.ledger.problems]
    error = ConfigError.gather(f"{where} ({family.name})", problems)
    if error is not None:
        raise error
    if not any(text.stated(key) for key in _DTYPE):
        notes.append(f"{CONFIG}: dtype is not stated; bf16 is assumed for activations")
    outside = [token for token in (*spec.bos_ids, *spec.eos_ids) if token >= spec.vocab]
    if outside:
        notes.append(f"{CONFIG}: special token {outside[0]} is outside the vocabulary of {spec.vocab}")
    return Reading(spec, (*notes, *quant_notes, *top.unknown()))


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
        raise ConfigError(f"{where}: architectures", found=found, expected=supported)
    if model_type is not None and not by_type:
        raise ConfigError(f"{where}: model_type", found=show(model_type), expected=supported)
    both = [family for family in by_architecture or by_type if not by_type or family in by_type]
    if not both:
        found = f"{named[0]}, while model_type is {model_type}"
        raise ConfigError(f"{where}: architectures", found=found, expected=f"{by_type[0].architectures[0]} for it")
    return both[0]


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

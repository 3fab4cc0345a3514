"""The flags that commands share, each defined once: engine settings and sampling values.

A field that is None was not given. Help and defaults come from `EngineConfig` and
`SamplingParams`, which also check the values.
"""

# Annotations are not postponed: the parser would evaluate them anew at every start.
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from surefoot.cli.flags import (
    attribute_help,
    flag,
    number,
    refused,
    size,
    switch,
    whole,
    wholes,
)
from surefoot.config import QUANTIZATIONS, EngineConfig, make_config, resolve_speculation
from surefoot.errors import SettingError
from surefoot.params import SamplingParams
from surefoot.weights.locate import PACKAGED

AUTO = "auto"
DEFAULT_MODEL = next(iter(PACKAGED))
"""The packaged model that commands take when none is named."""

ModelName = Annotated[
    str,
    Parameter(
        help="Folder, .gguf file, hub id (org/name) or packaged name: "
        + "; ".join(f"{name} is {known.about}" for name, known in PACKAGED.items()),
    ),
]
JsonOutput = Annotated[
    bool,
    Parameter(
        help="Print one JSON object and nothing else on stdout.", negative=(), show_default=False
    ),
]

_ENGINE = attribute_help(EngineConfig)
_SAMPLING = attribute_help(SamplingParams)
_DEFAULTS = EngineConfig()
_MAX_TOKENS = SamplingParams().max_tokens


@Parameter(name="*", group=Group("Speculation, as other engines spell it", sort_key=30))
@dataclass(frozen=True, kw_only=True)
class TheirOptions:
    """Speculation in the words of other engines, and what is refused with a reason."""

    speculative_algorithm: Annotated[
        str | None, flag("NGRAM, STANDALONE (a draft model) or NEXTN (a draft head).")
    ] = None
    speculative_num_draft_tokens: Annotated[
        int | None, flag("Tokens verified at once, the bonus token included.", convert=whole)
    ] = None
    speculative_num_steps: Annotated[int | None, flag("Tokens guessed at once.", convert=whole)] = (
        None
    )
    speculative_eagle_topk: Annotated[
        int | None, flag("Must be 1: only chains are drafted.", convert=whole)
    ] = None
    speculative_draft_model_path: Annotated[str | None, flag("The draft model.")] = None
    speculative_config: Annotated[
        str | None,
        flag("A JSON object with method, num_speculative_tokens, model.", metavar="JSON"),
    ] = None
    speculative_accept_threshold_single: Annotated[str | None, refused()] = None
    speculative_accept_threshold_acc: Annotated[str | None, refused()] = None
    rejection_sample_method: Annotated[str | None, refused()] = None
    typical_acceptance_sampler_posterior_threshold: Annotated[str | None, refused()] = None
    typical_acceptance_sampler_posterior_alpha: Annotated[str | None, refused()] = None
    posterior_threshold: Annotated[str | None, refused()] = None
    posterior_alpha: Annotated[str | None, refused()] = None
    trust_remote_code: Annotated[bool | None, refused()] = None


@Parameter(name="*", group=Group("Engine", sort_key=20))
@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How the engine runs. `drafter` and `draft_tokens` may be comma lists where that is said."""

    config: Annotated[
        Path | None, flag("YAML file with flags as keys; the command line wins.", metavar="FILE")
    ] = None
    drafter: Annotated[str | None, flag(_ENGINE["drafter"], _DEFAULTS.drafter)] = None
    draft_tokens: Annotated[
        str | None, flag(_ENGINE["draft_tokens"], AUTO, metavar=f"K|{AUTO}")
    ] = None
    draft_model: Annotated[str | None, flag(_ENGINE["draft_model"])] = None
    ngram_max: Annotated[
        int | None, flag(_ENGINE["ngram_max"], _DEFAULTS.ngram_max, convert=whole)
    ] = None
    ngram_min: Annotated[
        int | None, flag(_ENGINE["ngram_min"], _DEFAULTS.ngram_min, convert=whole)
    ] = None
    dtype: Annotated[str | None, flag(_ENGINE["dtype"], _DEFAULTS.dtype)] = None
    quantization: Annotated[
        str | None, flag(_ENGINE["quantization"], metavar="|".join(QUANTIZATIONS))
    ] = None
    device: Annotated[str | None, flag(_ENGINE["device"], _DEFAULTS.device)] = None
    emulate: Annotated[bool | None, switch(_ENGINE["emulate"])] = None
    bitwise: Annotated[bool | None, switch(_ENGINE["bitwise"], off=("--no-bitwise",))] = None
    capture: Annotated[bool | None, switch(_ENGINE["capture"], off=("--no-capture",))] = None
    capture_target: Annotated[
        bool | None, switch(_ENGINE["capture_target"], off=("--no-capture-target",))
    ] = None
    memory: Annotated[
        int | None, flag(f"{_ENGINE['memory']} 512MiB and 2GB are understood.", convert=size)
    ] = None
    max_model_len: Annotated[
        int | None, flag(_ENGINE["max_model_len"], alias=("--context-length",), convert=whole)
    ] = None
    page_tokens: Annotated[
        int | None,
        flag(_ENGINE["page_tokens"], alias=("--block-size", "--page-size"), convert=whole),
    ] = None
    max_rows: Annotated[
        int | None,
        flag(
            _ENGINE["max_rows"],
            _DEFAULTS.max_rows,
            ("--max-num-seqs", "--max-running-requests"),
            whole,
        ),
    ] = None
    max_step_tokens: Annotated[
        int | None,
        flag(
            _ENGINE["max_step_tokens"],
            _DEFAULTS.max_step_tokens,
            ("--max-num-batched-tokens",),
            whole,
        ),
    ] = None
    prefill_chunk: Annotated[
        int | None,
        flag(_ENGINE["prefill_chunk"], _DEFAULTS.prefill_chunk, ("--chunked-prefill-size",), whole),
    ] = None
    prefix_cache: Annotated[
        bool | None,
        switch(
            _ENGINE["prefix_cache"],
            _DEFAULTS.prefix_cache,
            alias=("--enable-prefix-caching",),
            off=("--no-prefix-cache", "--no-enable-prefix-caching", "--disable-radix-cache"),
        ),
    ] = None
    points: Annotated[int | None, flag(_ENGINE["points"], convert=whole)] = None
    point_every: Annotated[
        int | None, flag(_ENGINE["point_every"], _DEFAULTS.point_every, convert=whole)
    ] = None
    max_waiting: Annotated[
        int | None, flag(_ENGINE["max_waiting"], _DEFAULTS.max_waiting, convert=whole)
    ] = None
    threads: Annotated[int | None, flag(_ENGINE["threads"], convert=whole)] = None
    revision: Annotated[str | None, flag(_ENGINE["revision"])] = None
    theirs: TheirOptions = TheirOptions()

    def settings(self) -> dict[str, object]:
        """What was given, as keywords of `make_config`; comma lists stay text.

        Raises:
            SettingError: a speculative_* setting is refused or contradicts another.
        """
        ours = _given(self, {field.name for field in fields(EngineConfig)})
        if self.draft_tokens is not None and self.draft_tokens.isdecimal():
            ours["draft_tokens"] = int(self.draft_tokens)
        known = {field.name for field in fields(TheirOptions)}
        return resolve_speculation(ours | _given(self.theirs, known))

    def single(self, **defaults: object) -> EngineConfig:
        """The one config that these flags mean.

        Args:
            defaults: settings that hold where no flag was given.

        Raises:
            SettingError: it names the setting that is unknown, impossible or contradicts another.
        """
        settings = defaults | self.settings()
        if "draft_tokens" in settings:
            settings["draft_tokens"] = read_depth(str(settings["draft_tokens"]))
        return make_config(**settings)

    def several(self, drafters: str, depths: str, **defaults: object) -> list[EngineConfig]:
        """A config for every drafter and depth; `none` has no depth and comes once.

        Args:
            drafters: comma list that holds where no drafter was given.
            depths: comma list that holds where no depth was given.
            defaults: settings that hold where no flag was given.

        Raises:
            SettingError: as `single`.
        """
        settings = {"drafter": drafters, "draft_tokens": depths} | defaults | self.settings()
        names = comma_list("drafter", str(settings.pop("drafter")))
        wanted = comma_list("draft_tokens", str(settings.pop("draft_tokens")))
        model = settings.pop("draft_model", None)
        configs = []
        for name in names:
            own = {"draft_model": model} if name in (AUTO, "draft-model") else {}
            for depth in [AUTO] if name == "none" else wanted:
                chosen = settings | own | {"drafter": name, "draft_tokens": read_depth(depth)}
                configs.append(make_config(**chosen))
        return list(dict.fromkeys(configs))


@Parameter(name="*", group=Group("Sampling", sort_key=10))
@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How tokens are chosen; what is not given is the model's default, else greedy."""

    max_tokens: Annotated[int | None, flag("Most new tokens.", _MAX_TOKENS, convert=whole)] = None
    temperature: Annotated[float | None, flag(_SAMPLING["temperature"], convert=number)] = None
    top_p: Annotated[float | None, flag(_SAMPLING["top_p"], convert=number)] = None
    top_k: Annotated[int | None, flag(_SAMPLING["top_k"], convert=whole)] = None
    min_p: Annotated[float | None, flag(_SAMPLING["min_p"], convert=number)] = None
    seed: Annotated[int | None, flag(_SAMPLING["seed"], convert=whole)] = None
    n: Annotated[int | None, flag(_SAMPLING["n"], convert=whole)] = None
    stop: Annotated[list[str] | None, flag(f"{_SAMPLING['stop']} May be repeated.")] = None
    stop_token_ids: Annotated[
        list[int] | None, flag(f"{_SAMPLING['stop_token_ids']} May be repeated.", convert=wholes)
    ] = None
    ignore_eos: Annotated[bool | None, switch(_SAMPLING["ignore_eos"])] = None
    min_tokens: Annotated[int | None, flag(_SAMPLING["min_tokens"], convert=whole)] = None
    presence_penalty: Annotated[
        float | None, flag(_SAMPLING["presence_penalty"], convert=number)
    ] = None
    frequency_penalty: Annotated[
        float | None, flag(_SAMPLING["frequency_penalty"], convert=number)
    ] = None
    repetition_penalty: Annotated[
        float | None, flag(_SAMPLING["repetition_penalty"], convert=number)
    ] = None
    logit_bias: Annotated[
        str | None, flag(f"{_SAMPLING['logit_bias']} A JSON object.", metavar="JSON")
    ] = None
    bad_words: Annotated[list[str] | None, flag(f"{_SAMPLING['bad_words']} May be repeated.")] = (
        None
    )
    logprobs: Annotated[int | None, flag(_SAMPLING["logprobs"], convert=whole)] = None

    def over(self, defaults: SamplingParams) -> SamplingParams:
        """`defaults`, with what was given in their place.

        Raises:
            SettingError: a value is out of range; the error names it.
        """
        given = _given(self, {field.name for field in fields(SamplingOptions)})
        if self.logit_bias is not None:
            given["logit_bias"] = read_bias(json_object("logit_bias", self.logit_bias))
        return replace(defaults, **given)  # type: ignore[arg-type]


ENGINE_DEFAULTS = EngineOptions()
SAMPLING_DEFAULTS = SamplingOptions()


def without_drafter(config: EngineConfig) -> EngineConfig:
    """The same engine, computing one token after the other."""
    return replace(config, drafter="none", draft_tokens=None, draft_model=None)


def comma_list(name: str, text: str) -> list[str]:
    """The entries of a comma list, in order, each once.

    Raises:
        SettingError: it has an empty entry; the error names the flag `name`.
    """
    entries = [entry.strip() for entry in text.split(",")]
    if not all(entries):
        raise SettingError(name, f"must be a value or several with commas between, not {text!r}")
    return list(dict.fromkeys(entries))


def whole_list(name: str, text: str, low: int = 1) -> list[int]:
    """A comma list of whole numbers of at least `low`; raises as `comma_list` does."""
    return [read_whole(name, entry, low) for entry in comma_list(name, text)]


def read_depth(text: str) -> int | None:
    """A draft depth; None for "auto".

    Raises:
        SettingError: it is neither a whole number nor "auto".
    """
    if text == AUTO:
        return None
    try:
        return read_whole("draft_tokens", text, 0)
    except SettingError:
        raise SettingError(
            "draft_tokens", f"must be a whole number or {AUTO}, not {text!r}"
        ) from None


def read_whole(name: str, text: str, low: int) -> int:
    """A whole number of at least `low`.

    Raises:
        SettingError: it is something else; the error names the flag `name`.
    """
    if not text.isdecimal() or int(text) < low:
        raise SettingError(name, f"must be a whole number of at least {low}, not {text!r}")
    return int(text)


def check_whole(name: str, value: int, low: int) -> None:
    """Refuse a number below `low`.

    Raises:
        SettingError: it is; the error names the flag `name`.
    """
    if value < low:
        raise SettingError(name, f"must be at least {low}, not {value}")


def json_object(name: str, text: str) -> dict[str, object]:
    """The JSON object that a flag holds.

    Raises:
        SettingError: it is none; the error names the flag `name`.
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        raise SettingError(name, f"is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise SettingError(name, f"must be a JSON object, not {text!r}")
    return value


def read_bias(bias: Mapping[str, object]) -> dict[int, object]:
    """Biases by token id, as JSON has them by its digits; their values are checked elsewhere.

    Raises:
        SettingError: a key is no token id.
    """
    return {read_whole("logit_bias", token, 0): value for token, value in bias.items()}


def _given(options: object, names: set[str]) -> dict[str, object]:
    """Fields of a dataclass among `names` that are not None."""
    return {name: value for name, value in _values(options) if name in names and value is not None}


def _values(options: object) -> Iterator[tuple[str, object]]:
    for field in fields(options):  # type: ignore[arg-type]
        yield field.name, getattr(options, field.name)

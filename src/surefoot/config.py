"""Every engine setting in one place: names, defaults, limits and aliases; plain data.

Aliases and defaults are resolved first (`resolve_speculation`), then everything is checked once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from importlib.metadata import entry_points

from surefoot.errors import SettingError

DRAFTERS = ("auto", "none", "ngram", "draft-model", "mtp")
DRAFTER_GROUP = "surefoot.drafters"
"""Entry-point group under which other packages offer drafters."""
DTYPES = ("auto", "float32", "bfloat16")
W8A8, W4A8 = "w8a8", "w4a8"
QUANTIZATIONS = (W8A8, W4A8)
MAX_DRAFT_TOKENS = 16

_ALGORITHMS = {
    "NGRAM": "ngram",
    "STANDALONE": "draft-model",
    "NEXTN": "mtp",
    "MTP": "mtp",
    "NONE": "none",
    "AUTO": "auto",
}
_ALGORITHM_SETTINGS = frozenset(
    {
        "speculative_algorithm",
        "speculative_num_draft_tokens",
        "speculative_num_steps",
        "speculative_eagle_topk",
        "speculative_draft_model_path",
    }
)
_METHODS = {"ngram": "ngram", "draft_model": "draft-model", "mtp": "mtp", "nextn": "mtp"}
_METHOD_KEYS = frozenset(
    {"method", "model", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"}
)
LOSSY = {
    "speculative_accept_threshold_single": "it accepts tokens that the model would not have chosen",
    "speculative_accept_threshold_acc": "it accepts tokens that the model would not have chosen",
    "rejection_sample_method": "drafts are kept exactly while they equal the chosen tokens",
    "posterior_threshold": "typical acceptance changes the distribution of the output",
    "typical_acceptance_sampler_posterior_threshold": "typical acceptance changes the output",
    "typical_acceptance_sampler_posterior_alpha": "typical acceptance changes the output",
    "posterior_alpha": "typical acceptance changes the distribution of the output",
}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How an engine runs. Every field is a keyword of `LLM` and a flag of the commands.

    Attributes:
        drafter: who guesses ahead: ngram, draft-model, mtp, none, or the name of a drafter that
            an installed package offers; auto takes the model's own draft head if it has one,
            the draft model if one is given, else ngram.
        draft_tokens: most tokens guessed at once; None adapts to what pays.
        draft_model: path, hub id or packaged name of the draft model.
        dtype: element type of weights and caches; auto is the fastest one of the device.
        quantization: how the weights of linears are kept: w8a8 makes them int8, and their inputs
            row by row; a quarter of the memory of float32, more speed, a little less exact. w4a8
            gives feed-forwards codes of 4 bits, as such checkpoints have them: less exact still,
            and no smaller here, as codes are kept in int8. None leaves weights as the checkpoint
            has them, be that floats or int8.
        device: name of the backend; auto takes the fastest that is present.
        emulate: run the device's operators on the CPU, and check each call against what they demand
            (device npu).
        bitwise: keep results independent, to the last bit, of how work is cut; None means where
            the backend can.
        max_model_len: longest context in tokens; None is what the model was made for.
        memory: bytes for the caches; None takes at most half of what is free.
        page_tokens: tokens per page; None is the backend's choice.
        points: resume points for models with bounded caches; None takes four a row
            and at least 32, within a quarter of the memory that is spare.
        point_every: prompts leave resume points at pages 1, 2, 4, ... up to this one, at its
            multiples, and at their last whole page.
        max_rows: most requests computed at once.
        max_step_tokens: most tokens computed in one step, drafts included.
        prefill_chunk: most prompt tokens of one request computed in one step.
        prefix_cache: keep computed prompts for later requests that begin alike.
        capture: record steps and replay them, where the backend can.
        capture_target: record the target's steps too, not a drafter's alone; None does so on
            devices only. On the CPU small models decode up to twice as fast with it, and drafts
            bring less.
        ngram_max: longest suffix that the ngram drafter looks up.
        ngram_min: shortest one.
        max_waiting: most requests that may wait; further ones are refused.
        threads: compute threads; None leaves the library's choice.
        revision: branch, tag or commit of a model on the hub.
    """

    drafter: str = "auto"
    draft_tokens: int | None = None
    draft_model: str | None = None
    dtype: str = "auto"
    quantization: str | None = None
    device: str = "auto"
    emulate: bool = False
    bitwise: bool | None = None
    max_model_len: int | None = None
    memory: int | None = None
    page_tokens: int | None = None
    points: int | None = None
    point_every: int = 16
    max_rows: int = 32
    max_step_tokens: int = 512
    prefill_chunk: int = 256
    prefix_cache: bool = True
    capture: bool = True
    capture_target: bool | None = None
    ngram_max: int = 5
    ngram_min: int = 2
    max_waiting: int = 4096
    threads: int | None = None
    revision: str | None = None

    def __post_init__(self) -> None:
        """Check each field, then what they say together."""
        if self.drafter not in DRAFTERS:
            _choice("drafter", self.drafter, (*DRAFTERS, *plugin_names()))
        _choice("dtype", self.dtype, DTYPES)
        _choice("quantization", self.quantization, (None, *QUANTIZATIONS))
        _whole("draft_tokens", self.draft_tokens, 0, MAX_DRAFT_TOKENS)
        _whole("max_model_len", self.max_model_len, 2, None)
        _whole("memory", self.memory, 1, None)
        _whole("page_tokens", self.page_tokens, 1, 4096)
        _whole("threads", self.threads, 1, 1024)
        _whole("points", self.points, 0, 1 << 20)
        for name, high in (
            ("max_rows", 4096),
            ("max_step_tokens", 1 << 20),
            ("prefill_chunk", 1 << 20),
            ("point_every", 1 << 20),
        ):
            _whole(name, getattr(self, name), 1, high)
        _whole("max_waiting", self.max_waiting, 1, None)
        _whole("ngram_max", self.ngram_max, 1, 32)
        _whole("ngram_min", self.ngram_min, 1, 32)
        for name in ("prefix_cache", "capture", "capture_target", "emulate", "bitwise"):
            value, open_ones = getattr(self, name), ("bitwise", "capture_target")
            if not isinstance(value, bool) and not (value is None and name in open_ones):
                raise SettingError(name, f"must be true or false, not {value!r}")
        self._check_together()

    def _check_together(self) -> None:
        if self.ngram_min > self.ngram_max:
            raise SettingError(
                "ngram_min", f"{self.ngram_min} is more than ngram_max {self.ngram_max}"
            )
        if self.max_step_tokens < self.max_rows:
            raise SettingError(
                "max_step_tokens",
                f"{self.max_step_tokens} is less than max_rows {self.max_rows}; each needs one",
            )
        if self.drafter == "draft-model" and self.draft_model is None:
            raise SettingError(
                "draft_model", "the drafter 'draft-model' needs one: give a path, hub id or name"
            )
        if self.draft_model is not None and self.drafter not in ("auto", "draft-model"):
            raise SettingError("draft_model", f"has no use with the drafter {self.drafter!r}")

    @property
    def most_draft_tokens(self) -> int:
        """Depth that caches must be made for."""
        if self.drafter == "none":
            return 0
        return self.draft_tokens if self.draft_tokens is not None else AUTO_DRAFT_TOKENS


AUTO_DRAFT_TOKENS = 8
"""Greatest depth that `draft_tokens=None` may choose."""


def plugin_names() -> tuple[str, ...]:
    """Drafters that installed packages offer."""
    return tuple(sorted(entry.name for entry in entry_points(group=DRAFTER_GROUP)))


def make_config(**settings: object) -> EngineConfig:
    """An EngineConfig from loose settings, aliases included.

    Raises:
        SettingError: an unknown, lossy, contradictory or impossible setting; it names the setting.
    """
    resolved = resolve_speculation(settings)
    known = {field.name for field in fields(EngineConfig)}
    for name in resolved:
        if name not in known:
            raise SettingError(name, f"unknown setting; known are {', '.join(sorted(known))}")
    return replace(EngineConfig(), **resolved)  # type: ignore[arg-type]


def resolve_speculation(settings: Mapping[str, object]) -> dict[str, object]:
    """Translate other engines' spellings of speculation into ours.

    `speculative_algorithm` and its companions count the bonus slot in
    `speculative_num_draft_tokens`, so one is taken off; `speculative_config` does not.
    """
    for name, reason in LOSSY.items():
        if settings.get(name) is not None:
            raise SettingError(
                name, f"not offered: {reason}; surefoot's output never depends on drafting"
            )
    if settings.get("trust_remote_code"):
        raise SettingError("trust_remote_code", "not offered: code from a checkpoint is never run")
    ours = {key: value for key, value in settings.items() if not key.startswith("speculative_")}
    theirs = {
        key: value
        for key, value in settings.items()
        if key.startswith("speculative_") and value is not None
    }
    if not theirs:
        return ours
    if "speculative_config" in theirs:
        others = sorted(theirs.keys() - {"speculative_config"})
        if others:
            raise SettingError(others[0], "give either this or speculative_config, not both")
        translated = _from_config(theirs["speculative_config"])
    else:
        translated = _from_algorithm(theirs)
    for name, value in translated.items():
        if ours.get(name) is not None and ours[name] != value:
            raise SettingError(
                name, f"{ours[name]!r} contradicts the speculative_* settings, which say {value!r}"
            )
        ours[name] = value
    return ours


def _from_algorithm(theirs: Mapping[str, object]) -> dict[str, object]:
    for name in theirs:
        if name not in _ALGORITHM_SETTINGS:
            known = ", ".join(sorted(_ALGORITHM_SETTINGS))
            raise SettingError(name, f"unknown setting; known are {known}")
    translated: dict[str, object] = {"drafter": _algorithm(theirs)}
    if theirs.get("speculative_eagle_topk", 1) != 1:
        raise SettingError("speculative_eagle_topk", "only chains are drafted, so it must be 1")
    depths = set(_depths(theirs))
    if len(depths) > 1:
        raise SettingError(
            "speculative_num_draft_tokens",
            "counts the bonus slot, so it must be speculative_num_steps + 1",
        )
    if depths:
        translated["draft_tokens"] = depths.pop()
    if "speculative_draft_model_path" in theirs:
        translated["draft_model"] = theirs["speculative_draft_model_path"]
    return translated


def _algorithm(theirs: Mapping[str, object]) -> str:
    algorithm = theirs.get("speculative_algorithm")
    if algorithm is None:
        raise SettingError(next(iter(theirs)), "has no meaning without speculative_algorithm")
    if str(algorithm).upper() not in _ALGORITHMS:
        raise SettingError(
            "speculative_algorithm", f"{algorithm!r} is unknown; known are {', '.join(_ALGORITHMS)}"
        )
    return _ALGORITHMS[str(algorithm).upper()]


def _depths(theirs: Mapping[str, object]) -> Iterator[int]:
    """The depth as each of the settings says it; one of them counts the bonus slot."""
    for name, least in (("speculative_num_draft_tokens", 1), ("speculative_num_steps", 0)):
        if name in theirs:
            yield _counted(name, theirs[name], least) - least


def _from_config(text: object) -> dict[str, object]:
    try:
        config = json.loads(text) if isinstance(text, str) else text
    except json.JSONDecodeError as error:
        raise SettingError("speculative_config", f"is not JSON: {error}") from None
    if not isinstance(config, Mapping):
        raise SettingError("speculative_config", "must be a JSON object")
    for key in config:
        if key in LOSSY:
            raise SettingError(f"speculative_config.{key}", f"not offered: {LOSSY[key]}")
        if key not in _METHOD_KEYS:
            known = ", ".join(sorted(_METHOD_KEYS))
            raise SettingError(f"speculative_config.{key}", f"unknown key; known are {known}")
    method = config.get("method", "draft_model" if "model" in config else None)
    if method not in _METHODS:
        raise SettingError(
            "speculative_config.method", f"{method!r} is unknown; known are {', '.join(_METHODS)}"
        )
    names = {
        "num_speculative_tokens": "draft_tokens",
        "model": "draft_model",
        "prompt_lookup_max": "ngram_max",
        "prompt_lookup_min": "ngram_min",
    }
    translated = {ours: config[theirs] for theirs, ours in names.items() if theirs in config}
    return {"drafter": _METHODS[method], **translated}


def _counted(name: str, value: object, low: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise SettingError(name, f"must be a whole number of at least {low}, not {value!r}")
    return value


def _choice(name: str, value: object, known: tuple[str | None, ...]) -> None:
    if value not in known:
        listed = ", ".join(each for each in known if each is not None)
        raise SettingError(name, f"{value!r} is unknown; known are {listed}")


_NEVER_NONE = ("max_rows", "max_step_tokens", "prefill_chunk", "point_every")


def _whole(name: str, value: object, low: int, high: int | None) -> None:
    if value is None and name not in _NEVER_NONE:
        return
    bounds = f"at least {low}" if high is None else f"from {low} to {high}"
    good = isinstance(value, int) and not isinstance(value, bool)
    if not good or not isinstance(value, int) or value < low or (high is not None and value > high):
        raise SettingError(name, f"must be a whole number {bounds}, not {value!r}")

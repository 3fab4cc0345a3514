"""What a user may ask of one request: plain data, checked when it is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from surefoot.errors import SettingError

MAX_SAMPLES = 64
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
MAX_LOGPROBS = 20
MAX_SEED = 2**64 - 1


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when a request ends.

    Attributes:
        max_tokens: most new tokens; None means up to the context limit.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the k best tokens; 0 keeps all.
        top_p: keep the smallest set of best tokens with this probability; 1 keeps all.
        min_p: drop tokens less likely than min_p times the best one.
        presence_penalty: subtracted once from each token that was already generated.
        frequency_penalty: subtracted once per occurrence in the generated text.
        repetition_penalty: divides positive and multiplies negative logits of tokens seen
            in prompt or output; 1 is neutral.
        logit_bias: added to the logits of the given token ids.
        bad_words: strings that must not be generated.
        allowed_token_ids: if given, only these tokens can be chosen.
        min_tokens: end and stop tokens cannot be chosen before this many new tokens.
        seed: makes sampling repeatable; None draws a fresh one.
        n: independent samples of the same prompt; sample i uses hash(seed, i).
        stop: strings that end the text; not part of it unless include_stop_str_in_output.
        stop_token_ids: further tokens that end the text like the model's end token.
        ignore_eos: do not end at the model's end token.
        logprobs: return log-probabilities of the emitted token and this many best ones,
            from the model's own distribution before any processing; None returns none.
        prompt_logprobs: the same for each prompt token but the first; switches prefix reuse
            off for the request.
        skip_special_tokens: leave special tokens out of the text.
        speculate: whether this request may be drafted for; the tokens do not depend on it.

    Raises:
        SettingError: a value is out of range; the error names the parameter.
    """

    max_tokens: int | None = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    min_tokens: int = 0
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    speculate: bool = True

    def __post_init__(self) -> None:
        """Normalise lists to tuples and check every range."""
        for name in ("stop", "bad_words"):
            object.__setattr__(self, name, _strings(name, getattr(self, name)))
        object.__setattr__(self, "stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            allowed = _ids("allowed_token_ids", self.allowed_token_ids)
            object.__setattr__(self, "allowed_token_ids", allowed)
            _require(bool(allowed), "allowed_token_ids", "must name at least one token", allowed)
        self._check_integers()
        self._check_numbers()
        self._check_stops()

    def _check_integers(self) -> None:
        _integer("max_tokens", self.max_tokens, 1, None, optional=True)
        _integer("top_k", self.top_k, 0, None)
        _integer("min_tokens", self.min_tokens, 0, None)
        _integer("n", self.n, 1, MAX_SAMPLES)
        _integer("seed", self.seed, 0, MAX_SEED, optional=True)
        _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS, optional=True)
        _integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS, optional=True)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise SettingError(
                "min_tokens", f"{self.min_tokens} is more than max_tokens {self.max_tokens}"
            )

    def _check_numbers(self) -> None:
        _number("temperature", self.temperature, lambda x: 0 <= x <= 100, "from 0 to 100")
        _number("top_p", self.top_p, lambda x: 0 < x <= 1, "above 0 and at most 1")
        _number("min_p", self.min_p, lambda x: 0 <= x <= 1, "from 0 to 1")
        for name in ("presence_penalty", "frequency_penalty"):
            _number(name, getattr(self, name), lambda x: -2 <= x <= 2, "from -2 to 2")
        # Smaller ones are of no use, and at last make scores infinite.
        _number(
            "repetition_penalty",
            self.repetition_penalty,
            lambda x: 0.01 <= x <= 100,
            "from 0.01 to 100",
        )
        for token, bias in self.logit_bias.items():
            _integer("logit_bias", token, 0, None)
            _number("logit_bias", bias, lambda x: -100 <= x <= 100, "from -100 to 100")

    def _check_stops(self) -> None:
        _require(
            len(self.stop) <= MAX_STOP_STRINGS,
            "stop",
            f"takes at most {MAX_STOP_STRINGS} strings",
            self.stop,
        )
        for text in (*self.stop, *self.bad_words):
            name = "stop" if text in self.stop else "bad_words"
            _require(bool(text), name, "an empty string matches everything", text)
            _require(
                len(text) <= MAX_STOP_LENGTH,
                name,
                f"takes at most {MAX_STOP_LENGTH} characters",
                text,
            )

    @property
    def greedy(self) -> bool:
        """Whether no noise is added: the best processed token is taken."""
        return self.temperature == 0

    @property
    def cuts(self) -> bool:
        """Whether top_k, top_p or min_p may leave out tokens."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def needs_history(self) -> bool:
        """Whether the processed logits depend on the tokens before the row."""
        return (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
            or bool(self.bad_words)
        )


def _require(good: bool, name: str, rule: str, value: object) -> None:
    if not good:
        raise SettingError(name, f"{rule}, not {value!r}")


def _integer(name: str, value: object, low: int, high: int | None, optional: bool = False) -> None:
    if optional and value is None:
        return
    whole = isinstance(value, int) and not isinstance(value, bool)
    bounds = (
        f"a whole number of at least {low}"
        if high is None
        else f"a whole number from {low} to {high}"
    )
    fits = whole and isinstance(value, int) and value >= low and (high is None or value <= high)
    _require(fits, name, f"must be {bounds}", value)


def _number(name: str, value: object, fits: Callable[[float], bool], rule: str) -> None:
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    # Whole numbers may be too large for a float, and NaN fits nothing.
    good = numeric and isinstance(value, int | float) and fits(value)
    _require(good, name, f"must be a number {rule}", value)


def _strings(name: str, value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list | tuple) or not all(isinstance(text, str) for text in value):
        raise SettingError(name, f"must be a string or a list of strings, not {value!r}")
    return tuple(value)


def _ids(name: str, value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise SettingError(name, f"must be a list of token ids, not {value!r}")
    for token in value:
        _integer(name, token, 0, None)
    return tuple(value)

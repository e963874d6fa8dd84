"""From a body's fields to SamplingParams, every value checked."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from sapwood_server.api.wire_shared import SharedBody
from sapwood_server.errors import BadRequestError
from sapwood_server.quoting import quote_json
from sapwood_server.values.messages import EngineInfo
from sapwood_server.values.sampling import SamplingParams

MAX_CHOICES = 128
MAX_LOGIT_BIASES = 1024
"""Each is work in every step, for all whose requests share it."""
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 1024
"""Of one stop string. The engine keeps a table of eight times that, and each choice holds back as much text."""
MAX_STOP_TOKEN_IDS = 128
"""Far fewer than any vocabulary has: until `min_tokens` are reached these are banned, and some token must be left."""
MAX_TOP_LOGPROBS = 20
_MAX_INT = 2**31 - 1
_REPETITION_PENALTIES = (0.001, 1000)
"""It divides and multiplies logits; within these bounds they stay finite in fp32."""
_SEED_MASK = 2**64 - 1
_TOKEN_ID = re.compile(r"[0-9]{1,10}")


def to_sampling(
    body: SharedBody, info: EngineInfo, *, top_logprobs: int | None, draw_seed: Callable[[], int]
) -> SamplingParams:
    """The settings of one request. Raises BadRequestError that quotes the field, its value and what is accepted."""
    max_tokens = body.length
    if max_tokens is not None and max_tokens < 1:
        raise outside(body.length_field, max_tokens, "1 or more")
    min_tokens = integer("min_tokens", body.min_tokens, 0, 0, _MAX_INT)
    if max_tokens is not None and min_tokens > max_tokens:
        raise BadRequestError(
            f"min_tokens is {min_tokens}; accepted: at most {body.length_field}, {max_tokens}", param="min_tokens"
        )
    return SamplingParams(
        temperature=number("temperature", body.temperature, 1.0, 0, 2),
        top_p=_top_p(body.top_p),
        top_k=min(max(integer("top_k", body.top_k, 0, -1, _MAX_INT), 0), info.vocab_size),
        min_p=number("min_p", body.min_p, 0.0, 0, 1),
        presence_penalty=number("presence_penalty", body.presence_penalty, 0.0, -2, 2),
        frequency_penalty=number("frequency_penalty", body.frequency_penalty, 0.0, -2, 2),
        repetition_penalty=number("repetition_penalty", body.repetition_penalty, 1.0, *_REPETITION_PENALTIES),
        logit_bias=_logit_bias(body.logit_bias or {}, info.vocab_size),
        seed=_seed(body.seed, draw_seed),
        top_logprobs=top_logprobs,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop=_stop(body.stop),
        stop_token_ids=_stop_token_ids(body.stop_token_ids or (), info.vocab_size),
        ignore_eos=bool(body.ignore_eos),
        n=integer("n", body.n, 1, 1, MAX_CHOICES),
    )


def number(name: str, value: float | None, default: float, low: float, high: float) -> float:
    """`value`, or the default where it is None. Raises BadRequestError outside `[low, high]`."""
    if value is None:
        return default
    if not low <= value <= high:
        raise outside(name, value, f"{low} to {high}")
    return float(value)


def integer(name: str, value: int | None, default: int, low: int, high: int) -> int:
    """`value`, or the default where it is None. Raises BadRequestError outside `[low, high]`."""
    if value is None:
        return default
    if not low <= value <= high:
        raise outside(name, value, f"{low} to {high}")
    return value


def token_ids(name: str, ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """The same ids. Raises BadRequestError for one outside the vocabulary."""
    for index, token_id in enumerate(ids):
        if not 0 <= token_id < vocab_size:
            raise outside(f"{name}[{index}]", token_id, f"token ids from 0 to {vocab_size - 1}")
    return tuple(ids)


def outside(name: str, value: object, accepted: str) -> BadRequestError:
    """The refusal of a value, which names the field, shows the value, and says what is accepted."""
    return BadRequestError(f"{name} is {quote_json(value)}; accepted: {accepted}", param=name)


def _top_p(value: float | None) -> float:
    if value is not None and value == 0:
        raise outside("top_p", value, "more than 0, up to 1")
    return number("top_p", value, 1.0, 0, 1)


def _seed(value: int | None, draw_seed: Callable[[], int]) -> int:
    """OpenAI's seeds are signed; a negative one is the unsigned number with the same 64 bits."""
    if value is None:
        return draw_seed()
    if not -(2**63) <= value <= _SEED_MASK:
        raise outside("seed", value, "64-bit integers")
    return value & _SEED_MASK


def _logit_bias(bias: dict[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    if len(bias) > MAX_LOGIT_BIASES:
        raise outside("logit_bias", bias, f"up to {MAX_LOGIT_BIASES} entries")
    entries: dict[int, float] = {}
    for key, value in bias.items():
        if not _TOKEN_ID.fullmatch(key) or int(key) >= vocab_size:
            raise BadRequestError(
                f"logit_bias has the key {quote_json(key)}; accepted: token ids from 0 to {vocab_size - 1}",
                param="logit_bias",
            )
        entries[int(key)] = number(f"logit_bias[{key}]", value, 0.0, -100, 100)
    return tuple(entries.items())


def _stop(stop: str | list[str] | None) -> tuple[bytes, ...]:
    strings = [] if stop is None else [stop] if isinstance(stop, str) else stop
    stops = tuple(string.encode() for string in strings)
    if len(stops) > MAX_STOP_STRINGS or not all(0 < len(data) <= MAX_STOP_BYTES for data in stops):
        raise outside("stop", stop, f"up to {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_BYTES} bytes")
    return stops


def _stop_token_ids(ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise outside("stop_token_ids", ids, f"up to {MAX_STOP_TOKEN_IDS} token ids")
    return token_ids("stop_token_ids", ids, vocab_size)

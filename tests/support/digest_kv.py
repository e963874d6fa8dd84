"""A runner without a model that really keeps KV: each slot holds a digest of all tokens up to its position.

It obeys plans to the letter and reads only what the plans point it to, so wrong KV under a hit, a missing copy or a
page reused too early shows up as a digest that is not the sequence's own. The "model" draws the next token from the
digest at the last position, so what a request generates depends on its tokens alone and can be foretold.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sapwood_server.cache.manager import Admission, KVCacheManager
from sapwood_server.cache.table import BlockTable
from sapwood_server.cache.tokens import pack_tokens
from sapwood_server.cache.tree import Match
from sapwood_server.values.events import FinishReason
from sapwood_server.values.plan import (
    Draw,
    DrawFailure,
    FailedDraw,
    Phase,
    RowPlan,
    Sampled,
    SampleSpec,
    StepPlan,
    StepResult,
)
from sapwood_server.values.request import Request

END_ID = 7
OTHER_END_ID = 6
DAMAGED = -1
"""In a slot: KV that is no sequence's."""


@dataclass(frozen=True)
class ToyTokens:
    """A vocabulary of eight ids; some share bytes with others, some bytes are no whole UTF-8, two have none."""

    token_bytes: tuple[bytes, ...] = (b"a", b"b", b"ab", b"\xc3", b"\xa9", b"ba", b"", b"")
    eos_ids: frozenset[int] = frozenset({END_ID, OTHER_END_ID})


def start_digest(salt: str) -> int:
    return zlib.crc32(salt.encode())


def next_digest(digest: int, token_id: int) -> int:
    """Digest of a prefix and one more token; 64 bits, so that a collision is no explanation."""
    return hash((digest, token_id))


def digests(salt: str, ids: Sequence[int]) -> list[int]:
    """The digest at each position."""
    chain = []
    digest = start_digest(salt)
    for token_id in ids:
        digest = next_digest(digest, token_id)
        chain.append(digest)
    return chain


def draw(digest: int, choice: int, banned: Sequence[int] = ()) -> int:
    """The token that the toy model draws after a prefix; choices often, but not always, draw the same."""
    token_id = digest // 7 % 6 + (digest % 11 == 0) if digest % 3 else (digest // 5 + choice) % 6
    if digest % 13 == 0:
        token_id = END_ID
    while token_id in banned:
        token_id = (token_id + 1) % 8
    return token_id


class DigestKV:
    """The pages: `slots[page][slot]` is a digest, or None where nothing valid is written."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.slots: list[list[int | None]] = [[None] * page_size for _ in range(num_pages)]

    def truncate(self, page: int, num_slots: int = 0) -> None:
        """Only the first `num_slots` slots stay valid."""
        self.slots[page][num_slots:] = [None] * (self.page_size - num_slots)

    def resident_tokens(self, salt: str, ids: Sequence[int], is_free: Callable[[int], bool]) -> int:
        """Length of the longest prefix of `ids` each position of which is in some page that is not free."""
        held = {digest for page, slots in enumerate(self.slots) if page and not is_free(page) for digest in slots}
        for position, digest in enumerate(digests(salt, ids)):
            if digest not in held:
                return position
        return len(ids)


@dataclass(frozen=True)
class SeenAdmission:
    """What the oracle and the cache said about the same tokens at the same moment."""

    resident: int
    limit: int
    matched: int
    due: int
    """The most leading tokens that an admitted sequence has or is due to compute from what it was admitted with."""


class WatchedCache(KVCacheManager):
    """The real cache, with an oracle that looks at the pages themselves at the moment of each admission."""

    def __init__(self, num_pages: int, page_size: int, prefix_cache: bool = True) -> None:
        super().__init__(num_pages, page_size, prefix_cache=prefix_cache)
        self.kv = DigestKV(num_pages, page_size)
        self.seen: dict[BlockTable, SeenAdmission] = {}
        self._admitted_with: dict[BlockTable, tuple[str, tuple[int, ...]]] = {}
        self.num_takeovers = 0

    def admit(self, salt: str, tokens: bytes, match: Match) -> Admission:
        ids = unpack(tokens)
        resident = self.kv.resident_tokens(salt, ids, self.pool.is_free) if self.prefix_cache else 0
        due = 0
        for table in self._tables if self.prefix_cache else ():
            leader_salt, leader_ids = self._admitted_with[table]
            if leader_salt == salt and table.num_written < len(leader_ids):
                due = max(due, common_prefix(leader_ids, ids))
        admission = super().admit(salt, tokens, match)
        table = admission.table
        self._admitted_with[table] = (salt, ids)
        self.seen[table] = SeenAdmission(resident, len(ids) - 1, table.num_written, min(due, len(ids) - 1))
        used = table.num_written % self.page_size
        if used and admission.copy is None:
            self.num_takeovers += 1
            self.kv.truncate(table.pages[-1], used)  # the sequence is going to write the rest of the page
        return admission

    def clear(self) -> None:
        super().clear()
        for page in range(len(self.kv.slots)):
            self.kv.truncate(page)

    def _take_page(self) -> int:
        page = super()._take_page()
        self.kv.truncate(page)  # what it held before is gone from the moment somebody else may write to it
        return page


@dataclass
class DigestRunner:
    """Executes plans on a DigestKV. `tokens_of(sequence_id)`: that sequence's salt and all its tokens."""

    kv: DigestKV
    tokens_of: Callable[[int], tuple[str, Sequence[int]]]
    tables: dict[int, list[int]] = field(default_factory=dict)
    computed: int = 0
    """Tokens that went through, all in all."""
    failing: dict[int, DrawFailure] = field(default_factory=dict)
    """By choice key: draws of that choice fail. If the logits are not finite, neither is the KV of the row."""
    _drawn_in_step: dict[int, int] = field(default_factory=dict)
    """By choice key, the last step in which it drew."""
    _step: int = 0

    def execute(self, plan: StepPlan) -> StepResult:
        assert plan.step == self._step + 1
        self._step = plan.step
        for sequence_id in plan.released:
            self.tables.pop(sequence_id, None)
        for choice_key in plan.ended_choices:
            self._drawn_in_step.pop(choice_key, None)
        for copy in plan.copies:
            source, target = self.kv.slots[copy.source], self.kv.slots[copy.target]
            assert 0 < copy.num_slots < self.kv.page_size
            assert target == [None] * self.kv.page_size, f"copy to page {copy.target}, which is in use"
            target[: copy.num_slots] = source[: copy.num_slots]
        return StepResult(samples=tuple(self._compute(row) for row in plan.rows))

    def _compute(self, row: RowPlan) -> tuple[Draw, ...]:
        table = self.tables.setdefault(row.sequence_id, [])
        table.extend(row.new_pages)
        size = self.kv.page_size
        salt, ids = self.tokens_of(row.sequence_id)
        end = row.start + len(row.token_ids)
        assert row.token_ids, "a row without tokens"
        assert len(table) == -(-end // size), f"{len(table)} pages for {end} positions"
        assert tuple(row.token_ids) == tuple(ids[row.start : end])
        chain = digests(salt, ids)
        is_damaged = any(self.failing.get(spec.choice_key) is DrawFailure.NOT_FINITE for spec in row.samples)
        for position in range(row.start):
            slot = self.kv.slots[table[position // size]][position % size]
            assert slot == chain[position], f"position {position} of sequence {row.sequence_id} has other KV"
        for position in range(row.start, end):
            slots = self.kv.slots[table[position // size]]
            assert table[position // size] != 0, "the reserved page is written to"
            assert slots[position % size] is None, f"position {position} overwrites KV in {table[position // size]}"
            slots[position % size] = DAMAGED if is_damaged else chain[position]
        self.computed += len(row.token_ids)
        self._check_phase(row, end, len(ids))
        assert bool(row.samples) == (end == len(ids)), "logits are needed exactly at the last token"
        return tuple(self._draw(spec, ids, chain[-1]) for spec in row.samples)

    def _check_phase(self, row: RowPlan, end: int, num_tokens: int) -> None:
        drawn = {self._drawn_in_step.get(spec.choice_key) for spec in row.samples}
        is_decode = len(row.token_ids) == 1 and end == num_tokens and drawn == {self._step - 1}
        assert (row.phase is Phase.DECODE) == is_decode, f"{row.phase} for {row.token_ids} at {row.start}"

    def _draw(self, spec: SampleSpec, ids: Sequence[int], digest: int) -> Draw:
        assert [*spec.prompt_ids, *spec.output_ids] == list(ids)
        self._drawn_in_step[spec.choice_key] = self._step
        if spec.choice_key in self.failing:
            return FailedDraw(self.failing[spec.choice_key])
        return Sampled(draw(digest, spec.choice, spec.banned_ids) if spec.forced is None else spec.forced)


@dataclass(frozen=True)
class Expected:
    """What one choice generates."""

    token_ids: tuple[int, ...]
    text: bytes
    finish_reason: FinishReason


def expected_choice(request: Request, choice: int, budget: int, tokens: ToyTokens) -> Expected:
    """Foretell a choice from the request alone, in the plainest way."""
    sampling = request.sampling
    forced = request.forced_tokens[choice] if request.forced_tokens else ()
    end_ids = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else tokens.eos_ids)
    digest = digests(request.salt, request.prompt_token_ids)[-1]
    text, searched = b"", b""
    output: list[int] = []
    while True:
        banned = sorted(end_ids) if len(output) < sampling.min_tokens else []
        token_id = forced[len(output)] if len(output) < len(forced) else draw(digest, choice, banned)
        digest = next_digest(digest, token_id)
        output.append(token_id)
        may_stop = len(output) > sampling.min_tokens
        if may_stop and token_id in end_ids:
            return Expected(tuple(output), text + searched, FinishReason.STOP)
        if may_stop:
            searched += tokens.token_bytes[token_id]
        else:
            text += tokens.token_bytes[token_id]
        cut = first_stop(searched, sampling.stop)
        if cut is not None:
            return Expected(tuple(output), text + searched[:cut], FinishReason.STOP)
        if len(output) == budget:
            return Expected(tuple(output), text + searched, FinishReason.LENGTH)


def first_stop(text: bytes, stops: Sequence[bytes]) -> int | None:
    """Where the stop string begins that is complete first (the longest, of those that are complete at once)."""
    for end in range(1, len(text) + 1):
        found = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if found:
            return end - max(found)
    return None


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length


def unpack(tokens: bytes) -> tuple[int, ...]:
    """The inverse of `pack_tokens`."""
    ids = tuple(int.from_bytes(tokens[start : start + 4], "big") for start in range(0, len(tokens), 4))
    assert pack_tokens(ids) == tokens
    return ids

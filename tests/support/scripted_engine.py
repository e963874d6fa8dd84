"""An engine without a model: the real loop, scheduler and process around a runner whose next token is a formula.

Run as a script it is an engine process like `python -m sapwood_server.engine`; the configuration's `model` chooses what
happens at its start.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from sapwood_server.config import ServerConfig
from sapwood_server.engine.loop import Engine
from sapwood_server.engine.process import Progress, main
from sapwood_server.engine.scheduler import Scheduler, SchedulerLimits
from sapwood_server.errors import StartupError
from sapwood_server.values.messages import EngineInfo
from sapwood_server.values.plan import Draw, DrawFailure, FailedDraw, RowPlan, Sampled, StepPlan, StepResult

COMMAND = (sys.executable, __file__)

REFUSES = "refuses"
"""A model that can't be loaded."""
CRASHES = "crashes"
"""A model whose loading raises what nobody foresaw."""
DIES = "dies"
"""A model whose loading kills the process."""
STARTS_ONCE = "once "
"""Followed by a path where nothing is yet: a model that can be loaded once."""

VOCAB_SIZE = 300
EOS_ID = 256
RAISE_ID = 290
"""In a step's tokens: the runner raises."""
KILL_ID = 291
"""In a step's tokens: the process kills itself, as the kernel does when memory runs out."""
HANG_ID = 292
"""In a step's tokens: the step never ends."""
UNDRAWABLE_ID = 293
"""In a row's tokens: the logits after it are not finite."""


class ByteTable:
    """Ids 0 to 255 are bytes; the others are control tokens."""

    token_bytes: Sequence[bytes] = tuple(bytes([i]) if i < EOS_ID else b"" for i in range(VOCAB_SIZE))
    eos_ids = frozenset({EOS_ID})


def next_token(token_id: int, position: int) -> int:
    """What follows `token_id` at `position`: never a control token."""
    return (token_id * 31 + position * 7 + 1) % EOS_ID


def completion(prompt: Sequence[int], count: int) -> tuple[int, ...]:
    """The `count` ids that a runner of this kind generates after `prompt`."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_token(ids[-1], len(ids) - 1))
    return tuple(ids[len(prompt) :])


class ScriptedRunner:
    """Answers plans by `next_token`, and checks that each sequence's rows follow on one another."""

    def __init__(self, *, num_pages: int = 65_536, max_num_seqs: int = 64, max_model_len: int = 200_000) -> None:
        self.info = EngineInfo(
            model="scripted",
            architecture="scripted",
            fingerprint="scripted",
            device="none",
            dtype="none",
            dtype_reason="there is nothing to compute",
            deterministic=True,
            vocab_size=VOCAB_SIZE,
            max_model_len=max_model_len,
            page_size=16,
            num_pages=num_pages,
            kv_bytes_per_token=0,
            max_batched_tokens=2048,
            max_num_seqs=max_num_seqs,
            weight_bytes=0,
            load_seconds=0.0,
        )
        self._written: dict[int, int] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        """One token for each sample of the plan."""
        for sequence_id in plan.released:
            self._written.pop(sequence_id, None)
        return StepResult(samples=tuple(self._compute(row) for row in plan.rows))

    def _compute(self, row: RowPlan) -> tuple[Draw, ...]:
        if RAISE_ID in row.token_ids:
            raise ValueError("a token that can't be computed")
        if KILL_ID in row.token_ids:
            os.kill(os.getpid(), signal.SIGKILL)
        if HANG_ID in row.token_ids:
            time.sleep(3600)
        written = self._written.get(row.sequence_id, row.start)
        if written != row.start:
            raise ValueError(f"sequence {row.sequence_id} has {written} tokens, but the row starts at {row.start}")
        end = self._written[row.sequence_id] = row.start + len(row.token_ids)
        if UNDRAWABLE_ID in row.token_ids:
            return tuple(FailedDraw(DrawFailure.NOT_FINITE) for _ in row.samples)
        token_id = next_token(row.token_ids[-1], end - 1)
        return tuple(Sampled(token_id if spec.forced is None else spec.forced) for spec in row.samples)


def limits_of(runner: ScriptedRunner) -> SchedulerLimits:
    """The scheduler's limits that go with the runner."""
    info = runner.info
    return SchedulerLimits(
        num_pages=info.num_pages,
        page_size=info.page_size,
        max_num_seqs=info.max_num_seqs,
        max_batched_tokens=info.max_batched_tokens,
        max_model_len=info.max_model_len,
    )


def scripted_engine(runner: ScriptedRunner) -> Engine:
    """The runner under the real scheduler."""
    return Engine(scheduler=Scheduler(limits_of(runner), ByteTable()), runner=runner)


def build(config: ServerConfig, progress: Progress) -> Engine:
    """What `config.model` asks for."""
    progress("weights", 0.0)
    if config.model == REFUSES:
        raise StartupError("/models/refuses/config.json: no such file")
    if config.model == CRASHES:
        raise LookupError("nobody foresaw this")
    if config.model == DIES:
        os.kill(os.getpid(), signal.SIGKILL)
    if config.model.startswith(STARTS_ONCE):
        try:
            Path(config.model.removeprefix(STARTS_ONCE)).touch(exist_ok=False)
        except FileExistsError:
            raise StartupError("it has started once") from None
    progress("weights", 1.0)
    if config.api_key:
        raise StartupError("an API key reached the engine process")
    return scripted_engine(ScriptedRunner(max_num_seqs=config.max_num_seqs))


if __name__ == "__main__":
    sys.exit(main(sys.argv, build))

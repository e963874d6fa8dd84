"""First calls of each shape, made before a person waits for them."""

from __future__ import annotations

from typing import Protocol

from sapwood_server.errors import StartupError
from sapwood_server.values.messages import EngineInfo
from sapwood_server.values.plan import FailedDraw, Phase, RowPlan, SampleSpec, StepPlan, StepResult
from sapwood_server.values.sampling import SamplingParams

_SEQUENCE_ID = -1
_CHOICE_KEY = -1
_GREEDY = SamplingParams(temperature=0.0)
_EVERY_SETTING = SamplingParams(
    top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.1, logit_bias=((0, 1.0),), top_logprobs=1
)


class WarmRunner(Protocol):
    """What is warmed up."""

    @property
    def info(self) -> EngineInfo: ...
    def execute(self, plan: StepPlan) -> StepResult: ...


def warm_up(runner: WarmRunner) -> None:
    """A chunk of the largest size, the chunk after it, and two decode steps, one with a draw of every setting.

    What they wrote is never read again.

    Raises StartupError for a model that gives no finite logits even here: it would fail every request.
    """
    info = runner.info
    chunk = min(info.max_batched_tokens, (info.max_model_len - 2) // 2, (info.num_pages - 1) * info.page_size // 2 - 2)
    if chunk < 1:
        return
    covered = 0
    sizes = ((0, chunk, Phase.PREFILL), (chunk, chunk, Phase.PREFILL))
    decodes = ((2 * chunk, 1, Phase.DECODE), (2 * chunk + 1, 1, Phase.DECODE))
    draws = (_GREEDY, _GREEDY, _EVERY_SETTING, _GREEDY)
    for (start, count, phase), sampling in zip((*sizes, *decodes), draws, strict=True):
        needed = -(-(start + count) // info.page_size)
        new_pages = range(covered + 1, needed + 1)
        covered = needed
        result = runner.execute(StepPlan(step=-1, rows=(_row(start, count, phase, new_pages, sampling),)))
        if any(isinstance(draw, FailedDraw) for draw in result.samples[0]):
            raise StartupError(
                f"{info.model}: the model's logits are not finite in {info.dtype}; its weights are damaged, or need "
                "another --dtype"
            )
    runner.execute(StepPlan(step=-1, rows=(), released=(_SEQUENCE_ID,), ended_choices=(_CHOICE_KEY,)))


def _row(start: int, count: int, phase: Phase, new_pages: range, sampling: SamplingParams) -> RowPlan:
    sample = SampleSpec(choice_key=_CHOICE_KEY, choice=0, sampling=sampling, prompt_ids=(0,), output_ids=())
    return RowPlan(
        sequence_id=_SEQUENCE_ID,
        token_ids=[0] * count,
        start=start,
        phase=phase,
        new_pages=new_pages,
        samples=(sample,),
    )

"""The engine process as it is, but with its books verified after every step. To be run as a script."""

from __future__ import annotations

import sys

from sapwood_server.config import ServerConfig
from sapwood_server.engine.build import build_engine
from sapwood_server.engine.loop import Engine, StepScheduler
from sapwood_server.engine.process import Progress, main
from sapwood_server.values.events import FinalEvent, TokenEvent
from sapwood_server.values.messages import EngineStats
from sapwood_server.values.plan import StepPlan, StepResult
from sapwood_server.values.request import Request

COMMAND = (sys.executable, __file__)


class CheckedScheduler:
    """Another scheduler, whose `check` is called after everything that changes it."""

    def __init__(self, scheduler: StepScheduler) -> None:
        self._scheduler = scheduler
        self.fail = scheduler.fail
        self.check = scheduler.check

    def add(self, request: Request) -> None:
        self._scheduler.add(request)
        self.check()

    def cancel(self, request_id: str) -> None:
        self._scheduler.cancel(request_id)
        self.check()

    def schedule(self) -> StepPlan | None:
        plan = self._scheduler.schedule()
        self.check()
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        self._scheduler.commit(plan, result)
        self.check()

    def take_events(self) -> tuple[TokenEvent | FinalEvent, ...]:
        return self._scheduler.take_events()

    def stats(self) -> EngineStats:
        return self._scheduler.stats()


def build(config: ServerConfig, progress: Progress) -> Engine:
    """The engine of the configuration, checked."""
    engine = build_engine(config, progress)
    return Engine(scheduler=CheckedScheduler(engine.scheduler), runner=engine.runner)


if __name__ == "__main__":
    sys.exit(main(sys.argv, build))

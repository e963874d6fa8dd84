"""The engine as the API process sees it: requests in, events out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

from sapwood_server.config import ServerConfig
from sapwood_server.engine.client.launcher import ENGINE_COMMAND
from sapwood_server.engine.client.streams import StreamTable
from sapwood_server.engine.client.supervisor import EngineListener, SupervisionPolicy, Supervisor
from sapwood_server.errors import UnavailableError
from sapwood_server.values.events import Event, FinalEvent
from sapwood_server.values.messages import Cancel, EngineInfo, EngineStats, StepOutput, Submit
from sapwood_server.values.request import Request


def _ignore_progress(_stage: str, _fraction: float) -> None:
    """For a caller that shows none."""


def _ignore_step(_output: StepOutput) -> None:
    """For a caller that measures none."""


class EngineClient:
    """A running engine process, restarted when it dies. For one event loop; made by `start`, ended by `close`."""

    def __init__(
        self,
        config: ServerConfig,
        *,
        on_progress: Callable[[str, float], None] = _ignore_progress,
        on_step: Callable[[StepOutput], None] = _ignore_step,
        command: tuple[str, ...] = ENGINE_COMMAND,
        policy: SupervisionPolicy | None = None,
    ) -> None:
        """See `start`, which also starts it."""
        self.stats = EngineStats()
        """The engine's last word about itself; its counters begin anew when the engine is restarted."""
        self._on_step = on_step
        self._streams = StreamTable()
        listener = EngineListener(on_progress=on_progress, on_step=self._take_step, on_down=self._go_down)
        self._supervisor = Supervisor(config, listener, command=command, policy=policy)

    @classmethod
    async def start(
        cls,
        config: ServerConfig,
        *,
        on_progress: Callable[[str, float], None] = _ignore_progress,
        on_step: Callable[[StepOutput], None] = _ignore_step,
        command: tuple[str, ...] = ENGINE_COMMAND,
        policy: SupervisionPolicy | None = None,
    ) -> EngineClient:
        """Start an engine process and wait until it takes requests.

        `on_progress` gets each stage of the loading with how much of it is done, in [0, 1]; `on_step` every StepOutput,
        before its events are handed to their streams. `command` is what to run as the engine, before the endpoint that
        is added as its last argument. Raises StartupError with one line that says why the engine can't start.
        """
        client = cls(config, on_progress=on_progress, on_step=on_step, command=command, policy=policy)
        await client._supervisor.start()
        return client

    @property
    def info(self) -> EngineInfo:
        """What the engine decided when it started."""
        info = self._supervisor.info
        if info is None:
            raise RuntimeError("EngineClient.start has not returned")
        return info

    @property
    def ready(self) -> bool:
        """Whether requests are taken now; False while the engine is restarting, and after it was given up."""
        return self._supervisor.ready

    @property
    def failure(self) -> str | None:
        """Why the engine was given up; None while it runs or is restarting."""
        return self._supervisor.failure

    @property
    def engine_pid(self) -> int | None:
        """The engine's process id; None while there is none."""
        return self._supervisor.pid

    @property
    def num_open(self) -> int:
        """Requests that the engine has not ended, those whose consumer has gone included."""
        return len(self._streams)

    def stream(self, request: Request) -> AsyncGenerator[Event, None]:
        """The request's events, the last of them its FinalEvent.

        The request is sent when the first event is asked for. Closing the generator, or cancelling the task that waits
        in it, cancels the request in the engine (`contextlib.aclosing` closes it wherever the consumer stops). If the
        engine dies, the FinalEvent has `error` set, as for any failure.

        Raises UnavailableError while the engine takes no requests, ValueError if the request's id is that of a
        request which has not ended; both here already, not only at the first event.
        """
        self._check(request)
        return self._events(request)

    async def given_up(self) -> str:
        """Wait until the engine has died too often to be started again; returns why. By then every open stream has got
        its FinalEvent. Never returns after `close`."""
        return await self._supervisor.given_up()

    async def cancel(self, request_id: str) -> None:
        """End the request within a step of the engine; its stream then gets the FinalEvent. Unknown ids are ignored."""
        self._supervisor.send(Cancel(request_id))

    async def close(self) -> None:
        """End the engine within a bounded time; every open stream gets its FinalEvent. May be called twice."""
        await self._supervisor.close()
        self._streams.fail_all("the server was shut down")

    def _check(self, request: Request) -> None:
        if not self.ready:
            raise UnavailableError(self.failure or "the engine is starting; try again shortly")
        self._streams.check_free(request.request_id)

    async def _events(self, request: Request) -> AsyncGenerator[Event, None]:
        self._check(request)
        stream = self._streams.open(request)
        self._supervisor.send(Submit(request))
        try:
            while True:
                event = await stream.events.get()
                yield event
                if isinstance(event, FinalEvent):
                    return
        finally:
            if self._streams.abandon(stream):
                self._supervisor.send(Cancel(request.request_id))

    def _take_step(self, output: StepOutput) -> None:
        self.stats = output.stats
        self._on_step(output)
        for event in output.events:
            self._streams.deliver(event)

    def _go_down(self, reason: str) -> None:
        self.stats = EngineStats()
        self._streams.fail_all(reason)

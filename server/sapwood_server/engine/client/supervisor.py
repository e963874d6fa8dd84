"""Keeps one engine process running: the first start, the watch, and a bounded number of restarts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

import zmq.asyncio

from sapwood_server.config import ServerConfig
from sapwood_server.engine.client.launcher import ENGINE_COMMAND, EngineProcess, SocketDirectory
from sapwood_server.errors import StartupError
from sapwood_server.values.messages import EngineInfo, Failed, Loading, Ready, Shutdown, StepOutput, ToEngine

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SupervisionPolicy:
    """How often a dead engine is started again, and how long a living one has to end."""

    restart_delays: tuple[float, ...] = (1.0, 5.0, 30.0)
    """Seconds before each restart; as many restarts as there are entries within any `restart_window_seconds`. The first
    is for a crash on an unlucky request: long enough for the dead process's memory to be free. The others are for what
    takes its time to go by, such as another process that fills the memory or a device that resets. An engine that dies
    once more within the hour has a fault that another start, which costs the whole cache and the loading time, will
    not mend."""
    restart_window_seconds: float = 3600.0
    shutdown_seconds: float = 10.0
    """From the Shutdown message to SIGTERM: a step takes under a second, on a slow machine several."""
    terminate_seconds: float = 5.0
    """From SIGTERM to SIGKILL."""


@dataclass(frozen=True, kw_only=True)
class EngineListener:
    """What the supervisor calls, always from its event loop."""

    on_progress: Callable[[str, float], None]
    """A stage of the loading, and how much of it is done, in [0, 1]."""
    on_step: Callable[[StepOutput], None]
    on_down: Callable[[str], None]
    """The engine died, for this reason; nothing more comes of what it was sent."""


class Supervisor:
    """Starts, watches, restarts and ends the engine process."""

    def __init__(
        self,
        config: ServerConfig,
        listener: EngineListener,
        *,
        command: tuple[str, ...] = ENGINE_COMMAND,
        policy: SupervisionPolicy | None = None,
    ) -> None:
        self._config = config
        self._listener = listener
        self._command = command
        self._policy = policy or SupervisionPolicy()
        self._restart_times: list[float] = []
        self._directory = SocketDirectory()
        self._context = zmq.asyncio.Context()
        self._engine: EngineProcess | None = None
        self._watch: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._given_up = asyncio.Event()
        self.info: EngineInfo | None = None
        self.ready = False
        self.failure: str | None = None

    @property
    def pid(self) -> int | None:
        """The engine's process id; None while there is none."""
        return None if self._engine is None else self._engine.pid

    def send(self, message: ToEngine) -> None:
        """Queue a message to the engine; lost if it is dead, as `on_down` will tell."""
        if self._engine is not None:
            self._engine.send(message)

    async def start(self) -> None:
        """Start the engine and wait until it is ready. Raises StartupError with the engine's own reason."""
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watch = asyncio.create_task(self._run(started))
        try:
            await started
        except BaseException:
            await self.close()
            raise

    async def given_up(self) -> str:
        """Wait until the engine is down for good; returns why. Never returns if it is closed before that."""
        while self.failure is None:
            await self._given_up.wait()
        return self.failure

    async def close(self) -> None:
        """End the engine within a bounded time, and remove its sockets. May be called twice."""
        self._closing.set()
        serving, self.ready = self.ready, False
        if self._engine is not None:
            await self._stop(self._engine, serving=serving)
        if self._watch is not None:
            await self._watch
        self._context.destroy(linger=0)
        self._directory.remove()

    async def _run(self, started: asyncio.Future[None]) -> None:
        """One engine process after the other. Whatever goes wrong here leaves nobody waiting."""
        try:
            await self._keep_serving(started)
        except Exception as error:
            _logger.exception("the engine can't be watched any more; it is stopped")
            reason = f"{type(error).__name__}: {error}"
            self.ready = False
            if self._engine is not None:
                await self._stop(self._engine, serving=False)
                await self._engine.release()
                self._engine = None
            self._listener.on_down(reason)
            self._give_up(reason)
            if not started.done():
                started.set_exception(StartupError(reason))

    async def _keep_serving(self, started: asyncio.Future[None]) -> None:
        reason = await self._serve(started)
        while not self._closing.is_set():
            if not started.done():
                started.set_exception(StartupError(reason))
                return
            self._listener.on_down(reason)
            delay = self._next_delay()
            if delay is None:
                self._give_up(f"{reason}; restarted {len(self._policy.restart_delays)} times already")
                return
            _logger.error("restarting the engine in %g s: %s", delay, reason)
            if await self._closes_within(delay):
                return
            reason = await self._serve(started)

    async def _serve(self, started: asyncio.Future[None]) -> str:
        """Run one engine process from its start to its end, and say in a line why it ended."""
        try:
            endpoint = self._directory.next_endpoint()
            engine = await EngineProcess.spawn(self._command, self._config, self._context, endpoint)
        except StartupError as error:
            return str(error)
        self._engine = engine
        if self._closing.is_set():
            await self._stop(engine, serving=False)
        failure: str | None = None
        async for message in engine.messages():
            match message:
                case Loading(stage, fraction):
                    self._listener.on_progress(stage, fraction)
                case Ready(info):
                    self.info, self.ready = info, True
                    if not started.done():
                        started.set_result(None)
                case StepOutput():
                    self._listener.on_step(message)
                case Failed(text):
                    failure = text
        was_ready, self.ready = self.ready, False
        end = await engine.release()
        self._engine = None
        if was_ready:
            return f"the engine process died ({end})" + (f": {failure}" if failure else "")
        return failure or f"the engine process died while it was starting ({end})"

    async def _stop(self, engine: EngineProcess, *, serving: bool) -> None:
        """End the process within a bounded time: a Shutdown message if it serves, then SIGTERM, then SIGKILL."""
        if serving:
            engine.send(Shutdown())
            await engine.wait(self._policy.shutdown_seconds)
        if not engine.ended:
            engine.terminate()
            await engine.wait(self._policy.terminate_seconds)
        if not engine.ended:
            engine.kill()
            await engine.wait(None)

    def _next_delay(self) -> float | None:
        """Seconds to wait before the engine is started again; None if it has been too often."""
        now = asyncio.get_running_loop().time()
        self._restart_times = [time for time in self._restart_times if now - time < self._policy.restart_window_seconds]
        if len(self._restart_times) >= len(self._policy.restart_delays):
            return None
        self._restart_times.append(now)
        return self._policy.restart_delays[len(self._restart_times) - 1]

    async def _closes_within(self, seconds: float) -> bool:
        """Wait so long, or until `close` is called, and say which it was."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closing.wait()
        return self._closing.is_set()

    def _give_up(self, reason: str) -> None:
        self.failure = reason
        _logger.error("the engine stays down: %s", reason)
        self._given_up.set()

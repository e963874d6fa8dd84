"""The engine of a configuration: its model, vocabulary and scheduler."""

from __future__ import annotations

from sapwood_server.config import ServerConfig
from sapwood_server.engine.loop import Engine
from sapwood_server.engine.process import Progress
from sapwood_server.engine.scheduler import Scheduler, SchedulerLimits
from sapwood_server.formats.model_files import resolve_model
from sapwood_server.formats.vocabulary import load_vocabulary
from sapwood_server.model.load import load_runner


def build_engine(config: ServerConfig, progress: Progress) -> Engine:
    """Load the model and plan its memory. Raises StartupError with one line that says what is wrong."""
    progress("vocabulary", 0.0)
    vocabulary = load_vocabulary(resolve_model(config.model))
    runner = load_runner(config, progress, vocabulary)
    info = runner.info
    limits = SchedulerLimits(
        num_pages=info.num_pages,
        page_size=info.page_size,
        max_num_seqs=info.max_num_seqs,
        max_batched_tokens=info.max_batched_tokens,
        max_model_len=info.max_model_len,
        prefix_cache=config.prefix_cache,
        strict_max_tokens=config.strict_max_tokens,
    )
    return Engine(scheduler=Scheduler(limits, vocabulary), runner=runner)

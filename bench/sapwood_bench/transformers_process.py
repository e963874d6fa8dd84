"""transformers as a peer that is asked in turn: a process that holds the model and answers one prompt at a time."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence

from sapwood_bench.client import Timed
from sapwood_server.errors import StartupError

PEER_COMMAND = (sys.executable, "-m", "sapwood_bench.transformers_peer")


@contextlib.contextmanager
def transformers_process(
    model: str, command: Sequence[str] = PEER_COMMAND
) -> Iterator[Callable[[Sequence[int], int], Timed]]:
    """transformers' `generate` on `model`: float32, its KV cache, all cores. Called with a prompt's ids and the number
    of tokens to decode; the process loads its model meanwhile, and each call waits for it.

    A call raises StartupError, with the process's last line, if that has ended.
    """
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            [*command, model], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, bufsize=0
        ) as process,
    ):

        def ask(prompt: Sequence[int], max_tokens: int) -> Timed:
            if process.stdin is None or process.stdout is None:
                raise RuntimeError("the process was started without pipes")
            with contextlib.suppress(BrokenPipeError):  # it has ended: there is no answer to read either
                process.stdin.write(json.dumps({"prompt": list(prompt), "max_tokens": max_tokens}).encode() + b"\n")
            line = process.stdout.readline()
            if not line:
                process.wait()
                errors.seek(0)
                raise StartupError(f"transformers failed: {errors.read().decode(errors='replace').splitlines()[-1:]}")
            return Timed(**json.loads(line))

        yield ask
        # Leaving the block closes its stdin, at which it ends by itself, and waits for it.

"""transformers as a peer that answers in turn."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sapwood_bench.transformers_process import transformers_process
from sapwood_server.errors import StartupError
from support.tiny_models import make_tiny_model


def test_it_answers_prompt_after_prompt_and_ends_with_the_block(tmp_path: Path) -> None:
    with transformers_process(str(make_tiny_model(tmp_path / "tiny"))) as ask:
        for length, max_tokens in ((5, 2), (40, 7)):
            answer = ask(range(5, 5 + length), max_tokens)
            assert (answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens) == (length, 0, max_tokens)
            assert answer.prefill_tokens_per_second > 0
            assert answer.decode_tokens_per_second > 0


def test_one_that_ended_is_told_with_its_last_line() -> None:
    command = (sys.executable, "-c", "import sys; sys.exit('no such model')")
    with transformers_process("m", command) as ask:
        for _ in range(2):
            with pytest.raises(StartupError, match="no such model"):
                ask([1, 2, 3], 2)

"""The bench of what `--deterministic` costs, on a model that takes no time."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sapwood_bench import deterministic, deterministic_speed
from sapwood_bench.deterministic import SpeedPair, pair_figures, speed_pairs
from sapwood_server.config import ServerConfig
from support.tiny_models import make_tiny_model


def test_each_pair_gives_both_speeds_and_their_ratio() -> None:
    figures = list(pair_figures([SpeedPair(name="prefill", usual=300.0, deterministic=100.0)]))
    assert [(figure.name, figure.value, figure.unit) for figure in figures] == [
        ("prefill", 300.0, "tokens/s"),
        ("prefill, deterministic", 100.0, "tokens/s"),
        ("prefill, cost", 3.0, "x"),
    ]


_SAYS_ENVIRONMENT = """
import json, os, sys
said = ",".join(sys.argv[1:] + [os.environ.get(name, "-") for name in ("CUBLAS_WORKSPACE_CONFIG", "TRITON_INTERPRET")])
print(json.dumps({"dtype": said, "pairs": []}))
"""


@pytest.mark.parametrize(("device", "interprets"), [("cuda", "-"), ("interpreter", "1")])
def test_the_process_has_an_engines_environment(monkeypatch: pytest.MonkeyPatch, device: str, interprets: str) -> None:
    """Without it, cuBLAS may split products and the deterministic runner refuses to start."""
    monkeypatch.setattr(deterministic, "PAIR_COMMAND", (sys.executable, "-c", _SAYS_ENVIRONMENT))
    config = ServerConfig(model="m", device=device, deterministic=True)
    assert speed_pairs(config, 2, 3).dtype == f"m,{device},auto,2,3,:16:8,{interprets}"


def test_it_measures_two_runners_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny_model(tmp_path / "model", vocab_size=320)
    monkeypatch.setattr(deterministic_speed, "PREFILLS", (40,))
    monkeypatch.setattr(deterministic_speed, "DECODES", ((2, 30),))
    found = deterministic_speed.measure(str(folder), "cpu", "float32", rounds=1, steps=3)
    assert found.dtype == "float32"
    assert [pair.name for pair in found.pairs] == ["prefill, 40 tokens", "decode, 2 at 30 tokens"]
    assert all(pair.usual > 0 and pair.deterministic > 0 for pair in found.pairs)

"""What weights cost in memory, in the forms that linears take, against the tensors themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sapwood_server.errors import StartupError
from sapwood_server.formats.gguf_metadata import read_gguf_header
from sapwood_server.formats.model_files import resolve_model
from sapwood_server.model.config_files import load_model_config
from sapwood_server.model.config_json import config_from_json
from sapwood_server.model.gguf_source import num_packed_parameters
from sapwood_server.model.linear import PLAIN_FORMS, LinearForms, pack_int4
from sapwood_server.model.matrix import Matrix
from sapwood_server.model.weight_plan import num_parameters, plan_weights, weight_bytes
from sapwood_server.model.weights import ModelWeights, WeightPlacement, load_weights
from support.tiny_gguf import make_tiny_gguf
from support.tiny_models import random_tensors, tiny_config

CONFIG = config_from_json(tiny_config("qwen3", 300, 512), Path("config.json"))
BF16 = torch.bfloat16


def matrices(weights: ModelWeights) -> list[Matrix]:
    """What linears are made of."""
    layers = [matrix for layer in weights.layers for matrix in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    return [*layers, weights.lm_head]


def test_parameters_are_those_of_the_matrices() -> None:
    tensors = random_tensors(tiny_config("qwen3", 300, 512), 0).values()
    assert num_parameters(CONFIG) == sum(tensor.numel() for tensor in tensors if tensor.dim() == 2)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("blocked", "int4"), [(False, False), (False, True), (True, False), (True, True)])
def test_every_form_is_counted(tied: bool, blocked: bool, int4: bool, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    make_tiny_gguf(path, "llama", "Q4_1", overrides={"tie_word_embeddings": tied})
    files = resolve_model(str(path))
    config = load_model_config(files)
    weights = load_weights(
        files, config, WeightPlacement(BF16, torch.device("cpu"), keep_packed=True), lambda fraction: None
    )
    num_q4 = num_packed_parameters(read_gguf_header(path))
    linears = matrices(weights)
    dense = sum(matrix.dense.nbytes for matrix in linears)
    packed = [matrix.packed for matrix in linears if matrix.packed is not None]
    unpacked = sum(p.quants.nbytes + p.scale.nbytes + p.minimum.nbytes for p in packed)
    four_bits = sum(tensor.nbytes for p in packed for tensor in pack_int4(p))
    if not tied:  # the embedding's own integers, which no linear takes, are counted as if one did
        spare = num_q4 - sum(p.quants.numel() for p in packed)
        assert spare == weights.embedding.numel()
        unpacked += spare + spare // 32 * 8
        four_bits += spare // 2 + spare // 32 * 4
    read = dense + (0 if tied else weights.embedding.nbytes)
    extra = four_bits if int4 else 0
    kept, peak = weight_bytes(config, BF16, num_q4, LinearForms(blocked=blocked, int4=int4))
    assert kept == (weights.embedding.nbytes + dense if blocked else read) + extra
    assert peak == read + (dense if blocked else 0) + extra + (unpacked if int4 else 0)


def test_what_does_not_fit_is_left_out_or_refused() -> None:
    plain = num_parameters(CONFIG) * 2
    assert plan_weights(CONFIG, BF16, 0, None).num_bytes >= plain
    small = plan_weights(CONFIG, BF16, 0, plain)
    assert (small.forms, small.num_bytes, small.peak_bytes) == (PLAIN_FORMS, plain, plain)
    if plan_weights(CONFIG, BF16, 0, None).forms != PLAIN_FORMS:
        assert f"while they are made, {plain} are available" in small.problems[-1]
    with pytest.raises(
        StartupError, match=f"weights take {plain} bytes, but {plain - 1} bytes of memory are available"
    ):
        plan_weights(CONFIG, BF16, 0, plain - 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_take_plain_weights_without_a_word(dtype: torch.dtype) -> None:
    plan = plan_weights(CONFIG, dtype, 0, None)
    assert (plan.forms, plan.problems) == (PLAIN_FORMS, ())
    assert plan.num_bytes == plan.peak_bytes == num_parameters(CONFIG) * dtype.itemsize

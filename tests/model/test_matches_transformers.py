"""The demo model in fp32: greedy ids are those of transformers on the same weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sapwood_bench import transformers_peer
from sapwood_server.formats.model_files import resolve_model
from sapwood_server.formats.tokenizer import chat_templates
from sapwood_server.values.demo import DEMO_MODEL
from support.scale import scaled
from support.stepping import Driver, make_config, make_runner
from support.texts import demo_ids, essay_ids

NUM_PROMPTS = 30
NUM_TOKENS = 64
SHORTEST, LONGEST = 5, 3000
NEAR_TIE = 1e-4
"""Logits so close that the order of a sum decides between them."""


def prompts() -> list[list[int]]:
    """Raw text and chat in turn, lengths from 5 to 3,000 tokens in a geometric row, each from another place of the
    text; middle lengths first, so that a slice of them says most."""
    essay = essay_ids()
    made = []
    for index in range(NUM_PROMPTS):
        length = round(SHORTEST * (LONGEST / SHORTEST) ** (index / (NUM_PROMPTS - 1)))
        start = (index * 397) % (len(essay) - length)
        body = essay[start : start + length]
        made.append(chat_prompt(body) if index % 2 and length > 60 else body)
    assert (min(map(len, made)), max(map(len, made))) == (SHORTEST, LONGEST)
    return sorted(made, key=lambda ids: abs(len(ids) - 300))


def chat_prompt(body: list[int]) -> list[int]:
    """As many tokens as `body`, most of them its own, in the demo model's chat form."""
    assert "<|im_start|>" in chat_templates(resolve_model(DEMO_MODEL))["default"]
    before = demo_ids("<|im_start|>user\nWhat is this text about?\n")
    after = demo_ids("<|im_end|>\n<|im_start|>assistant\n")
    return [*before, *body[len(before) + len(after) :], *after]


@dataclass
class Comparison:
    """What was compared so far."""

    num_tokens: int = 0
    num_near_ties: int = 0

    def check(self, logits: torch.Tensor, token_id: int) -> None:
        """The id is the oracle's, or one of its two best where they are as good as equal."""
        best = torch.topk(logits, 2)
        self.num_tokens += 1
        if token_id != int(best.indices[0]):
            gap = float(best.values[0] - best.values[1])
            assert token_id == int(best.indices[1]), f"{token_id} is not among the two best, {best}"
            assert gap < NEAR_TIE, f"{token_id} is {gap} below the best, {best}"
            self.num_near_ties += 1


def test_greedy_ids_are_transformers() -> None:
    """By teacher forcing: the oracle sees the prompt and our ids, and must have chosen each of them."""
    driver = Driver(make_runner(make_config(DEMO_MODEL, kv_memory="512MiB")))
    oracle = transformers_peer.load(DEMO_MODEL)
    comparison = Comparison()
    chosen = prompts()[: scaled(NUM_PROMPTS, 3)]
    for index, prompt in enumerate(chosen):
        ids = driver.generate(prompt, NUM_TOKENS, chunk=(64, 256, len(prompt))[index % 3])
        with torch.inference_mode():
            logits = oracle(torch.tensor([prompt + ids[:-1]]), logits_to_keep=NUM_TOKENS).logits[0]
        for row, token_id in zip(logits, ids, strict=True):
            comparison.check(row, token_id)
    print(f"{comparison.num_tokens} tokens of {len(chosen)} prompts, {comparison.num_near_ties} near-ties differ")
    assert comparison.num_tokens == NUM_TOKENS * len(chosen)

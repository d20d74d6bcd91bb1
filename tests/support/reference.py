"""transformers as the judge of greedy outputs.

`generate` is the definition. For many prompts, one forward pass over prompt + output says the same much faster: if every token is
the argmax of transformers' logits after the tokens before it, then, by induction, the output is what `generate` would have given.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel


class Reference:
    def __init__(self, folder: Path) -> None:
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model.eval()

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        ids = torch.tensor([list(prompt)])
        output = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, min_new_tokens=num_tokens,
            do_sample=False, eos_token_id=-1, pad_token_id=0,
        )  # fmt: skip
        return output[0, len(prompt) :].tolist()

    @torch.inference_mode()
    def margins(self, prompt: Sequence[int], output: Sequence[int]) -> list[float]:
        """For each output token, by how much its logit falls short of the best one: 0.0 where it is the greedy choice."""
        ids = torch.tensor([[*prompt, *output]])
        logits = self.model(ids, logits_to_keep=len(output) + 1).logits[0, :-1].float()
        chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        return (logits.max(dim=1).values - chosen).tolist()

    def assert_greedy(self, prompt: Sequence[int], output: Sequence[int], tolerance: float = 0.0) -> None:
        for index, margin in enumerate(self.margins(prompt, output)):
            assert margin <= tolerance, f"prompt of {len(prompt)}: token {index} is {margin:.4f} below the best"

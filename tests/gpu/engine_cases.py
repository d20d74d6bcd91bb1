"""The engine on the GPU, which is asynchronous there: looking ahead changes no token, and no block is lost.

Run by `python -m bench.kernels.gpu_check`; the name keeps pytest from collecting it where there is no GPU.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from shared.base.request import Output, Request, SamplingParams
from shared.engine.compute.runner import ModelRunner
from shared.engine.engine import Engine
from shared.engine.schedule.blocks import BlockManager
from shared.engine.schedule.plan import Event, Pending, Plan
from shared.engine.schedule.scheduler import Scheduler
from tests.support.engine import VOCAB_SIZE, make_tiny_model, tiny_runner

NUM_REQUESTS, NUM_BLOCKS, MAX_NUM_SEQS = 40, 200, 12
TIMEOUT_S = 60


class Counted:
    """A runner that counts the steps launched ahead; it may hide that it is asynchronous."""

    def __init__(self, runner: ModelRunner, is_asynchronous: bool) -> None:
        self.is_asynchronous = is_asynchronous
        self.num_ahead = 0
        self._runner = runner

    def launch(self, plan: Plan) -> Pending:
        self.num_ahead += plan.sampled_rows is not None
        return self._runner.launch(plan)


def requests() -> list[Request]:
    rng = random.Random(5)
    made = []
    for i in range(NUM_REQUESTS):
        prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 60))]
        sampling = SamplingParams(
            max_tokens=rng.randint(1, 60),
            temperature=rng.choice([0.0, 0.9]),
            seed=i,
            stop_token_ids=tuple(rng.sample(range(VOCAB_SIZE), 6)),
            num_logprobs=rng.choice([None, None, 2]),
        )
        made.append(Request(f"r{i}", prompt, len(prompt), sampling))
    return made


def tokens_of(runner: Counted) -> dict[str, list[int]]:
    blocks = BlockManager(NUM_BLOCKS, 16)
    scheduler = Scheduler(blocks, digest="d", max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=128, max_model_len=200)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests()}
    num_ended, all_ended = 0, threading.Event()

    def listen(events: Sequence[Event]) -> None:
        nonlocal num_ended
        for event in events:
            assert isinstance(event, Output)
            tokens[event.request_id] += [token.token_id for token in event.tokens]
            num_ended += event.finish_reason is not None
        if num_ended == NUM_REQUESTS:
            all_ended.set()

    engine = Engine(runner, scheduler, listen)
    engine.start()
    for request in requests():
        engine.submit(request)
    assert all_ended.wait(TIMEOUT_S)
    engine.stop()
    engine.check()
    assert blocks.num_free_blocks == blocks.num_usable_blocks
    return tokens


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_looking_ahead_changes_no_token(enforce_eager: bool, tmp_path: Path) -> None:
    make_tiny_model("llama", tmp_path)
    runner = tiny_runner(
        tmp_path, device="cuda", kernels="auto", dtype="float32", num_blocks=NUM_BLOCKS, enforce_eager=enforce_eager
    )
    assert runner.is_asynchronous
    ahead, plain = Counted(runner, is_asynchronous=True), Counted(runner, is_asynchronous=False)
    assert tokens_of(ahead) == tokens_of(plain)
    assert ahead.num_ahead > 20
    assert plain.num_ahead == 0

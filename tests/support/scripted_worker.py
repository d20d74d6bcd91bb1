"""A worker without an engine: it answers Generate, Prefill and StopChoice as the test says, and keeps what it was asked."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from shared.base.worker_info import BootId, Load, Role, WorkerId, WorkerInfo
from shared.options.worker import WorkerConfig
from shared.rpc import control_pb2, control_pb2_grpc, request_pb2
from shared.wire.serving import Server
from tests.support.cluster import Cluster
from tests.support.fake_runner import GEOMETRY

_ids = itertools.count()

Answer = Callable[[control_pb2.GenerateRequest], AsyncIterator[control_pb2.GenerateReply]]
PrefillAnswer = Callable[[control_pb2.PrefillRequest], AsyncIterator[control_pb2.PrefillEvent]]


class ScriptedWorker(control_pb2_grpc.DecodeServicer, control_pb2_grpc.PrefillServicer):
    def __init__(self, role: Role, answer: Answer | PrefillAnswer, digest: str = GEOMETRY.digest, max_num_seqs: int = 8) -> None:
        """`answer`: what follows the acceptance of a Generate, or all of a Prefill."""
        self.requests: list[Any] = []
        self.stopped: list[tuple[str, int]] = []
        self.num_open = 0
        self._answer = answer
        self._server = Server(WorkerConfig())
        self._server.add(control_pb2_grpc.add_DecodeServicer_to_server, self, "twostroke.v1.Decode")
        self._server.add(control_pb2_grpc.add_PrefillServicer_to_server, self, "twostroke.v1.Prefill")
        number = next(_ids)
        self._info = WorkerInfo(
            WorkerId(f"scripted-{number}"), BootId(f"boot-{number}"), role, "", "", digest, GEOMETRY.block_size, 1000, 8192,
            max_num_seqs, load=Load(num_free_blocks=1000),
        )  # fmt: skip

    async def join(self, made: Cluster) -> ScriptedWorker:
        """Until the cluster ends."""
        port = self._server.bind("127.0.0.1", 0)
        await self._server.start()
        self._info = made.announce_info(self._info, f"127.0.0.1:{port}")
        made.at_end(lambda: self._server.stop(0))
        return self

    def info(self) -> WorkerInfo:
        return self._info

    async def Generate(self, message: control_pb2.GenerateRequest, context: Any) -> AsyncIterator[control_pb2.GenerateReply]:
        self.requests.append(message)
        self.num_open += 1
        try:
            yield control_pb2.GenerateReply(accepted=control_pb2.Accepted(boot_id=self._info.boot_id))
            async for reply in self._answer(message):
                yield reply
        finally:
            self.num_open -= 1

    async def Prefill(self, message: control_pb2.PrefillRequest, context: Any) -> AsyncIterator[control_pb2.PrefillEvent]:
        self.requests.append(message)
        async for event in self._answer(message):
            yield event

    async def StopChoice(self, message: control_pb2.StopChoiceRequest, context: Any) -> control_pb2.StopChoiceReply:
        self.stopped.append((message.request_id, message.choice))
        return control_pb2.StopChoiceReply()


def tokens_reply(first_index: int, token_ids: Sequence[int], choice: int = 0, *, is_last: bool = False, cached: int = 0) -> Any:
    tokens = [request_pb2.Token(index=first_index + i, token_id=t) for i, t in enumerate(token_ids)]
    reason = request_pb2.FINISH_REASON_LENGTH if is_last else request_pb2.FINISH_REASON_UNSPECIFIED
    return control_pb2.GenerateReply(
        tokens=[control_pb2.Tokens(choice=choice, tokens=tokens, finish_reason=reason, num_cached_tokens=cached)]
    )


async def replies(*messages: Any, then: Exception | None = None) -> AsyncIterator[Any]:
    for message in messages:
        yield message
    if then is not None:
        raise then


async def forever(*messages: Any) -> AsyncIterator[Any]:
    """Silence after the messages."""
    async for message in replies(*messages):
        yield message
    await asyncio.Event().wait()

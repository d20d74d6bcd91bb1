from shared.rpc import request_pb2 as _request_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GenerateRequest(_message.Message):
    __slots__ = ("request", "handoff")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    request: _request_pb2.Request
    handoff: Handoff
    def __init__(self, request: _Optional[_Union[_request_pb2.Request, _Mapping]] = ..., handoff: _Optional[_Union[Handoff, _Mapping]] = ...) -> None: ...

class Handoff(_message.Message):
    __slots__ = ("transfer_id",)
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    transfer_id: bytes
    def __init__(self, transfer_id: _Optional[bytes] = ...) -> None: ...

class GenerateReply(_message.Message):
    __slots__ = ("accepted", "tokens")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    accepted: Accepted
    tokens: _containers.RepeatedCompositeFieldContainer[Tokens]
    def __init__(self, accepted: _Optional[_Union[Accepted, _Mapping]] = ..., tokens: _Optional[_Iterable[_Union[Tokens, _Mapping]]] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("boot_id",)
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    def __init__(self, boot_id: _Optional[str] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("choice", "tokens", "finish_reason", "num_cached_tokens")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    choice: int
    tokens: _containers.RepeatedCompositeFieldContainer[_request_pb2.Token]
    finish_reason: _request_pb2.FinishReason
    num_cached_tokens: int
    def __init__(self, choice: _Optional[int] = ..., tokens: _Optional[_Iterable[_Union[_request_pb2.Token, _Mapping]]] = ..., finish_reason: _Optional[_Union[_request_pb2.FinishReason, str]] = ..., num_cached_tokens: _Optional[int] = ...) -> None: ...

class StopChoiceRequest(_message.Message):
    __slots__ = ("request_id", "choice")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    choice: int
    def __init__(self, request_id: _Optional[str] = ..., choice: _Optional[int] = ...) -> None: ...

class StopChoiceReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("request", "destination")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    request: _request_pb2.Request
    destination: Destination
    def __init__(self, request: _Optional[_Union[_request_pb2.Request, _Mapping]] = ..., destination: _Optional[_Union[Destination, _Mapping]] = ...) -> None: ...

class Destination(_message.Message):
    __slots__ = ("transfer_id", "attempt", "address", "boot_id")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    transfer_id: bytes
    attempt: int
    address: str
    boot_id: str
    def __init__(self, transfer_id: _Optional[bytes] = ..., attempt: _Optional[int] = ..., address: _Optional[str] = ..., boot_id: _Optional[str] = ...) -> None: ...

class PrefillEvent(_message.Message):
    __slots__ = ("reply",)
    REPLY_FIELD_NUMBER: _ClassVar[int]
    reply: PrefillReply
    def __init__(self, reply: _Optional[_Union[PrefillReply, _Mapping]] = ...) -> None: ...

class PrefillReply(_message.Message):
    __slots__ = ("num_cached_tokens", "num_shipped_blocks", "queue_s", "compute_s", "transfer_s")
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SHIPPED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    num_cached_tokens: int
    num_shipped_blocks: int
    queue_s: float
    compute_s: float
    transfer_s: float
    def __init__(self, num_cached_tokens: _Optional[int] = ..., num_shipped_blocks: _Optional[int] = ..., queue_s: _Optional[float] = ..., compute_s: _Optional[float] = ..., transfer_s: _Optional[float] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("worker_id", "boot_id", "role", "model", "digest", "block_size", "max_model_len", "num_blocks", "num_free_blocks", "num_running", "num_waiting", "num_reservations", "num_held", "draining", "num_steps")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    boot_id: str
    role: str
    model: str
    digest: str
    block_size: int
    max_model_len: int
    num_blocks: int
    num_free_blocks: int
    num_running: int
    num_waiting: int
    num_reservations: int
    num_held: int
    draining: bool
    num_steps: int
    def __init__(self, worker_id: _Optional[str] = ..., boot_id: _Optional[str] = ..., role: _Optional[str] = ..., model: _Optional[str] = ..., digest: _Optional[str] = ..., block_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_reservations: _Optional[int] = ..., num_held: _Optional[int] = ..., draining: _Optional[bool] = ..., num_steps: _Optional[int] = ...) -> None: ...

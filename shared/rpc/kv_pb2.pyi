from shared.rpc import request_pb2 as _request_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TransferKey(_message.Message):
    __slots__ = ("transfer_id", "attempt", "boot_id")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    transfer_id: bytes
    attempt: int
    boot_id: str
    def __init__(self, transfer_id: _Optional[bytes] = ..., attempt: _Optional[int] = ..., boot_id: _Optional[str] = ...) -> None: ...

class KvGeometry(_message.Message):
    __slots__ = ("digest", "num_layers", "num_kv_heads", "head_dim", "block_size", "kv_dtype")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    digest: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    kv_dtype: str
    def __init__(self, digest: _Optional[str] = ..., num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., block_size: _Optional[int] = ..., kv_dtype: _Optional[str] = ...) -> None: ...

class OffersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OffersReply(_message.Message):
    __slots__ = ("offers",)
    OFFERS_FIELD_NUMBER: _ClassVar[int]
    offers: _containers.RepeatedCompositeFieldContainer[Offer]
    def __init__(self, offers: _Optional[_Iterable[_Union[Offer, _Mapping]]] = ...) -> None: ...

class Offer(_message.Message):
    __slots__ = ("transport", "machine_id", "socket_path")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    MACHINE_ID_FIELD_NUMBER: _ClassVar[int]
    SOCKET_PATH_FIELD_NUMBER: _ClassVar[int]
    transport: str
    machine_id: str
    socket_path: str
    def __init__(self, transport: _Optional[str] = ..., machine_id: _Optional[str] = ..., socket_path: _Optional[str] = ...) -> None: ...

class PoolGreeting(_message.Message):
    __slots__ = ("boot_id", "link_id", "pools")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    LINK_ID_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    link_id: bytes
    pools: _containers.RepeatedCompositeFieldContainer[PoolMemory]
    def __init__(self, boot_id: _Optional[str] = ..., link_id: _Optional[bytes] = ..., pools: _Optional[_Iterable[_Union[PoolMemory, _Mapping]]] = ...) -> None: ...

class PoolMemory(_message.Message):
    __slots__ = ("size_bytes", "first_head", "num_heads", "cuda")
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    FIRST_HEAD_FIELD_NUMBER: _ClassVar[int]
    NUM_HEADS_FIELD_NUMBER: _ClassVar[int]
    CUDA_FIELD_NUMBER: _ClassVar[int]
    size_bytes: int
    first_head: int
    num_heads: int
    cuda: CudaMemory
    def __init__(self, size_bytes: _Optional[int] = ..., first_head: _Optional[int] = ..., num_heads: _Optional[int] = ..., cuda: _Optional[_Union[CudaMemory, _Mapping]] = ...) -> None: ...

class CudaMemory(_message.Message):
    __slots__ = ("ipc_handle", "offset_bytes", "device_uuid")
    IPC_HANDLE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    ipc_handle: bytes
    offset_bytes: int
    device_uuid: str
    def __init__(self, ipc_handle: _Optional[bytes] = ..., offset_bytes: _Optional[int] = ..., device_uuid: _Optional[str] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("boot_id", "transport", "link_id")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    LINK_ID_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    transport: str
    link_id: bytes
    def __init__(self, boot_id: _Optional[str] = ..., transport: _Optional[str] = ..., link_id: _Optional[bytes] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("store_host", "store_port")
    STORE_HOST_FIELD_NUMBER: _ClassVar[int]
    STORE_PORT_FIELD_NUMBER: _ClassVar[int]
    store_host: str
    store_port: int
    def __init__(self, store_host: _Optional[str] = ..., store_port: _Optional[int] = ...) -> None: ...

class OpenRequest(_message.Message):
    __slots__ = ("key", "geometry", "num_blocks", "transport", "link_id", "writer_id")
    KEY_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    LINK_ID_FIELD_NUMBER: _ClassVar[int]
    WRITER_ID_FIELD_NUMBER: _ClassVar[int]
    key: TransferKey
    geometry: KvGeometry
    num_blocks: int
    transport: str
    link_id: bytes
    writer_id: int
    def __init__(self, key: _Optional[_Union[TransferKey, _Mapping]] = ..., geometry: _Optional[_Union[KvGeometry, _Mapping]] = ..., num_blocks: _Optional[int] = ..., transport: _Optional[str] = ..., link_id: _Optional[bytes] = ..., writer_id: _Optional[int] = ...) -> None: ...

class OpenReply(_message.Message):
    __slots__ = ("num_cached_blocks", "lease_s", "max_chunk_bytes", "block_ids")
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    MAX_CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    num_cached_blocks: int
    lease_s: float
    max_chunk_bytes: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, num_cached_blocks: _Optional[int] = ..., lease_s: _Optional[float] = ..., max_chunk_bytes: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class PushRequest(_message.Message):
    __slots__ = ("key", "chunk", "commit")
    KEY_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    key: TransferKey
    chunk: Chunk
    commit: Commit
    def __init__(self, key: _Optional[_Union[TransferKey, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("sequence_number", "first_block", "num_blocks", "first_layer", "num_layers", "first_head", "num_heads", "checksum", "data", "message_number")
    SEQUENCE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    FIRST_HEAD_FIELD_NUMBER: _ClassVar[int]
    NUM_HEADS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    sequence_number: int
    first_block: int
    num_blocks: int
    first_layer: int
    num_layers: int
    first_head: int
    num_heads: int
    checksum: int
    data: bytes
    message_number: int
    def __init__(self, sequence_number: _Optional[int] = ..., first_block: _Optional[int] = ..., num_blocks: _Optional[int] = ..., first_layer: _Optional[int] = ..., num_layers: _Optional[int] = ..., first_head: _Optional[int] = ..., num_heads: _Optional[int] = ..., checksum: _Optional[int] = ..., data: _Optional[bytes] = ..., message_number: _Optional[int] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("num_chunks", "num_blocks", "first_tokens", "num_cached_tokens")
    NUM_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_chunks: int
    num_blocks: int
    first_tokens: _containers.RepeatedCompositeFieldContainer[_request_pb2.Token]
    num_cached_tokens: int
    def __init__(self, num_chunks: _Optional[int] = ..., num_blocks: _Optional[int] = ..., first_tokens: _Optional[_Iterable[_Union[_request_pb2.Token, _Mapping]]] = ..., num_cached_tokens: _Optional[int] = ...) -> None: ...

class PushReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("key", "reason")
    KEY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    key: TransferKey
    reason: str
    def __init__(self, key: _Optional[_Union[TransferKey, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class AbortReply(_message.Message):
    __slots__ = ("was_live",)
    WAS_LIVE_FIELD_NUMBER: _ClassVar[int]
    was_live: bool
    def __init__(self, was_live: _Optional[bool] = ...) -> None: ...

"""Nonsense for gRPC methods: messages of random fields, and bytes that are no message."""

from __future__ import annotations

import random
from collections.abc import Mapping

from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from shared.rpc import control_pb2, kv_pb2

MAX_DEPTH = 4  # of messages in messages


def _methods() -> Mapping[str, MethodDescriptor]:
    services = [service for file in (control_pb2, kv_pb2) for service in file.DESCRIPTOR.services_by_name.values()]
    return {f"/{service.full_name}/{method.name}": method for service in services for method in service.methods}


_METHODS = _methods()
METHODS = sorted(_METHODS)  # paths


def nonsense_bytes(rng: random.Random, method: str) -> bytes:
    """What a method of this path may be sent: bytes that are no message, or a message of random fields, perhaps damaged."""
    if rng.random() < 0.2:
        return rng.randbytes(rng.choice([0, 1, 10, 300]))
    data = random_message(rng, GetMessageClass(_METHODS[method].input_type)()).SerializeToString()
    return damaged(rng, data) if rng.random() < 0.3 else data


def random_message(rng: random.Random, message: Message, share: float = 0.75, depth: int = 0) -> Message:
    """Gives a share of the fields values that are plausible, extreme or wrong; repeated ones get more of them."""
    for field in message.DESCRIPTOR.fields:
        target = getattr(message, field.name)
        if field.message_type is None:
            if rng.random() < share:
                _set_values(rng, message, field)
        elif not field.message_type.GetOptions().map_entry and depth < MAX_DEPTH and rng.random() < 0.75:
            random_message(rng, target.add() if field.is_repeated else target, share, depth + 1)
    return message


def _set_values(rng: random.Random, message: Message, field: FieldDescriptor) -> None:
    if field.is_repeated:
        getattr(message, field.name).extend(_random_value(rng, field) for _ in range(rng.choice([1, 3, 40])))
    else:
        setattr(message, field.name, _random_value(rng, field))


def _random_value(rng: random.Random, field: FieldDescriptor) -> object:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return rng.choice([0.0, 0.5, 1.0, -1.0, 1e30, float("inf"), float("nan")])
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
            return rng.randbytes(rng.choice([0, 1, 16, 17, 500]))
        case FieldDescriptor.CPPTYPE_STRING:
            return rng.choice(["", "x", "boot", "grpc", "shm", "gloo", "nccl", "127.0.0.1:1", "\0", "é" * 300])
        case FieldDescriptor.CPPTYPE_BOOL:
            return rng.random() < 0.5
        case FieldDescriptor.CPPTYPE_ENUM:
            return rng.randrange(4)
    return rng.choice([0, 1, 2, 3, 16, 127, 999, 2**31 - 1, 2**32 - 1])


def damaged(rng: random.Random, data: bytes) -> bytes:
    """Cut off, or with some bytes changed."""
    if not data or rng.random() < 0.5:
        return data[: rng.randrange(len(data) + 1)]
    changed = bytearray(data)
    for _ in range(rng.randrange(1, 6)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)

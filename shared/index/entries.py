"""What is read from Redis is input: here it becomes a typed value, or is refused with the field that is wrong.

    bytes ─> read_worker, read_goodbye, read_worker_id ─> WorkerInfo, Goodbye, WorkerId
                                                     └─> InvalidEntry ─> Refusals: counted, logged once per source and field

Others may write to the same Redis: workers of another version, other programs, people. Nothing that they write may do more than be
ignored. Fields that this version does not know are ignored, so that older routers understand newer workers.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Any, Literal

import orjson

from shared.base.address import Address
from shared.base.worker_info import MAX_ID_CHARS, BootId, Load, Role, WorkerId, WorkerInfo
from shared.index.metrics import REFUSED

log = logging.getLogger(__name__)

MAX_ENTRY_BYTES = 16 * 1024
_MAX_TEXT_CHARS = 4096
_MAX_COUNT = 2**53
_MAX_BLOCK_SIZE = 4096
_MAX_SEQS = 2**20
_MAX_TRANSPORTS = 32
_MAX_ADDRESSES = 4096  # remembered, because a heartbeat repeats its own each second

_ROLES = {role.value: role for role in Role}

Source = Literal["entry", "roster", "heartbeat", "goodbye", "lookup"]


class InvalidEntry(ValueError):
    """`field` is one of a few names, so that there are as many log lines and no more."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field} is {repr(value)[:80]}; it must be {allowed}")
        self.field = field


@dataclass(frozen=True, slots=True)
class Goodbye:
    worker_id: WorkerId
    boot_id: BootId


class Refusals:
    """Counts what was refused, and logs each kind of fault once."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def add(self, source: Source, error: InvalidEntry) -> None:
        REFUSED.labels(source).inc()
        if error.field not in self._logged:
            self._logged.add(error.field)
            log.warning("ignoring what Redis says (%s): %s", source, error)


def write_worker(info: WorkerInfo) -> bytes:
    return orjson.dumps(asdict(info) | {"role": info.role.value})


def read_worker(data: object) -> WorkerInfo:
    """Raises InvalidEntry."""
    raw = _read_object(data)
    return WorkerInfo(
        worker_id=WorkerId(_name(raw, "worker_id")),
        boot_id=BootId(_name(raw, "boot_id")),
        role=_role(raw),
        address=_address(raw),
        model=_name(raw, "model"),
        digest=_name(raw, "digest"),
        block_size=_count(raw, "block_size", least=1, most=_MAX_BLOCK_SIZE),
        num_blocks=_count(raw, "num_blocks", least=1),
        max_model_len=_count(raw, "max_model_len", least=1),
        max_num_seqs=_count(raw, "max_num_seqs", least=1, most=_MAX_SEQS),
        transports=_transports(raw),
        draining=_bool(raw, "draining"),
        load=_load(raw),
        source=_text(raw, "source"),
        revision=_text(raw, "revision"),
    )


def write_goodbye(goodbye: Goodbye) -> bytes:
    return orjson.dumps(goodbye)


def read_goodbye(data: object) -> Goodbye:
    """Raises InvalidEntry."""
    raw = _read_object(data)
    return Goodbye(WorkerId(_name(raw, "worker_id")), BootId(_name(raw, "boot_id")))


def read_worker_id(data: object) -> WorkerId:
    """A member of the roster. Raises InvalidEntry."""
    try:
        text = data.decode() if isinstance(data, bytes) else ""
    except UnicodeDecodeError:
        text = ""
    if not _is_name(text):
        raise InvalidEntry("roster member", data, f"1 to {MAX_ID_CHARS} printable characters")
    return WorkerId(text)


def read_counts(data: object, num_sets: int, most: int) -> list[int]:
    """A lookup's answer: for each set, how many leading blocks it holds. Raises InvalidEntry."""
    if not isinstance(data, list) or len(data) != num_sets or not all(type(n) is int and 0 <= n <= most for n in data):
        raise InvalidEntry("lookup", data, f"{num_sets} counts up to {most}")
    return data


def read_boot_tags(data: object, most: int) -> list[bytes]:
    """What the table of recent holders says. Raises InvalidEntry."""
    if not isinstance(data, list) or len(data) > most or not all(isinstance(tag, bytes) for tag in data):
        raise InvalidEntry("holders", data, f"at most {most} runs of bytes")
    return data


def _read_object(data: object) -> dict[str, Any]:
    if not isinstance(data, bytes) or len(data) > MAX_ENTRY_BYTES:
        raise InvalidEntry("entry", data, f"at most {MAX_ENTRY_BYTES} bytes")
    try:
        raw = orjson.loads(data)  # refuses NaN, invalid UTF-8 and deep nesting
    except orjson.JSONDecodeError:
        raw = None
    if not isinstance(raw, dict):
        raise InvalidEntry("entry", data, "a JSON object")
    return raw


def _is_name(value: object) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= MAX_ID_CHARS and value.isprintable()


def _name(raw: dict[str, Any], field: str) -> str:
    value = raw.get(field)
    if not _is_name(value):
        raise InvalidEntry(field, value, f"1 to {MAX_ID_CHARS} printable characters")
    return str(value)


def _text(raw: dict[str, Any], field: str) -> str:
    value = raw.get(field, "")
    if not isinstance(value, str) or len(value) > _MAX_TEXT_CHARS or not value.isprintable():
        raise InvalidEntry(field, value, f"at most {_MAX_TEXT_CHARS} printable characters")
    return value


def _count(raw: dict[str, Any], field: str, *, least: int = 0, most: int = _MAX_COUNT, default: int | None = None) -> int:
    value = raw.get(field, default)
    if type(value) is not int or not least <= value <= most:  # type(): True is an int too
        raise InvalidEntry(field, value, f"a whole number from {least} to {most}")
    return value


def _bool(raw: dict[str, Any], field: str) -> bool:
    value = raw.get(field, False)
    if type(value) is not bool:
        raise InvalidEntry(field, value, "true or false")
    return value


def _role(raw: dict[str, Any]) -> Role:
    value = raw.get("role")
    role = _ROLES.get(value) if isinstance(value, str) else None
    if role is None:
        raise InvalidEntry("role", value, f"one of {', '.join(_ROLES)}")
    return role


def _address(raw: dict[str, Any]) -> str:
    value = raw.get("address")
    try:
        return _normal_address(value if isinstance(value, str) else "")
    except ValueError:
        raise InvalidEntry("address", value, "host:port") from None


@lru_cache(maxsize=_MAX_ADDRESSES)
def _normal_address(text: str) -> str:
    """Raises ValueError."""
    return str(Address.parse(text))


def _transports(raw: dict[str, Any]) -> tuple[str, ...]:
    values = raw.get("transports", [])
    if not isinstance(values, list) or len(values) > _MAX_TRANSPORTS or not all(map(_is_name, values)):
        raise InvalidEntry("transports", values, f"a list of at most {_MAX_TRANSPORTS} names")
    return tuple(values)


def _load(raw: dict[str, Any]) -> Load:
    load = raw.get("load", {})
    if not isinstance(load, dict):
        raise InvalidEntry("load", load, "an object")
    return Load(**{name: read(load, name) for name, read in _LOAD_FIELDS})


def _speed(raw: dict[str, Any], field: str) -> float:
    value = raw.get(field, 0.0)
    if type(value) not in (int, float) or not 0 <= value <= _MAX_COUNT or not math.isfinite(value):
        raise InvalidEntry(field, value, f"a number from 0 to {_MAX_COUNT}")
    return float(value)


def _load_count(raw: dict[str, Any], field: str) -> int:
    return _count(raw, field, default=0)


_LOAD_FIELDS: list[tuple[str, Callable[[dict[str, Any], str], Any]]] = [
    (field.name, _speed if field.name == "prefill_tokens_per_s" else _load_count) for field in fields(Load)
]

"""The workers by model and weights, so that choosing among a thousand looks at a few.

    heartbeat ─> see ─(joined, restarted, drains, gone)─> Group of a model and a digest ─> its prefill and its decode workers

A heartbeat that changes nothing but the load costs one comparison.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterator, Mapping
from hashlib import blake2b

from services.router.dispatch.model_pool import ModelPool, model_pools
from shared.base.errors import InvalidRequest, Unavailable
from shared.base.worker_info import Role, WorkerId, WorkerInfo
from shared.index.recent_holders import boot_tag

_DIGEST_BYTES = 64  # 16 numbers of 4 bytes, at a tenth of what seeding a generator costs


class Members:
    """Worker ids, of which any few are drawn in constant time."""

    def __init__(self) -> None:
        self._ids: list[WorkerId] = []
        self._at: dict[WorkerId, int] = {}

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[WorkerId]:
        return iter(self._ids)

    def add(self, worker_id: WorkerId) -> None:
        self._at[worker_id] = len(self._ids)
        self._ids.append(worker_id)

    def remove(self, worker_id: WorkerId) -> None:
        """The last one takes its place."""
        at, last = self._at.pop(worker_id), self._ids.pop()
        if last != worker_id:
            self._ids[at], self._at[last] = last, at

    def draw(self, most: int, num_tries: int, seed: str, is_good: Callable[[WorkerId], bool]) -> list[WorkerId]:
        """Up to `most` that are good, of at most `num_tries` (up to 16) drawn at random; the same ones for the same seed."""
        drawn: list[WorkerId] = []
        if not self._ids:
            return drawn
        numbers = array("I", blake2b(seed.encode(), digest_size=_DIGEST_BYTES).digest())
        for at in dict.fromkeys(number % len(self._ids) for number in numbers[:num_tries]):
            if is_good(self._ids[at]):
                drawn.append(self._ids[at])
                if len(drawn) == most:
                    break
        return drawn


class Group:
    """The workers that have one model with the same weights: any prefill worker of them pairs with any decode worker."""

    def __init__(self, digest: str) -> None:
        self.digest = digest
        self.prefills = Members()
        self.decoders = Members()

    def __len__(self) -> int:
        return len(self.prefills) + len(self.decoders)

    def __iter__(self) -> Iterator[WorkerId]:
        yield from self.prefills
        yield from self.decoders

    def of(self, role: Role) -> Members:
        return self.decoders if role.can_decode else self.prefills


class Pools:
    """Of workers that take requests: those that drain are not in it."""

    def __init__(self) -> None:
        self._members: dict[WorkerId, WorkerInfo] = {}  # as they were when they joined, but for their load
        self._groups: dict[str, dict[str, Group]] = {}  # by model and digest
        self._by_tag: dict[bytes, WorkerId] = {}
        self._models: dict[str, ModelPool] | None = None

    def see(self, worker_id: WorkerId, info: WorkerInfo | None) -> bool:
        """What a worker says, or None if it is gone. True if it joined, changed in more than its load, or left."""
        before = self._members.get(worker_id)
        after = None if info is None or info.draining else info
        if _identity(before) == _identity(after):
            return False
        if before is not None:
            self._leave(before)
        if after is not None:
            self._join(after)
        self._models = None
        return True

    def groups(self, model: str, digest: str | None = None) -> Collection[Group]:
        """With these weights, or all of the model; an empty name means the only model. Raises Unavailable and InvalidRequest."""
        if not model:
            if len(self._groups) > 1:
                raise InvalidRequest(f"model is missing; it must be one of {', '.join(sorted(self._groups))}", param="model")
            model = next(iter(self._groups), "")
        groups = self._groups.get(model, {})
        if digest is None:
            if not groups:
                raise Unavailable(f"no worker of model {model!r} is registered" if model else "no worker is registered")
            return groups.values()
        if digest not in groups:
            raise Unavailable("no worker with the weights that this request began with is registered")
        return [groups[digest]]

    def with_tag(self, tag: bytes) -> WorkerId | None:
        return self._by_tag.get(tag)

    def models(self) -> Mapping[str, ModelPool]:
        if self._models is None:
            self._models = model_pools(self._members.values())
        return self._models

    def _join(self, info: WorkerInfo) -> None:
        self._members[info.worker_id] = info
        self._by_tag[boot_tag(info.boot_id)] = info.worker_id
        by_digest = self._groups.setdefault(info.model, {})
        if info.digest not in by_digest:
            by_digest[info.digest] = Group(info.digest)
        by_digest[info.digest].of(info.role).add(info.worker_id)

    def _leave(self, info: WorkerInfo) -> None:
        del self._members[info.worker_id]
        self._by_tag.pop(boot_tag(info.boot_id), None)
        by_digest = self._groups[info.model]
        by_digest[info.digest].of(info.role).remove(info.worker_id)
        if not len(by_digest[info.digest]):
            del by_digest[info.digest]
        if not by_digest:
            del self._groups[info.model]


def _identity(info: WorkerInfo | None) -> tuple[object, ...] | None:
    """All that decides where a worker belongs and what it can do, without its load."""
    if info is None:
        return None
    limits = (info.max_model_len, info.max_num_seqs, info.source, info.revision)
    return info.boot_id, info.model, info.digest, info.role, info.block_size, *limits

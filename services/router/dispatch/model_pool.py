"""What a router can serve under one name: the common ground of all workers that have this model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shared.base.worker_info import WorkerInfo


@dataclass(frozen=True, slots=True)
class ModelPool:
    """A model that at least one living worker decodes. In a rolling update its workers may differ in weights."""

    name: str
    source: str  # folder or hub id, for the tokenizer
    revision: str
    max_model_len: int  # that every worker of the model takes
    max_num_seqs: int  # that every decode worker of the model takes


def model_pools(workers: Iterable[WorkerInfo]) -> dict[str, ModelPool]:
    """By served name. Of several sources, that of the decode worker with the smallest id."""
    by_model: dict[str, list[WorkerInfo]] = {}
    for worker in sorted(workers, key=lambda w: w.worker_id):
        by_model.setdefault(worker.model, []).append(worker)
    pools = {}
    for name, members in by_model.items():
        decoders = [w for w in members if w.role.can_decode]
        if decoders:
            pools[name] = ModelPool(
                name,
                decoders[0].source,
                decoders[0].revision,
                max_model_len=min(w.max_model_len for w in members),
                max_num_seqs=min(w.max_num_seqs for w in decoders),
            )
    return pools

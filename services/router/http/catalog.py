"""The models that this router serves, each with its tokenizer.

    a model's first worker appears ──> its tokenizer is loaded beside the event loop ──> requests find the model by its name
    its last worker has gone       ──> the model is dropped

What `--model` names is there from the start, and stays while its workers come and go. A request keeps the model that it found.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from services.router.dispatch.backend import Backend
from services.router.dispatch.model_pool import ModelPool
from services.router.http.metrics import MODELS_REFUSED
from services.router.text.tokenizer import ChatTokenizer
from shared.base.errors import InvalidRequest, NotFound, Unavailable
from shared.index.connection import Backoff
from shared.process.tasks import cancel_and_wait, start_essential

log = logging.getLogger(__name__)

_NUM_LOADS = 2  # at once
_FIRST_RETRY_S, _MOST_RETRY_S = 5.0, 300.0
_MAX_SHOWN_CHARS = 100  # of a name that a client sent


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    tokenizer: ChatTokenizer
    created_at: int = field(default_factory=lambda: int(time.time()))


class Catalog:
    def __init__(
        self,
        backend: Backend,
        load: Callable[[ModelPool], ChatTokenizer],
        *,
        max_models: int,
        own: ServedModel | None = None,
    ) -> None:
        """`load` runs in a thread. `own` is what `--model` names."""
        self._backend = backend
        self._load = load
        self._max_models = max_models
        self._own = own
        self._models: dict[str, ServedModel] = {} if own is None else {own.name: own}
        self._loads: dict[str, _Load] = {}  # of models with workers, without our own
        self._refused: set[str] = set()  # beyond `max_models`
        self._misses_own = False
        self._grew = asyncio.Event()
        self._threads = ThreadPoolExecutor(_NUM_LOADS, thread_name_prefix="tokenizers")
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = start_essential(self._follow(), "catalog")

    async def stop(self) -> None:
        for task in (self._task, *(each.task for each in self._loads.values())):
            await cancel_and_wait(task)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def find(self, name: str) -> ServedModel:
        """An empty name means the only model. Raises NotFound, InvalidRequest and Unavailable."""
        if not self._models:
            raise Unavailable("no model is served yet: no worker has registered, or its tokenizer is not loaded")
        if not name:
            if len(self._models) > 1:
                raise InvalidRequest(f"model is missing; it must be one of {self._names()}", param="model")
            return next(iter(self._models.values()))
        if (model := self._models.get(name)) is not None:
            return model
        if (loading := self._loads.get(name)) is not None and not loading.has_failed:
            raise Unavailable(f"model {name!r} is being loaded; try again")
        raise NotFound(f"there is no model {name[:_MAX_SHOWN_CHARS]!r}; this server has {self._names()}", param="model")

    def served(self) -> list[tuple[ServedModel, ModelPool]]:
        """What can be served now, by name."""
        pools = self._backend.models()
        return [(self._models[name], pools[name]) for name in sorted(self._models) if name in pools]

    def why_not_ready(self) -> str | None:
        """None if a request for one of the models would succeed now, else one line that says why not."""
        reasons = [self._backend.is_ready(name) for name in self._models]
        if None in reasons:
            return None
        return reasons[0] if reasons else self._backend.is_ready("") or "no model's tokenizer is loaded yet"

    async def wait_for_any(self) -> None:
        """Returns when there is a model."""
        while not self._models:
            await self._grew.wait()

    async def _follow(self) -> None:
        while True:
            self._update(self._backend.models())
            await self._backend.wait_for_change()

    def _update(self, pools: Mapping[str, ModelPool]) -> None:
        pools = {name: pool for name, pool in pools.items() if self._own is None or name != self._own.name}
        for name in self._loads.keys() - pools.keys():
            self._loads.pop(name).task.cancel()
            if self._models.pop(name, None) is not None:
                log.info("model %s has no workers any more", name)
        for name, pool in pools.items():
            loading = self._loads.get(name)
            if loading is None and len(self._loads) + (self._own is not None) >= self._max_models:
                self._refuse(name)
            elif loading is None or (loading.pool.source, loading.pool.revision) != (pool.source, pool.revision):
                if loading is not None:  # its tokenizer serves until the new one is there
                    loading.task.cancel()
                self._loads[name] = self._begin(pool)
        self._refused &= pools.keys() - self._loads.keys()
        self._look_for_own(pools)

    def _begin(self, pool: ModelPool) -> _Load:
        loading = _Load(pool)
        loading.task = asyncio.create_task(self._load_until_it_works(loading), name=f"tokenizer-{pool.name}")
        return loading

    async def _load_until_it_works(self, loading: _Load) -> None:
        pool, backoff = loading.pool, Backoff(_FIRST_RETRY_S, _MOST_RETRY_S)
        while True:
            try:
                tokenizer = await asyncio.get_running_loop().run_in_executor(self._threads, self._load, pool)
                break
            except Exception as error:  # whatever a file or a library can do must not end the others
                if not loading.has_failed:  # one line, however often it is tried again
                    log.warning("model %s is not served: its tokenizer (%s) cannot be loaded: %s", pool.name, pool.source, error)
                    MODELS_REFUSED.labels("tokenizer").inc()
                loading.has_failed = True
                self._models.pop(pool.name, None)  # an older revision's
            await asyncio.sleep(backoff.next_delay_s())
        loading.has_failed = False
        self._models[pool.name] = ServedModel(pool.name, tokenizer)
        self._grew.set()
        log.info("serving model %s, tokenizer from %s", pool.name, pool.source)

    def _refuse(self, name: str) -> None:
        if name not in self._refused:
            log.warning("model %s is not served: there are %d others (--max-models)", name, self._max_models)
            MODELS_REFUSED.labels("max_models").inc()
        self._refused.add(name)

    def _look_for_own(self, others: Mapping[str, ModelPool]) -> None:
        """Workers under other names only: what `--model` names might be waited for in vain."""
        misses_own = self._own is not None and bool(others) and self._own.name not in self._backend.models()
        if self._own is not None and misses_own and not self._misses_own:
            log.warning("no worker has model %s, as --model says; there are %s", self._own.name, ", ".join(sorted(others)))
        self._misses_own = misses_own

    def _names(self) -> str:
        return ", ".join(map(repr, sorted(self._models)))


@dataclass(slots=True, eq=False)
class _Load:
    pool: ModelPool
    has_failed: bool = False
    task: asyncio.Task[None] = field(init=False)

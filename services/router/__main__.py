"""`twostroke router`: HTTP in, tokens out. Needs no torch."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from services.router.config import RouterConfig
from services.router.dispatch.dispatcher import Dispatcher
from services.router.dispatch.fleet import Fleet
from services.router.dispatch.model_pool import ModelPool
from services.router.http.app import create_app
from services.router.http.catalog import Catalog, ServedModel
from services.router.http.server import HttpServer, raise_file_limit
from services.router.http.stopping import Stopping
from services.router.text.tokenizer import ChatTokenizer
from services.router.torch_free import forbid_torch
from shared.index.keys import Keys
from shared.index.prefix_index import PrefixLookup
from shared.index.watcher import FleetWatcher
from shared.options.config import parse_config
from shared.process.listener import listen
from shared.process.readiness import notify_progress, notify_ready
from shared.process.tasks import cancel_and_wait
from shared.process.telemetry import configure_logging
from shared.wire.channels import Channels


def main(argv: Sequence[str]) -> None:
    forbid_torch()
    config = parse_config(RouterConfig, argv, "twostroke router", os.environ)
    configure_logging(config.log_level, "router")
    listener = listen(config.host, config.port)  # before anything slow: a port in use is known at once
    raise_file_limit()
    asyncio.run(_serve(config, _own_model(config), listener))


def _own_model(config: RouterConfig) -> ServedModel | None:
    """What --model names."""
    if not config.model:
        return None
    notify_progress("loading tokenizer")
    tokenizer = ChatTokenizer.load(config.model, config.revision, config.chat_template, config.tokenizer, config.generation_config)
    return ServedModel(config.model_name, tokenizer)


async def _serve(config: RouterConfig, own: ServedModel | None, listener: socket.socket) -> None:
    async with _backend(config) as backend, _catalog(config, backend, own) as catalog:
        stopping = Stopping()
        server = HttpServer(create_app(config, backend, catalog, stopping), config, stopping)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, server.stop)
        serving = asyncio.create_task(server.serve(listener))
        notify_progress("waiting for workers")
        ready = asyncio.create_task(_wait_ready(backend, catalog, own))
        await asyncio.wait({serving, ready}, return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            notify_ready()
        await cancel_and_wait(ready)
        await serving


async def _wait_ready(backend: Dispatcher, catalog: Catalog, own: ServedModel | None) -> None:
    await catalog.wait_for_any()
    await backend.wait_ready(own.name if own else "")


@asynccontextmanager
async def _catalog(config: RouterConfig, backend: Dispatcher, own: ServedModel | None) -> AsyncIterator[Catalog]:
    def load(pool: ModelPool) -> ChatTokenizer:
        return ChatTokenizer.load(pool.source, pool.revision, generation_config=config.generation_config)

    catalog = Catalog(backend, load, max_models=config.max_models, own=own)
    catalog.start()
    try:
        yield catalog
    finally:
        await catalog.stop()


@asynccontextmanager
async def _backend(config: RouterConfig) -> AsyncIterator[Dispatcher]:
    channels = Channels(config)
    keys = Keys(config.namespace)
    prefixes = PrefixLookup(config.redis_url, keys)
    watcher = FleetWatcher(config.redis_url, keys, on_change=lambda worker_id: fleet.notify_change(worker_id))
    fleet = Fleet(watcher, prefixes, channels, always_hand_off=config.handoff == "always")
    dispatcher = Dispatcher(fleet, config.worker_wait_s)
    await watcher.start()
    await dispatcher.start()
    try:
        yield dispatcher
    finally:
        await dispatcher.stop()
        await watcher.stop()
        await prefixes.close()
        await channels.close()

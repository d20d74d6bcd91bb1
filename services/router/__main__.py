"""`twostroke router`: HTTP in, tokens out. Needs no torch."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI

from services.router.config import RouterConfig
from services.router.dispatch.dispatcher import Dispatcher
from services.router.dispatch.fleet import Fleet
from services.router.http.app import create_app
from services.router.text.tokenizer import ChatTokenizer
from services.router.torch_free import forbid_torch
from shared.index.keys import Keys
from shared.index.prefix_index import PrefixLookup
from shared.index.watcher import FleetWatcher
from shared.options.config import parse_config
from shared.process.listener import listen
from shared.process.readiness import notify_progress, notify_ready
from shared.process.telemetry import configure_logging
from shared.wire.channels import Channels

_SHUTDOWN_S = 1  # for streams that are open when the router is told to stop


def main(argv: Sequence[str]) -> None:
    forbid_torch()
    config = parse_config(RouterConfig, argv, "twostroke router", os.environ)
    configure_logging(config.log_level, "router")
    listener = listen(config.host, config.port)  # before anything slow: a port in use is known at once
    notify_progress("loading tokenizer")
    tokenizer = ChatTokenizer.load(config.model, config.revision, config.chat_template)
    asyncio.run(_serve(config, tokenizer, listener))


async def _serve(config: RouterConfig, tokenizer: ChatTokenizer, listener: socket.socket) -> None:
    async with _backend(config) as backend:
        server = uvicorn.Server(_uvicorn_config(config, create_app(config, backend, tokenizer)))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        notify_progress("waiting for workers")
        await asyncio.wait({serving, ready := asyncio.create_task(backend.wait_ready())}, return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            notify_ready()
        ready.cancel()
        await serving


def _uvicorn_config(config: RouterConfig, app: FastAPI) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        ssl_certfile=config.ssl_certfile or None,
        ssl_keyfile=config.ssl_keyfile or None,
        timeout_graceful_shutdown=_SHUTDOWN_S,
        server_header=False,
    )


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

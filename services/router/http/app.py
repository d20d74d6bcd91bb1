"""The router's HTTP front end: OpenAI's API on one side, a `Backend` on the other.

request ──> middleware ──> endpoint ──> Run ──> Backend.generate
response <── SSE or JSON <── Writer <── pieces of text <── Choice per output <── Output events
"""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from services.router.config import RouterConfig
from services.router.dispatch.backend import Backend
from services.router.http.catalog import Catalog
from services.router.http.chat import ChatCompletions
from services.router.http.completions import Completions
from services.router.http.errors import install_error_handlers
from services.router.http.frontend import Frontend
from services.router.http.middleware import Begin, BoundConcurrency, CheckKey, CheckOrigin, Measure, RefuseWhenStopping
from services.router.http.models import Models
from services.router.http.probes import Probes
from services.router.http.stopping import Stopping
from services.router.http.tokens import Tokens

PROBE_PATHS = ("/health", "/ready", "/metrics")
GENERATION_PATHS = ("/v1/completions", "/v1/chat/completions")
OTHER_PATHS = ("/v1/models", "/tokenize", "/detokenize")


def create_app(settings: RouterConfig, backend: Backend, catalog: Catalog, stopping: Stopping) -> FastAPI:
    app = FastAPI(title="Twostroke", openapi_url=None, redirect_slashes=False)
    _add_routes(app, Frontend(settings, backend, catalog), Probes(catalog, stopping))
    install_error_handlers(app)
    # The one added last is outermost.
    app.add_middleware(BoundConcurrency, paths=GENERATION_PATHS, limit=settings.max_concurrent_requests)
    app.add_middleware(CheckKey, keys=settings.api_keys, open_paths=PROBE_PATHS)
    if not settings.api_keys:
        app.add_middleware(CheckOrigin, allowed=settings.origins)
    app.add_middleware(RefuseWhenStopping, stopping=stopping, open_paths=PROBE_PATHS)
    if settings.origins:  # answers preflights, which bear no key
        exposed = ["X-Request-Id"]
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=exposed,
        )
    app.add_middleware(Measure, known_paths=(*PROBE_PATHS, *GENERATION_PATHS, *OTHER_PATHS))
    app.add_middleware(Begin, timeout_s=settings.request_timeout_s, stopping=stopping)
    return app


def _add_routes(app: FastAPI, frontend: Frontend, probes: Probes) -> None:
    completions, chat = Completions(frontend), ChatCompletions(frontend)
    models, tokens = Models(frontend), Tokens(frontend)
    routes = (
        ("POST", "/v1/completions", completions.create),
        ("POST", "/v1/chat/completions", chat.create),
        ("GET", "/v1/models", models.index),
        ("GET", "/v1/models/{model_id:path}", models.show),
        ("POST", "/tokenize", tokens.tokenize),
        ("POST", "/detokenize", tokens.detokenize),
        ("GET", "/health", probes.health),
        ("GET", "/ready", probes.ready),
        ("GET", "/metrics", probes.metrics),
    )
    for method, path, endpoint in routes:
        methods = ["GET", "HEAD"] if method == "GET" else [method]
        app.add_api_route(path, endpoint, methods=methods, response_model=None)

"""The options of a router process."""

from __future__ import annotations

from dataclasses import dataclass

from shared.options.checks import check_at_least, check_listener, check_served_name, served_name
from shared.options.config import option, size_bytes
from shared.options.peers import PeerConfig


@dataclass(frozen=True, slots=True)
class RouterConfig(PeerConfig):
    """A Twostroke router: OpenAI-compatible HTTP in front, workers over gRPC behind."""

    model: str = option("", "folder with a model's tokenizer, .gguf file or hub id; without it, the models are the workers'")
    served_model_name: str = option("", "name that clients and workers use for --model; default: its last part")
    max_models: int = option(16, "most models to serve at once; further ones are not listed")
    revision: str = option("", "hub revision of --model")
    tokenizer: str = option("", "folder, .gguf file or hub id with the tokenizer; default: the model's own")
    chat_template: str = option("", "file with a Jinja chat template; default: the model's own")
    generation_config: str = option(
        "auto", "sampling defaults: auto, from the model's generation_config.json, or none", choices=("auto", "none")
    )
    special_tokens_in_messages: str = option(
        "text",
        "what special tokens inside messages are: text, or parse, as if the template had written them",
        choices=("text", "parse"),
    )
    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "HTTP port; 0 picks a free one")
    redis_url: str = option("redis://127.0.0.1:6379/0", "Redis or Valkey with registry and prefix index", secret=True)
    api_key: str = option("", "keys that clients may use, comma separated; empty: no key is asked for", secret=True)
    share_prefix_cache: bool = option(False, "let all API keys share cached prefixes, which tells one what another has asked")
    allowed_origins: str = option("", "origins of web pages that may use this server, comma separated; *: all; empty: none")
    ssl_certfile: str = option("", "certificate chain (PEM file) for HTTPS; empty: plain HTTP")
    ssl_keyfile: str = option("", "private key (PEM file) of --ssl-certfile")
    request_timeout_s: float = option(600.0, "longest time one request may take, its answer's way to the client included")
    keep_alive_timeout_s: float = option(120.0, "how long an idle connection stays open")
    drain_timeout_s: float = option(30.0, "after SIGTERM, how long running requests may go on")
    worker_wait_s: float = option(60.0, "how long a request may wait while no worker can serve it, before it gets 503")
    handoff: str = option(
        "auto", "when prefill workers compute prompts: auto, where it pays, or always", choices=("auto", "always")
    )
    max_concurrent_requests: int = option(1024, "most requests being answered at once; further ones get 429")
    max_connections: int = option(4096, "most connections of clients at once; further ones get 503")
    max_request_bytes: int = option(4 * 1024**2, "largest request body, such as 4MiB", parse=size_bytes)
    log_level: str = option("info", "least severe messages to log", choices=("debug", "info", "warning", "error"))

    def __post_init__(self) -> None:
        super(RouterConfig, self).__post_init__()  # slots=True makes a new class: zero-argument super() would miss it
        if bool(self.ssl_certfile) != bool(self.ssl_keyfile):
            raise ValueError("--ssl-certfile and --ssl-keyfile go together")
        check_listener(self.host, self.port)
        if self.model:
            check_served_name(self.model_name)
        check_at_least(1, self, "max_concurrent_requests", "max_connections", "max_request_bytes", "max_models")
        if not self.model and (self.tokenizer or self.chat_template):
            raise ValueError("--tokenizer and --chat-template are those of --model, which is missing")
        if not self.request_timeout_s > 0:
            raise ValueError(f"--request-timeout-s is {self.request_timeout_s}; it must be above 0")
        if not self.keep_alive_timeout_s > 0:
            raise ValueError(f"--keep-alive-timeout-s is {self.keep_alive_timeout_s}; it must be above 0")
        if not self.drain_timeout_s >= 0:
            raise ValueError(f"--drain-timeout-s is {self.drain_timeout_s}; it must be at least 0")

    @property
    def model_name(self) -> str:
        return served_name(self.model, self.served_model_name)

    @property
    def api_keys(self) -> tuple[str, ...]:
        return _items(self.api_key)

    @property
    def origins(self) -> tuple[str, ...]:
        return _items(self.allowed_origins)


def _items(listed: str) -> tuple[str, ...]:
    return tuple(item.strip() for item in listed.split(",") if item.strip())

"""`twostroke COMMAND …`: one command for every process of the project. Only the command's own modules are imported."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from shared.base.errors import ConfigError
from shared.base.exit_codes import CONFIG_ERROR, INTERRUPTED
from shared.base.version import VERSION

_COMMANDS = {
    "up": ("services.local.__main__", "everything on this machine: Valkey, prefill and decode workers, a router"),
    "router": ("services.router.__main__", "HTTP in, tokens out; one process of a larger installation"),
    "prefill": ("services.prefill.__main__", "a worker that computes prompts and ships their KV blocks"),
    "decode": ("services.decode.__main__", "a worker that generates from computed prompts"),
    "bench": ("bench.__main__", "measures a server under load"),
}

# Read when torch is imported. An idle engine sleeps: OpenMP's threads spin no longer than from one product of a step to
# the next. Weights and KV pools in large pages are read faster: products of 32 rows take 0.8 to 0.9 of the time.
_TORCH_ENVIRON = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "20000", "THP_MEM_ALLOC_ENABLE": "1"}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a command. The exit code is 2, with one line on stderr, for what the user can mend."""
    command, *rest = (sys.argv[1:] if argv is None else list(argv)) or ["--help"]
    if command in ("-h", "--help", "help"):
        print(_usage())
    elif command in ("-V", "--version"):
        print(f"twostroke {VERSION}")
    else:
        sys.exit(_run(command, rest))


def _run(command: str, argv: Sequence[str]) -> int:
    try:
        if command not in _COMMANDS:
            raise ConfigError(f"there is no command {command!r}; commands are {', '.join(_COMMANDS)}")
        for name, value in _TORCH_ENVIRON.items():
            os.environ.setdefault(name, value)
        importlib.import_module(_COMMANDS[command][0]).main(argv)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return CONFIG_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _usage() -> str:
    lines = [f"  {name:<10}{text}" for name, (_, text) in _COMMANDS.items()]
    return "\n".join(
        [
            "usage: twostroke COMMAND [OPTION …]",
            "",
            "Large-language-model serving with prefill and decode on separate machines.",
            "",
            *lines,
            "",
            "twostroke COMMAND --help lists a command's options. Each is also a variable: --block-size is TWOSTROKE_BLOCK_SIZE.",
        ]
    )


if __name__ == "__main__":
    main()

"""What the documents tell people to type exists: commands, options, make targets, files."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from bench.compare.config import CompareConfig
from bench.failover.__main__ import FailoverConfig
from bench.handoff.__main__ import HandoffConfig
from bench.load.config import BenchConfig
from services.decode.config import DecodeConfig
from services.local.config import UpConfig
from services.router.config import RouterConfig
from shared.options.config import parse_config
from shared.options.worker import WorkerConfig

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
MEASUREMENTS = (CompareConfig, FailoverConfig, HandoffConfig)  # python -m bench.…
CONFIGS = {"up": UpConfig, "router": RouterConfig, "prefill": WorkerConfig, "decode": DecodeConfig, "bench": BenchConfig}


def code_lines() -> list[str]:
    lines = []
    for document in DOCUMENTS:
        for block in re.findall(r"^```[a-z]*\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL):
            lines += re.sub(r"\\\n\s*", "", block).splitlines()
        lines += re.findall(r"`([^`\n]+)`", document.read_text())
    return lines


def commands() -> list[str]:
    found = {match[0] for line in code_lines() if (match := re.search(r"(?<![\w/])(twostroke [a-z]+ --[^#|]*)", line))}
    return sorted(found)


@pytest.mark.parametrize("command", commands())
def test_every_twostroke_command_is_understood(command: str) -> None:
    _, name, *argv = shlex.split(command)
    if argv != ["--help"]:
        argv = [re.sub(r"\b[NMKR]\b", "1", word) for word in argv]
        parse_config(CONFIGS[name], argv, name, {})


def test_documents_name_commands_at_all() -> None:
    assert len(commands()) >= 4


def test_every_make_target_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {match for line in code_lines() for match in re.findall(r"^make ([a-z-]+)", line)}
    assert named >= {"up", "test"}
    assert named <= targets


def test_every_option_in_a_table_exists() -> None:
    options = {
        f"--{name.replace('_', '-')}" for config in (*CONFIGS.values(), *MEASUREMENTS) for name in config.__dataclass_fields__
    }
    named = {word for line in code_lines() for word in re.findall(r"^(--[a-z-]+)", line)}
    assert named
    assert named - options - {"--help", "--version"} == set()


def test_every_file_that_the_architecture_names_exists() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    folder = ""
    for name in re.findall(r"`([\w/]+\.py)`", text):
        folder = name.rpartition("/")[0] or folder
        assert (ROOT / folder / name.rpartition("/")[2]).exists(), name

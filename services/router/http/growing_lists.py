"""Lists that grow within one object, kept as the JSON that they become."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson


class GrowingLists:
    """The logprobs of a long answer are a hundred times larger as objects than as JSON, and take a second to write at once."""

    def __init__(self, first: Mapping[str, Any]) -> None:
        self._parts: dict[str, list[orjson.Fragment]] = {}  # each: some items, without the brackets
        self._others: dict[str, Any] = {}
        self.add(first)

    def add(self, more: Mapping[str, Any]) -> None:
        """Its lists continue those of before; what is no list stands for itself."""
        for name, value in more.items():
            if isinstance(value, list):
                parts = self._parts.setdefault(name, [])
                if value:
                    parts.append(orjson.Fragment(orjson.dumps(value)[1:-1]))
            else:
                self._others[name] = value

    def whole(self) -> dict[str, Any]:
        """For orjson only."""
        return self._parts | self._others

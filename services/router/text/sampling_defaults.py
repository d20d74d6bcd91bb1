"""The sampling values of requests that do not say: what the model's generation_config.json recommends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from shared.base.errors import ConfigError, InvalidRequest
from shared.base.request import SamplingParams

MAX_TOP_K = 2**32 - 1  # as the wire holds it


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def read(cls, generation_config: Mapping[str, Any], folder: Path) -> SamplingDefaults:
        """Its other fields are not for us, null means not said. Raises ConfigError for a value out of range."""
        names = {one.name for one in fields(cls)}
        said = {name: value for name, value in generation_config.items() if name in names and value is not None}
        for name, value in said.items():
            kinds = (int,) if name == "top_k" else (int, float)
            if type(value) not in kinds:
                raise ConfigError(f"{folder / 'generation_config.json'}: {name} is {value!r}; it must be a number")
        defaults = cls(**said)
        try:
            SamplingParams(**defaults.normalized())
        except InvalidRequest as error:
            raise ConfigError(f"{folder / 'generation_config.json'}: {error.message}") from None
        return defaults

    def normalized(self) -> dict[str, Any]:
        """As an engine takes them: -1, other servers' way to turn top_k off, is 0. Raises InvalidRequest for a top_k too large."""
        if self.top_k > MAX_TOP_K:
            raise InvalidRequest(f"top_k is {self.top_k}; it must be between -1 and {MAX_TOP_K}", param="top_k")
        return asdict(self) | {"top_k": 0 if self.top_k == -1 else self.top_k}

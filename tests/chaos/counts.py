"""What the processes have counted, over all their lives: a killed process takes its counters with it, so they are read before."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.chaos.site import Site
from tests.support.parts import Part

_SCRAPE_TIMEOUT_S = 2.0

Series = tuple[str, tuple[tuple[str, str], ...]]  # name, labels


class Counts:
    def __init__(self, site: Site) -> None:
        self._site = site
        self._ended: Counter[Series] = Counter()
        self._living: dict[str, Counter[Series]] = {}

    async def note_death(self, part: Part) -> None:
        """The process is about to be ended."""
        await self._scrape(part.name)
        self._ended.update(self._living.pop(part.name, Counter()))

    async def total(self, name: str) -> dict[str, int]:
        """The counters of this name by their labels, "leg=decode cause=unavailable_error", of all processes that ever were."""
        await asyncio.gather(*(self._scrape(part) for part in self._site.metrics_urls))
        found: Counter[str] = Counter()
        for counters in (self._ended, *self._living.values()):
            for (series, labels), value in counters.items():
                if series == name and value:
                    found[" ".join(f"{key}={value}" for key, value in labels)] += value
        return dict(sorted(found.items()))

    def of_living(self, part: str, name: str) -> Mapping[tuple[tuple[str, str], ...], int]:
        """One process's counters of this name by their labels, as last read."""
        return {labels: value for (series, labels), value in self._living[part].items() if series == name}

    async def _scrape(self, name: str) -> None:
        """A process that does not answer keeps what it last said."""
        try:
            async with httpx.AsyncClient(timeout=_SCRAPE_TIMEOUT_S) as client:
                text = (await client.get(self._site.metrics_urls[name])).text
        except httpx.TransportError:
            return
        self._living[name] = Counter(
            {
                (sample.name, tuple(sorted(sample.labels.items()))): int(sample.value)
                for family in text_string_to_metric_families(text)
                if family.type == "counter"
                for sample in family.samples
                if sample.name.endswith("_total")
            }
        )

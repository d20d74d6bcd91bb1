"""One run of chaos: learn the right answers, load and faults together, then look for what was lost, repeated or kept.

The plan of faults is drawn from the seed alone; lanes take the next one from it, each as soon as its last one is healed.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

from tests.chaos import baseline
from tests.chaos.counts import Counts
from tests.chaos.faults import Fault
from tests.chaos.load import NUM_ASKS, NUM_STREAMS, Load, make_asks
from tests.chaos.report import Report
from tests.chaos.site import Site

_WARM_UP_REQUESTS = 60  # at once; at least as many as load and faults together have
# As `services/router/dispatch/rests.py` logs it when a worker begins to fail, once for all requests that notice. A worker's name
# begins with its role, which is the leg.
_FAILURE_LINE = re.compile(r"WARNING +router (decode|prefill)-\d+ fails and rests: ")
_FULL = "overloaded_error"  # a worker that is full is counted, and does not rest


class Chaos:
    def __init__(
        self, site: Site, seed: int, say: Callable[[str], None] = print, num_asks: int = NUM_ASKS, pause_s: float = 0.0
    ) -> None:
        self._site = site
        self._say = say
        rng = random.Random(seed)
        self.load = Load(site, make_asks(rng, num_asks), rng, pause_s)
        self.report = Report(seed=seed, num_streams=NUM_STREAMS)
        self._rng = rng
        self._counts = Counts(site)
        self._router_log_start = 0
        self._struck: Counter[str] = Counter()
        site.on_death = self._note_death

    async def run(self, kinds: Sequence[type[Fault]], num_faults: int, num_requests: int, num_lanes: int) -> Report:
        """At least so many of each. The report is complete when it returns."""
        begin = time.monotonic()
        await self.load.learn()
        before = await self._footprints()
        self._say(f"undisturbed runs took {time.monotonic() - begin:.1f} s")
        await self._load_and_faults(self._plan(kinds, num_faults), num_requests, num_lanes)
        await self._look_for_leaks(before)
        await self._gather_counts()
        await self.load.close()
        self._finish(time.monotonic() - begin)
        return self.report

    def _plan(self, kinds: Sequence[type[Fault]], num_faults: int) -> list[tuple[Fault, random.Random]]:
        """Every kind once, then at random by weight, in random order."""
        drawn = [*kinds, *self._rng.choices(kinds, [kind.weight for kind in kinds], k=max(0, num_faults - len(kinds)))]
        self._rng.shuffle(drawn)
        return [(kind(), random.Random(self._rng.random())) for kind in drawn]

    async def _load_and_faults(self, plan: list[tuple[Fault, random.Random]], num_requests: int, num_lanes: int) -> None:
        enough = asyncio.Event()
        loading = asyncio.create_task(self.load.run(enough))
        todo = iter(plan)
        await asyncio.gather(*(self._lane(todo, len(plan)) for _ in range(num_lanes)))
        while self.load.tally.num_done < num_requests and not loading.done():
            await asyncio.wait({loading}, timeout=0.2)
        enough.set()
        await loading

    async def _lane(self, todo: Iterator[tuple[Fault, random.Random]], total: int) -> None:
        for fault, rng in todo:
            begin = time.monotonic()
            what = await fault.strike(self._site, self.load, rng)
            kind = type(fault).__name__
            self._struck[kind] += 1
            tally = self.load.tally
            self._say(
                f"{self._struck.total():4}/{total} {kind} {what} ({time.monotonic() - begin:.1f} s); "
                f"{tally.num_exact} exact, {len(tally.violations)} wrong"
            )
            await asyncio.sleep(rng.uniform(0.1, 0.5))

    async def _look_for_leaks(self, before: dict[str, baseline.Footprint]) -> None:
        self.report.violations += await baseline.settle(self._site)
        after = await self._footprints()
        self.report.violations += baseline.compare(before, after)
        self.report.footprints_before = {name: asdict(one) for name, one in before.items()}
        self.report.footprints_after = {name: asdict(one) for name, one in after.items()}

    async def _footprints(self) -> dict[str, baseline.Footprint]:
        """Always after the same work, which opens all the connections to Redis that a pool may keep, and when clients are gone."""
        await self.load.once()
        await self.load.burst(_WARM_UP_REQUESTS, self._rng)
        await self.load.hang_up()
        self.report.violations += await baseline.settle(self._site)
        return baseline.footprints(self._site)

    async def _gather_counts(self) -> None:
        self.report.failures_by_leg_and_cause = await self._counts.total("twostroke_failovers_total")
        self.report.transfers_by_result = await self._counts.total("twostroke_transfers_total")
        self.report.refused_messages_by_cause = await self._counts.total("twostroke_transfer_refusals_total")
        counted = Counter[str]()
        for labels, value in self._counts.of_living("router", "twostroke_failovers_total").items():
            if dict(labels)["cause"] != _FULL:
                counted[dict(labels)["leg"]] += value
        log = self._site.router.log_path.read_text(errors="replace")[self._router_log_start :]
        logged = Counter(_FAILURE_LINE.findall(log))
        if (+counted).keys() != logged.keys() or not logged <= counted:
            self.report.violations.append(
                f"the router's log has {dict(logged)} failing workers, its counters {dict(counted)} failures"
            )

    async def _note_death(self, part: object) -> None:
        assert part in self._site.parts
        await self._counts.note_death(part)  # type: ignore[arg-type]
        if part is self._site.router:
            self._router_log_start = len(self._site.router.log_path.read_text(errors="replace"))

    def _finish(self, duration_s: float) -> None:
        tally, report = self.load.tally, self.report
        report.num_faults, report.faults_by_kind = self._struck.total(), dict(sorted(self._struck.items()))
        report.duration_s = round(duration_s, 1)
        report.num_requests, report.num_exact = tally.num_done, tally.num_exact
        report.requests_by_kind = dict(sorted(tally.by_kind.items()))
        report.num_retried_after_router_kill, report.num_clients_left = tally.num_retried, tally.num_left
        report.slowest_request_s = round(tally.slowest_s, 2)
        report.violations = tally.violations + report.violations

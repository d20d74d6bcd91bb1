"""A request's time at the router and at its workers."""

from __future__ import annotations

from services.router.dispatch.budget import Budget


def test_what_is_left_counts_down_to_nothing() -> None:
    assert 9.0 < Budget(10.0).left_s <= 10.0
    assert Budget(0.0).left_s == 0.0


def test_a_worker_does_not_end_a_call_before_the_router_does() -> None:
    budget = Budget(10.0)
    assert budget.left_s + 0.5 < budget.call_timeout_s < budget.left_s + 2.0

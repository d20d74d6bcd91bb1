"""How every Redis client of this project is made: nothing waits longer than a second, and nothing retries behind one's back.

A caller that wants to try again does so itself, with `Backoff`, because it must know that something may have been lost.
"""

from __future__ import annotations

import random

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from shared.base.errors import ConfigError

OPERATION_TIMEOUT_S = 1.0
MAX_CONNECTIONS = 16
TTL_S = 5.0  # of all that a worker writes, unless its next heartbeat renews it
FIRST_RETRY_S = 0.1
REDIS_ERRORS = (RedisError, OSError, TimeoutError)  # all that a Redis operation may fail with; ConnectionError is an OSError


def connect(url: str) -> Redis:
    """A client of redis://, rediss:// or unix://; it connects when first used. Raises ConfigError if `url` is none of these."""
    try:
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=MAX_CONNECTIONS,
            timeout=OPERATION_TIMEOUT_S,
            socket_timeout=OPERATION_TIMEOUT_S,
            socket_connect_timeout=OPERATION_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
    except ValueError as error:  # the url itself is not shown: it may hold a password
        raise ConfigError(f"--redis-url is not a redis://, rediss:// or unix:// URL: {error}") from None
    return Redis.from_pool(pool)


def describe(error: Exception) -> str:
    """Never empty, as a TimeoutError's text is."""
    return str(error) or type(error).__name__


class Backoff:
    """Growing delays between attempts, from `first_s` doubling to `most_s`, each cut by up to a half at random, so that a fleet
    does not come back all at once."""

    def __init__(self, first_s: float, most_s: float) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._next_s = first_s

    def next_delay_s(self) -> float:
        delay_s = self._next_s
        self._next_s = min(2 * delay_s, self._most_s)
        return delay_s * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        self._next_s = self._first_s

"""What strangers may write into Redis: everything that is not a valid entry is refused by the field that is wrong."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shared.base.worker_info import Load, Role, WorkerInfo
from shared.index import entries
from shared.index.entries import (
    Goodbye,
    InvalidEntry,
    Refusals,
    read_boot_tags,
    read_counts,
    read_goodbye,
    read_worker,
    read_worker_id,
    write_goodbye,
    write_worker,
)

INFO = WorkerInfo(
    worker_id="w0",
    boot_id="b0",
    role=Role.PREFILL,
    address="[::1]:7001",
    model="m",
    digest="d",
    block_size=16,
    num_blocks=1000,
    max_model_len=4096,
    max_num_seqs=8,
    transports=("shm", "grpc"),
    draining=True,
    load=Load(1, 2, 3, 4, 5, 6.5),
    source="org/m",
    revision="v1",
)
VALID = json.loads(write_worker(INFO))
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from([10**400, -1, 0, "", "a:b:c", "\x00"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


def changed(**changes: object) -> bytes:
    return json.dumps(VALID | changes).encode()


def test_what_is_written_is_read_again():
    assert read_worker(write_worker(INFO)) == INFO
    assert read_goodbye(write_goodbye(Goodbye("w0", "b0"))) == Goodbye("w0", "b0")
    assert read_worker_id(b"prefill@[::1]:7001") == "prefill@[::1]:7001"


def test_fields_of_newer_versions_are_ignored_and_those_that_older_ones_lack_have_defaults():
    load = {"num_running": 3, "num_dreams": 1}
    raw = {name: value for name, value in VALID.items() if name not in ("source", "revision", "draining", "transports")}
    read = read_worker(json.dumps(raw | {"load": load, "field_of_tomorrow": {}}).encode())
    assert read == replace(INFO, source="", revision="", draining=False, transports=(), load=Load(num_running=3))


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("worker_id", [None, "", 1, [], {}, "x" * 257, "a\nb", "\u0000"]),
        ("boot_id", [None, "", 1, "x" * 257, "\u202e"]),
        ("role", [None, "encode", "", 1, [], ["prefill"], {}]),
        ("address", [None, "", "host", "host:", ":1", "host:0", "host:65536", "::1:1", "a b:1", 5, "h:1:2", "[x]:1", "h:+1"]),
        ("model", [None, "", 3, "x" * 257]),
        ("digest", [None, "", 3, ["d"]]),
        ("block_size", [None, 0, -16, 16.0, "16", True, 4097, 2**70]),
        ("num_blocks", [None, 0, -1, 1.5, True, 2**53 + 1]),
        ("max_model_len", [None, 0, False, "4096", 1e300]),
        ("max_num_seqs", [None, 0, -1, True, 2**20 + 1, [8]]),
        ("transports", ["grpc", None, [1], [""], ["grpc"] * 33, {"grpc": 1}]),
        ("draining", [0, 1, "false", None, []]),
        ("load", [None, [], 1, "idle"]),
        ("source", [None, 1, "x" * 4097, "a\u0000b"]),
        ("revision", [None, 1, ["v1"]]),
    ],
)
def test_each_field_is_checked_for_type_and_range(field, values):
    for value in values:
        with pytest.raises(InvalidEntry, match=field) as caught:
            read_worker(changed(**{field: value}))
        assert caught.value.field == field


@pytest.mark.parametrize("field", list(Load.__dataclass_fields__))
def test_each_number_of_the_load_is_checked(field):
    for value in (-1, True, "1", None, [], 2**53 + 1, 1e300, 2**100):
        with pytest.raises(InvalidEntry, match=field):
            read_worker(changed(load={field: value}))
    read_worker(changed(load={field: 2**53}))
    with pytest.raises(InvalidEntry):
        read_worker(changed(load={field: float("nan")}))


def test_limits_themselves_are_allowed():
    read = read_worker(changed(max_num_seqs=1, block_size=1, num_blocks=1, max_model_len=2**53, worker_id="x" * 256, transports=[]))
    assert (read.max_num_seqs, read.max_model_len, len(read.worker_id)) == (1, 2**53, 256)


@pytest.mark.parametrize(
    "data",
    [
        *(
            b"",
            b"null",
            b"[]",
            b"1",
            b'"text"',
            b"{",
            b"\xff\xfe",
            b'{"worker_id": "\xff"}',
            b"[" * 10_000,
            b'{"a":' * 3000,
            b"NaN",
        ),
        *(1, None, "{}", [], b"{}" + b" " * entries.MAX_ENTRY_BYTES),
    ],
)
def test_what_is_no_small_json_object_is_refused_whole(data):
    for read in (read_worker, read_goodbye):
        with pytest.raises(InvalidEntry, match="entry"):
            read(data)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200) | ANYTHING.map(lambda value: json.dumps(value).encode()))
@example(b'{"worker_id":[],"boot_id":""}')
def test_whatever_comes_is_a_value_or_a_refusal(data):
    for read in (read_worker, read_goodbye, read_worker_id):
        with suppress(InvalidEntry):
            read(data)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(VALID)), ANYTHING)
def test_a_valid_entry_with_one_field_changed_is_a_worker_that_can_be_used_or_a_refusal(field, value):
    try:
        info = read_worker(changed(**{field: value}))
    except InvalidEntry:
        return
    assert info.max_num_seqs >= 1
    assert info.block_size >= 1
    assert read_worker(write_worker(info)) == info


@given(ANYTHING)
def test_a_lookup_answers_with_counts_in_range_or_is_refused(value):
    try:
        counts = read_counts(value, num_sets=2, most=5)
    except InvalidEntry:
        return
    assert len(counts) == 2
    assert all(type(n) is int and 0 <= n <= 5 for n in counts)


@pytest.mark.parametrize("answer", [None, 3, [1], [1, 2, 3], [1, 6], [1, -1], [1, True], [1, 1.0], [1, b"1"], b"12", {"a": 1}])
def test_counts_of_the_wrong_number_type_or_size_are_refused(answer):
    with pytest.raises(InvalidEntry):
        read_counts(answer, num_sets=2, most=5)
    assert read_counts([0, 5], num_sets=2, most=5) == [0, 5]


@pytest.mark.parametrize("answer", [None, 3, b"1234", [1], ["1234"], [b"1", b"2", b"3"]])
def test_tags_of_the_wrong_number_or_type_are_refused(answer):
    with pytest.raises(InvalidEntry):
        read_boot_tags(answer, most=2)
    assert read_boot_tags([b"1", b"2"], most=2) == [b"1", b"2"]


@pytest.mark.parametrize("member", [b"", b"\xff", b"x" * 257, b"a\x00", "text", 1, None])
def test_a_member_of_the_roster_that_is_no_name_is_refused(member):
    with pytest.raises(InvalidEntry, match="roster member"):
        read_worker_id(member)


def test_refusals_are_counted_each_and_logged_once_per_field(caplog):
    refusals = Refusals()
    before = entries.REFUSED.labels("heartbeat")._value.get()
    for number in range(3):
        refusals.add("heartbeat", InvalidEntry("role", number, "a role"))
    refusals.add("entry", InvalidEntry("address", "x", "host:port"))
    assert entries.REFUSED.labels("heartbeat")._value.get() == before + 3
    assert [record.args[1].field for record in caplog.records] == ["role", "address"]


def test_orjson_keeps_what_the_checks_rely_on():
    for text in (b"NaN", b"Infinity", b'{"a": NaN}', b'"\xff"', b"[" * 5000 + b"]" * 5000):
        with pytest.raises(orjson.JSONDecodeError):
            orjson.loads(text)

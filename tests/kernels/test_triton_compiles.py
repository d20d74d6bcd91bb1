"""Every launch that dispatch can choose compiles for NVIDIA devices of two generations, without spills, into the instructions
that its speed depends on. Needs no GPU."""

from __future__ import annotations

import re

import pytest
from triton_cubin import Cubin, compile_all

from shared.kernels.triton.aot import all_launches

pytestmark = pytest.mark.timeout(900)  # half a minute to one on two idle cores; several on busy ones

# The most shared memory that one program may have, in bytes: A100, and H100.
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}
PREFILL, DECODE = "prefill-d128-bf16-g4-bs16", "decode_split-d128-bf16-g4-bs16"


@pytest.fixture(scope="module", params=SHARED_BYTES, ids=lambda capability: f"sm_{capability}")
def cubins(request: pytest.FixtureRequest) -> dict[str, Cubin]:
    names = [n.name for n in all_launches(request.param)]
    return {c.name: c for c in compile_all(names, request.param, {PREFILL, DECODE, "gather_blocks"})}


def test_no_kernel_spills_registers(cubins: dict[str, Cubin]) -> None:
    assert not [str(c) for c in cubins.values() if c.stack_bytes]


def test_every_kernel_fits_shared_memory(cubins: dict[str, Cubin]) -> None:
    assert not [str(c) for c in cubins.values() if c.shared_bytes > SHARED_BYTES[c.capability]]


def test_prefill_uses_the_tensor_cores_of_its_generation(cubins: dict[str, Cubin]) -> None:
    prefill = cubins[PREFILL]
    assert (" HGMMA." if prefill.capability == 90 else " HMMA.") in prefill.sass


def test_keys_and_values_are_read_in_units_of_16_bytes(cubins: dict[str, Cubin]) -> None:
    for name in (DECODE, PREFILL):
        # Narrower asynchronous copies fetch the block ids of a tile, one per key.
        wide = len(re.findall(r"LDGSTS\.E\S*\.128", cubins[name].sass))
        narrow = len(re.findall(r"LDGSTS\.E", cubins[name].sass)) - wide
        assert wide >= 16
        assert narrow < wide


def test_blocks_are_copied_in_units_of_16_bytes(cubins: dict[str, Cubin]) -> None:
    sass = cubins["gather_blocks"].sass
    assert re.search(r"LDG\.E\S*\.128", sass)
    assert re.search(r"STG\.E\S*\.128", sass)

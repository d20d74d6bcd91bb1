"""What can be wrong with the chunks of a transfer, and how a worker process is told. Torch-free."""

from __future__ import annotations

from enum import Enum

CHUNKS_FILE_VARIABLE = "CHAOS_CHUNKS_FILE"


class ChunkFault(Enum):
    CORRUPT = "corrupt"  # a byte changes after the checksum was taken
    DUPLICATE = "duplicate"
    LATE = "late"  # it comes after the lease has ended
    MISSING = "missing"  # it never comes, but the commit does

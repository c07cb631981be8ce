"""How much memory a program may take."""

import os
from pathlib import Path
from typing import Any

import jax


def memory_limit() -> int:
    """Bytes that a program may take: what the first device reports as free, or the machine's available memory."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    if not Path("/proc/meminfo").exists():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available = [line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable")]
    return int(available[0].split()[1]) * 1024


def program_bytes(compiled: Any) -> int | None:
    """Bytes that a compiled program has at a time, by its own account: arguments, results that are not written over
    them, and what is in between. None where the backend gives no account.
    """
    need = compiled.memory_analysis()
    if need is None:
        return None
    results = need.output_size_in_bytes - need.alias_size_in_bytes
    return need.argument_size_in_bytes + results + need.temp_size_in_bytes

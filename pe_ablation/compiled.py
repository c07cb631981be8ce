"""Compiled programs, kept on disk: a second launch of a sweep compiles nothing, nor does a resumed run."""

import functools
import hashlib
import os
import platform
from pathlib import Path
from typing import Any

import jax

SECONDS = 0.3  # what compiles in less is not worth a file
MOST = 2 * 2**30  # bytes in all; what was used least recently goes first


def keep(folder: Path) -> None:
    """From now on this process keeps its programs below `folder`, and takes them from there.

    They lie apart by what made them and by what the processor can do, since the program of one may not run on another.
    Where jax has been told itself (JAX_COMPILATION_CACHE_DIR, JAX_ENABLE_COMPILATION_CACHE=false) that holds; a folder
    that can't be written keeps nothing.
    """
    config: Any = jax.config
    if not config.jax_enable_compilation_cache or config.jax_compilation_cache_dir is not None:
        return
    own = folder / "compiled" / _machine()
    try:
        own.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    if not os.access(own, os.W_OK):
        return
    config.update("jax_compilation_cache_dir", str(own))
    config.update("jax_compilation_cache_max_size", MOST)
    config.update("jax_persistent_cache_min_compile_time_secs", SECONDS)


@functools.cache
def _machine() -> str:
    """12 hex digits: versions of jax and Python, the processor and its instructions."""
    about = [jax.__version__, platform.python_version(), platform.machine(), platform.processor()]
    listed = Path("/proc/cpuinfo")
    if listed.exists():
        lines = listed.read_text().splitlines()
        about += sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))})
    return hashlib.sha256("\n".join(about).encode()).hexdigest()[:12]

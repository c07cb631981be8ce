"""Fixtures that several test files ask for by name."""

import gc
import os

import jax
import pytest

os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # in what tests start; those of kept programs ask for it
jax.config.update("jax_enable_compilation_cache", False)
os.environ["WANDB_MODE"] = "disabled"  # here and in what tests start; those of the mirror ask for it

# Nearly all time goes into compiling and tracing: XLA's plain emitter and one piece of code a program take a quarter of
# the time that the usual ones take, here and in what tests start; and tracing makes objects by the million.
QUICK = ("--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1")
os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *QUICK)).strip()
gc.set_threshold(100_000, 50, 50)

FLAG = "jax_disable_most_optimizations"


@pytest.fixture(scope="module")
def quick_compilation():
    """Hundreds of tiny programs: compiling them is all the time there is, so compile them with little optimisation."""
    before = jax.config.read(FLAG)
    jax.config.update(FLAG, True)
    yield
    jax.config.update(FLAG, before)


@pytest.fixture
def usual_compilation():
    """What users get, for a test of compiled programs in a file that asks for the quick kind."""
    before = jax.config.read(FLAG)
    jax.config.update(FLAG, False)
    yield
    jax.config.update(FLAG, before)


@pytest.fixture
def rolled_layers(monkeypatch):
    """One layer a loop step, compiled once whatever the depth."""
    from pe_ablation import model

    monkeypatch.setattr(model, "UNROLL", 1)


@pytest.fixture(autouse=True, scope="module")
def compiled_programs_go():
    """Each program of jax's on a CPU keeps maps of memory, of which a process may have some 65,000."""
    yield
    jax.clear_caches()
    gc.collect()

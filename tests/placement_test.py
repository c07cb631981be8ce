import os

import pytest

from pe_ablation import placement
from pe_ablation.placement import Share


@pytest.fixture
def machine(monkeypatch):
    """`machine(backend, devices, cores)`: what there is."""

    def pretend(backend, devices, cores=range(7)):
        monkeypatch.setattr(placement, "_backend", lambda: (backend, devices))
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(cores))

    for name in placement.VISIBLE.values():
        monkeypatch.delenv(name, raising=False)
    return pretend


def test_one_worker_has_the_machine_and_nothing_is_asked(monkeypatch):
    monkeypatch.setattr(placement, "_backend", lambda: pytest.fail("asked"))
    assert placement.shares(1) == [Share()]


def test_cores_are_dealt_evenly_and_all_of_them(machine):
    machine("cpu", 1)
    cores = [each.cores for each in placement.shares(3)]
    assert cores == [{0, 1}, {2, 3}, {4, 5, 6}]
    machine("cpu", 1, cores=[3, 8])
    assert [each.cores for each in placement.shares(2)] == [{3}, {8}]


def test_more_workers_than_cores_are_refused_with_both_numbers(machine):
    machine("cpu", 1)
    with pytest.raises(ValueError, match="workers: 8 are more than the 7 cores"):
        placement.shares(8)
    with pytest.raises(ValueError, match="workers: 0; at least 1"):
        placement.shares(0)


def test_a_worker_per_device(machine, monkeypatch):
    machine("gpu", 3)
    assert placement.shares(2) == [Share(None, {"CUDA_VISIBLE_DEVICES": each}) for each in "01"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-7,2")
    names = [each.environment["CUDA_VISIBLE_DEVICES"] for each in placement.shares(3)]
    assert names == ["5", "GPU-7", "2"]
    machine("tpu", 4)
    chips = placement.shares(4)
    assert [each.environment["TPU_VISIBLE_CHIPS"] for each in chips] == ["0", "1", "2", "3"]
    assert all(each.environment["TPU_PROCESS_BOUNDS"] == "1,1,1" and each.cores is None for each in chips)


def test_more_workers_than_devices_are_refused_with_both_numbers(machine):
    machine("gpu", 1)
    with pytest.raises(ValueError, match="workers: 2 are more than the 1 gpu devices"):
        placement.shares(2)
    machine("metal", 4)
    with pytest.raises(ValueError, match="how to share metal devices"):
        placement.shares(2)


def test_jax_is_asked_in_a_process_of_its_own(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=3")
    assert placement._backend() == ("cpu", 3)
    monkeypatch.setenv("JAX_PLATFORMS", "nothing")
    with pytest.raises(ValueError, match="jax finds no device here"):
        placement._backend()


def test_a_thread_is_pinned_for_a_while():
    before = os.sched_getaffinity(0)
    with placement.pinned(Share(frozenset({min(before)}))):
        assert os.sched_getaffinity(0) == {min(before)}
    with placement.pinned(Share()):
        assert os.sched_getaffinity(0) == before
    assert os.sched_getaffinity(0) == before

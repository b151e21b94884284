"""Header, shared files and segment, as trainer and server use them across processes and crashes."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from example_trainer.weight_protocol import shm_header
from example_trainer.weight_protocol.segment import make_segment
from example_trainer.weight_protocol.shm_header import (
    NO_VERSION,
    SegmentHeader,
    SharedFile,
    SharedMemoryError,
    WriteRefused,
    remove_shared_files,
    sweep_stale_files,
)

BOOT_ID = secrets.token_hex(8)  # of this run alone: others may use the same shared memory


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    remove_shared_files(BOOT_ID)


def new_header(tmp_path):
    path = tmp_path / "header"
    path.write_bytes(bytes(SegmentHeader.nbytes()))
    return SegmentHeader.initialise(path)


def test_a_write_is_torn_between_its_stamps(tmp_path):
    header = new_header(tmp_path)
    assert (header.state().version, header.state().torn) == (NO_VERSION, False)
    header.begin_write(3)
    assert header.state().torn is True
    header.end_write(3)
    assert (header.state().version, header.state().torn) == (3, False)


def test_another_mapping_sees_the_stamps(tmp_path):
    header = new_header(tmp_path)
    other = SegmentHeader(header.path)
    header.begin_write(1)
    assert other.state().write_begin == 1


def test_versions_are_never_reused(tmp_path):
    header = new_header(tmp_path)
    header.begin_write(2)
    header.end_write(2)
    for version in (2, 1):
        with pytest.raises(ValueError, match="never reused"):
            header.begin_write(version)


def test_a_write_ends_under_the_version_it_began_with(tmp_path):
    header = new_header(tmp_path)
    header.begin_write(2)
    with pytest.raises(ValueError, match="version 2 began"):
        header.end_write(3)


def test_a_forbidden_write_leaves_no_trace(tmp_path):
    header = new_header(tmp_path)
    header.allow_writes(False)
    with pytest.raises(WriteRefused):
        header.begin_write(1)
    assert header.state().torn is False


def test_a_forbidden_write_into_torn_weights_leaves_them_torn(tmp_path):
    header = new_header(tmp_path)
    header.begin_write(1)
    header.allow_writes(False)
    with pytest.raises(WriteRefused):
        header.begin_write(2)
    assert header.state().torn is True


def test_a_write_that_has_begun_may_be_given_another_version(tmp_path):
    header = new_header(tmp_path)
    header.begin_write(1)
    header.begin_write(5)
    header.end_write(5)
    assert (header.state().version, header.state().torn) == (5, False)


def test_a_missing_or_foreign_header_is_reported(tmp_path):
    with pytest.raises(SharedMemoryError, match="still running"):
        SegmentHeader(tmp_path / "none")
    foreign = tmp_path / "foreign"
    foreign.write_bytes(b"x" * 64)
    with pytest.raises(SharedMemoryError, match="not a header"):
        SegmentHeader(foreign)


def test_files_of_the_living_stay_and_of_the_dead_go():
    code = (
        "from example_trainer.weight_protocol.shm_header import SharedFile\n"
        f"print(SharedFile.create('{BOOT_ID}', 'weights', 64).path, flush=True)\n"
        "input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        path = Path(owner.stdout.readline().strip())
        assert path not in sweep_stale_files()
        assert path.exists()
        owner.kill()
        owner.wait()
    assert path in sweep_stale_files()
    assert not path.exists()


def test_files_of_other_users_are_never_swept(monkeypatch):
    """Root may open the weights of another user's running server, but must not remove them."""
    file = SharedFile.create(BOOT_ID, "weights", 4096)
    os.close(file._descriptor)  # its server is gone, so only its owner protects it
    ours = os.getuid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: ours + 1)
        assert file.path not in sweep_stale_files()
    assert file.path.exists()
    assert file.path in sweep_stale_files()


def test_a_shared_file_is_this_users_alone():
    file = SharedFile.create(BOOT_ID, "weights", 128)
    assert file.path.stat().st_mode & 0o777 == 0o600
    file.remove()
    assert not file.path.exists()


def test_memory_that_cannot_be_reserved_is_reported_and_leaves_nothing():
    with pytest.raises(SharedMemoryError, match="--shm-size"):
        SharedFile.create(BOOT_ID, "weights", 1 << 50)
    assert not list(Path("/dev/shm").glob(f"atropos-{BOOT_ID}-*"))


def test_exported_tensors_keep_their_values_ties_and_overlaps():
    base = torch.arange(24, dtype=torch.float32).reshape(6, 4)
    tensors = {"fused": base, "rows": base[2:4], "tied": base, "bias": torch.ones(3, dtype=torch.bfloat16)}
    segment = make_segment("cpu", BOOT_ID)
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    exported = segment.export(tensors)
    (storage,) = exported.storages
    memory = make_segment("cpu").attach(storage.handle)
    for name, place in exported.placements.items():
        view = torch.empty(0, dtype=tensors[name].dtype).set_(memory, place.offset, place.shape, place.stride)
        assert torch.equal(view, expected[name])
        assert torch.equal(tensors[name], expected[name])
    view = torch.empty(0).set_(memory, exported.placements["rows"].offset, (2, 4), (4, 1))
    view.fill_(-1)
    assert torch.equal(base[2:4], torch.full((2, 4), -1.0))
    segment.close()


def test_a_parameter_changed_by_another_process_is_seen_without_a_call():
    parameter = torch.nn.Parameter(torch.zeros(8))
    segment = make_segment("cpu", BOOT_ID)
    (storage,) = segment.export({"w": parameter}).storages
    code = (
        "import torch; from example_trainer.weight_protocol.segment import make_segment\n"
        f"memory = make_segment('cpu').attach({storage.handle!r})\n"
        "torch.empty(0).set_(memory, 0, (8,), (1,)).fill_(5)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert parameter.tolist() == [5.0] * 8
    segment.close()


def test_attaching_to_a_segment_that_is_gone_is_reported():
    handle = {"kind": "posix", "path": f"/dev/shm/atropos-{BOOT_ID}-weights", "nbytes": 64}
    with pytest.raises(SharedMemoryError, match="still running"):
        make_segment("cpu").attach(handle)


def test_a_sweep_takes_what_nobody_holds_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(shm_header, "SHARED_MEMORY_DIR", tmp_path)
    living = SharedFile.create(BOOT_ID, "weights", 64)
    others = [tmp_path / name for name in (f"atropos-{BOOT_ID}-notes", f"atropos-{BOOT_ID}-header.bak")]
    left = tmp_path / "atropos-0123456789abcdef-weights"
    being_made = tmp_path / "atropos-0123456789abcdef-header"
    for path in (*others, left):
        path.write_bytes(b"x")
    being_made.touch()
    assert sweep_stale_files() == [left]
    assert sorted(tmp_path.iterdir()) == sorted([living.path, *others, being_made])
    living.remove()


def test_a_file_longer_than_its_handle_says_is_not_taken_for_the_segment(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(bytes(128))
    with pytest.raises(SharedMemoryError, match="64 bytes"):
        make_segment("cpu").attach({"kind": "posix", "path": str(path), "nbytes": 64})

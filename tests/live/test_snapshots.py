"""States on disk: the same bits come back, or a refusal in one line."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.live.toys import clean, make, states_equal
from trust_tta.errors import StateError
from trust_tta.live.snapshots import Folder, Memory, Snapshot, decode, encode, read_state, write_state

STATE: dict[str, Any] = {
    "weights": {"a.b": torch.arange(6.0).view(2, 3).T, "half": torch.ones(3, dtype=torch.bfloat16)},
    "optimizer": {
        "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.zeros(0)}},
        "groups": [{"betas": (0.9, 1)}],
    },
    "plain": [None, True, 3, -0.0, math.inf, -math.inf, "ü", {}, (), [], {1: "int", "1": "string"}],
    "bits": torch.tensor([True, False]),
    "count": torch.tensor([2**62]),
}

plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
tensors = st.sampled_from([torch.float32, torch.float16, torch.int64, torch.bool, torch.uint8]).map(
    lambda dtype: torch.arange(4).view(2, 2).to(dtype)
)
trees = st.recursive(
    plain | tensors,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(trees)
def test_encode_and_decode_round_trip(tree: Any) -> None:
    tensors_by_name, rest = encode(tree)
    assert states_equal(decode(rest, tensors_by_name), tree)


def test_a_state_comes_back_from_disk_bit_for_bit(tmp_path: Path) -> None:
    write_state(tmp_path / "a", STATE, about={"number": 1})
    state, about = read_state(tmp_path / "a")
    assert states_equal(state, STATE)
    assert about == {"number": 1}
    assert math.copysign(1, state["plain"][3]) == -1


def test_encode_refuses_other_objects() -> None:
    with pytest.raises(StateError, match="a state holds a object; it may hold tensors and plain values alone"):
        encode({"a": [object()]})


def test_encode_copies_tensors() -> None:
    tensor = torch.zeros(2)
    tensors_by_name, _ = encode({"a": tensor, "b": tensor})
    tensor.fill_(1)
    assert not any(t.any() for t in tensors_by_name.values())


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.9, 0.999])
def test_every_damaged_byte_is_noticed(tmp_path: Path, share: float) -> None:
    path = tmp_path / "a"
    write_state(path, STATE, about={})
    content = bytearray(path.read_bytes())
    content[int(share * len(content))] ^= 0x10
    path.write_bytes(content)
    with pytest.raises(StateError, match=r"the snapshot .* (is damaged|cannot be read)"):
        read_state(path)


@pytest.mark.parametrize("length", [0, 4, 100, -1])
def test_a_file_that_was_cut_off_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "a"
    write_state(path, STATE, about={})
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(StateError, match="cannot be read"):
        read_state(path)


def test_a_foreign_safetensors_file_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(1)}, tmp_path / "a")
    with pytest.raises(StateError, match="cannot be read"):
        read_state(tmp_path / "a")


def test_the_newest_whole_snapshot_is_found(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    for number in (1, 2, 3):
        folder.write(Snapshot(number, {"n": number}))
    (tmp_path / "snapshot-000000000003.safetensors").write_bytes(b"x" * 50)
    newest, problems = folder.newest()
    assert newest == Snapshot(2, {"n": 2})
    assert len(problems) == 1
    assert "000000000003" in problems[0]


def test_a_renamed_snapshot_is_refused(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.write(Snapshot(1, {}))
    (tmp_path / "snapshot-000000000001.safetensors").rename(tmp_path / "snapshot-000000000009.safetensors")
    with pytest.raises(StateError, match="says that it is snapshot 1; it was renamed"):
        folder.read(9)


@pytest.mark.parametrize("kind", ["folder", "memory"])
def test_old_snapshots_go_but_never_those_that_are_needed(tmp_path: Path, kind: str) -> None:
    store = Folder(tmp_path) if kind == "folder" else Memory()
    for number in range(1, 8):
        store.write(Snapshot(number, {"n": number}))
    store.prune(2, always=(1, 4))
    for number in (1, 4, 6, 7):
        assert store.read(number).state == {"n": number}
    for number in (2, 3, 5):
        with pytest.raises(StateError):
            store.read(number)


def test_temporary_files_of_a_killed_writer_are_removed(tmp_path: Path) -> None:
    left = tmp_path / ".snapshot-000000000001.safetensors.0123.tmp"
    left.write_bytes(b"half")
    other = tmp_path / "notes.txt"
    other.write_text("mine")
    assert Folder(tmp_path).newest() == (None, [])
    assert not left.exists()
    assert other.exists()


def test_two_streams_never_share_a_folder(tmp_path: Path) -> None:
    first = Folder(tmp_path)
    with pytest.raises(StateError, match="belongs to a stream or a service that is running; close it"):
        Folder(tmp_path)
    first.close()
    Folder(tmp_path).close()


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("")
    with pytest.raises(StateError, match="snapshots cannot be kept in"):
        Folder(tmp_path / "f")


@pytest.mark.parametrize("name", ["tent", "shot", "sar", "eta", "bn", "lame"])
def test_method_states_round_trip_through_files(tmp_path: Path, name: str) -> None:
    method = make(name)
    stream = clean(4)
    for images in stream[:2]:
        method(images)
    write_state(tmp_path / "a", method.state_dict(), about={})
    twin = make(name)
    twin.load_state_dict(read_state(tmp_path / "a")[0])
    for images in stream[2:]:
        assert torch.equal(method(images), twin(images))
    assert states_equal(method.state_dict(), twin.state_dict())

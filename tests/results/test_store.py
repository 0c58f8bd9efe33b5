from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from tests.results.samples import KEY, PROVENANCE, RESULT
from tests.results.test_record import KEYS, RESULTS, exact
from trust_tta.errors import DataError, StateError, TrustError
from trust_tta.results import Cell, CellKey, CellResult, Counts, History, ResultStore, to_json, write_csv, write_parquet
from trust_tta.results.order_records import read_records
from trust_tta.results.store import CLOCK_SECONDS, LEASE_SECONDS, Failure, create_file


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "results.db"


@pytest.fixture
def store(path: Path) -> Iterator[ResultStore]:
    with ResultStore(path) as opened:
        yield opened


def execute(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute(statement)


@given(key=KEYS, result=RESULTS)
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_cells_are_read_back_bit_for_bit(store: ResultStore, key: CellKey, result: CellResult) -> None:
    if not store.finish(key, result, PROVENANCE):
        return
    (cell,) = store.results(lambda k: k == key)
    assert exact(cell.result) == exact(result)
    assert (cell.key, cell.provenance) == (key, PROVENANCE)
    (bare,) = store.results(lambda k: k == key, history=False)
    assert exact(bare.result) == exact(replace(result, history=History()))


def test_results_survive_reopening_and_are_sorted(path: Path) -> None:
    keys = [
        replace(KEY, domain=domain, method=method, seed=seed)
        for domain in ("zoom_blur", "fog", "art_painting", "gaussian_noise")
        for method in ("trust", "zebra", "source", "tent")
        for seed in (10, 9)
    ]
    with ResultStore(path) as store:
        for key in keys:
            assert store.finish(key, RESULT, PROVENANCE)
    with ResultStore(path, create=False) as store:
        found = [(cell.key.domain, cell.key.method, cell.key.seed) for cell in store.results()]
    domains = ("gaussian_noise", "zoom_blur", "fog", "art_painting")
    assert found == [(d, m, s) for d in domains for m in ("source", "tent", "trust", "zebra") for s in (9, 10)]


def test_states_of_a_cell(store: ResultStore, path: Path) -> None:
    store.plan([KEY, replace(KEY, seed=1), KEY])
    assert store.counts() == Counts(pending=2)
    assert store.claim([KEY])
    assert not store.claim([KEY])
    assert store.counts() == Counts(pending=1, running=1)
    store.fail(KEY, "out of memory")
    assert store.failures() == [Failure(KEY, "out of memory", "trust")]
    assert not store.claim([KEY])
    assert store.retry_failed(lambda key: key.seed == 1) == 0
    assert store.retry_failed() == 1
    assert store.claim([KEY])
    assert store.failures() == []
    assert store.finish(KEY, RESULT, PROVENANCE)
    assert not store.claim([KEY])
    store.fail(KEY, "too late")
    store.plan([KEY])
    assert store.counts() == Counts(pending=1, done=1)
    assert store.keys("done") == [KEY]
    assert store.keys() == [KEY, replace(KEY, seed=1)]
    assert store.keys("pending", where=lambda key: key.seed == 0) == []


def test_a_second_store_cannot_take_a_living_claim(path: Path) -> None:
    with ResultStore(path) as one, ResultStore(path) as two:
        assert one.claim([KEY])
        assert not two.claim([KEY])
        two.fail(KEY, "not mine")
        assert one.counts() == Counts(running=1)
        one.close()
        assert two.claim([KEY])


def move_claims_elsewhere(path: Path) -> None:
    """As if the claims were those of a process of another machine, which cannot be seen from here."""
    execute(path, "UPDATE cells SET claimant = json_set(claimant, '$.data.place', 'another boot')")


def test_a_late_claim_is_taken_over_unless_renewed(path: Path) -> None:
    with ResultStore(path) as one, ResultStore(path) as two:
        assert one.claim([KEY])
        move_claims_elsewhere(path)
        execute(path, "UPDATE cells SET expires = 0")
        one.heartbeat()
        assert not two.claim([KEY])
        execute(path, "UPDATE cells SET expires = 0")
        assert two.claim([KEY])


@pytest.mark.parametrize(("ahead", "free"), [(LEASE_SECONDS, False), (LEASE_SECONDS + CLOCK_SECONDS + 5, True)])
def test_a_claim_from_before_the_clock_was_set_back_has_expired(path: Path, ahead: float, free: bool) -> None:
    with ResultStore(path) as one, ResultStore(path) as two:
        assert one.claim([KEY])
        move_claims_elsewhere(path)
        execute(path, f"UPDATE cells SET expires = {time.time() + ahead}")
        assert bool(two.claim([KEY])) is free


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells whether a claimant lives")
def test_a_late_claim_of_a_process_that_lives_here_stays(path: Path) -> None:
    with ResultStore(path, lease=-1.0) as slow, ResultStore(path) as other:
        assert slow.claim([KEY])
        assert not other.claim([KEY])
        slow.close()
        assert other.claim([KEY])


@pytest.mark.parametrize("late_first", [False, True], ids=["new-holder-first", "late-holder-first"])
def test_first_result_of_a_cell_is_recorded(path: Path, late_first: bool) -> None:
    with ResultStore(path, lease=-1.0) as late, ResultStore(path) as new:
        assert late.claim([KEY])
        move_claims_elsewhere(path)
        assert new.claim([KEY])
        first, second = (late, new) if late_first else (new, late)
        assert first.finish(KEY, replace(RESULT, accuracy=0.25), PROVENANCE)
        assert not second.finish(KEY, replace(RESULT, accuracy=0.75), PROVENANCE)
        assert [cell.result.accuracy for cell in new.results()] == [0.25]


def test_a_sequence_is_claimed_completely_or_not_at_all(path: Path) -> None:
    keys = [replace(KEY, seed=seed) for seed in range(4)]
    with ResultStore(path) as one, ResultStore(path) as two:
        one.finish(keys[0], RESULT, PROVENANCE)
        assert one.claim([keys[2]])
        assert two.claim(keys) == ()
        assert two.counts() == Counts(done=1, running=1)
        one.close()
        assert two.claim(keys) == tuple(keys[1:])
        assert two.claim(keys[:1]) == ()


def test_a_cell_is_never_half_recorded(path: Path) -> None:
    with ResultStore(path) as store, pytest.raises(DataError, match="cannot hold"):
        store.finish(KEY, replace(RESULT, nll=object()), PROVENANCE)  # type: ignore[arg-type]
    with pytest.raises(sqlite3.IntegrityError):
        execute(path, "INSERT INTO cells (digest, key, status) VALUES ('d', 'k', 'done')")


def test_creating_a_store_never_replaces_one_created_meanwhile(store: ResultStore, path: Path) -> None:
    store.finish(KEY, RESULT, PROVENANCE)
    create_file(path)
    with ResultStore(path) as again:
        assert again.counts() == Counts(done=1)
    assert not list(path.parent.glob("*.tmp"))


def test_missing_store_is_not_made_when_only_reading(path: Path) -> None:
    with pytest.raises(DataError, match="no results store"):
        ResultStore(path, create=False)
    assert not path.parent.exists()


def test_a_store_in_a_read_only_folder_can_be_read(path: Path) -> None:
    with ResultStore(path) as store:
        store.finish(KEY, RESULT, PROVENANCE)
    before = path.read_bytes()
    shared = path.with_name(f"{path.name}-shm")
    shared.symlink_to(path.parent / "nowhere" / "file")  # SQLite can make it as little as on a read-only disk
    with ResultStore(path, create=False) as store:
        assert [cell.key for cell in store.results()] == [KEY]
        with pytest.raises(StateError, match="readonly"):
            store.plan([replace(KEY, seed=1)])
    assert path.read_bytes() == before


def test_a_store_with_a_write_ahead_log_is_not_read_as_immutable(path: Path) -> None:
    with ResultStore(path):
        pass
    path.with_name(f"{path.name}-shm").symlink_to(path.parent / "nowhere" / "file")
    path.with_name(f"{path.name}-wal").touch()
    with pytest.raises(StateError, match="unable to open"):
        ResultStore(path, create=False)


def test_a_message_that_is_no_text_is_kept(store: ResultStore) -> None:
    assert store.claim([KEY])
    store.fail(KEY, "there is no caf\udce9.png")
    assert store.failures() == [Failure(KEY, "there is no caf?.png", "trust")]


def test_closed_store_says_so(path: Path) -> None:
    store = ResultStore(path)
    store.close()
    store.close()
    with pytest.raises(StateError, match="closed"):
        store.results()


def test_another_thread_is_refused(store: ResultStore) -> None:
    errors: list[TrustError] = []

    def use() -> None:
        try:
            store.counts()
        except TrustError as error:
            errors.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert [type(error) for error in errors] == [StateError]


def test_a_forked_child_is_refused(path: Path) -> None:
    code = (
        "import os, sys\n"
        "from trust_tta.errors import StateError\n"
        "from trust_tta.results import ResultStore\n"
        "store = ResultStore(sys.argv[1])\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    try: store.counts()\n"
        "    except StateError: os._exit(7)\n"
        "    os._exit(0)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)]).returncode == 7


def _text(path: Path) -> None:
    path.write_text("method,accuracy\ntrust,77.5\n" * 50)


def _other_database(path: Path) -> None:
    execute(path, "CREATE TABLE cells (digest TEXT)")


def _store(path: Path) -> None:
    with ResultStore(path) as store:
        for seed in range(40):
            store.finish(replace(KEY, seed=seed), RESULT, PROVENANCE)


def _cut(path: Path) -> None:
    _store(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _scribbled(path: Path) -> None:
    _store(path)
    data = bytearray(path.read_bytes())
    data[8192:16384] = b"\xa5" * 8192
    path.write_bytes(data)


def _before_first_release(path: Path) -> None:
    _store(path)
    execute(path, "UPDATE store SET schema_version = 2")


def _newer(path: Path) -> None:
    _store(path)
    execute(path, "UPDATE store SET schema_version = 99")


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (Path.touch, "not a results store"),
        (_text, "not a results store"),
        (_other_database, "not a results store"),
        (_cut, "is damaged"),
        (_scribbled, "is damaged"),
        (_before_first_release, "schema version 2, this package reads 3"),
        (_newer, "schema version 99"),
    ],
    ids=["empty", "text", "other-database", "cut", "scribbled", "before-0.1.0", "newer"],
)
def test_unreadable_stores_are_refused_unchanged(tmp_path: Path, make: Callable[[Path], None], match: str) -> None:
    path = tmp_path / "results.db"
    make(path)
    before = path.read_bytes()
    with pytest.raises(DataError, match=match) as caught:
        ResultStore(path)
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["results.db"]


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is a folder in which nobody can make a file")
def test_a_store_that_cannot_be_made_is_one_line() -> None:
    with pytest.raises(StateError, match="cannot be used now .*; check that its folder is writable") as caught:
        ResultStore("/proc/x.sqlite")
    assert "\n" not in str(caught.value)


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be opened"):
        ResultStore(tmp_path)


def test_damage_that_sqlite_reports_in_broken_utf8_is_one_line(path: Path) -> None:
    """SQLite's own message quotes the schema, in which a byte is no text."""
    with ResultStore(path) as store:
        store.finish(KEY, RESULT, PROVENANCE)
    path.write_bytes(path.read_bytes().replace(b"CREATE TABLE cells", b"CREATE \xffABLE cells"))
    with pytest.raises(DataError, match="is damaged"):
        ResultStore(path, create=False)


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS digest, 'done' AS status FROM n"


@pytest.mark.parametrize(
    "statements",
    [
        ["DROP TABLE cells", f"CREATE VIEW cells AS {ENDLESS}"],
        ["CREATE TRIGGER t AFTER UPDATE ON store BEGIN DELETE FROM cells; END"],
    ],
    ids=["view", "trigger"],
)
def test_a_store_of_views_and_triggers_is_refused_before_they_run(path: Path, statements: list[str]) -> None:
    ResultStore(path).close()
    for statement in statements:
        execute(path, statement)
    with pytest.raises(DataError, match="is damaged .it holds the (view|trigger) '"):
        ResultStore(path, create=False)


def test_damaged_history_is_reported(path: Path) -> None:
    with ResultStore(path) as store:
        store.finish(KEY, RESULT, PROVENANCE)
        execute(path, "UPDATE cells SET course = x'00112233'")
        with pytest.raises(DataError, match="damaged"):
            store.results()


def remove(path: Path) -> None:
    for file in path.parent.glob(f"{path.name}*"):
        file.unlink()


def replace_by_text(path: Path) -> None:
    remove(path)
    path.write_text("something else")


@pytest.mark.parametrize("lose", [Path.unlink, remove, replace_by_text], ids=["unlinked", "removed", "replaced"])
@pytest.mark.parametrize("moment", ["finish", "heartbeat", "close"])
def test_a_store_lost_during_a_run_is_saved_beside_its_path(
    path: Path, lose: Callable[[Path], None], moment: str
) -> None:
    """Old and new records both survive in a new file."""
    store, second = ResultStore(path), replace(KEY, seed=1)
    store.finish(KEY, RESULT, PROVENANCE, label="mine")
    store.claim([second])
    lose(path)
    step = {
        "finish": lambda: store.finish(second, RESULT, PROVENANCE),
        "heartbeat": store.heartbeat,
        "close": store.close,
    }
    with pytest.raises(StateError, match="was (removed|replaced by another file) during the run; .*saved") as caught:
        step[moment]()
    store.close()
    assert "\n" not in str(caught.value)
    saved = path.with_name("results.saved.db")
    with ResultStore(saved, create=False) as store:
        assert [cell.key.seed for cell in store.results()] == ([0, 1] if moment == "finish" else [0])
        assert store.results()[0].label == "mine"
    if lose is replace_by_text:
        assert path.read_text() == "something else"
    assert not list(path.parent.glob(".*.tmp*"))


def test_two_losses_are_saved_under_two_names(path: Path) -> None:
    for _ in range(2):
        store = ResultStore(path)
        store.plan([KEY])
        remove(path)
        with pytest.raises(StateError, match="saved"):
            store.close()
    assert sorted(file.name for file in path.parent.iterdir()) == ["results.saved-2.db", "results.saved.db"]


def test_labels_are_recorded_by_the_plan_and_may_be_changed(store: ResultStore) -> None:
    other = replace(KEY, options='{"k": 2}')
    store.plan([KEY, other], labels={KEY: "mine", other: "two"})
    store.finish(KEY, RESULT, PROVENANCE)
    assert [cell.label for cell in store.results()] == ["mine"]
    assert store.claim([other])
    store.fail(other, "no")
    assert [failure.label for failure in store.failures()] == ["two"]
    store.plan([KEY], labels={KEY: "ours"})
    store.plan([KEY])
    assert [(cell.key, cell.label) for cell in store.results()] == [(KEY, "ours")]


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE cells SET result = 'x'",
        "UPDATE cells SET result = CAST(x'ff00fe' AS TEXT)",
        "UPDATE cells SET key = '[' || replace(hex(zeroblob(40000)), '00', '[')",
        "UPDATE cells SET key = 5",
        "UPDATE cells SET facts = x'00'",
        "UPDATE cells SET course = 'text'",
        f"UPDATE cells SET key = '{to_json(replace(KEY, seed=9))}'",  # of another cell
        f"UPDATE cells SET course = x'{zlib.compress(bytes(1 << 27)).hex()}'",  # 130 kB that become 128 MB
        "UPDATE pictures SET content = 'text'",
        "UPDATE pictures SET place = 'first'",
        "UPDATE classes SET names = '{'",
        "UPDATE classes SET names = '[1, 2]'",
        "UPDATE classes SET names = CAST(x'ff' AS TEXT)",
    ],
)
def test_invalid_stored_values_are_reported_in_one_line(path: Path, statement: str) -> None:
    with ResultStore(path) as store:
        store.finish(KEY, RESULT, PROVENANCE)
        store.keep_pictures(KEY, {1: b"picture"}, class_names=["a"])
    execute(path, statement)
    with ResultStore(path, create=False) as store, pytest.raises(DataError, match="is damaged") as caught:
        store.results(), store.pictures(), store.class_names()
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such pipes")
def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="pipe or a device"):
        ResultStore(tmp_path / "pipe", create=False)
    with pytest.raises(DataError, match="^'[^']*pipe' is not a file"):
        read_records([tmp_path / "pipe"])


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is a folder in which nobody can make a file")
def test_errors_name_the_user_s_file() -> None:
    cells = [Cell(KEY, RESULT, PROVENANCE)]
    for write in (write_csv, write_parquet):
        with pytest.raises(OSError, match="'/proc/out'") as caught:
            write(cells, "/proc/out")
        assert ".tmp" not in str(caught.value)

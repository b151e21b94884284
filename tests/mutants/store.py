"""One-line faults of the stores: data that a kill, a full disk or a power loss would cost, or that is never freed."""

from __future__ import annotations

from .mutant import Mutant

_SEGMENTS = "atropos_api/store/segments.py"
_SQLITE = "atropos_api/store/sqlite_ledger.py"
_DIRECTORY = "atropos_api/store/directory.py"

_LOG = "unit/store/test_store.py::test_"
_RECORDS = "unit/store/test_ledger_kills.py::test_"
_CONTRACT = "unit/store/test_store_contract.py::test_"
_SYNCED = "unit/store/test_syncing.py::test_"

STORE: tuple[Mutant, ...] = (
    # Refused writes leave nothing behind
    Mutant(
        "bodies of a refused write stay",
        "atropos_api/broker/submissions.py",
        "            state.bodies.discard(refs)\n            raise",
        "            raise",
        f"{_CONTRACT}bodies_of_refused_ledger_writes_take_no_space[memory]",
    ),
    Mutant(
        "a torn record stays",
        _SEGMENTS,
        "os.ftruncate(self._active_fd, segment.size_bytes)",
        "pass",
        f"{_LOG}a_refused_write_leaves_nothing_behind",
    ),
    Mutant(
        "half a body counts as written",
        _SEGMENTS,
        "if written != size:",
        "if written > size:",
        f"{_LOG}a_refused_write_leaves_nothing_behind",
    ),
    Mutant(
        "a transaction that fails is kept",
        _SQLITE,
        'self._db.execute("ROLLBACK")',
        'self._db.execute("COMMIT")',
        f"{_LOG}a_transaction_that_fails_keeps_nothing",
    ),
    Mutant(
        "memory goes on after a refused change",
        "atropos_api/broker/state.py",
        "            self.store_inconsistent = True\n",
        "",
        "unit/store/test_disk.py::test_a_change_the_ledger_refused_is_not_remembered",
    ),
    # The state of the disk, and the order of writes
    Mutant(
        "bodies are not forced to the disk",
        _SEGMENTS,
        "                os.fdatasync(descriptor)",
        "                pass",
        f"{_SYNCED}always_answers_only_what_is_on_the_disk_many_answers_at_a_time",
    ),
    Mutant(
        "the folder of bodies is not forced to the disk",
        _SEGMENTS,
        "            if directory_changed:\n                sync_path",
        "            if False:\n                sync_path",
        f"{_SYNCED}how_often_data_is_forced_to_the_disk[interval-8]",
    ),
    Mutant(
        "the database is not forced to the disk",
        _SQLITE,
        "            os.fdatasync(descriptor)",
        "            pass",
        f"{_SYNCED}a_sync_forces_bodies_and_ledger_to_the_disk",
    ),
    Mutant(
        "a failed sync is forgotten",
        _SEGMENTS,
        "if self._sync_failure is not None:",
        "if False:",
        f"{_SYNCED}after_a_failed_sync_that_room_does_not_explain_nothing_is_taken",
    ),
    Mutant(
        "rows go to copies that are not safe",
        _SEGMENTS,
        "return not self._syncs or all(",
        "return True or all(",
        f"{_LOG}a_body_is_safe_once_a_sync_has_covered_it",
    ),
    Mutant(
        "files go before the ledger is safe",
        _SEGMENTS,
        "        if self._syncs:\n            with self._lock:\n                self._doomed",
        "        if False:\n            with self._lock:\n                self._doomed",
        f"{_LOG}the_file_of_a_dead_segment_stays_until_bodies_and_ledger_were_synced",
    ),
    Mutant(
        "files of dead segments stay",
        _SEGMENTS,
        "if segment.live_count == 0 and ref.segment != self._active:",
        "if False:",
        f"{_LOG}a_segment_goes_when_nothing_in_it_is_alive",
    ),
    # Recovery at a start
    Mutant(
        "a number is used twice",
        _SQLITE,
        "next_seq = max(next_seq, coalesce((SELECT max(seq) FROM groups), 0) + 1)",
        "next_seq = next_seq",
        f"{_RECORDS}a_number_is_not_used_twice_though_its_group_is_gone",
    ),
    Mutant(
        "groups that remain do not tell the next number",
        _SQLITE,
        "next_seq=max(next_seq, groups[-1].seq + 1) if groups else next_seq",
        "next_seq=next_seq",
        f"{_RECORDS}what_was_kept_is_found_after_a_kill",
    ),
    Mutant(
        "an answered group is unanswered again",
        _SQLITE,
        'self._execute_many("DELETE FROM unanswered WHERE seq = ?", [(seq,) for seq in answers.answered])',
        "pass",
        f"{_RECORDS}what_is_unanswered_is_found_after_a_kill",
    ),
    Mutant(
        "a repeated fingerprint that is settled stays expected",
        _SQLITE,
        'self._execute_many("DELETE FROM expected WHERE fingerprint = ?", gone)',
        "pass",
        f"{_RECORDS}what_is_unanswered_is_found_after_a_kill",
    ),
    Mutant(
        "a transaction inside another is one of its own",
        _SQLITE,
        "        self.depth += 1\n",
        "",
        f"{_RECORDS}a_transaction_is_whole_or_nothing",
    ),
    Mutant(
        "a body is believed",
        _SEGMENTS,
        "!= HEADER.pack(MAGIC, ref.length, isal_zlib.crc32(body)):",
        "[:8] != HEADER.pack(MAGIC, ref.length, 0)[:8]:",
        f"{_LOG}a_changed_byte_is_noticed",
    ),
    Mutant(
        "the first segment that was not forced is believed",
        _SEGMENTS,
        "whole=ref.segment >= unforced)",
        "whole=ref.segment > unforced)",
        f"{_LOG}whatever_was_not_forced_to_the_disk_is_looked_at_whole_at_the_start",
    ),
    Mutant(
        "what was not looked at is called forced",
        _SEGMENTS,
        "if self._adopted:",
        "if True:",
        f"{_LOG}what_was_never_looked_at_is_not_called_forced",
    ),
    Mutant(
        "full segments are rewritten",
        _SEGMENTS,
        "segment.live_bytes < SPARSE_FRACTION * segment.size_bytes",
        "segment.live_bytes > SPARSE_FRACTION * segment.size_bytes",
        f"{_LOG}mostly_dead_segments_are_named_for_rewriting",
    ),
    Mutant(
        "a newer schema is written to",
        _SQLITE,
        "if found != SCHEMA_VERSION:",
        "if found < SCHEMA_VERSION:",
        f"{_LOG}another_schema_is_refused_by_name",
    ),
    Mutant(
        "the ledger keeps every event",
        _SQLITE,
        "if event.id % TRIM_EVERY == 0:",
        "if False:",
        f"{_CONTRACT}events_and_their_ids_go_on_where_the_last_process_was[directory]",
    ),
    # The owner of a directory
    Mutant(
        "two brokers hold a directory",
        _DIRECTORY,
        "fcntl.LOCK_EX | fcntl.LOCK_NB",
        "fcntl.LOCK_SH | fcntl.LOCK_NB",
        f"{_LOG}one_broker_holds_a_directory_at_a_time",
    ),
    Mutant(
        "a fresh start finds the old ledger",
        _DIRECTORY,
        '("ledger.sqlite", "ledger.sqlite-wal", ',
        "(",
        f"{_LOG}fresh_deletes_what_was_there",
    ),
    Mutant(
        "others may read the store",
        _DIRECTORY,
        "exist_ok=True, mode=0o700)",
        "exist_ok=True)",
        f"{_LOG}a_new_directory_is_its_owners_alone",
    ),
)

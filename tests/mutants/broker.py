"""One-line faults of the broker's rules: accepting, batching, dropping, storing and answering."""

from __future__ import annotations

from .mutant import Mutant

_BATCHES = "atropos_api/broker/batches.py"
_RUNS = "atropos_api/broker/runs.py"
_SUCCESSION = "atropos_api/broker/run_succession.py"
_HOLDS = "atropos_api/broker/policy_holds.py"
_SUBMISSIONS = "atropos_api/broker/submissions.py"
_PACING = "atropos_api/broker/pacing.py"
_QUEUE = "atropos_api/broker/queue.py"
_AUTH = "atropos_api/http/auth.py"

_LIMITS = "unit/broker/test_limits.py::test_"
_ITEMS = "unit/broker/test_items.py::test_"
_MINIMA = "unit/broker/test_minima.py::test_"
_AGAIN = "unit/broker/test_v0_repeats.py::test_"
_V1 = "integration/broker/test_v1.py::test_"
_HELD = "integration/broker/test_policy_holds.py::test_"
_AUTH_TESTS = "integration/broker/test_auth.py::test_"

BROKER: tuple[Mutant, ...] = (
    # Groups that are accepted
    Mutant(
        "a queue of any number of bytes",
        _SUBMISSIONS,
        " or body_bytes > state.settings.max_queued_bytes:",
        ":",
        f"{_LIMITS}a_queue_is_bounded_in_sequences_and_in_bytes",
    ),
    Mutant(
        "a queue of any number of sequences",
        _SUBMISSIONS,
        "if sequences > state.settings.max_queued_sequences or body_bytes",
        "if body_bytes",
        f"{_LIMITS}a_queue_is_bounded_in_sequences_and_in_bytes",
    ),
    Mutant(
        "a key's number is given again",
        _SUBMISSIONS,
        "self._last_id = max(self._last_id, group.key_id)",
        "pass",
        f"{_LIMITS}a_new_key_is_not_that_of_a_kept_batch_whose_own_was_forgotten",
    ),
    Mutant(
        "keys are never forgotten",
        _SUBMISSIONS,
        "if row.done_at is not None and row.done_at <= limit and not self._is_open(row.owner, row.key):",
        "if False:",
        f"{_LIMITS}a_key_is_remembered_for_its_time_after_its_groups_are_done",
    ),
    Mutant(
        "keys of groups under way are forgotten",
        _SUBMISSIONS,
        "if row.done_at is not None and row.done_at <= limit and not self._is_open(row.owner, row.key):",
        "if True:",
        f"{_LIMITS}a_key_is_remembered_for_its_time_after_its_groups_are_done",
    ),
    Mutant(
        "keys of items that may be rolled out again are forgotten",
        _SUBMISSIONS,
        " and not self._is_open(row.owner, row.key)",
        "",
        f"{_ITEMS}the_key_of_an_item_that_may_be_used_again_is_remembered_over_a_night",
    ),
    Mutant(
        "a settled item's late group is taken",
        _SUBMISSIONS,
        " or self._is_open(owner, key) is False",
        "",
        f"{_ITEMS}a_group_of_a_settled_item_is_a_repeat_however_late_it_comes",
    ),
    Mutant(
        "versions need not be said",
        _SUBMISSIONS,
        "if self._state.settings.require_versions and group.oldest_version is None:",
        "if False:",
        f"{_LIMITS}require_versions_refuses_the_group_without_and_takes_its_neighbours",
    ),
    Mutant(
        "columns are not compared",
        _SUBMISSIONS,
        "    for part in parts:\n",
        "    for part in [*parts][:1]:\n",
        f"{_AGAIN}a_v1_submission_without_a_key_is_known_again_if_its_answer_was_lost[columns]",
    ),
    Mutant(
        "a repeat is one for ever",
        _SUBMISSIONS,
        "self._forget_before(self._clock())",
        "pass",
        f"{_AGAIN}after_the_window_equal_bytes_are_another_group",
    ),
    Mutant(
        "a repeat is recognised without end",
        _SUBMISSIONS,
        "                self._take_one(fingerprint)\n                self._recognised",
        "                self._recognised",
        f"{_AGAIN}equal_groups_of_one_submission_are_each_known_again",
    ),
    Mutant(
        "a lost key is kept over a loss of power",
        "atropos_api/broker/recovery.py",
        "keys.withdraw(cut_short)",
        "pass",
        "unit/store/test_damage.py::test_a_submission_cut_short_by_the_power_is_as_if_it_never_was",
    ),
    # Batches
    Mutant(
        "any number of open batches",
        _BATCHES,
        "last = min(run.formed_batch + 1, run.committed_batch + allowed)",
        "last = run.formed_batch + 1",
        f"{_LIMITS}max_uncommitted_bounds_what_is_open_and_a_commit_makes_way",
    ),
    Mutant(
        "no room for the batch that is prefetched",
        _BATCHES,
        "run.checkpoint_interval + 2)",
        "run.checkpoint_interval)",
        f"{_V1}the_bound_on_open_batches_leaves_room_for_a_checkpoint_interval",
    ),
    Mutant(
        "the committed batch is formed anew",
        _BATCHES,
        "if number <= run.committed_batch:\n            raise",
        "if number < run.committed_batch:\n            raise",
        f"{_LIMITS}committed_batches_are_gone",
    ),
    Mutant(
        "a batch is committed before it is formed",
        _BATCHES,
        "if number > run.formed_batch:",
        "if number > run.formed_batch + 1:",
        f"{_LIMITS}a_batch_that_was_never_formed_is_not_committed",
    ),
    Mutant(
        "one batch too few is kept for replay",
        _BATCHES,
        "if n <= number - state.settings.keep_batches]",
        "if n <= number - state.settings.keep_batches + 1]",
        f"{_LIMITS}keep_batches_lets_a_trainer_come_back_to_before_its_last_commit",
    ),
    Mutant(
        "groups at the staleness budget are dropped",
        _BATCHES,
        "step_then - step > budget",
        "step_then - step >= budget",
        f"{_LIMITS}groups_at_the_staleness_budget_are_served_and_those_beyond_it_dropped",
    ),
    Mutant(
        "the laxer staleness budget holds",
        _BATCHES,
        "return min(bounds, default=None)",
        "return max(bounds, default=None)",
        f"{_LIMITS}a_run_may_be_stricter_than_the_operator_and_not_laxer",
    ),
    Mutant(
        "age is counted in versions",
        _RUNS,
        "            return row.step\n",
        "            return row.version\n",
        f"{_LIMITS}groups_at_the_staleness_budget_are_served_and_those_beyond_it_dropped",
    ),
    Mutant(
        "groups of a lost policy stay",
        _BATCHES,
        "orphaned = state.settings.drop_orphaned and",
        "orphaned = False and",
        f"{_LIMITS}drop_orphaned_takes_them_out_of_the_queue_and_nothing_else",
    ),
    Mutant(
        "ranks get groups by number",
        _BATCHES,
        "key=lambda row: (-row.token_count, row.seq)",
        "key=lambda row: row.seq",
        f"{_V1}ranks_get_whole_groups_balanced_by_tokens",
    ),
    Mutant(
        "groups of a dissolved batch go last",
        _QUEUE,
        "lane.rows = deque(sorted(lane.rows, key=lambda row: row.seq))",
        "lane.rows = deque(lane.rows)",
        f"{_V1}batches_that_no_longer_fit_go_back_to_their_old_places",
    ),
    Mutant(
        "a minimum is waited for without end",
        _BATCHES,
        "if now - self._blocked_since < state.settings.min_allocation_wait:",
        "if True:",
        f"{_MINIMA}a_minimum_is_waived_for_one_batch_after_the_wait",
    ),
    Mutant(
        "silent environments are waited for",
        "atropos_api/broker/environments.py",
        "if row.connected and now - row.seen_at <= timeout_seconds]",
        "if row.connected]",
        f"{_MINIMA}the_minimum_of_a_silent_environment_is_void_at_once",
    ),
    # Runs, and the trainers that hold them
    Mutant(
        "an earlier epoch is taken",
        _RUNS,
        "epoch != run.epoch:",
        "epoch > run.epoch:",
        f"{_V1}a_takeover_supersedes_the_older_trainer",
    ),
    Mutant(
        "a superseded trainer ends the run",
        "atropos_api/broker/broker.py",
        "self.state.runs.find(run_id, epoch)",
        "self.state.runs.find(run_id)",
        f"{_V1}a_takeover_supersedes_the_older_trainer",
    ),
    Mutant(
        "the epoch stays",
        _SUCCESSION,
        "epoch=run.epoch + 1",
        "epoch=run.epoch",
        f"{_V1}a_takeover_supersedes_the_older_trainer",
    ),
    Mutant(
        "a run takes another's groups",
        _SUCCESSION,
        "rest = batched + state.queue.clear()",
        "rest = batched",
        f"{_V1}groups_of_one_run_are_never_served_to_another",
    ),
    Mutant(
        "a rival takes over unasked",
        _SUCCESSION,
        "if not (same or request.take_over):",
        "if False:",
        "integration/broker/every_store/test_run_ownership.py::test_v1_refuses_another_name_over_a_live_run_unless_it_takes_over",
    ),
    Mutant(
        "a trainer that trains for long has gone",
        _RUNS,
        "return max(AT_WORK_SECONDS, LONGEST_INTERVALS * run.longest_silence_seconds)",
        "return AT_WORK_SECONDS",
        "integration/broker/every_store/test_run_ownership.py::test_a_trainer_that_trains_for_long_is_at_work_for_three_times_as_long",
    ),
    Mutant(
        "a policy of the checkpoint itself is given up",
        _RUNS,
        "row.step > after_step",
        "row.step >= after_step",
        f"{_LIMITS}drop_orphaned_takes_them_out_of_the_queue_and_nothing_else",
    ),
    Mutant(
        "an earlier version is published",
        _RUNS,
        "if run.policy_version is not None and update.version <= run.policy_version:",
        "if False:",
        f"{_V1}policies_rise_and_repeats_are_harmless",
    ),
    Mutant(
        "left-over groups fill the disk",
        _SUCCESSION,
        "if total <= state.settings.max_left_over_bytes:",
        "if True:",
        "unit/store/test_disk.py::test_left_over_groups_go_when_they_take_too_much",
    ),
    # Holds and pacing
    Mutant(
        "a part of a hold's id releases it",
        _HOLDS,
        "secrets.compare_digest(row.hold_id.encode(), hold_id.encode())",
        "row.hold_id.startswith(hold_id)",
        "unit/broker/test_policy_holds.py::test_a_hold_is_released_and_renewed_by_its_whole_id_alone",
    ),
    Mutant(
        "a hold that ran out is renewed",
        _HOLDS,
        "for row in self.alive(run):\n            if",
        "for row in run.holds:\n            if",
        "unit/broker/test_policy_holds.py::test_a_hold_that_ran_out_is_not_renewed",
    ),
    Mutant(
        "every hold was heeded",
        _HOLDS,
        "kept=row.version == run.policy_version",
        "kept=True",
        f"{_HELD}the_trainer_is_told_of_a_hold_before_and_after_it_publishes",
    ),
    Mutant(
        "room beyond the staleness budget",
        _PACING,
        "batches = min(batches, max_staleness + 1)",
        "batches = max(batches, max_staleness + 1)",
        f"{_V1}room_shrinks_with_what_is_queued_and_returns_with_training",
    ),
    Mutant(
        "room for what is never trained",
        _PACING,
        "room = min(room, still_needed)",
        "pass",
        f"{_V1}no_room_is_given_for_what_the_run_will_never_train",
    ),
    Mutant(
        "all weigh the same",
        _PACING,
        "share = 1.0 / len(weights) if total <= 0 else",
        "share = 1.0 / len(weights) if True else",
        f"{_V1}room_is_shared_by_weight",
    ),
    Mutant(
        "dropped groups count twice",
        "atropos_api/broker/counters.py",
        "before = known.groups if known is not None and known.session == report.session else {}",
        "before = {}",
        "integration/broker/test_drops.py::test_reports_may_come_twice_or_late_and_restarted_environments_count_on",
    ),
    # Access
    Mutant(
        "the beginning of a token will do",
        _AUTH,
        "hmac.compare_digest(token, accepted)",
        "accepted.startswith(token)",
        f"{_AUTH_TESTS}a_wrong_token_is_refused",
    ),
    Mutant(
        "the status is open",
        _AUTH,
        '{"/livez", "/readyz", "/health"}',
        '{"/livez", "/readyz", "/health", "/v1/status"}',
        f"{_AUTH_TESTS}without_the_token_only_health_is_answered",
    ),
    Mutant(
        "any host name is ours",
        _AUTH,
        "if self._token.value is None and not self._is_own_host(host):",
        "if False:",
        f"{_AUTH_TESTS}a_rebound_name_is_refused_where_no_token_protects",
    ),
    Mutant(
        "a foreign page resets the run",
        _AUTH,
        'r"/(reset_data|batch|',
        'r"/(batch|',
        f"{_AUTH_TESTS}nothing_changes_on_behalf_of_a_foreign_page",
    ),
    Mutant(
        "the token in the path goes on",
        _AUTH,
        'token, path = shown.encode(), f"/{rest}"',
        "token, path = shown.encode(), path",
        f"{_AUTH_TESTS}the_token_is_taken_from_the_header_and_from_the_path",
    ),
)

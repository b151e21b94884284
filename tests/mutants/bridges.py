"""One-line faults of the weight bridges: writes, checks of the server's answers, and what is left behind."""

from __future__ import annotations

from .mutant import Mutant

_SHARED = "example_trainer/weights/shared_vllm.py"
_ATTACHMENT = "example_trainer/weights/attachment.py"
_PROOF = "example_trainer/weights/logprob_parity.py"
_MANIFEST = "example_trainer/weight_protocol/manifest.py"
_TOKEN = "example_trainer/weight_protocol/manifest.py"
_VERSIONS = "example_trainer/weight_protocol/shm_header.py"
_SEGMENT = "example_trainer/weight_protocol/segment.py"
_MAP = "example_trainer/weights/tensor_map.py"
_PUBLISH_LOOP = "example_trainer/weights/publish_loop.py"
_PUBLISHED = "unit/weights/test_shared_vllm.py::test_"
_IN_PLACE = "unit/weights/test_served_masters.py::test_"
_ATTACHED = "unit/weights/test_attachment.py::test_"
_PROVEN = "unit/weights/test_logprob_parity.py::test_"
_FOUND = "unit/weight_protocol/test_manifest.py::test_"
_PRIVATE = "unit/weight_protocol/test_bridge_token.py::test_"
_FILES = "unit/weight_protocol/test_shm_header.py::test_"
_MAPPED = "unit/weights/test_tensor_map.py::test_"
_SPACED = "unit/weights/test_publish_loop.py::test_"

BRIDGES: tuple[Mutant, ...] = (
    # Shared weights: the content and the order of a publish
    Mutant(
        "weights are written before the header says so",
        _SHARED,
        "                _begin_write(attachment, version)\n                self._policy.write_served()\n",
        "                self._policy.write_served()\n                _begin_write(attachment, version)\n",
        f"{_ATTACHED}the_header_is_marked_before_the_first_weight_is_written_and_after_the_last",
    ),
    Mutant(
        "weights are written after the header says that they are whole",
        _SHARED,
        "                self._policy.write_served()\n                attachment.segment.synchronise()\n"
        "                attachment.header.end_write(version)\n",
        "                attachment.header.end_write(version)\n                self._policy.write_served()\n",
        f"{_ATTACHED}the_header_is_marked_before_the_first_weight_is_written_and_after_the_last",
    ),
    Mutant(
        "a refused write leaves the server standing still",
        _SHARED,
        "                opened.abort()\n                raise\n        written",
        "                raise\n        written",
        f"{_PUBLISHED}a_version_that_is_not_new_is_refused_and_the_fence_is_lifted",
    ),
    Mutant(
        "an end whose answer was lost is another publish",
        _SHARED,
        "        if not written.publish_id:\n",
        "        if True:\n",
        f"{_PUBLISHED}r41_where_the_end_is_lost_for_longer_than_the_lease_the_same_publish_counts",
    ),
    Mutant(
        "a lapse before the write ends the run",
        _SHARED,
        "failed, also=(WriteRefused,)",
        "failed",
        f"{_PUBLISHED}a_publish_whose_lease_lapsed_before_the_write_is_begun_again",
    ),
    Mutant(
        "the version of a broken write is taken again",
        _SHARED,
        "return max(0, state.write_begin, state.write_end)",
        "return max(0, state.write_end)",
        f"{_PUBLISHED}r26_a_trainer_that_dies_mid_publish_leaves_torn_weights_that_a_whole_publish_mends",
    ),
    Mutant(
        "torn weights stay torn",
        _SHARED,
        "or info.policy_version is None or info.torn\n",
        "or info.policy_version is None\n",
        f"{_PUBLISHED}r26_a_trainer_that_dies_mid_publish_leaves_torn_weights_that_a_whole_publish_mends",
    ),
    Mutant(
        "a restarted server is left without weights",
        _SHARED,
        "return info.boot_id != self._attached.boot_id or info.policy_version is None or info.torn",
        "return info.torn",
        f"{_PUBLISHED}r27_a_restarted_server_gets_the_current_masters_before_anything_else",
    ),
    Mutant(
        "a restarted server's own memory is not written",
        _SHARED,
        "        attachment.bind(self._policy, forwards_from_masters=self._config.forwards_from_masters)\n"
        "        self._attached",
        "        self._attached",
        f"{_PUBLISHED}r27_a_restarted_server_gets_the_current_masters_before_anything_else",
    ),
    Mutant(
        "a server may come back with another model",
        _SHARED,
        "if attachment.info.model != current.info.model:",
        "if False:",
        f"{_PUBLISHED}r27_a_server_that_comes_back_with_another_model_is_refused",
    ),
    Mutant(
        "weights that were the server's memory alone are taken for there",
        _SHARED,
        'if self._policy.steps_served and attachment.device.type == "cuda":',
        "if False:",
        f"{_IN_PLACE}r27_on_a_gpu_the_weights_are_gone_with_the_server",
    ),
    Mutant(
        "the optimizer writes what the header calls whole",
        _SHARED,
        "self._begin_write, ",
        "self._begin, ",
        f"{_IN_PLACE}nothing_is_served_while_the_optimizer_writes",
    ),
    Mutant(
        "a lease is not kept while a long copy runs",
        _PUBLISH_LOOP,
        "        self._lease.enter_context(client.lease(self.publish_id, lease_seconds))\n",
        "",
        f"{_PUBLISHED}the_lease_is_renewed_while_a_long_copy_runs",
    ),
    Mutant(
        "a server's word that its weights are torn is not heard",
        "example_trainer/weight_protocol/client.py",
        "return ServerInfo(**known)",
        "return ServerInfo(**known | {'torn': False})",
        f"{_PUBLISHED}r26_a_trainer_that_dies_mid_publish_leaves_torn_weights_that_a_whole_publish_mends",
    ),
    # Checks of what a server reports
    Mutant(
        "the first publish is not proven",
        _SHARED,
        "if attachment.boot_id in self._check.proven and not due:",
        "if not due:",
        f"{_PUBLISHED}the_proof_stops_a_run_whose_publish_misses_weights[wrong slice-views]",
    ),
    Mutant(
        "served weights are not compared with the masters",
        _PROOF,
        "    if stale:\n",
        "    if False:\n",
        f"{_PUBLISHED}a_row_flipped_in_bf16_is_found_by_the_proof_though_its_logprobs_might_pass",
    ),
    Mutant(
        "logprobs are not compared",
        _PROOF,
        "if not agreement.difference.within(agreement.limit):",
        "if False:",
        f"{_PROVEN}a_server_that_tells_other_logprobs_is_found",
    ),
    Mutant(
        "the mean difference makes up for the largest",
        _PROOF,
        "self.maximum <= limit.maximum and self.mean <= limit.mean",
        "self.maximum <= limit.maximum or self.mean <= limit.mean",
        f"{_PROVEN}neither_the_worst_token_nor_the_mean_may_be_beyond_its_limit",
    ),
    Mutant(
        "a proof from two versions",
        _PROOF,
        "if versions != {version} or",
        "if version not in versions or",
        f"{_PROVEN}an_answer_of_another_version_or_of_another_start_proves_nothing",
    ),
    Mutant(
        "a proof from another start of the server",
        _PROOF,
        'answer["boot_id"] != boot_id:',
        'not answer["boot_id"].startswith(boot_id):',
        f"{_PROVEN}an_answer_of_another_version_or_of_another_start_proves_nothing",
    ),
    Mutant(
        "checksums of the shared memory are not compared",
        _ATTACHMENT,
        "if ours != theirs:",
        "if False:",
        f"{_ATTACHED}a_server_that_reads_other_memory_than_is_mapped_here_is_found",
    ),
    Mutant(
        "a write outside of a publish passes",
        _ATTACHMENT,
        "if expected is not None and self.checksum() != expected:",
        "if False:",
        f"{_IN_PLACE}a_write_outside_of_a_publish_is_found_at_the_next_one[fp32]",
    ),
    Mutant(
        "frozen weights may differ",
        _ATTACHMENT,
        "    if frozen:\n",
        "    if False:\n",
        f"{_ATTACHED}other_weights_at_the_server_are_replaced_with_a_warning",
    ),
    Mutant(
        "starts of a server are told apart by a part of their id",
        _ATTACHMENT,
        "if info.boot_id != manifest.boot_id:",
        "if info.boot_id[:8] != manifest.boot_id[:8]:",
        f"{_ATTACHED}a_manifest_of_another_start_than_the_servers_is_not_the_one_to_attach_to",
    ),
    Mutant(
        "a server of adapters shares its weights",
        _ATTACHMENT,
        "    if info.lora:\n",
        "    if False:\n",
        f"{_ATTACHED}what_a_server_cannot_share_is_refused_at_start",
    ),
    # Files: their owners, and their removal
    Mutant(
        "a manifest that others may read",
        _MANIFEST,
        "if status.st_mode & 0o077:",
        "if status.st_mode & 0o022:",
        f"{_FOUND}a_manifest_others_may_touch_is_not_read",
    ),
    Mutant(
        "another process has the number of the server that is gone",
        _MANIFEST,
        "if process_start_time(manifest.pid) != manifest.pid_start_time:",
        "if process_start_time(manifest.pid) is None:",
        f"{_FOUND}a_manifest_of_a_server_that_is_gone_is_stale",
    ),
    Mutant(
        "the next server's manifest goes with the old server",
        _MANIFEST,
        '    if read_json_object(path).get("boot_id") == boot_id:\n',
        "    if True:\n",
        f"{_FOUND}a_server_removes_its_own_manifest_only",
    ),
    Mutant(
        "a token that others may read",
        _TOKEN,
        "if status.st_uid != os.getuid() or status.st_mode & 0o077:",
        "if status.st_uid != os.getuid():",
        f"{_PRIVATE}a_token_that_others_may_touch_is_not_read",
    ),
    Mutant(
        "a token that another user has put there",
        _TOKEN,
        "if status.st_uid != os.getuid() or status.st_mode & 0o077:",
        "if status.st_mode & 0o077:",
        f"{_PRIVATE}a_token_of_another_user_is_not_read",
    ),
    Mutant(
        "the next server's token goes with the old server",
        _TOKEN,
        ".strip() == token:",
        ".startswith(token):",
        f"{_PRIVATE}a_server_removes_its_own_token_only",
    ),
    Mutant(
        "everybody may read the weights",
        _VERSIONS,
        "os.O_CLOEXEC, 0o600)",
        "os.O_CLOEXEC, 0o644)",
        f"{_FILES}a_shared_file_is_this_users_alone",
    ),
    Mutant(
        "weights of a living server are swept",
        _VERSIONS,
        "        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
        "",
        f"{_FILES}a_sweep_takes_what_nobody_holds_and_nothing_else",
    ),
    Mutant(
        "a living server does not hold its weights",
        _VERSIONS,
        "            fcntl.flock(descriptor, fcntl.LOCK_EX)\n",
        "",
        f"{_FILES}a_sweep_takes_what_nobody_holds_and_nothing_else",
    ),
    Mutant(
        "files of another name are swept",
        _VERSIONS,
        "_FILE_NAME.fullmatch(path.name)",
        "_FILE_NAME.match(path.name)",
        f"{_FILES}a_sweep_takes_what_nobody_holds_and_nothing_else",
    ),
    Mutant(
        "a file that is being made is swept",
        _VERSIONS,
        " or os.fstat(descriptor).st_size == 0:",
        ":",
        f"{_FILES}a_sweep_takes_what_nobody_holds_and_nothing_else",
    ),
    Mutant(
        "another segment is mapped",
        _SEGMENT,
        "if path.stat().st_size != nbytes:",
        "if path.stat().st_size < nbytes:",
        f"{_FILES}a_file_longer_than_its_handle_says_is_not_taken_for_the_segment",
    ),
    Mutant(
        "writes stay in this process",
        _SEGMENT,
        "shared=True, nbytes=nbytes",
        "shared=False, nbytes=nbytes",
        f"{_FILES}exported_tensors_keep_their_values_ties_and_overlaps",
    ),
    # Places of tensors
    Mutant(
        "a tensor with rows that are there twice",
        _MAP,
        "if covered != prod(shape) or any(a.overlaps(b) for a, b in combinations(boxes, 2)):",
        "if covered != prod(shape):",
        f"{_MAPPED}pieces_with_gaps_holes_or_overlaps_are_refused",
    ),
    Mutant(
        "a view beyond the end",
        _MAP,
        "(last + 1) * dtype.itemsize > storage.nbytes()",
        "last * dtype.itemsize > storage.nbytes()",
        f"{_MAPPED}a_place_outside_the_storage_is_refused_and_never_grows_it",
    ),
    Mutant(
        "two tensors in one place",
        _MAP,
        "if (twin := owners.setdefault(region, name)) != name:",
        "if not (twin := owners.setdefault(region, name)):",
        f"{_MAPPED}tensors_that_only_the_server_ties_are_refused",
    ),
    Mutant(
        "a tie that the server does not have",
        _MAP,
        "            if not same:\n",
        "            if False:\n",
        f"{_MAPPED}ties_are_judged_by_memory_and_not_by_config",
    ),
    # The frequency of publishes and checks
    Mutant(
        "staleness grows beyond its bound",
        _PUBLISH_LOOP,
        "steps_since_publish >= max(1, self._most_steps)",
        "steps_since_publish > max(1, self._most_steps)",
        f"{_SPACED}the_staleness_bound_outranks_the_budget",
    ),
    Mutant(
        "a costly publish is never forgotten",
        _PUBLISH_LOOP,
        "self._publishes[0][0] < oldest",
        "self._publishes[0][0] > oldest",
        f"{_SPACED}recomputing_more_than_the_share_waits_until_the_window_has_passed",
    ),
    Mutant(
        "a sync is never proven again",
        _PUBLISH_LOOP,
        "if self.every == 0 or self._since < self.every:",
        "if self.every == 0 or self._since <= self.every:",
        f"{_SPACED}every_nth_sync_is_proven",
    ),
)

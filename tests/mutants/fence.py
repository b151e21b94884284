"""One-line faults of the inference server: mixtures of weights, wrong stamps, lapses, handovers, access."""

from __future__ import annotations

from .mutant import Mutant

_FENCE = "example_trainer/serving/fence.py"
_ADMISSION = "example_trainer/serving/admission.py"
_ENGINE_CORE = "example_trainer/serving/vllm/engine_core.py"
_HANDOVER = "example_trainer/serving/handover.py"
_GUARD = "example_trainer/serving/auth.py"
_ASGI = "example_trainer/serving/asgi.py"
_VERSIONS = "example_trainer/weight_protocol/shm_header.py"

_STATES = "unit/serving/test_fence.py::test_"
_LAPSES = "unit/serving/test_fence_lapses.py::test_"
_FILES = "unit/weight_protocol/test_shm_header.py::test_"
_BUFFERED = "unit/serving/test_output_buffer.py::test_"
_OVER = "unit/serving/test_handover.py::test_"
_ASKED = "unit/serving/test_auth.py::test_"
_OUTERMOST = "unit/serving/test_app.py::test_"

FENCE: tuple[Mutant, ...] = (
    # The served version
    Mutant(
        "the served version stays",
        _FENCE,
        "self.policy_version, self.torn, self._overwriting, self._engine_paused = version, False, False, False",
        "self.torn, self._overwriting, self._engine_paused = False, False, False",
        f"{_STATES}r27_a_sharing_server_serves_nothing_before_the_first_publish",
    ),
    Mutant(
        "tokens after a publish are stamped with the version before",
        _FENCE,
        "await self._engine.resume(str(version))",
        "await self._engine.resume(None)",
        f"{_STATES}a_publish_pauses_with_discard_and_resumes_under_the_new_version",
    ),
    Mutant(
        "what was computed with old weights is kept",
        _FENCE,
        'discard=publish.in_flight != "keep_kv"',
        "discard=False",
        f"{_STATES}a_publish_pauses_with_discard_and_resumes_under_the_new_version",
    ),
    Mutant(
        "cached prefixes of old weights are found again",
        _FENCE,
        'self._engine.salt_prefixes(f"policy-{version}")',
        "pass",
        f"{_STATES}r37_keeping_kv_salts_later_prefixes_and_discards_nothing",
    ),
    Mutant(
        "a version is served a second time",
        _FENCE,
        "served is not None and version <= served:",
        "served is not None and version < served:",
        f"{_STATES}versions_rise_and_the_header_must_agree",
    ),
    Mutant(
        "a publish ends under a version that was not written",
        _FENCE,
        "if header.torn or header.version != version:",
        "if header.torn:",
        f"{_STATES}versions_rise_and_the_header_must_agree",
    ),
    Mutant(
        "a publish ends in the middle of a write",
        _FENCE,
        "if header.torn or header.version != version:",
        "if header.version != version:",
        f"{_STATES}whole_weights_do_not_end_a_publish_while_another_write_has_begun",
    ),
    Mutant(
        "new weights of the server's own may have the old version",
        _FENCE,
        "        self._check_new(version)\n        publish.update",
        "        publish.update",
        f"{_STATES}a_version_that_is_not_new_changes_nothing",
    ),
    # The owner of a publish
    Mutant(
        "a second publish takes the place of the first",
        _FENCE,
        "if current is not None and (current.restoring or not current.abandoned):",
        "if False:",
        f"{_STATES}a_second_publish_is_refused_while_one_is_under_way",
    ),
    Mutant(
        "a part of a publish's id is enough",
        _FENCE,
        "self._publish.publish_id != publish_id or self._publish.abandoned",
        "not self._publish.publish_id.startswith(publish_id) or self._publish.abandoned",
        f"{_STATES}a_publish_answers_to_its_whole_id_alone",
    ),
    Mutant(
        "a publish that is over begins again",
        _FENCE,
        "if publish_id is not None and publish_id in self._past:",
        "if False:",
        f"{_LAPSES}a_begin_that_arrives_after_its_publish_is_over_opens_nothing",
    ),
    Mutant(
        "an end whose answer was lost is refused",
        _FENCE,
        'if past is not None and past["version"] == version:',
        "if False:",
        f"{_STATES}a_repeated_end_has_the_same_answer_and_no_effect",
    ),
    Mutant(
        "a publish that is over ended under any version",
        _FENCE,
        'if past is not None and past["version"] == version:',
        "if past is not None:",
        f"{_LAPSES}r41_a_lapse_after_the_whole_write_serves_the_version_that_the_header_names",
    ),
    Mutant(
        "a publish that lapsed is in the way of the next",
        _FENCE,
        "if current is not None and (current.restoring or not current.abandoned):",
        "if current is not None:",
        f"{_LAPSES}r41_a_begin_supersedes_a_publish_whose_lease_has_run_out_though_the_engine_did_not_go_on",
    ),
    # Leases
    Mutant(
        "a lease is not renewed",
        _FENCE,
        '        publish.lease.begin()\n        return {"publish_id"',
        '        return {"publish_id"',
        f"{_STATES}a_renewed_lease_holds",
    ),
    Mutant(
        "a renewed lease lapses all the same",
        "example_trainer/serving/publish.py",
        "        self.stop()\n        self._timer = asyncio",
        "        self._timer = asyncio",
        f"{_STATES}a_renewed_lease_holds",
    ),
    Mutant(
        "a publish without a lease",
        _FENCE,
        "            publish.lease.begin()\n            self._allow_writes(True)",
        "            self._allow_writes(True)",
        f"{_STATES}r26_a_lapse_before_anything_was_written_goes_on_under_the_old_version",
    ),
    Mutant(
        "no lease while the server drains",
        _FENCE,
        "        if publish_id is not None:\n            publish.lease.begin()\n",
        "",
        f"{_LAPSES}a_trainer_that_dies_while_the_server_drains_holds_it_up_no_longer_than_its_lease",
    ),
    Mutant(
        "a lapse in the middle of putting weights back",
        _FENCE,
        "publish.lease.stop()  # restoring",
        "pass  # restoring",
        f"{_LAPSES}an_abort_that_takes_longer_than_the_lease_does_not_lapse_meanwhile",
    ),
    Mutant(
        "an engine that did not go on is not asked again",
        _FENCE,
        'trying again", publish.publish_id)\n            publish.lease.begin()',
        'trying again", publish.publish_id)',
        f"{_LAPSES}r41_while_the_engine_does_not_go_on_the_publish_is_open_and_goes_on_by_itself_later[lapse]",
    ),
    Mutant(
        "an engine that cannot pause ends all serving",
        _FENCE,
        "            publish.abandoned = True\n            self._settle_soon(publish)\n            raise",
        "            raise",
        f"{_STATES}an_engine_that_cannot_pause_leaves_the_gate_as_it_was",
    ),
    # The weights after a trainer has ended
    Mutant(
        "an abort does not look at the header",
        _FENCE,
        "self.torn = self._overwriting or (header is not None and header.torn)",
        "self.torn = self._overwriting",
        f"{_STATES}an_aborted_publish_that_wrote_is_torn",
    ),
    Mutant(
        "a header in the middle of a write is whole",
        _VERSIONS,
        "return self.write_begin != self.write_end",
        "return self.write_begin < self.write_end",
        f"{_STATES}r26_a_lapse_with_torn_weights_stays_paused_until_a_whole_publish",
    ),
    Mutant(
        "new weights go on under the old version",
        _FENCE,
        "elif header is not None and header.version not in {NO_VERSION, self.policy_version}:",
        "elif False:",
        f"{_LAPSES}r41_a_lapse_after_the_whole_write_serves_the_version_that_the_header_names",
    ),
    Mutant(
        "weights that the server has begun to change are whole",
        _FENCE,
        "        self._overwriting = True\n",
        "",
        f"{_STATES}a_change_whose_end_nobody_told_is_neither_kept_nor_taken_back",
    ),
    Mutant(
        "torn weights are put back",
        _FENCE,
        "publish.update is not None and not publish.was_torn and await",
        "publish.update is not None and await",
        f"{_STATES}a_change_that_cannot_be_taken_back_is_refused_until_a_whole_publish",
    ),
    Mutant(
        "a trainer that wakes up writes over what is served",
        _FENCE,
        "self._allow_writes(False)  # before",
        "pass  # before",
        f"{_STATES}r26_who_wakes_after_the_lapse_is_refused_the_write",
    ),
    Mutant(
        "writes without a publish",
        _FENCE,
        "        self._allow_writes(False)\n        self._publish: ",
        "        self._publish: ",
        f"{_STATES}nobody_may_write_without_a_publish",
    ),
    Mutant(
        "a write goes on though it is forbidden",
        _VERSIONS,
        "if not self._load(32):",
        "if False:",
        f"{_FILES}a_forbidden_write_leaves_no_trace",
    ),
    Mutant(
        "a forbidden write makes torn weights whole",
        _VERSIONS,
        "self._store(16, before.write_begin)",
        "self._store(16, before.write_end)",
        f"{_FILES}a_forbidden_write_into_torn_weights_leaves_them_torn",
    ),
    Mutant(
        "a write ends under another version than it began with",
        _VERSIONS,
        "        if begun != version:",
        "        if begun > version:",
        f"{_FILES}a_write_ends_under_the_version_it_began_with",
    ),
    Mutant(
        "a version is written a second time",
        _VERSIONS,
        "if version <= before.write_end:",
        "if version < before.write_end:",
        f"{_FILES}versions_are_never_reused",
    ),
    # Manual pauses, and the end
    Mutant(
        "a resume by hand breaks into a write",
        _FENCE,
        "if not self._engine_paused:",
        "if True:",
        f"{_LAPSES}r41_a_resume_by_hand_during_a_publish_changes_nothing[in the write]",
    ),
    Mutant(
        "a resume by hand serves torn weights",
        _FENCE,
        'logger.error("the weights are torn: nothing is served until a trainer publishes them completely")',
        "self._engine_paused = False",
        f"{_LAPSES}r41_weights_that_were_torn_are_not_served_by_a_resume_once_they_are_whole",
    ),
    Mutant(
        "a publish ends a pause by hand",
        _FENCE,
        "        if self._held:\n            await self._engine.stamp",
        "        if False:\n            await self._engine.stamp",
        f"{_STATES}paused_by_hand_stays_paused_over_a_publish",
    ),
    Mutant(
        "a lapse ends a pause by hand",
        _FENCE,
        "if not self._held:\n                    await self._engine.resume(None)",
        "if True:\n                    await self._engine.resume(None)",
        f"{_LAPSES}held_by_hand_a_lapse_before_the_write_does_not_have_the_engine_go_on",
    ),
    Mutant(
        "the old server answers after the new one",
        _FENCE,
        "        if self._stopped:\n            return\n",
        "",
        f"{_STATES}a_server_that_stops_lets_nobody_in_after_a_publish_that_ends_then",
    ),
    # The gate
    Mutant(
        "a closed gate lets in",
        _ADMISSION,
        "while self._closed:",
        "while False:",
        f"{_STATES}newcomers_wait_outside_until_the_publish_has_ended",
    ),
    Mutant(
        "drained when the first has left",
        _ADMISSION,
        "if self.inside == 0:",
        "if True:",
        f"{_STATES}finish_waits_until_the_last_has_left",
    ),
    Mutant(
        "finish means drain",
        _FENCE,
        '"finish": math.inf}',
        '"finish": limit_seconds}',
        f"{_STATES}finish_waits_until_the_last_has_left",
    ),
    Mutant(
        "who waited is not refused",
        _ADMISSION,
        "            await self._changed.wait()\n            self.check()",
        "            await self._changed.wait()",
        f"{_STATES}stopping_turns_everybody_away_even_those_waiting",
    ),
    # Outputs kept in the engine core
    Mutant(
        "tokens are sent twice",
        _ENGINE_CORE,
        "        self._buffered.clear()\n",
        "",
        f"{_BUFFERED}taking_all_sends_what_is_kept_and_goes_on_afterwards",
    ),
    Mutant(
        "tokens go to the first client",
        _ENGINE_CORE,
        "taken.setdefault(buffered.client_index, [])",
        "taken.setdefault(0, [])",
        f"{_BUFFERED}taking_all_sends_what_is_kept_and_goes_on_afterwards",
    ),
    Mutant(
        "tokens of an aborted request stay",
        _ENGINE_CORE,
        "self._buffered.pop(request_id, None)",
        "pass",
        f"{_BUFFERED}an_aborted_request_is_forgotten",
    ),
    Mutant(
        "a token that was not told is certain",
        _ENGINE_CORE,
        "constant_values=-np.inf)",
        "constant_values=0.0)",
        f"{_BUFFERED}a_row_with_too_few_alternatives_says_that_the_missing_ones_have_no_probability",
    ),
    # The handover to the next server
    Mutant(
        "half a body is left behind",
        _HANDOVER,
        "return not self._in_message and all(",
        "return all(",
        f"{_OVER}a_request_that_was_answered_before_its_body_had_come_is_not_answered_again",
    ),
    Mutant(
        "what was read of a request is lost",
        _HANDOVER,
        'received = b"" if self._idle else bytes(self._received)',
        'received = b""',
        f"{_OVER}r42_whatever_has_no_answer_yet_is_answered_by_the_next_server_once[a byte of a request]",
    ),
    Mutant(
        "an adapter is loaded by both servers",
        _HANDOVER,
        '("/bridge/", "/lora/", "_lora_adapter")',
        '("/bridge/", "_lora_adapter")',
        f"{_OVER}a_call_that_changes_the_server_is_not_repeated_and_no_copy_of_its_body_is_kept",
    ),
    Mutant(
        "an answered request is kept",
        _HANDOVER,
        "        super().on_response_complete()\n        self._forget_if_idle()",
        "        super().on_response_complete()",
        f"{_OVER}a_request_in_many_pieces_arrives_whole_and_is_forgotten_once_it_is_answered",
    ),
    # Access
    Mutant(
        "any page may ask",
        _GUARD,
        'self._origins.isdisjoint({_text(origin).lower(), "*"})',
        "False",
        f"{_ASKED}r28_pages_of_other_sites_are_refused_where_they_cost_or_change_something",
    ),
    Mutant(
        "a page may have all weights read",
        _GUARD,
        "(method not in SAFE_METHODS or path in _COSTLY_GETS)",
        "method not in _SAFE_METHODS",
        f"{_ASKED}r28_pages_of_other_sites_are_refused_where_they_cost_or_change_something",
    ),
    Mutant(
        "the beginning of a key will do",
        _GUARD,
        "secrets.compare_digest(given, key)",
        "key.startswith(given)",
        f"{_ASKED}a_key_is_asked_for_only_where_one_is_set",
    ),
    Mutant(
        "the metrics are open",
        _ASGI,
        '_OPEN = frozenset({"/health", "/readyz", "/ping"})',
        '_OPEN = frozenset({"/health", "/readyz", "/ping", "/metrics"})',
        f"{_OUTERMOST}with_keys_every_route_but_health_needs_one_and_the_bridge_token_is_one",
    ),
    Mutant(
        "the routes of /v1 pass beside the fence",
        _ASGI,
        "elif posted and path.startswith(_GENERATING):",
        "elif False:",
        f"{_OUTERMOST}generating_routes_pass_the_admission_gate_and_vllms_loading_of_adapters_is_ours",
    ),
    Mutant(
        "vLLM loads adapters in its own way",
        _ASGI,
        "elif path in _TAKEN_OVER:",
        "elif False:",
        f"{_OUTERMOST}generating_routes_pass_the_admission_gate_and_vllms_loading_of_adapters_is_ours",
    ),
)

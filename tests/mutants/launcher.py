"""One-line faults of a launch: secrets, directories, programs and their remains, and the files that a run keeps."""

from __future__ import annotations

from .mutant import Mutant

_RESTARTS = "example_trainer/launcher/restarts.py"
_RESTARTED = "unit/launcher/test_restarts.py::test_"
_SUPERVISOR = "example_trainer/launcher/supervisor.py"
_TREE = "example_trainer/processes/tree.py"
_LEFTOVERS = "example_trainer/processes/cleanup.py"
_CREDENTIALS = "example_trainer/launcher/endpoints.py"
_RUN_DIR = "example_trainer/launcher/run_dir.py"
_RUN_FILE = "example_trainer/launcher/run_file.py"
_SECTION_FLAGS = "example_trainer/launcher/section_flags.py"
_SERVER = "example_trainer/options/server.py"
_CHECKPOINTS = "example_trainer/checkpointing.py"

_TESTS = "unit/launcher/"
_SECRETS = f"{_TESTS}test_secrets.py::test_"
_REDACTED = "unit/common/test_redaction.py::test_"
_TOKENS = "unit/common/test_token_file.py::test_"
_WHOLE = "unit/common/test_whole_files.py::test_"
_CHILDREN = f"{_TESTS}test_supervisor.py::test_"
_SWEPT = "unit/processes/test_cleanup_and_ports.py::test_"
_KEPT = f"{_TESTS}test_run_dir_and_summary.py::test_"
_SETTINGS = f"{_TESTS}test_run_file.py::test_"
_WITHOUT_EFFECT = "example_trainer/options/without_effect.py"
_MATRIX = "unit/trainer/test_modes_and_flags.py::test_"
_CHECKPOINTED = "unit/trainer/test_checkpointing.py::test_"

LAUNCHER: tuple[Mutant, ...] = (
    # Secrets
    Mutant(
        "others may read what is private",
        "atropos_api/common/files.py",
        "        Path(temporary).replace(path)",
        "        Path(temporary).chmod(0o644)\n        Path(temporary).replace(path)",
        f"{_REDACTED}a_private_file_is_its_owner_s_alone_also_where_one_was_open_to_all",
    ),
    Mutant(
        "others may read the logs",
        "example_trainer/processes/program_log.py",
        "os.O_APPEND, 0o600)",
        "os.O_APPEND, 0o644)",
        f"{_SECRETS}a_secret_reaches_a_program_in_a_private_file_that_goes_with_the_run",
    ),
    Mutant(
        "a log that was moved stays as large as it was",
        "example_trainer/processes/program_log.py",
        "os.ftruncate(log.fileno(), 0)",
        "log.flush()",
        "unit/processes/test_program_log.py::test_"
        "a_log_that_has_become_too_large_keeps_its_newest_lines_and_its_program_goes_on_writing",
    ),
    Mutant(
        "nobody replaces the last server",
        "example_trainer/launcher/fleet.py",
        "max(self._limits.least, self._record.wanted - 1)",
        "self._record.wanted - 1",
        f"{_TESTS}test_fleet.py::test_the_last_server_is_replaced_when_it_is_drained_from_outside",
    ),
    Mutant(
        "the record holds the command line",
        _RUN_DIR,
        "redact_arguments(sys.argv)",
        "list(sys.argv)",
        f"{_KEPT}the_record_leaves_out_what_names_itself_a_secret",
    ),
    Mutant(
        "the record holds all settings",
        _RUN_DIR,
        "**redact(resolved),",
        "**resolved,",
        f"{_KEPT}the_record_leaves_out_what_names_itself_a_secret",
    ),
    Mutant(
        "typed secrets stay on the command line",
        _SECTION_FLAGS,
        "for group in self.groups if not _is_secret(group)])",
        "for group in self.groups])",
        f"{_SECRETS}no_command_line_of_a_child_holds_a_secret",
    ),
    Mutant(
        "further options of vLLM reach no server",
        _SERVER,
        "return settings | config.vllm_settings",
        "return settings",
        f"{_TESTS}test_vllm_section.py::test_the_section_and_its_flags_reach_the_server_in_every_mode",
    ),
    Mutant(
        "secrets do not reach their program",
        _SUPERVISOR,
        "if not spec.secret_settings:",
        "if True:",
        f"{_SECRETS}a_secret_reaches_a_program_in_a_private_file_that_goes_with_the_run",
    ),
    Mutant(
        "files of secrets outlive the run",
        _SUPERVISOR,
        "        shutil.rmtree(self._temporary_dir, ignore_errors=True)",
        "        pass",
        f"{_SECRETS}a_secret_reaches_a_program_in_a_private_file_that_goes_with_the_run",
    ),
    Mutant(
        "an inherited token contradicts the file",
        _CREDENTIALS,
        'return {TOKEN_VARIABLE: "", f"',
        'return {f"',
        f"{_SECRETS}a_token_file_is_named_to_every_program_and_contradicted_by_no_variable",
    ),
    Mutant(
        "an inherited bridge token is passed over",
        _CREDENTIALS,
        "given_token(None if given is None else str(given), os.environ) or",
        "given or",
        f"{_SECRETS}an_inherited_bridge_token_stays_that_of_servers_which_run_elsewhere",
    ),
    Mutant(
        "a password in an address is shown",
        "atropos_api/common/secrets.py",
        """(re.compile(r"(?<=://)([^/\\s:@'\\"]*):[^/\\s@'\\"]*(?=@)"), rf"\\1:{MASK}"),""",
        "",
        f"{_REDACTED}a_text_is_shown_without_the_secrets_that_its_form_gives_away",
    ),
    Mutant(
        "a token in a path is shown",
        "atropos_api/common/secrets.py",
        """(re.compile(r"(://[^/\\s'\\"]+/t/)[^/\\s'\\"?#]+"), rf"\\1{MASK}"),""",
        "",
        f"{_REDACTED}a_text_is_shown_without_the_secrets_that_its_form_gives_away",
    ),
    Mutant(
        "only the first of several secrets is hidden",
        "atropos_api/common/secrets.py",
        "return any(_is_secret(key, inner) for inner in value)",
        "return False",
        f"{_REDACTED}a_record_leaves_out_undeclared_keys_that_name_a_secret",
    ),
    Mutant(
        "arguments of strangers are shown",
        "atropos_api/common/secrets.py",
        "words = list(command[:1])",
        "words = list(command)",
        f"{_REDACTED}of_another_process_only_its_program_is_named",
    ),
    Mutant(
        "a token file in the middle of its replacement counts",
        "atropos_api/common/secrets.py",
        "        except TokenUnreadable:\n",
        "        except TokenAmbiguous:\n",
        f"{_TOKENS}a_file_is_read_again_and_what_it_lacks_meanwhile_changes_nothing",
    ),
    # Programs and their processes
    Mutant(
        "a server that exits 0 has not failed",
        "example_trainer/processes/child.py",
        "not (code == 0 and self.spec.ends_by_itself)",
        "code != 0",
        f"{_CHILDREN}a_server_that_exits_0_has_failed",
    ),
    Mutant(
        "a refusal is a crash",
        _SUPERVISOR,
        "if refused and len(refused) == len(children):",
        "if False:",
        f"{_CHILDREN}a_refusal_or_a_stop_at_a_sign_is_one_line_and_keeps_its_exit_code",
    ),
    Mutant(
        "a server that dies ends the run",
        "example_trainer/launcher/programs.py",
        "environment=environment, ends_by_itself=registered, may_restart=True)",
        "environment=environment, ends_by_itself=registered)",
        "unit/launcher/test_plan.py::test_every_program_may_be_started_again",
    ),
    Mutant(
        "a program is started again without end",
        _RESTARTS,
        "if len(history.failed_at) > self._budget.restarts:",
        "if False:",
        f"{_RESTARTED}one_failure_more_than_the_budget_ends_the_run_and_says_so",
    ),
    Mutant(
        "a program is started again although its settings do not work",
        _RESTARTS,
        "if child.name in never_ready and not (killed or code == OUTAGE):",
        "if False:",
        f"{_RESTARTED}a_program_that_exits_before_it_was_ever_ready_is_not_tried_again_but_a_killed_one_is",
    ),
    Mutant(
        "old failures count for ever",
        _RESTARTS,
        "now - history.failed_at[0] > window_seconds",
        "False",
        f"{_RESTARTED}failures_older_than_the_window_no_longer_count",
    ),
    Mutant(
        "a trainer starts anew instead of continuing",
        "example_trainer/launcher/restarts.py",
        'return replace(spec, command=(*first, RESUME_FLAG, "auto"))',
        "return spec",
        "unit/launcher/test_resuming.py::test_a_trainer_is_started_again_from_the_newest_checkpoint",
    ),
    Mutant(
        "who ignores the end outlives it",
        _TREE,
        "    _signal_all([process for process in find() if not _is_resource_tracker(process)], signal.SIGKILL)\n"
        "    if wait_until(lambda: not find(), 1.0):\n        return\n    _signal_all(find(), signal.SIGKILL)",
        "    _signal_all(find(), signal.SIGTERM)",
        f"{_CHILDREN}closing_ends_children_that_ignore_sigterm_and_those_in_sessions_of_their_own",
    ),
    Mutant(
        "orphans outlive the run",
        _TREE,
        "return any(variable.startswith(beginning)",
        "return all(variable.startswith(beginning)",
        f"{_CHILDREN}an_orphan_is_found_by_the_mark_it_inherited",
    ),
    Mutant(
        "children outlive a killed launcher",
        "example_trainer/processes/cleanup.py",
        "end_processes(lambda: find_tree((), mark), grace_seconds=GRACE_SECONDS, asks_twice=False)",
        "pass",
        f"{_CHILDREN}what_a_killed_launcher_leaves_is_cleaned_up_for_it",
    ),
    Mutant(
        "a killed launcher's memory stays",
        "example_trainer/processes/cleanup.py",
        "        sweep(shared_memory)",
        "        pass",
        f"{_CHILDREN}what_a_killed_launcher_leaves_is_cleaned_up_for_it",
    ),
    # Leftovers of ended programs, and ports
    Mutant(
        "what was there before is swept",
        _LEFTOVERS,
        "self._listing() - self._foreign - self._owned",
        "self._listing() - self._owned",
        f"{_SWEPT}what_we_had_mapped_is_swept_and_nothing_else",
    ),
    Mutant(
        "what nobody of ours mapped is swept",
        _LEFTOVERS,
        "frozenset(undecided & mapped)",
        "frozenset(undecided)",
        f"{_SWEPT}what_we_had_mapped_is_swept_and_nothing_else",
    ),
    Mutant(
        "what is in use is swept",
        _LEFTOVERS,
        "sorted(present - in_use)",
        "sorted(present)",
        f"{_SWEPT}what_another_process_still_maps_stays",
    ),
    Mutant(
        "a taken port is free",
        "example_trainer/processes/ports.py",
        "    held.bind((host, port))",
        "    held.bind((host, 0))",
        f"{_SWEPT}a_taken_port_is_reported_with_its_holder",
    ),
    Mutant(
        "a port above the last",
        "example_trainer/processes/ports.py",
        "if not 1 <= port <= LAST_PORT:",
        "if not 1 <= port:",
        f"{_TESTS}test_starts_that_fail.py::test_a_value_that_is_not_a_port_is_reported",
    ),
    # Run directories and run files
    Mutant(
        "a second run mixes with the first",
        _RUN_DIR,
        ".exists() and not resumes:",
        ".exists() and resumes is None:",
        f"{_KEPT}a_directory_that_holds_a_run_is_refused_unless_it_is_resumed",
    ),
    Mutant(
        "an attempt overwrites the last one's logs",
        _RUN_DIR,
        "return max(numbers, default=0) + 1",
        "return 1",
        f"{_KEPT}each_attempt_has_logs_of_its_own",
    ),
    Mutant(
        "half a line is a row",
        "example_trainer/monitoring/trackers.py",
        'if not line.endswith(b"\\n"):',
        "if not line:",
        f"{_TESTS}test_progress.py::test_a_row_still_being_written_is_left_for_the_next_look",
    ),
    Mutant(
        "the earlier file wins",
        _RUN_FILE,
        "sections = merge(sections, read_sections(path))",
        "sections = merge(read_sections(path), sections)",
        f"{_SETTINGS}flags_lie_over_files_and_later_files_over_earlier_ones",
    ),
    Mutant(
        "a mode's settings are those of all modes",
        _RUN_FILE,
        'mode = _requested_mode(own) or settings.get("weight_bridge_mode", default_mode)',
        "mode = default_mode",
        f"{_SETTINGS}a_mode_brings_what_differs_in_it_for_launcher_and_trainer_alike",
    ),
    # Flags in each mode
    Mutant(
        "options of a server that nobody starts are ignored without a word",
        _WITHOUT_EFFECT,
        "    for field in SERVER_FIELDS:",
        "    for field in ():",
        f"{_MATRIX}each_flag_is_observed_refused_or_warned_about_in_each_mode[shared_vllm]",
    ),
    Mutant(
        "a token for a server of the trainer's own is ignored without a word",
        _WITHOUT_EFFECT,
        'yield _Rule("bridge_token", outlives,',
        'yield _Rule("bridge_token", True,',
        f"{_MATRIX}each_flag_is_observed_refused_or_warned_about_in_each_mode[none]",
    ),
    Mutant(
        "a manifest that nobody reads is ignored without a word",
        _WITHOUT_EFFECT,
        'yield _Rule("vllm_config_path", config.shares_memory,',
        'yield _Rule("vllm_config_path", True,',
        f"{_MATRIX}each_flag_is_observed_refused_or_warned_about_in_each_mode[none]",
    ),
    Mutant(
        "a backend without a broadcast is ignored without a word",
        _WITHOUT_EFFECT,
        "yield _Rule(field, config.broadcasts,",
        "yield _Rule(field, True,",
        f"{_MATRIX}each_flag_is_observed_refused_or_warned_about_in_each_mode[none]",
    ),
    Mutant(
        "a launched server sleeps in no mode",
        "example_trainer/options/server.py",
        '        settings["enable_sleep_mode"] = True',
        "        pass",
        f"{_MATRIX}under_the_launcher_each_flag_is_observed_refused_or_remarked_on_in_each_mode[lora_only]",
    ),
    # Files that a run keeps
    Mutant(
        "a command's file is not forced to the disk",
        "atropos_api/common/files.py",
        "            os.fsync(self._file.fileno())",
        "            pass",
        f"{_WHOLE}what_is_written_is_on_the_disk_before_it_has_its_name",
    ),
    Mutant(
        "a file that appeared meanwhile is lost",
        "atropos_api/common/files.py",
        "            os.link(self.part, self.path)",
        "            shutil.copyfile(self.part, self.path)",
        f"{_WHOLE}a_file_that_appears_meanwhile_is_not_lost",
    ),
    Mutant(
        "checkpoints are not forced to the disk",
        "atropos_api/common/files.py",
        "        os.fsync(descriptor)",
        "        pass",
        f"{_CHECKPOINTED}every_file_of_a_checkpoint_is_on_the_disk_before_it_has_its_name_and_the_name_after",
    ),
    Mutant(
        "a checkpoint runs code",
        _CHECKPOINTS,
        "weights_only=True, mmap",
        "weights_only=False, mmap",
        f"{_CHECKPOINTED}a_poisoned_checkpoint_is_refused_and_not_executed",
    ),
)

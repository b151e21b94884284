"""Flags of the trainer whose effect needs more than one process on recorded batches, and the test of each."""

from __future__ import annotations

ELSEWHERE: dict[str, str] = {
    "atropos_token_file": "tests/unit/trainer/test_flag_effects.py::test_the_token_in_a_file_is_shown_to_the_broker",
    "batch_timeout": "tests/unit/trainer/test_flag_effects.py"
    "::test_a_batch_that_nobody_fills_is_given_up_after_the_timeout",
    "bridge_token": "tests/unit/weights/test_flags_of_bridges.py"
    "::test_the_bridge_token_that_is_given_is_shown_instead_of_the_manifests",
    "broadcast_address": "tests/unit/weights/test_broadcast.py"
    "::test_servers_meet_the_trainer_where_nobody_else_listens",
    "broadcast_backend": "tests/unit/weights/test_broadcast.py"
    "::test_trainer_and_the_workers_of_all_servers_meet_with_the_backend_that_is_asked_for",
    "device": "tests/unit/trainer/test_flag_effects.py::test_a_device_that_is_not_there_is_one_clear_line",
    "fit": "tests/unit/memory/test_preflight.py::test_fit_auto_sets_the_flags_and_says_which",
    "gpu_memory_gb": "tests/unit/memory/test_preflight.py::test_the_gpus_own_memory_counts_unless_another_is_named",
    "inference_urls": "tests/unit/weights/test_factory.py"
    "::test_the_servers_of_a_broadcast_are_those_named_or_count_up_from_the_port",
    "init_method": "tests/integration/trainer/test_ranks.py"
    "::test_r12_two_ranks_train_as_one_process_by_rows_or_by_layers_and_one_goes_on_from_their_checkpoint",
    "kernels": "tests/unit/trainer/test_flag_effects.py::test_kernels_that_no_compiler_can_make_are_one_clear_line",
    "log_format": "tests/e2e/test_observed_run.py::test_a_run_is_seen_from_the_item_to_the_step",
    "logprob_chunk_tokens": "tests/unit/trainer/test_flag_effects.py"
    "::test_the_head_works_on_as_many_tokens_at_a_time_as_it_is_told",
    "max_nonfinite_steps": "tests/unit/trainer/test_training.py"
    "::test_a_step_without_finite_gradient_is_skipped_counted_and_stops_after_a_few",
    "num_inference_nodes": "tests/unit/trainer/test_flag_effects.py"
    "::test_with_inference_on_other_hosts_no_server_is_started_here",
    "otlp_traces_endpoint": "tests/e2e/test_observed_run.py::test_a_run_is_seen_from_the_item_to_the_step",
    "overlap_publish": "tests/integration/trainer/test_loop.py"
    "::test_r2_each_step_publishes_announces_checkpoints_and_commits_in_that_order",
    "registered_servers": "tests/unit/weights/test_factory.py"
    "::test_registered_servers_get_what_the_mode_sends_and_no_address_is_needed",
    "reshard_after_forward": "tests/unit/distributed/test_ranks.py"
    "::test_gathered_weights_are_let_go_after_a_forward_unless_they_are_to_stay",
    "restart_method": "tests/integration/weights/test_restart_bridge.py"
    "::test_no_rollout_is_lost_when_a_new_server_starts_next_to_the_old_one_and_no_other_process_is_harmed",
    "resume": "tests/unit/trainer/test_flag_effects.py::test_a_resumed_run_goes_on_after_its_newest_checkpoint",
    "standby_server": "tests/unit/weights/test_restart.py"
    "::test_the_next_servers_process_is_ready_after_each_publish_unless_told_not_to",
    "start_vllm": "tests/unit/weights/test_factory.py::test_lora_only_starts_a_server_unless_it_is_told_not_to",
    "sync_budget": "tests/unit/weights/test_flags_of_bridges.py::test_a_smaller_sync_budget_publishes_less_often",
    "sync_check": "tests/integration/weights/test_lora_only.py"
    "::test_a_sync_that_is_not_what_was_sent_is_found_within_one_publish_and_taken_back",
    "trainer_rank": "tests/integration/trainer/test_ranks.py"
    "::test_r12_two_ranks_train_as_one_process_by_rows_or_by_layers_and_one_goes_on_from_their_checkpoint",
    "trainer_tensor_parallel_size": "tests/integration/trainer/test_ranks.py"
    "::test_r12_two_ranks_train_as_one_process_by_rows_or_by_layers_and_one_goes_on_from_their_checkpoint",
    "unusable_groups": "tests/unit/trainer/test_data.py"
    "::test_the_run_goes_on_without_groups_that_cannot_be_trained_if_it_is_asked_to",
    "use_trackio": "tests/unit/monitoring/test_trackers.py"
    "::test_with_use_trackio_steps_settings_and_signs_go_to_a_run_that_a_resume_continues",
    "vllm_config_path": "tests/unit/weights/test_flags_of_bridges.py"
    "::test_the_manifest_that_is_named_is_read_and_no_other",
    "vllm_gpu": "tests/unit/trainer/test_flag_effects.py::test_the_server_sees_the_gpu_that_it_is_given",
    "weight_bridge_mode": "tests/unit/weights/test_factory.py::test_each_mode_has_its_bridge",
    "world_size": "tests/unit/distributed/test_ranks.py"
    "::test_p2_ranks_give_the_loss_gradients_metrics_and_weights_of_one_process",
}

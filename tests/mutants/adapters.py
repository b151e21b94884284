"""One-line faults where adapters, files and a quantised base reach a server."""

from __future__ import annotations

from .mutant import Mutant

_LORA_ONLY = "example_trainer/weights/lora_only.py"
_ADAPTER_TARGET = "example_trainer/weights/adapter_target.py"
_PAYLOAD = "example_trainer/weight_protocol/transfer.py"
_FOREIGN = "example_trainer/weights/adapter_target.py"
_RESTART = "example_trainer/weights/restart.py"
_BROADCAST = "example_trainer/weights/broadcast.py"
_EXCHANGE = "example_trainer/weights/broadcast_exchange.py"
_SERVED = "example_trainer/weights/served_model.py"
_ADAPTERS_PUBLISHED = "unit/weights/test_lora_only.py::test_"
_SENT = "unit/weight_protocol/test_adapter_payload.py::test_"
_STOCK = "unit/weights/test_adapter_target.py::test_"
_RESTARTED = "unit/weights/test_restart.py::test_"
_ALL = "unit/weights/test_broadcast.py::test_"
_QUANTISED = "unit/weights/test_quantised_base.py::test_"

ADAPTERS: tuple[Mutant, ...] = (
    # Sent adapters
    Mutant(
        "an adapter that arrived otherwise is served",
        _ADAPTER_TARGET,
        'if answer["digest"] != payload.digest():',
        "if False:",
        f"{_ADAPTERS_PUBLISHED}an_adapter_that_arrived_with_another_checksum_is_refused",
    ),
    Mutant(
        "tensors that vLLM did not take over pass",
        _ADAPTER_TARGET,
        ' or answer["misplaced"]:',
        ":",
        f"{_ADAPTERS_PUBLISHED}a_server_that_computes_with_other_tensors_is_found",
    ),
    Mutant(
        "the good version goes in place of the bad one",
        _ADAPTER_TARGET,
        "self._client.unload_adapter(adapter_name(bad_version))",
        "self._client.unload_adapter(adapter_name(good_version))",
        f"{_ADAPTERS_PUBLISHED}a_bad_version_goes_only_once_a_good_one_is_served_again",
    ),
    Mutant(
        "a server of adapters that has started anew is not missed",
        _LORA_ONLY,
        "return now.boot_id != self._boot_id or",
        "return not now.boot_id.startswith(self._boot_id or '') or",
        f"{_ADAPTERS_PUBLISHED}a_server_that_has_started_anew_or_serves_nothing_is_published_to",
    ),
    Mutant(
        "a checksum of the tensors alone",
        _PAYLOAD,
        "json.dumps([self.config, self.layout], sort_keys=True)",
        "json.dumps([self.layout], sort_keys=True)",
        f"{_SENT}the_checksum_is_that_of_the_content",
    ),
    Mutant(
        "a checksum of the names alone",
        _PAYLOAD,
        "        total.update(memoryview(self.body)[self.data_start :])\n",
        "",
        f"{_SENT}the_checksum_is_that_of_the_content",
    ),
    Mutant(
        "a stock server loses a version that rollouts still ask for",
        _FOREIGN,
        "while len(self._versions) > self._keep:",
        "while len(self._versions) >= self._keep:",
        f"{_STOCK}a_stock_server_whose_answer_is_lost_has_the_adapter_once_and_forgets_old_ones",
    ),
    Mutant(
        "clients ask a server for names that it does not tell apart",
        _FOREIGN,
        "                self._by_name = False\n",
        "",
        f"{_STOCK}r23_only_where_adapters_are_told_apart_by_name_clients_are_given_one",
    ),
    # Weights in files and over a process group
    Mutant(
        "the weights that are served are removed",
        _RESTART,
        "            if path != kept:\n",
        "            if path.is_dir():\n",
        f"{_RESTARTED}of_the_weights_on_disk_those_that_are_served_stay",
    ),
    Mutant(
        "the disk fills with what was never served",
        _RESTART,
        '(*served.glob("policy-v*"), *served.glob(".policy-v*.part"))',
        'served.glob("policy-v*")',
        f"{_RESTARTED}of_the_weights_on_disk_those_that_are_served_stay",
    ),
    Mutant(
        "a reload without an answer counts",
        _RESTART,
        "if (info := client.info()).policy_version != version:",
        "if (info := client.info()).policy_version is None:",
        f"{_RESTARTED}a_reload_whose_answer_is_lost_counts_if_the_server_serves_that_version",
    ),
    Mutant(
        "other bytes than were sent are loaded",
        _EXCHANGE,
        "if found != digest]:",
        "if not digest.startswith(found)]:",
        f"{_ALL}a_server_at_which_other_bytes_have_arrived_is_named",
    ),
    Mutant(
        "some servers keep the version that others could not load",
        _EXCHANGE,
        "self._calls.all(self._reachable(list(opened)), abort)",
        "pass",
        f"{_ALL}all_go_on_under_the_new_version_or_all_are_taken_back",
    ),
    Mutant(
        "a newer version is overwritten",
        _BROADCAST,
        "if served is not None and served > version:",
        "if served is None:",
        f"{_ALL}who_serves_an_older_version_or_torn_weights_is_behind_and_a_newer_one_is_not_overwritten",
    ),
    Mutant(
        "a server with torn weights is up to date",
        _BROADCAST,
        "if each.info.policy_version != version or each.info.torn]",
        "if each.info.policy_version != version]",
        f"{_ALL}who_serves_an_older_version_or_torn_weights_is_behind_and_a_newer_one_is_not_overwritten",
    ),
    # A 4-bit base: which server serves its values
    Mutant(
        "lora_only serves the unquantised model",
        _LORA_ONLY,
        "should_stop=self._should_stop)\n        try:\n            manager.start(self.base.model,",
        "should_stop=self._should_stop)\n        try:\n            manager.start(self._config.model_name,",
        f"{_QUANTISED}lora_only_starts_its_server_on_the_values_of_the_base",
    ),
    Mutant(
        "lora_only comes back with the unquantised model",
        _LORA_ONLY,
        "        manager.stop()\n        manager.start(self.base.model,",
        "        manager.stop()\n        manager.start(self._config.model_name,",
        f"{_QUANTISED}lora_only_starts_its_server_on_the_values_of_the_base",
    ),
    Mutant(
        "lora_restart serves the unquantised model",
        _RESTART,
        "model, adapter = self._base.model, directory",
        "model, adapter = self._config.model_name, directory",
        f"{_QUANTISED}lora_restart_starts_each_server_on_the_values_of_the_base",
    ),
    Mutant(
        "any server counts as one of the quantised base",
        _SERVED,
        "if self.digest is None or server_digest == self.digest:",
        "if self.digest is None or server_digest is None:",
        f"{_QUANTISED}a_server_of_somebody_else_is_used_if_it_has_the_base_and_refused_in_one_line_if_not",
    ),
    Mutant(
        "an older base counts as this one",
        _SERVED,
        "if written is None or written.digest != digest:",
        "if written is None:",
        f"{_QUANTISED}a_base_of_other_values_or_without_a_record_is_written_anew",
    ),
    Mutant(
        "the server is restarted one step late",
        _RESTART,
        "steps_since_publish >= self._config.vllm_restart_interval",
        "steps_since_publish > self._config.vllm_restart_interval",
        "unit/weights/test_factory.py::test_mode_none_starts_its_own_server_in_the_run_directory",
    ),
)

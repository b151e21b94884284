"""Which of our modules stand behind each module name of Atropos' library. A new name is one line here."""

from __future__ import annotations

from collections.abc import Mapping

BASE = "environments.compat.base"
SERVERS = "environments.compat.servers"
HISTORY = "environments.compat.history"
REWARDS = "environments.compat.rewards"
TOKENIZING = "environments.compat.tokenizing"

ALIASES: Mapping[str, str | None] = {
    "atroposlib": None,
    "atroposlib.api": None,
    "atroposlib.envs": None,
    "atroposlib.envs.base": BASE,
    "atroposlib.envs.constants": "environments.compat.constants",
    "atroposlib.envs.eval": "environments.compat.evals",
    "atroposlib.envs.reward_fns": REWARDS,
    "atroposlib.envs.reward_fns.combined_reward": REWARDS,
    "atroposlib.envs.reward_fns.registry": REWARDS,
    "atroposlib.envs.reward_fns.reward_function": REWARDS,
    "atroposlib.envs.server_handling": None,
    "atroposlib.envs.server_handling.managed_server": SERVERS,
    "atroposlib.envs.server_handling.managed_server_proxy": SERVERS,
    "atroposlib.envs.server_handling.openai_server": SERVERS,
    "atroposlib.envs.server_handling.proxy_client": SERVERS,
    "atroposlib.envs.server_handling.server_baseline": SERVERS,
    "atroposlib.envs.server_handling.server_manager": SERVERS,
    "atroposlib.envs.server_handling.sglang_server": SERVERS,
    "atroposlib.envs.server_handling.trl_vllm_server": SERVERS,
    "atroposlib.envs.server_handling.vllm_server": SERVERS,
    "atroposlib.envs.teacher_distillation_env": "environments.compat.teacher",
    "atroposlib.frontend": None,
    "atroposlib.frontend.jsonl2html": "environments.compat.page",
    "atroposlib.type_definitions": "environments.compat.types",
    "atroposlib.utils": None,
    "atroposlib.utils.advantages": "environments.compat.advantages",
    "atroposlib.utils.best_of_n_selection": HISTORY,
    "atroposlib.utils.io": "environments.compat.http_io",
    "atroposlib.utils.message_history_utils": HISTORY,
    "atroposlib.utils.metrics": "environments.compat.metrics",
    "atroposlib.utils.tokenize_for_trainer": TOKENIZING,
    "atroposlib.utils.tool_call_parser": "environments.compat.tool_calls",
}
"""None: a package with nothing of its own but its submodules."""

"""`atropos doctor RUN.yaml` finds faults of tokenizer, chat template, end of turn, sampling and logprobs."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.unit.commands.doctor_harness import DoctorHarness

OWN_ENVIRONMENT = """
from environments.sdk import APIServerConfig, BaseEnv, BaseEnvConfig, scored_group

class OwnEnv(BaseEnv):
    name = "own"

    @classmethod
    def config_init(cls):
        return BaseEnvConfig(steps_per_eval=0), APIServerConfig(server_type="vllm")

    async def setup(self):
        pass

    async def get_next_item(self):
        return 1

    async def collect_trajectories(self, item):
        IMPORT
        async with self.server.managed_server() as session:
            reply = await session.chat_completion(messages=[{"role": "user", "content": "Hello"}], SAMPLING)
            return scored_group(session.nodes, [1.0]), []

    async def evaluate(self):
        await self.server.chat_completion(messages=[{"role": "user", "content": "Hello"}], temperature=0.0, top_p=0.5)
"""


def own(sampling: str = "n=2", imported: str = "pass") -> str:
    return OWN_ENVIRONMENT.replace("SAMPLING", sampling).replace("IMPORT", imported)


def test_a_model_without_a_tokenizer_is_found(harness: DoctorHarness) -> None:
    (harness.model / "tokenizer.json").unlink()
    harness.find_one("tokenizer", "no tokenizer.json")


def test_a_tokenizer_that_cannot_be_loaded_is_found(harness: DoctorHarness) -> None:
    path = harness.model / "tokenizer.json"
    path.write_text(path.read_text()[:1000])
    harness.find_one("tokenizer", "cannot be loaded")


def test_a_token_beyond_the_embedding_is_found(harness: DoctorHarness) -> None:
    path = harness.model / "tokenizer.json"
    content = json.loads(path.read_text())
    last = len(content["model"]["vocab"]) - 1
    for index in range(last + 1, 400):
        content["added_tokens"].append({**content["added_tokens"][0], "id": index, "content": f"<|extra {index}|>"})
    path.write_text(json.dumps(content))
    harness.find_one("tokenizer", "'<|extra 399|>'", "id 399", "384 rows")


def test_an_environment_with_another_tokenizer_is_found(harness: DoctorHarness) -> None:
    other = harness.folder / "other"
    shutil.copytree(harness.model, other)
    path = other / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    one, two = list(vocabulary)[100:102]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    path.write_text(json.dumps(content))
    harness.chat(tokenizer_name=str(other))
    assert "leave env.tokenizer_name out" in harness.find_one("tokenizer", str(other), "not the tokenizer").advice
    harness.chat(tokenizer_name=str(harness.model))
    assert harness.find() == []


def test_a_server_with_another_tokenizer_is_found(harness: DoctorHarness) -> None:
    harness.sections["vllm"]["tokenizer"] = "/no/such/tokenizer"
    harness.find_one("tokenizer", "vllm.tokenizer", "/no/such/tokenizer")


def test_a_chat_without_a_template_is_found_with_a_hint_for_base_models(harness: DoctorHarness) -> None:
    (harness.model / "chat_template.jinja").unlink()
    harness.chat()
    assert "base model" in harness.find_one("chat template", "arithmetic_server.py chats").advice
    harness.sections["env"] = {"server": "math_server_zero.py", "max_token_length": 64, "data_path": str(harness.model)}
    assert harness.find() == [], "a text to continue needs no template"


def test_a_template_that_fails_is_found(harness: DoctorHarness) -> None:
    (harness.model / "chat_template.jinja").write_text("{{ messages[0].rolle | upper }}{% endif %}")
    harness.chat()
    harness.find_one("chat template", "fails", "TemplateSyntaxError")


def test_a_template_without_the_question_is_found(harness: DoctorHarness) -> None:
    (harness.model / "chat_template.jinja").write_text("<|user|>{{ messages[0].text }}<|end|><|assistant|>")
    harness.chat()
    harness.find_one("chat template", "leaves out the user's message")


def test_a_turn_that_ends_with_another_token_than_the_server_stops_at_is_found(harness: DoctorHarness) -> None:
    harness.edit("tokenizer_config.json", eos_token="<|pad|>")
    harness.edit("generation_config.json", eos_token_id=0)
    harness.edit("config.json", eos_token_id=0)
    harness.chat()
    found = harness.find_one("end of turn", "ends a turn with '<|end|>' (1)", "stops at '<|pad|>'")
    assert "generation_config.json" in found.advice
    harness.edit("generation_config.json", eos_token_id=[0, 1])
    assert harness.find() == []


def test_a_stop_text_ends_a_turn_too(harness: DoctorHarness) -> None:
    harness.edit("tokenizer_config.json", eos_token="<|pad|>")
    harness.edit("generation_config.json", eos_token_id=0)
    harness.write_environment(own('n=2, stop=["<|end|>"]'))
    assert harness.find() == []


def test_end_tokens_that_disagree_are_found(harness: DoctorHarness) -> None:
    harness.edit("config.json", eos_token_id=3)
    harness.edit("generation_config.json", eos_token_id=3)
    harness.find_one("end of turn", "'<|end|>' is 1", "end at 3")


def test_a_tokenizer_without_an_end_token_is_found(harness: DoctorHarness) -> None:
    harness.edit("tokenizer_config.json", eos_token="<|im_end|>")
    harness.find_one("end of turn", "'<|im_end|>'", "not in its vocabulary")
    harness.edit("tokenizer_config.json", eos_token=None)
    assert harness.find() == [], "the server ends at generation_config.json's"
    harness.edit("generation_config.json", eos_token_id=None)
    harness.edit("config.json", eos_token_id=None)
    harness.find_one("end of turn", "names no eos_token")


@pytest.mark.parametrize("flags", [(), ("--vllm.logprobs_mode", "raw_logprobs")])
def test_other_logprobs_than_the_trainer_recomputes_are_found(harness: DoctorHarness, flags: tuple[str, ...]) -> None:
    if not flags:
        harness.sections["vllm"]["logprobs_mode"] = "raw_logprobs"
    assert "processed_logprobs" in harness.find_one("logprobs", "raw_logprobs", flags=flags).advice


def test_options_of_the_server_that_make_logprobs_inexact_are_found(harness: DoctorHarness) -> None:
    harness.sections["vllm"]["kv_cache_dtype"] = "fp8"
    harness.find_one("logprobs", "vllm.kv_cache_dtype fp8", verdict="warning")


def test_a_server_that_rounds_the_logits_that_the_trainer_keeps_in_fp32_is_found(harness: DoctorHarness) -> None:
    harness.sections["vllm"]["head_dtype"] = "auto"
    assert harness.find() == [], "a float32 server has nothing to round"
    harness.sections["trainer"]["dtype"] = harness.sections["vllm"]["dtype"] = "bfloat16"
    harness.find_one("logprobs", "vllm.head_dtype auto", verdict="warning")


def test_a_server_of_another_dtype_is_an_error_only_where_the_trainer_has_weights_of_its_own(
    harness: DoctorHarness,
) -> None:
    """In shared memory the server's dtype is taken, and the trainer follows with a warning."""
    harness.sections["vllm"]["dtype"] = "bfloat16"
    harness.find_one("logprobs", "vllm.dtype bfloat16", "trainer.dtype float32", verdict="warning")
    harness.sections["trainer"]["weight_bridge_mode"] = "lora_only"
    harness.find_one("logprobs", "vllm.dtype bfloat16", "trainer.dtype float32")


def test_a_server_option_that_cannot_share_weights_is_found(harness: DoctorHarness) -> None:
    harness.find_one("server", "--quantization fp8", flags=("--vllm.quantization", "fp8"))


def test_a_misspelt_option_of_the_server_is_found(harness: DoctorHarness) -> None:
    harness.sections["vllm"]["max_num_seq"] = 8
    assert "max_num_seqs" in harness.find_one("server", "vllm.max_num_seq").advice
    harness.sections["vllm"] = {"port": harness.sections["vllm"]["port"], "max_num_batched_tokens": 4096}
    assert harness.find() == [], "vLLM's own options are accepted"


def test_greedy_rollouts_are_found_and_greedy_evaluations_are_not_a_fault(harness: DoctorHarness) -> None:
    harness.write_environment(own("n=2, temperature=0"))
    assert "own_env.py:20" in harness.find_one("temperature", "temperature 0", "greedy").text
    harness.write_environment(own("n=2, temperature=0.005"))
    assert "vLLM samples at 0.01" in harness.find_one("temperature", "temperature 0.005", "refused for training").text
    harness.write_environment(own("n=2, temperature=0.01"))
    assert harness.find() == []
    harness.write_environment(own("n=2, temperature=0.7"))
    assert harness.find() == [], "a session tells the trainer its temperature"


def test_truncated_rollouts_are_found_by_the_line_that_asks_for_them(harness: DoctorHarness) -> None:
    harness.write_environment(own("n=2, top_p=0.9, extra_body={'top_k': 20}"))
    found = harness.find()
    assert [(one.subject, one.verdict) for one in found] == [("sampling", "error")] * 2
    told = " ".join(one.text for one in found)
    assert "top_p 0.9 (own_env.py:20)" in told
    assert "top_k 20 (own_env.py:20)" in told
    harness.sections["env"]["allow_truncated_sampling"] = True
    assert {one.verdict for one in harness.find()} == {"warning"}
    harness.sections["env"]["sampling_mask_limit"] = 64
    assert harness.find() == [], "with masks the ratio is exact"
    harness.write_environment(own("n=2, top_p=0.9, presence_penalty=0.5"))
    harness.sections["env"] |= {"allow_truncated_sampling": True, "sampling_mask_limit": 64}
    found = harness.find()
    assert [(one.subject, one.verdict) for one in found] == [("sampling", "warning")] * 2, "no mask repeats a penalty"
    assert not any("sampling_mask_limit" in one.advice for one in found)


def test_defaults_that_the_server_would_apply_to_plain_requests_are_found(harness: DoctorHarness) -> None:
    harness.sections["vllm"]["override_generation_config"] = {"temperature": 1.0, "top_p": 0.8}
    harness.find_one("sampling", "top_p 0.8", verdict="warning")


def test_defaults_of_the_model_are_found_where_our_server_applies_them(harness: DoctorHarness) -> None:
    """Requests to a stock vLLM name every value, so that its defaults change no rollout."""
    harness.edit("generation_config.json", top_p=0.8)
    assert harness.find() == [], "our own server does not apply them"
    harness.sections["vllm"]["generation_config"] = "auto"
    harness.find_one("sampling", "vllm.generation_config auto applies it", verdict="warning")
    del harness.sections["vllm"]["generation_config"]
    harness.sections["trainer"] |= {
        "weight_bridge_mode": "lora_only",
        "num_inference_nodes": 1,
        "inference_urls": ["http://elsewhere:9001"],
    }
    assert harness.find() == []


def test_text_alone_is_found_to_be_untrainable(harness: DoctorHarness) -> None:
    harness.chat()
    harness.sections["openai"]["server_type"] = "openai"
    harness.find_one("environment", "server_type", "openai")


def test_a_missing_environment_is_found(harness: DoctorHarness) -> None:
    harness.chat(server="arithmetik_server.py")
    harness.find_one("environment", "arithmetik_server.py", "no such file")


def test_a_misspelt_setting_of_the_environment_is_found(harness: DoctorHarness) -> None:
    harness.chat(group_siz=4)
    harness.find_one("environment", "'group_siz', did you mean group_size?")


def test_a_package_that_the_environment_imports_at_work_is_found(harness: DoctorHarness) -> None:
    harness.write_environment(own(imported="import no_such_package_here"))
    assert "pip install" in harness.find_one("environment", "no_such_package_here").advice


def test_an_environment_that_cannot_be_imported_is_found(harness: DoctorHarness) -> None:
    harness.write_environment("raise ValueError('not today')")
    harness.find_one("environment", "ValueError: not today")


def test_a_file_without_an_environment_class_is_only_noted(harness: DoctorHarness) -> None:
    harness.write_environment("print('no class')")
    assert [(one.verdict, one.subject) for one in harness.find()] == [("note", "environment")]


def test_groups_that_never_fill_a_batch_are_found(harness: DoctorHarness) -> None:
    harness.chat(group_size=6)
    harness.find_one("batch", "groups of env.group_size 6", "batch of 64")
    chat = {"env": {"server": "arithmetic_server.py", "group_size": 4, "max_token_length": 64}}
    other = {"env": {**chat["env"], "group_size": 6}}
    del harness.sections["env"]
    harness.sections["environments"] = [chat, other]  # type: ignore[assignment]
    assert harness.find() == [], "10 groups of 6 and one of 4 do"


def test_missing_data_are_found(harness: DoctorHarness) -> None:
    harness.chat(data_path="/no/such/data.jsonl")
    harness.find_one("environment", "env.data_path", "/no/such/data.jsonl")


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"server": "dataset_server.py", "reward": ["formt"]}, "no reward 'formt', did you mean format?"),
        ({"server": "dataset_server.py", "reward": "nowhere.py:polite"}, "nowhere.py"),
        ({"server": "dataset_server.py", "system_prompt": "no/system.txt"}, "there is no such file"),
        ({"server": "gsm8k_server.py", "prompt_template": "no.prompt"}, "prompt template no.prompt: cannot be read"),
        ({"server": "math_server_zero.py", "prompt_template": "no.prompt"}, "prompt template no.prompt"),
    ],
)
def test_a_name_or_file_in_an_environments_settings_that_does_not_exist_is_found(
    harness: DoctorHarness, env: dict[str, object], words: str
) -> None:
    harness.chat(**env)
    assert words in " ".join(one.text for one in harness.find() if one.subject == "environment")

"""The light tokenizer: the same ids and texts as transformers gives for the same folder."""

import json
import shutil
import subprocess
import sys

import pytest

from environments.sdk.errors import TokenizerUnavailable
from environments.sdk.tokenizer import FastTokenizer, load_tokenizer

TEXTS = [
    "Ann has 35 pens. gets 7. loses 4. gets 9. How many now?",
    "35+7=42\n42-4=38\n#### 38<|end|>",
    "  Völlig andere Zeichen: ünïcödé – 漢字 🙂\t\n\n it's",
    "<|user|>x<|end|><|assistant|>",
    "",
]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  2+2?\n"},
    {"role": "assistant", "content": "#### 4"},
    {"role": "user", "content": "Sure?"},
]


def test_it_agrees_with_transformers_in_everything_it_does(tokenizer_folder):
    from transformers import PreTrainedTokenizerFast

    light, full = FastTokenizer(tokenizer_folder), PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)
    for text in TEXTS:
        ids = light.encode(text)
        assert ids == full.encode(text)
        assert light.decode(ids) == full.decode(ids)
        assert light.decode(ids, skip_special_tokens=True) == full.decode(ids, skip_special_tokens=True)
    for generation_prompt in (False, True):
        options = {"tokenize": False, "add_generation_prompt": generation_prompt}
        assert light.apply_chat_template(CHAT, **options) == full.apply_chat_template(CHAT, **options)
        assert light.apply_chat_template(CHAT, add_generation_prompt=generation_prompt) == full.apply_chat_template(
            CHAT, add_generation_prompt=generation_prompt, return_dict=False
        )
    assert (light.eos_token_id, light.pad_token_id, light.bos_token_id) == (full.eos_token_id, full.pad_token_id, None)
    assert set(light.all_special_ids) >= set(full.all_special_ids)
    assert len(light) == len(full)


def test_everything_else_comes_from_the_full_tokenizer(tokenizer_folder):
    light = load_tokenizer(str(tokenizer_folder))
    assert light.convert_tokens_to_ids("<|end|>") == light.eos_token_id
    assert light(["a b"])["input_ids"] == [light.encode("a b")]
    assert "input_ids" in light.apply_chat_template(CHAT, return_dict=True)


def test_a_folder_in_the_home_directory_is_found(tokenizer_folder, monkeypatch):
    """`tokenizer_name: ~/model` in a run file was refused as a folder that does not exist."""
    monkeypatch.setenv("HOME", str(tokenizer_folder.parent))
    assert isinstance(load_tokenizer(f"~/{tokenizer_folder.name}"), FastTokenizer)


def test_the_light_tokenizer_loads_no_transformers(tokenizer_folder):
    probe = (
        "import sys; from environments.sdk.tokenizer import load_tokenizer\n"
        f"t = load_tokenizer({str(tokenizer_folder)!r}); t.decode(t.encode('a 1'))\n"
        "t.apply_chat_template([{'role': 'user', 'content': 'x'}])\n"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))\n"
    )
    assert subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0


def test_templates_may_use_what_transformers_offers_them(tokenizer_folder, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((tokenizer_folder / name).read_text())
    first = "{% if loop.index > 1 %}{% break %}{% endif %}{{ m | tojson }}{{ eos_token }}"
    template = "{% for m in messages %}" + first + "{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    text = FastTokenizer(tmp_path).apply_chat_template([{"role": "user", "content": "é"}, {}], tokenize=False)
    assert text == json.dumps({"role": "user", "content": "é"}, ensure_ascii=False) + "<|end|>"


def test_templates_may_give_json_the_options_that_transformers_gives_it(tokenizer_folder, tmp_path):
    from transformers import PreTrainedTokenizerFast

    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((tokenizer_folder / name).read_text())
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m | tojson(ensure_ascii=False) }}{{ m | tojson(True, 1) }}"
        "{{ m | tojson(separators=(',', ':'), sort_keys=True) }}{% endfor %}"
    )
    chat = [{"role": "user", "content": "é"}]
    full = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert FastTokenizer(tmp_path).apply_chat_template(chat, tokenize=False) == full.apply_chat_template(
        chat, tokenize=False
    )


def test_a_text_is_neither_cut_nor_padded_though_the_file_keeps_a_length(tokenizer_folder, tmp_path):
    """transformers writes the length of its last batch into the file, as after fine-tuning."""
    from tokenizers import Tokenizer

    kept = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    kept.enable_truncation(max_length=4)
    kept.enable_padding(length=16)
    kept.save(str(tmp_path / "tokenizer.json"))
    text = TEXTS[0]
    assert FastTokenizer(tmp_path).encode(text) == FastTokenizer(tokenizer_folder).encode(text)
    assert FastTokenizer(tmp_path).encode("a") == FastTokenizer(tokenizer_folder).encode("a")


def test_an_unknown_tokenizer_says_what_to_set(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(TokenizerUnavailable, match=r"--env\.tokenizer_name"):
        load_tokenizer("nobody/no-such-model")
    with pytest.raises(TokenizerUnavailable, match=r"no such folder.*--env\.tokenizer_name"):
        load_tokenizer("./no-such-folder")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", '{"version": "1.0", "trunc'),
        ("tokenizer.json", "version https://git-lfs.github.com/spec/v1\n"),
        ("tokenizer_config.json", '{"eos_token"'),
    ],
)
def test_a_folder_with_a_file_in_part_is_named_with_what_to_set(tokenizer_folder, tmp_path, file, content):
    shutil.copytree(tokenizer_folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / file).write_text(content)
    with pytest.raises(TokenizerUnavailable, match=rf"{tmp_path}' cannot be loaded \(.*; set --tokenizer to a model's"):
        load_tokenizer(str(tmp_path), flag="--tokenizer")

"""The tokenizer of environments: it is loaded here, and `Codec` adapts it to sessions.

Loading transformers (and with it torch) costs an environment server seconds of CPU and hundreds of megabytes for two
operations, encode and decode. `FastTokenizer` does those and the chat template from a model folder's `tokenizer.json`
and chat template with the same libraries underneath, and loads in a tenth of a second. Any other attribute of a
transformers tokenizer still works: asking for it loads the real one.

`Codec` turns text into tokens and back and chats into text, and knows which tokens are special.
"""

from __future__ import annotations

import datetime as dt
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atropos_api.common.files import named_path
from environments.sdk.errors import RequestRefused, TokenizerUnavailable
from environments.sdk.tools import with_parsed_arguments

if TYPE_CHECKING:
    from jinja2 import Template
    from tokenizers import Tokenizer


def load_tokenizer(name: str, *, flag: str = "--env.tokenizer_name") -> Any:
    """Load a tokenizer by folder or Hugging Face name; local folders get a `FastTokenizer`. Errors name the flag."""
    name = str(named_path(name)) if name else name
    folder = Path(name)
    if (folder / "tokenizer.json").is_file():
        try:
            return FastTokenizer(folder)
        except Exception as error:  # its library raises plain `Exception` for a file that was copied in part
            raise _unavailable(name, flag, error) from error
    return load_transformers_tokenizer(name, flag=flag)


def load_transformers_tokenizer(name: str, *, flag: str = "--env.tokenizer_name") -> Any:
    if name.startswith(("/", ".", "~")) and not Path(name).is_dir():
        raise TokenizerUnavailable(f"tokenizer {name!r}: no such folder; set {flag} to a model's folder")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        # transformers 5 returns a mapping by default; environments expect the list that earlier versions return.
        tokenizer.apply_chat_template = functools.partial(tokenizer.apply_chat_template, return_dict=False)
        return tokenizer
    except Exception as error:  # files, hub and packages of custom tokenizers may raise anything
        raise _unavailable(name, flag, error) from error


def _unavailable(name: str, flag: str, error: Exception) -> TokenizerUnavailable:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return TokenizerUnavailable(
        f"tokenizer {name!r} cannot be loaded ({reason}); set {flag} to a model's name or folder"
    )


class FastTokenizer:
    """A light tokenizer: it encodes, decodes and renders chats as the model folder's files say."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        self.name_or_path = str(folder)
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        # The file keeps the length of the last batch that transformers cut or padded, and each text would be cut to it.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._config: dict[str, Any] = _read_json(folder / "tokenizer_config.json")
        self.chat_template = _find_chat_template(folder, self._config)
        self._template: Template | None = None
        self._full: Any = None
        self._bytes = TokenBytes(self._tokenizer) if is_byte_level(self._tokenizer) else None
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(index for index, token in added.items() if token.special)
        for role in ("bos", "eos", "pad", "unk"):
            token = _token_text(self._config.get(f"{role}_token"))
            setattr(self, f"{role}_token", token)
            setattr(self, f"{role}_token_id", None if token is None else self._tokenizer.token_to_id(token))

    @property
    def all_special_ids(self) -> list[int]:
        return sorted(self._special_ids)

    def __len__(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def get_vocab(self) -> dict[str, int]:
        return self._tokenizer.get_vocab(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True, **more: Any) -> list[int]:
        if more:
            return list(self.load_full().encode(text, add_special_tokens=add_special_tokens, **more))
        # "fast" skips the character offsets of the tokens, which nothing here needs.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def decode(self, token_ids: Sequence[int] | int, *, skip_special_tokens: bool = False, **more: Any) -> str:
        if more:
            return str(self.load_full().decode(token_ids, skip_special_tokens=skip_special_tokens, **more))
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        if self._bytes is not None and not skip_special_tokens:
            return b"".join(map(self._bytes.__getitem__, ids)).decode("utf-8", "replace")
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def batch_decode(self, sequences: Sequence[Sequence[int]], *, skip_special_tokens: bool = False) -> list[str]:
        return [self.decode(sequence, skip_special_tokens=skip_special_tokens) for sequence in sequences]

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        **more: Any,
    ) -> Any:
        """Render a chat as text, or as a list of ids if `tokenize`; other forms come from the full tokenizer."""
        if more.get("return_dict") or more.get("return_tensors") or not self._can_render(more):
            more.setdefault("return_dict", False)
            return self.load_full().apply_chat_template(
                conversation, tools=tools, tokenize=tokenize, add_generation_prompt=add_generation_prompt, **more
            )
        variables = {key: value for key, value in more.items() if key not in {"return_dict", "return_tensors"}}
        text = self._compiled().render(
            messages=conversation,
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **self._token_variables(),
            **variables,
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.load_full(), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.load_full()(*args, **kwargs)

    def load_full(self) -> Any:
        """Return the tokenizer as transformers builds it from the same files."""
        if self._full is None:
            self._full = load_transformers_tokenizer(self.name_or_path)
        return self._full

    def _can_render(self, more: Mapping[str, Any]) -> bool:
        plain = isinstance(self.chat_template, str) and "{% generation" not in self.chat_template
        return plain and not more.get("continue_final_message") and "chat_template" not in more

    def _token_variables(self) -> dict[str, str]:
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def _compiled(self) -> Template:
        if self._template is None:
            self._template = _environment().from_string(self.chat_template or "")
        return self._template


class TokenBytes(dict[int, bytes]):
    """The bytes of each token of a byte-level vocabulary, looked up once: joined, they are the text in UTF-8.

    It costs a sixth of the library's own decoding, which looks every token up by its letters each time.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, index: int) -> bytes:
        token = self._tokenizer.id_to_token(index)
        self[index] = found = b"" if token is None else bytes_of(token)
        return found


def is_byte_level(tokenizer: Tokenizer) -> bool:
    """Return True if tokens are written as byte-level letters with no other decoding step, as in GPT-2."""
    from tokenizers.decoders import ByteLevel

    return isinstance(tokenizer.decoder, ByteLevel)


def bytes_of(token: str) -> bytes:
    """Return the bytes that a token's letters encode; if any letter encodes no byte, the token's text in UTF-8."""
    letters = _letters()
    found = [letters.get(letter) for letter in token]
    return token.encode() if None in found else bytes(value for value in found if value is not None)


@functools.cache
def _letters() -> dict[str, int]:
    """Return the byte that each letter of a byte-level vocabulary stands for.

    A byte that is a visible letter in Latin-1 is written as that letter, the others as the letters from 256 on, in
    order (Radford et al., 2019, "Language Models are Unsupervised Multitask Learners": `bytes_to_unicode` of their
    code).
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + at): byte for at, byte in enumerate(hidden)}


def _environment() -> Any:
    """Return the same sandboxed Jinja environment in which transformers renders chat templates."""
    from jinja2.exceptions import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def strftime_now(pattern: str) -> str:
        return dt.datetime.now().strftime(pattern)  # noqa: DTZ005 - templates mean the local date

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def _find_chat_template(folder: Path, config: Mapping[str, Any]) -> Any:
    file = folder / "chat_template.jinja"
    return file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _token_text(token: dict[str, Any] | str | None) -> str | None:
    """Return a special token's text; files store it as text or as a description of an added token."""
    return str(token["content"]) if isinstance(token, dict) else token


class Codec:
    """A tokenizer as sessions use it, with its special tokens: finding those may take longer than a rollout, so make it
    once.

    A tokenizer that is neither ours nor transformers' needs `encode`, `decode`, `apply_chat_template` and
    `eos_token_id`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        special = set(getattr(tokenizer, "all_special_ids", ()))
        self._decoding: dict[str, Any] = {}
        if not isinstance(tokenizer, FastTokenizer):
            added = getattr(tokenizer, "added_tokens_decoder", {})
            special |= {index for index, token in added.items() if getattr(token, "special", False)}
            if hasattr(tokenizer, "clean_up_tokenization_spaces"):
                self._decoding = {"clean_up_tokenization_spaces": False}
        if tokenizer.eos_token_id is not None:
            special.add(tokenizer.eos_token_id)
        self.special_ids = frozenset(special)
        self._bos = getattr(tokenizer, "bos_token_id", None)

    def encode(self, text: str) -> list[int]:
        """Encode a whole text; the tokenizer adds its own special tokens, but a doubled start token is removed."""
        tokens: list[int] = self.tokenizer.encode(text)
        return tokens[1:] if self._bos is not None and tokens[:2] == [self._bos, self._bos] else tokens

    def encode_part(self, text: str) -> list[int]:
        """Encode a piece of a text or a rendered template; special tokens are only those written in it."""
        return list(self.tokenizer.encode(text, add_special_tokens=False)) if text else []

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False, **self._decoding))

    def visible(self, tokens: Sequence[int]) -> str:
        """Decode to the text that a client sees, without special tokens."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True, **self._decoding))

    def text_of(self, token: int) -> str:
        if token == self.tokenizer.eos_token_id and hasattr(self.tokenizer, "eos_token"):
            return str(self.tokenizer.eos_token)
        return self.decode([token])

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Any = None,
        options: Mapping[str, Any],
        add_generation_prompt: bool,
    ) -> str:
        """Render a chat with its template; an error names the message that the template fails at."""
        more = {"tools": tools, "add_generation_prompt": add_generation_prompt, **options}
        try:
            return self._render(messages, more)
        except Exception as error:
            index = self._first_failing(messages, more)
            raise RequestRefused(
                f"the chat template fails at messages[{index}] ({messages[index].get('role')}): "
                f"{type(error).__name__}: {error}",
                param=f"messages[{index}]",
            ) from error

    def _render(self, messages: Sequence[dict[str, Any]], more: Mapping[str, Any]) -> str:
        given = {name: value for name, value in more.items() if name != "tools" or value}
        return str(self.tokenizer.apply_chat_template(with_parsed_arguments(messages), tokenize=False, **given))

    def _first_failing(self, messages: Sequence[dict[str, Any]], more: Mapping[str, Any]) -> int:
        """Return the index of the last message of the shortest beginning of the chat that cannot be rendered."""
        for count in range(1, len(messages)):
            try:
                self._render(messages[:count], more)
            except Exception:  # noqa: BLE001 - templates fail in as many ways as Python does
                return count - 1
        return len(messages) - 1

"""The files of a model as a check reads them: configurations, tokenizer, and the shapes of the stored tensors.

Only the headers of weight files are read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from example_trainer.weight_protocol.checkpoint_files import StoredTensor, missing_bytes, read_header

if TYPE_CHECKING:
    from tokenizers import Tokenizer

INDEX_NAME = "model.safetensors.index.json"
OTHER_WEIGHTS = ("pytorch_model.bin", "pytorch_model.bin.index.json")
OTHER_TOKENIZERS = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")

EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens|wte|word_embeddings|embed_in)\.weight$")


@dataclass
class ModelFiles:
    """A model's directory; each part is read at its first use, and `faults` collects what cannot be read."""

    folder: Path
    hub_name: str | None = None
    """The Hugging Face id if this is its snapshot in the local cache: what is missing can then be downloaded."""
    faults: list[str] = field(default_factory=list)
    tokenizer_fault: str = ""

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The `config.json`; empty if it cannot be read."""
        return self._read_json("config.json")

    @cached_property
    def text_config(self) -> Mapping[str, Any]:
        """The part of the configuration that describes the language model."""
        nested = self.config.get("text_config")
        return {**self.config, **nested} if isinstance(nested, Mapping) else self.config

    @cached_property
    def generation_config(self) -> Mapping[str, Any]:
        return self._read_json("generation_config.json")

    @cached_property
    def tokenizer_config(self) -> Mapping[str, Any]:
        return self._read_json("tokenizer_config.json")

    @property
    def has_tokenizer(self) -> bool:
        return any((self.folder / name).is_file() for name in ("tokenizer.json", *OTHER_TOKENIZERS))

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of `tokenizer.json`; None if there is no such file or it cannot be read (`tokenizer_fault`)."""
        from tokenizers import Tokenizer

        path = self.folder / "tokenizer.json"
        if not path.is_file():
            return None
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001 - the library raises plain exceptions
            self.tokenizer_fault = str(error)
            return None

    @cached_property
    def vocabulary(self) -> Mapping[str, int]:
        """Token text to id, added tokens included; empty without a readable `tokenizer.json`."""
        return {} if self.tokenizer is None else self.tokenizer.get_vocab(with_added_tokens=True)

    @cached_property
    def chat_template(self) -> str | None:
        """The chat template, from its own file or the tokenizer's configuration; the default one of several."""
        file = self.folder / "chat_template.jinja"
        found = file.read_text(encoding="utf-8") if file.is_file() else self.tokenizer_config.get("chat_template")
        if isinstance(found, list):
            found = next((one.get("template") for one in found if one.get("name") == "default"), None)
        return found or self._read_json("chat_template.json").get("chat_template")

    def special_token(self, role: str) -> str | None:
        """Return the text of the token with a role such as `eos`; files hold it as text or as a description."""
        name = f"{role}_token"
        token = self.tokenizer_config.get(name) or self._read_json("special_tokens_map.json").get(name)
        return str(token["content"]) if isinstance(token, Mapping) else token

    @cached_property
    def weight_files(self) -> Sequence[Path]:
        """The safetensors files that should be there: those that the index names, or all that are found."""
        index = self.folder / INDEX_NAME
        if index.is_file():
            names = self._read_json(INDEX_NAME).get("weight_map", {}).values()
            return [self.folder / name for name in sorted(set(names))]
        return sorted(self.folder.glob("*.safetensors"))

    @property
    def has_other_weights(self) -> bool:
        """True if the weights are in another format than safetensors, which is not examined."""
        return any((self.folder / name).is_file() for name in OTHER_WEIGHTS)

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Every stored tensor by name; empty where there is no readable safetensors file."""
        found: dict[str, StoredTensor] = {}
        for path in filter(Path.is_file, self.weight_files):
            try:
                stored = read_header(path)
            except (OSError, ValueError) as error:
                cause = error.strerror if isinstance(error, OSError) else f"not a safetensors file: {error}"
                self.faults.append(f"{path.name}: {cause}")
                continue
            if missing := missing_bytes(path, stored):
                sizes = f"{missing[0]} of {missing[1]}"
                self.faults.append(f"{path.name}: it has {sizes} bytes, so a copy or download has not finished")
                continue
            found |= {tensor.name: tensor for tensor in stored}
        return found

    @property
    def embedding_rows(self) -> int | None:
        """The number of rows of the stored embedding, or else what the configuration says; None if neither is known."""
        stored = next((tensor.shape[0] for name, tensor in self.tensors.items() if EMBEDDING.search(name)), None)
        described = self.text_config.get("vocab_size")
        return stored if stored is not None else described if isinstance(described, int) else None

    def _read_json(self, name: str) -> Mapping[str, Any]:
        path = self.folder / name
        if not path.is_file():
            return {}
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            self.faults.append(f"{name}: {error}")
            return {}
        return content if isinstance(content, Mapping) else {}


def token_ids(value: object) -> frozenset[int]:
    """Return the ids of a configuration's field, which holds one, a list of them, or nothing."""
    given = value if isinstance(value, list) else [value]
    return frozenset(one for one in given if isinstance(one, int))

"""A tiny model on disk and a run file, into which tests put one fault each for `atropos doctor` to find."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from example_trainer.commands.doctor.examination import examine_run
from example_trainer.commands.doctor.findings import Finding
from example_trainer.processes.ports import free_port

ARITHMETIC = {
    "server": "arithmetic_server.py",
    "group_size": 8,
    "max_token_length": 64,
    "use_wandb": False,
}


@dataclass(slots=True)
class DoctorHarness:
    """A healthy run: `model` is a copy of its own, and `sections` are those of its run file."""

    folder: Path
    model: Path
    sections: dict[str, dict[str, Any]]

    @classmethod
    def make(cls, source: Path, folder: Path) -> DoctorHarness:
        """Copy the model into `folder`; no environment is started by this run, which saves its process."""
        model = folder / "model"
        shutil.copytree(source, model)
        trainer = {
            "model_name": str(model),
            "weight_bridge_mode": "shared_vllm",
            "dtype": "float32",
            "optimizer": "adamw",
            "training_steps": 2,
            "seq_len": 256,
            "max_model_len": 256,
            "run_dir": str(folder / "run"),
        }
        sections: dict[str, dict[str, Any]] = {"trainer": trainer, "vllm": {"port": free_port()}}
        return cls(folder, model, sections)

    def chat(self, **env: Any) -> None:
        """Let the run start an environment that chats."""
        self.sections["env"] = {**ARITHMETIC, **env}
        self.sections["openai"] = {"server_type": "vllm"}

    def write_environment(self, source: str) -> None:
        """Let the run start an environment with this source."""
        path = self.folder / "own_env.py"
        path.write_text(source, encoding="utf-8")
        self.sections["env"] = {"server": str(path), "use_wandb": False, "max_token_length": 64}
        self.sections["openai"] = {"server_type": "vllm"}

    def edit(self, name: str, **changes: Any) -> None:
        """Change fields of one of the model's JSON files; None removes a field."""
        path = self.model / name
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) | changes
        path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))

    def tensors(self) -> Mapping[str, Any]:
        from safetensors.torch import load_file

        return load_file(self.model / "model.safetensors")

    def store(self, tensors: Mapping[str, Any]) -> None:
        from safetensors.torch import save_file

        save_file(dict(tensors), self.model / "model.safetensors", metadata={"format": "pt"})

    @property
    def run_file(self) -> Path:
        path = self.folder / "run.yaml"
        path.write_text(yaml.safe_dump(self.sections), encoding="utf-8")
        return path

    def find(self, *flags: str) -> list[Finding]:
        return examine_run(["--config", str(self.run_file), *flags])

    def find_one(self, subject: str, *words: str, verdict: str = "error", flags: tuple[str, ...] = ()) -> Finding:
        """Return the only finding, which has this subject, the words in its text, and advice."""
        found = self.find(*flags)
        assert [one.subject for one in found] == [subject], found
        assert found[0].verdict == verdict
        for word in words:
            assert word in found[0].text
        assert found[0].advice
        return found[0]

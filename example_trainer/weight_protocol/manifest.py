"""The manifest `vllm_bridge_config.json`, in which an inference server tells a trainer where its weights are stored.

The server writes it once its tensors are exported; the trainer builds a model of views into them from it. The manifest
holds a token that allows to change the weights, so only its owner can read it, and a reader checks that. A server
without a manifest puts its bridge token into a file of the same kind, whose path `/bridge/info` returns, so that a
trainer of the same user needs no further setting.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from atropos_api.common.files import write_private
from example_trainer.errors import TrainerError
from example_trainer.weight_protocol.shm_header import ParamMapping, Storage, TensorMap

MANIFEST_NAME = "vllm_bridge_config.json"


class ManifestMissing(TrainerError):
    """There is no manifest in any of the places where one may lie."""


class ManifestStale(TrainerError):
    """The manifest was written by a server that is gone."""


class ManifestUnsafe(TrainerError):
    """Somebody else could have written or read the manifest."""


class BridgeManifest(BaseModel):
    """Everything a trainer on this machine needs to attach to the server's weights."""

    model_config = ConfigDict(protected_namespaces=())

    model: str
    param_mappings: dict[str, ParamMapping]
    boot_id: str
    pid: int
    pid_start_time: float
    url: str
    bridge_token: str
    device: str
    dtype: str
    header_path: str
    storages: list[Storage]
    tensors: dict[str, TensorMap]
    tied: dict[str, str]
    unmapped: list[str]
    vllm_version: str
    created_at: float


def write_manifest(manifest: BridgeManifest, directory: Path) -> Path:
    """Put the manifest into `directory`, whole or not at all, readable by this user alone."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / MANIFEST_NAME
    write_private(path, manifest.model_dump_json(indent=1))
    return path


def remove_manifest(directory: Path, boot_id: str) -> None:
    """At a server's exit: take its manifest away, but not that of a server started since."""
    path = directory / MANIFEST_NAME
    try:
        ours = json.loads(path.read_bytes()).get("boot_id") == boot_id
    except (OSError, ValueError):
        return
    if ours:
        path.unlink(missing_ok=True)


def load_manifest(path: Path) -> BridgeManifest:
    """Read a manifest after checking that only this user could have written it and that its server lives."""
    manifest_path = path / MANIFEST_NAME if path.is_dir() else path
    _check_owner(manifest_path)
    try:
        manifest = BridgeManifest.model_validate_json(manifest_path.read_bytes())
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise ManifestStale(f"{manifest_path} is no manifest of this release ({where}: {problem['msg']})") from error
    if process_start_time(manifest.pid) != manifest.pid_start_time:
        raise ManifestStale(
            f"{manifest_path} is of a vLLM server (process {manifest.pid}) that is gone; start the server again"
        )
    return manifest


def find_manifest(flag: str | None, environ: Mapping[str, str], server_url: str | None) -> Path:
    """The manifest's path: the flag (unless `auto`), then `$LOGDIR`, then what the server says, then here."""
    if flag and flag != "auto":
        given = Path(flag)
        candidate = given / MANIFEST_NAME if given.is_dir() else given
        if candidate.is_file():
            return candidate
        raise ManifestMissing(_missing([str(candidate)]))
    places: list[str] = []
    if environ.get("LOGDIR"):
        places.append(str(Path(environ["LOGDIR"]) / MANIFEST_NAME))
    told, place = _ask_server(server_url)
    if place:
        places.append(told or place)
    places.append(str(Path.cwd() / MANIFEST_NAME))
    for found in places:
        if Path(found).is_file():
            return Path(found)
    if place and not told:
        places[places.index(place)] = f"{place} (no answer with a manifest)"
    raise ManifestMissing(_missing(places))


def process_start_time(pid: int) -> float | None:
    """Start of the process in clock ticks since boot, which with the pid names it for good; None if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return None
    return float(stat.rpartition(")")[2].split()[19])


def _check_owner(path: Path) -> None:
    try:
        status = path.stat()
    except FileNotFoundError:
        raise ManifestMissing(_missing([str(path)])) from None
    if status.st_uid != os.getuid():
        raise ManifestUnsafe(f"{path} belongs to user {status.st_uid}, not to you ({os.getuid()}); it is not read")
    if status.st_mode & 0o077:
        raise ManifestUnsafe(
            f"{path} has mode {status.st_mode & 0o777:o}: others may read or write it; chmod 600 {path}"
        )


def _ask_server(server_url: str | None) -> tuple[str | None, str | None]:
    """Return the path of the manifest that `/bridge/info` names, and the address that was asked."""
    if not server_url:
        return None, None
    address = f"{server_url.rstrip('/')}/bridge/info"
    try:
        with urllib.request.urlopen(address, timeout=5) as answer:  # noqa: S310  the user's own server
            told = json.load(answer).get("manifest_path")
    except (OSError, ValueError, urllib.error.URLError):
        return None, address
    return (str(told) if told else None), address


def _missing(places: list[str]) -> str:
    return (
        f"Parameter mapping file not found; looked at {', '.join(places)}. Start the vLLM server with --share-weights "
        "(or VLLM_ENABLE_SHARED_WEIGHTS=1), or name the file with --vllm-config-path"
    )


TOKEN_NAME = "vllm_bridge_token"  # noqa: S105  a file's name


def write_token(directory: Path, token: str) -> Path:
    """Put the token into `directory`, whole or not at all, readable by this user alone."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / TOKEN_NAME
    write_private(path, token)
    return path


def read_token(path: str) -> str | None:
    """The token, or None where there is none to be read; refuses a file that another user may have written."""
    try:
        status = Path(path).stat()
        token = Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return None
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ManifestUnsafe(f"{path} is not yours alone (mode {status.st_mode & 0o777:o}); chmod 600 it or remove it")
    return token


def remove_token(directory: Path, token: str) -> None:
    """At a server's exit: take its token away, but not that of a server started since."""
    path = directory / TOKEN_NAME
    try:
        if path.read_text(encoding="utf-8") == token:
            path.unlink()
    except OSError:
        return

"""The manifest `vllm_bridge_config.json`, in which an inference server tells a trainer where its weights are stored.

The server writes it once its tensors are exported; the trainer builds a model of views into them from it. The manifest
holds a token that allows changing the weights, so only its owner can read it, and a reader checks that. A server
without a manifest puts its bridge token into a file of the same kind, whose path `/bridge/info` returns, so that a
trainer of the same user needs no further setting.
"""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, ValidationError

from atropos_api.common.files import read_json_object, write_private
from atropos_api.common.secrets import TokenSource
from example_trainer.errors import TrainerError
from example_trainer.weight_protocol.shm_header import ParamMapping, Storage, TensorMap

MANIFEST_NAME = "vllm_bridge_config.json"
_ENDED_STATES = frozenset({"Z", "X"})
"""States in `/proc/PID/stat` of a process that has ended and that its parent has not waited for."""


class ManifestMissing(TrainerError):
    """No manifest was found in any of the places searched."""


class ManifestStale(TrainerError):
    """The manifest was written by a server that has exited."""


class ManifestUnsafe(TrainerError):
    """Another user could have written or read the manifest."""


class BridgeManifest(BaseModel):
    """The manifest: it holds everything that a trainer on this machine needs to attach to the server's weights."""

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
    """Write the manifest into `directory` atomically, readable by this user only."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / MANIFEST_NAME
    write_private(path, manifest.model_dump_json(indent=1))
    return path


def remove_manifest(directory: Path, boot_id: str) -> None:
    """Remove the manifest of a server that exits, but not that of a server started since."""
    path = directory / MANIFEST_NAME
    if read_json_object(path).get("boot_id") == boot_id:
        path.unlink(missing_ok=True)


def load_manifest(path: Path) -> BridgeManifest:
    """Read a manifest after checking that only this user could have written it and that its server still runs."""
    manifest_path = path / MANIFEST_NAME if path.is_dir() else path
    _check_owner(manifest_path)
    try:
        manifest = BridgeManifest.model_validate_json(manifest_path.read_bytes())
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise ManifestStale(f"{manifest_path} is not a manifest of this release ({where}: {problem['msg']})") from error
    if process_start_time(manifest.pid) != manifest.pid_start_time:
        raise ManifestStale(
            f"{manifest_path} is of a vLLM server (process {manifest.pid}) that has exited; start the server again"
        )
    return manifest


def find_manifest(flag: str | None, environ: Mapping[str, str], server_url: str | None) -> Path:
    """Return the manifest's path: from the flag unless `auto`, else `$LOGDIR`, the server or the current directory.

    If there are several, the one of the server at this address precedes those that a killed server, or another, has
    left.
    """
    if flag and flag != "auto":
        given = Path(flag)
        candidate = given / MANIFEST_NAME if given.is_dir() else given
        if candidate.is_file():
            return candidate
        raise ManifestMissing(_missing([str(candidate)]))
    places: list[str] = []
    if environ.get("LOGDIR"):
        places.append(str(Path(environ["LOGDIR"]) / MANIFEST_NAME))
    named, place = _query_server(server_url)
    if place:
        places.append(named or place)
    places.append(str(Path.cwd() / MANIFEST_NAME))
    found = [Path(each) for each in places if _is_there(each)]
    if found:
        return next((path for path in found if len(found) > 1 and _is_of(path, server_url)), found[0])
    if place and not named:
        places[places.index(place)] = f"{place} (no answer with a manifest)"
    raise ManifestMissing(_missing(places))


def _is_there(path: str) -> bool:
    try:
        return Path(path).is_file()
    except PermissionError:
        raise ManifestUnsafe(
            f"{path} is in a directory that you may not read, so the server is another user's; start one of your own, "
            "and give both it and the trainer another port (--port, --vllm-port)"
        ) from None


def _is_of(path: Path, server_url: str | None) -> bool:
    try:
        return urlsplit(load_manifest(path).url).port == urlsplit(server_url or "").port
    except (ManifestMissing, ManifestStale, ManifestUnsafe):  # one that is chosen in the end is checked again
        return False


def process_start_time(pid: int) -> float | None:
    """Return a process's start in clock ticks since boot, unique together with its pid; None if it does not run."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in _ENDED_STATES else float(fields[18])


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


def _query_server(server_url: str | None) -> tuple[str | None, str | None]:
    """Return the path of the manifest that `/bridge/info` names, and the address that was asked."""
    if not server_url:
        return None, None
    address = f"{server_url.rstrip('/')}/bridge/info"
    without_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # as in all other calls to a server
    try:
        with without_proxy.open(address, timeout=5) as answer:
            info = json.load(answer)
    except (OSError, ValueError, HTTPException):  # no answer, or one of another program
        return None, address
    named = info.get("manifest_path") if isinstance(info, dict) else None
    return (str(named) if named else None), address


def _missing(places: list[str]) -> str:
    return (
        f"Parameter mapping file not found; looked at {', '.join(places)}. Start the vLLM server with --share-weights "
        "(or VLLM_ENABLE_SHARED_WEIGHTS=1), or name the file with --vllm-config-path"
    )


TOKEN_NAME = "vllm_bridge_token"  # noqa: S105  the beginning of a file's name
TOKEN_VARIABLE = "ATROPOS_BRIDGE_TOKEN"  # noqa: S105  a variable's name


def given_token(token: str | None, environ: Mapping[str, str]) -> str | None:
    """Return the bridge token that is given, or else that of the environment; None if there is neither.

    Raises `TokenUnreadable` for one that no HTTP header can carry: a secret that was made from a file often ends with a
    line break, and the server that is called with it seems not to answer.
    """
    if token:
        return TokenSource(token, flag="--bridge-token-file").value
    return TokenSource(environ.get(TOKEN_VARIABLE) or None, flag=f"${TOKEN_VARIABLE}-file").value


def write_token(directory: Path, token: str, *, port: int) -> Path:
    """Write the token into `directory` atomically, readable by this user only; the file is named after the port."""
    directory.mkdir(parents=True, exist_ok=True)
    path = _token_file(directory, port)
    write_private(path, f"{token}\n")
    return path


def read_token(path: str, url: str) -> str | None:
    """Return the token of the server at `url`, which names the file; None if there is no such token in it.

    The token is sent to that address, and any process may answer there. So no other file is read, and none of a server
    at another port. A file that another user may have written is refused.
    """
    place = Path(path)
    if place != _token_file(place.parent, urlsplit(url).port or 80):
        return None
    try:
        status = place.stat()
        token = place.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ManifestUnsafe(
            f"{path} is accessible to other users (mode {status.st_mode & 0o777:o}); chmod 600 it or remove it"
        )
    return token


def remove_token(directory: Path, token: str, *, port: int) -> None:
    """Remove the token of a server that exits, but not that of a server started since."""
    path = _token_file(directory, port)
    try:
        if path.read_text(encoding="utf-8").strip() == token:
            path.unlink()
    except OSError:
        return


def _token_file(directory: Path, port: int) -> Path:
    """Return the file of the server at this port: two servers may be given one directory."""
    return directory / f"{TOKEN_NAME}-{port}"

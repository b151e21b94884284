"""Attachment to a running inference server: find its manifest, check that it fits, map its memory.

Each step may have to wait, because processes are started in any order. A problem that waiting cannot solve is refused
at once with the reason and the flag to change.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import torch

from example_trainer.errors import CannotShare, ProofFailed, ServerRefused, ServerUnavailable
from example_trainer.modeling.loading import SERVED_DTYPES, name_of
from example_trainer.modeling.policy import Policy
from example_trainer.weight_protocol.checksums import combined_checksum
from example_trainer.weight_protocol.client import (
    NotYet,
    ServerClient,
    ServerInfo,
    ShouldStop,
    check_host,
    never,
    wait_for,
)
from example_trainer.weight_protocol.manifest import (
    BridgeManifest,
    ManifestMissing,
    ManifestStale,
    find_manifest,
    load_manifest,
)
from example_trainer.weight_protocol.segment import make_segment
from example_trainer.weight_protocol.shm_header import NO_VERSION, SegmentHeader
from example_trainer.weights.tensor_map import map_parameters

logger = logging.getLogger(__name__)


class Attachment:
    """The mapped tensors of one server process, valid as long as that process runs."""

    def __init__(self, manifest: BridgeManifest, info: ServerInfo, client: ServerClient) -> None:
        self.manifest = manifest
        self.info = info
        self.client = client
        self.segment = make_segment(manifest.device)
        self.header = SegmentHeader(Path(manifest.header_path))
        self.storages = {storage.id: self.segment.attach(storage.handle) for storage in manifest.storages}
        self.generated_tokens_total = 0
        self._proven_checksum: str | None = None

    @property
    def boot_id(self) -> str:
        return self.manifest.boot_id

    @property
    def device(self) -> torch.device:
        return next(iter(self.storages.values())).device

    def bind(self, policy: Policy, *, forwards_from_masters: bool) -> None:
        """Map every parameter of the policy onto these tensors."""
        views = map_parameters(policy.module, self.manifest, self.storages)
        if not policy.served:
            _compare_with_loaded(policy, views, untouched=self.header.state().version == NO_VERSION)
        policy.attach(views, forwards_from_masters=forwards_from_masters)
        logger.info(
            "attached to %d tensors (%.1f MB) of the vLLM server at %s",
            len(views),
            sum(view.numel() * view.element_size() for view in views.values()) / 1e6,
            self.client.url,
        )

    def checksum(self) -> str:
        """Return a checksum over vLLM's parameters as mapped here; the server's differs if it reads other memory."""
        self.segment.synchronise()
        homes = {json.dumps(storage.handle, sort_keys=True): storage.id for storage in self.manifest.storages}
        views: dict[str, torch.Tensor] = {}
        for name, mapping in self.manifest.param_mappings.items():
            handle = dict(mapping.ipc_handle)
            offset, stride = handle.pop("offset"), handle.pop("stride")
            storage = self.storages[homes[json.dumps(handle, sort_keys=True)]]
            view = torch.empty(0, dtype=getattr(torch, mapping.dtype), device=storage.device)
            views[name] = view.set_(storage, offset, mapping.shape, stride)
        return combined_checksum(views)

    def check_memory(self) -> None:
        """Raise `ProofFailed` unless the server computes with the same bytes that this process has mapped."""
        ours, theirs = self.checksum(), self.client.checksum()
        self._proven_checksum = ours
        if ours != theirs:
            raise ProofFailed(
                f"the tensors mapped here have checksum {ours}, those the server reads {theirs}: it does not serve "
                "what is written here; start the server again"
            )

    def check_untouched(self) -> None:
        """Raise `ProofFailed` if the tensors have changed since `check_memory`, that is, outside of any publish.

        It runs before the next publish begins; tokens sampled after such a change belong to no version.
        """
        expected, self._proven_checksum = self._proven_checksum, None
        if expected is not None and self.checksum() != expected:
            raise ProofFailed(
                f"the served weights of version {self.header.state().version} have changed since they were published: "
                "something writes them outside of a publish; tokens sampled meanwhile cannot be trained on"
            )

    def close(self) -> None:
        self.client.close()
        self.header.close()


def attach(
    server_url: str,
    *,
    manifest_flag: str,
    port_is_given: bool,
    token: str | None,
    timeout_seconds: float,
    should_stop: ShouldStop = never,
) -> Attachment:
    """Wait until a server shares its weights and answers, then map them.

    Only a manifest that is named may be of a server at another port, and only if the port is not given.
    """
    check_host(server_url, "--vllm-host")
    has_any_port = manifest_flag != "auto" and not port_is_given
    return wait_for(
        lambda: _try_attach(server_url, manifest_flag, token, has_any_port=has_any_port),
        what=f"the vLLM server at {server_url}",
        timeout_seconds=timeout_seconds,
        should_stop=should_stop,
    )


def _try_attach(server_url: str, manifest_flag: str, token: str | None, *, has_any_port: bool) -> Attachment:
    try:
        path = find_manifest(manifest_flag, os.environ, server_url)
        manifest = load_manifest(path)
    except (ManifestMissing, ManifestStale) as error:
        raise NotYet("; ".join([str(error), *_refuse_unreachable(server_url)])) from error
    if not has_any_port and urlsplit(manifest.url).port != urlsplit(server_url).port:
        raise NotYet(f"{path} belongs to the server at {manifest.url}, not to the one at {server_url} (--vllm-port)")
    client = ServerClient(manifest.url, token or manifest.bridge_token)
    try:
        info = client.info()
        _check_boot(path, manifest, info)
        _refuse_unfit(manifest, info)
        return Attachment(manifest, info, client)
    except (ServerUnavailable, ServerRefused) as error:
        client.close()
        raise NotYet(str(error)) from error
    except BaseException:
        client.close()
        raise


def _refuse_unreachable(server_url: str) -> list[str]:
    """Raise `CannotShare` if the server runs without sharing, or on another host: waiting is useless then.

    Return the reason why it does not answer, if it does not.
    """
    try:
        with closing(ServerClient(server_url)) as client:
            info = client.info()
    except (ServerUnavailable, ServerRefused) as error:
        return [str(error)]
    if not info.sharing:
        remedy = info.how_to_share or "start it with --share-weights"
        raise CannotShare(f"the vLLM server at {server_url} does not share its weights: {remedy}")
    own = socket.gethostname()
    if info.hostname not in (None, own) and info.manifest_path and not Path(info.manifest_path).exists():
        raise CannotShare(
            f"the vLLM server at {server_url} runs on {info.hostname} and the trainer on {own}, which share no memory: "
            "add --num-inference-nodes 1 or --registered-servers to send it the weights, or use "
            "--weight-bridge-mode lora_only"
        )
    return []


def _check_boot(path: Path, manifest: BridgeManifest, info: ServerInfo) -> None:
    if info.boot_id != manifest.boot_id:
        raise NotYet(f"{path} belongs to another start (boot {manifest.boot_id}) than the server (boot {info.boot_id})")


def _refuse_unfit(manifest: BridgeManifest, info: ServerInfo) -> None:
    if info.lora:
        raise CannotShare(
            f"the vLLM server at {manifest.url} runs with --enable-lora, which shared_vllm does not train; "
            "start it without, or use --weight-bridge-mode lora_restart"
        )
    if manifest.dtype.removeprefix("torch.") not in map(name_of, SERVED_DTYPES):
        raise CannotShare(
            f"the vLLM server at {manifest.url} serves {manifest.dtype}, which cannot be trained; "
            "start it with --dtype bfloat16, or float32 on a CPU"
        )


def _compare_with_loaded(policy: Policy, views: dict[str, torch.Tensor], *, untouched: bool) -> None:
    """Compare the server's tensors bit by bit with the checkpoint just loaded: frozen ones must be equal."""
    loaded = {policy.parameter_names[name]: parameter for name, parameter in policy.module.named_parameters()}
    different = [name for name, view in views.items() if not _same(loaded[name], view)]
    frozen = [name for name in different if name not in policy.masters]
    if frozen:
        raise CannotShare(
            f"{len(frozen)} tensors that are not trained differ between {policy.tokenizer_name} and the server "
            f"({', '.join(frozen[:3])}, ...); start both with the same model"
        )
    if different and untouched:
        logger.warning(
            "the server was started with other weights than %s (%d of %d tensors differ, %s first); "
            "the first publish replaces them",
            policy.tokenizer_name,
            len(different),
            len(views),
            different[0],
        )


@torch.no_grad()
def _same(loaded: torch.Tensor, view: torch.Tensor) -> bool:
    return torch.equal(loaded.to(device=view.device, dtype=view.dtype), view)

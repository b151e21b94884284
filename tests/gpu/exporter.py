"""A stand-in for the inference server on a GPU: owns fused weights, has captured a CUDA graph, exports them.

Reads one command a line from standard input and answers each with one JSON line. On a CPU it computes without a graph.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import sys
import time
from dataclasses import asdict

import torch

from example_trainer.weight_protocol.segment import make_segment

ROWS = 8


class Exporter:
    """Layers of fused qkv and gate_up matrices in bf16, and one forward over them as a CUDA graph."""

    def __init__(self, device: str, layers: int, hidden: int, inner: int) -> None:
        torch.manual_seed(0)
        self.device = torch.device(device)
        scale = hidden**-0.5
        self.weights: dict[str, torch.Tensor] = {}
        for layer in range(layers):
            for name, shape in {
                "qkv": (3 * hidden, hidden),
                "gate_up": (2 * inner, hidden),
                "down": (hidden, inner),
            }.items():
                weight = torch.randn(shape, device=device, dtype=torch.bfloat16) * scale
                self.weights[f"layers.{layer}.{name}"] = weight
        self.layers = layers
        self.input = torch.randn(ROWS, hidden, device=device, dtype=torch.bfloat16)
        self.graph = self._capture() if self.device.type == "cuda" else None
        self.segment = make_segment(device, secrets.token_hex(8))

    def _capture(self) -> torch.cuda.CUDAGraph:
        graph, warm_up = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        warm_up.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm_up):
            self.forward()
        torch.cuda.current_stream().wait_stream(warm_up)
        with torch.cuda.graph(graph):
            self.output = self.forward()
        return graph

    def forward(self) -> torch.Tensor:
        states = self.input
        for layer in range(self.layers):
            query, key, value = (states @ self.weights[f"layers.{layer}.qkv"].t()).chunk(3, dim=-1)
            states = states + query * key.sigmoid() + value
            gate, up = (states @ self.weights[f"layers.{layer}.gate_up"].t()).chunk(2, dim=-1)
            states = states + (gate.sigmoid() * up) @ self.weights[f"layers.{layer}.down"].t()
            states = states / states.float().norm(dim=-1, keepdim=True).to(states.dtype)
        return states

    def replay(self) -> None:
        if self.graph is None:
            self.output = self.forward()
            return
        self.graph.replay()
        torch.cuda.synchronize()

    def replays(self, seconds: float) -> int:
        """Replay for some seconds, one token after another as in decoding, and return the count."""
        count, end = 0, time.perf_counter() + seconds
        while time.perf_counter() < end:
            self.replay()
            count += 1
        return count

    def answer(self, command: str) -> dict[str, object]:
        if command == "export":
            exported = self.segment.export(self.weights)
            return {
                "storages": [asdict(storage) for storage in exported.storages],
                "placements": {
                    name: [place.storage, place.offset, list(place.shape), list(place.stride)]
                    for name, place in exported.placements.items()
                },
            }
        if command == "replay":
            self.replay()
            return {"replayed": digest(self.output), "eager": digest(self.forward())}
        if command.startswith("replays "):
            return {"replays": self.replays(float(command.split()[1]))}
        if command == "checksum":
            return {name: digest(weight) for name, weight in self.weights.items()}
        if command == "memory":
            return {"nbytes": torch.cuda.memory_allocated()}
        return {"nbytes": sum(weight.nbytes for weight in self.weights.values())}


def digest(tensor: torch.Tensor) -> str:
    return hashlib.blake2b(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes()).hexdigest()


def main() -> None:
    exporter = Exporter(sys.argv[1], *map(int, sys.argv[2:5]))
    try:
        for line in sys.stdin:
            sys.stdout.write(json.dumps(exporter.answer(line.strip())) + "\n")
            sys.stdout.flush()
    finally:
        exporter.segment.close()


if __name__ == "__main__":
    main()

"""Servers that only speak OpenAI's protocol: good for evaluation and judging, not for training."""

from __future__ import annotations

from environments.sdk.inference.server import HttpServer, refuse_for_training

__all__ = ["OpenAIServer", "refuse_for_training"]


class OpenAIServer(HttpServer):
    """One server of the chat completions API; it gives text, so `generate` refuses."""

"""Managed sessions: chat with a model and keep the exact tokens, masks, logprobs and policy versions."""

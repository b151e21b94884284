"""Managed sessions: chat with a model and keep the exact tokens, masks, logprobs and policy versions.

In reading order: `session` (the calls), `turns` (one call), `prompt_tokens` (which sequence a call continues),
`tokens_and_masks`, `messages`; over HTTP `openai_proxy`, `openai_routes`, `openai_requests`, `openai_types`,
`served`; `openai_client` is a session with the calls of OpenAI's client. It may import `sdk.inference`,
`sdk.tokenizer`, `sdk.tools`, `sdk.config`, `sdk.errors` and the broker's `wire`.
"""

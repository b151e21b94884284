"""Access to inference servers: tokens in; tokens, logprobs and policy versions out.

In reading order: `pool` (several servers as one), `registered` (those that come and go at the broker), `server` (what
all kinds share), `vllm` and `other_servers` (the kinds), `sampling` (requests and samples), `retries` (one server:
repeated requests, outages), `http_transport`. It may import `sdk.config`, `sdk.errors` and the broker's `wire` and
client.
"""

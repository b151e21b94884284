"""How environments reach inference servers: tokens in, tokens, logprobs and policy versions out."""

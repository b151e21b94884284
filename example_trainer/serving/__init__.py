"""What runs inside the inference server: vLLM's own application with token-exact generation and weight publishing."""

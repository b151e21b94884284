"""How trained weights reach the inference server."""

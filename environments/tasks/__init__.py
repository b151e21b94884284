"""Problem generators and graders: pure Python, importable without a server, a model or a download."""

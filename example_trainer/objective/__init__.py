"""The objective as pure torch: advantages, packing, logprobs, losses and their metrics.

Nothing here knows of HTTP, processes, configuration files or weight bridges; every function takes
tensors (or plain lists) and gives tensors back, so that each can be tested by its formula.
"""

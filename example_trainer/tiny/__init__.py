"""Makes the tiny base model on this machine, so that the demo and the tests need no download.

`ensure_base` is the entry point: it answers the cached model or makes it in about a minute. The model is a
394k-parameter Qwen2 that can work out small arithmetic but usually prefers to guess; training has to bring the skill
out. Importing this package loads no torch.
"""

from example_trainer.tiny.cache import ensure_base

__all__ = ["ensure_base"]

"""Finds or makes the tiny base models, so that the demo and the tests need no download.

`ensure_base` is the entry point: it returns a model that is here, or makes it in about a minute. The model is a
394k-parameter Qwen2 that can work out small arithmetic but usually prefers to guess; training has to bring the skill
out. The demo's own (`bases/chain-0`) comes with the package; after a change to its recipe it is made again by
`python -m example_trainer.tiny.make chain 0 example_trainer/tiny/bases/chain-0`, which a test asks for. Importing this
package loads no torch.
"""

from example_trainer.tiny.cache import ensure_base

__all__ = ["ensure_base"]

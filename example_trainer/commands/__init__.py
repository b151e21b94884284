"""The verbs of `atropos`, and the generator of the reference pages.

`main` finds the verb; `doctor/`, `memory`, `render`, `replay`, `report`, `top` and `view` are one each, `scaling` has
`scale` and `drain`; `generate_docs` prints reference pages. They may import all of the trainer and the launcher, and
`view` the broker's module of that name.
"""

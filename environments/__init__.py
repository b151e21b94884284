"""The package holds the environment servers and the SDK that they are written with.

Each `*_server.py` is one runnable environment. `sdk` has the classes that they subclass, `tasks` their questions,
`rewards` the functions that score answers, and `sandbox` runs a model's code. `export` turns collected groups into data
sets and pages, `compat` runs environments written for Atropos, `scaffold` and `commands` are the verbs of `atropos
env`, and `facts` reports facts about an environment without starting it.
"""

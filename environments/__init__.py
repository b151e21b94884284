"""The package holds the environment servers and the SDK that they are written with.

Each `*_server.py` is one runnable environment; `sdk` is what they subclass, `tasks` their questions, `rewards`
their scores, `sandbox` where a model's code runs. `export` turns collected groups into data sets and pages,
`compat` runs environments written for Atropos, `scaffold` and `commands` are the verbs of `atropos env`; `facts` says
of an environment what can be known before it starts.
"""

"""Runs environments that were written for Atropos, unmodified and without `atroposlib`.

    atropos-compat path/to/their_env.py serve --env.tokenizer_name MODEL_FOLDER

`finder` answers their imports, in this process alone; `names` lists what stands behind each; `runner` runs the file.
"""

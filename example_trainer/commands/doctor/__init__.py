"""The verb `atropos doctor`: it examines this machine, or what a run file asks of it, before anything is started.

`command` reads the command line, and `machine` examines the machine alone. For a run file, `examination` runs every
check over the `requested_run`: `model_checks` (files, family, layers, lengths, head), `tokenizer_checks` (tokenizer,
chat template, end of turn), `sampling_checks` (environments, logprobs, temperature, the server's options) and
`resource_checks` (ports, disk, GPU, packages). `model_files` reads a model's directory, and `findings` is what a check
reports. Nothing here imports torch or opens a connection.
"""

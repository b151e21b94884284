"""Placement: it decides on which machine each program of a run is started, and nothing else.

In reading order: `roles` (the protocol, what is asked for, and `LocalPlacement`: everything here), `settings` (the run
file's section), `choice` (what a launch asks for), `seated_supervisor` (a supervisor whose programs run in seats),
`seat` (the code inside one), `ray_placement` (placement groups and actors; the only module that imports ray),
`render` (files by which Slurm and Kubernetes start Ray), `testing`. A run's state is at the broker and in
checkpoints, never here. It may import what the launcher may, and of the launcher `supervisor`, `programs` and
what is below them.
"""

"""One launch: from a run file to programs, and from their end to a summary.

In reading order: `run_file` with `run_file_sections`, `section_flags`, `environment_settings` and `teacher` (what is
asked for), `endpoints` and `base_model` (what must be settled first), `plan` over `programs` with `fleet_plan` (which
programs with which settings), `environment_check`, `placement/` (where each runs), `preflight` (what is refused at
once), `launch` with `stop_request` (the course of it), `supervisor` (the processes), `restarts`, `fleet` (inference
servers that come and go), `progress` with `views`, `run_dir` with `run_lock`, `summary` with `totals`, `evaluations`
and `data_use`, `run_report` with `svg_chart` and `comparison`. It may import `config`, `memory`, `options`,
`monitoring`, `processes`, `weight_protocol`, the broker's client and page, its options, to refuse what it would refuse,
and of the environments their names, tasks and files of groups; never weights or model.
"""

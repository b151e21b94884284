"""Starting, finding and ending programs on this machine, and what they leave behind.

In reading order: `child` (one program, or one server), `program_log`, `tree` (its descendants), `die_with_parent` (a
program that ends with its parent), `ports` (ports and listening sockets), `cleanup`, `scratch` (temporary directories),
`gpus` (their names and free memory). It may import `errors` and the broker's `common`.
"""

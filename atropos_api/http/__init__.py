"""The parts that HTTP handlers share; no route is defined here.

In reading order: `context` (what one app shares), `auth`, `request`, `content_negotiation`, `streaming` (answers in
pieces, long polls), `problems` (errors as answers), `connection_limits`. It may import `broker`, `store`, `wire`,
`config`, `errors` and `common`.
"""

"""The live page: what a browser is sent, and the documents that it reads.

In reading order: `documents` (the documents as types), `series` (metrics as columns, reduced to what a picture shows),
`rollouts` (groups and tokens as documents), `files` (what the browser is sent). It may import `wire`, `errors` and
`common`.

`static` has the page itself: `index.html`, styles, and modules that a browser loads as they are; begin with `main.js`,
then `flow.js`, `curves.js`, `rollouts.js`, `group.js` and `parts.js` for the views, `live.js` for what is new. `vendor`
in it has uPlot, which draws curves.
"""

"""`python -m environments.compat FILE VERB [flags]`."""

from environments.compat.runner import main

main()

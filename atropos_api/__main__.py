"""`python -m atropos_api` is `run-api`."""

from atropos_api.cli import main

if __name__ == "__main__":
    main()

"""`python -m example_trainer` trains, as `python -m example_trainer.grpo` does."""

from example_trainer.cli import main

if __name__ == "__main__":
    main()

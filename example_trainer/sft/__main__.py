"""`python -m example_trainer.sft`: the same as `atropos-sft`."""

from example_trainer.sft.cli import main

if __name__ == "__main__":
    main()

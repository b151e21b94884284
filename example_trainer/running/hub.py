"""Whether a model that is named, and not a directory, can be had: asked once, before four programs ask for it."""

from __future__ import annotations

import os

from example_trainer.errors import ModelNotFound

ANSWER_SECONDS = 5.0


def require_on_hub(name: str) -> None:
    """Pass if `name` is in the local cache or the hub knows it; else `ModelNotFound` says which of the two failed."""
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return
    except HFValidationError as error:
        raise ModelNotFound(f"--model-name {name}: not a directory and not a Hugging Face id: {error}") from None
    if constants.HF_HUB_OFFLINE:
        raise ModelNotFound(
            f"--model-name {name}: not in the local Hugging Face cache, and HF_HUB_OFFLINE forbids to download it"
        )
    _ask_hub(name)


def _ask_hub(name: str) -> None:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    try:
        HfApi().model_info(name, timeout=ANSWER_SECONDS)
    except HFValidationError as error:
        raise ModelNotFound(f"--model-name {name}: not a directory and not a Hugging Face id: {error}") from None
    except RepositoryNotFoundError:
        raise ModelNotFound(
            f"--model-name {name}: no such model on {_endpoint()}, or a private one (then set HF_TOKEN)"
        ) from None
    except HfHubHTTPError:
        return  # it exists; whether these credentials may have it is told by the program that downloads it
    except Exception as error:  # noqa: BLE001 - the hub's client has changed its HTTP library, and with it the errors
        raise ModelNotFound(
            f"--model-name {name}: not a directory, not in the local cache, and {_endpoint()} does not answer ({error})"
        ) from None


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "huggingface.co")

"""A number that the broker could not compute with or keep is refused, and harms no later call."""

import json

import httpx
import pytest

from atropos_api.testing import make_memory_app

ENVIRONMENT = {"name": "e", "group_size": 4, "max_token_length": 9}
LEGACY_ENVIRONMENT = {"desired_name": "e", "group_size": 4, "max_token_length": 9, "weight": 1.0}
RUN = {"name": "r", "batch_size": 4, "num_steps": 1, "max_token_length": 9}
LEGACY_RUN = {
    "wandb_group": "g",
    "wandb_project": "p",
    "batch_size": 4,
    "max_token_len": 9,
    "checkpoint_dir": "",
    "save_checkpoint_interval": 0,
    "starting_step": 0,
    "num_steps": 1,
}


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/environments", ENVIRONMENT, "max_token_length"),
        ("/v1/environments", ENVIRONMENT, "weight"),
        ("/register-env", LEGACY_ENVIRONMENT, "max_token_length"),
        ("/register-env", LEGACY_ENVIRONMENT, "weight"),
        ("/v1/runs", RUN, "max_token_length"),
        ("/v1/runs", RUN, "checkpoint_interval"),
        ("/register", LEGACY_RUN, "max_token_len"),
        ("/register", LEGACY_RUN, "save_checkpoint_interval"),
        ("/register", LEGACY_RUN, "num_steps"),
        ("/v1/groups", {"groups": []}, "environment_id"),
        ("/v1/runs/r/finish", {}, "epoch"),
    ],
)
async def test_a_number_of_any_length_is_a_422_and_harms_no_later_call(path, body, field):
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(make_memory_app(), raise_app_exceptions=False), base_url="http://127.0.0.1"
    ) as caller:
        if path != "/register":
            assert (await caller.post("/v1/runs", json=RUN)).status_code == 200
        for number in ("1" * 400, "-" + "1" * 400, "9223372036854775808", "1e308"):
            text = json.dumps({**body, field: 0}).replace(f'"{field}": 0', f'"{field}": {number}')
            answer = await caller.post(path, content=text, headers={"Content-Type": "application/json"})
            assert answer.status_code == 422, (number, answer.text)
        assert (await caller.get("/v1/status")).status_code == 200
        assert (await caller.post("/v1/environments", json=ENVIRONMENT)).status_code == 200

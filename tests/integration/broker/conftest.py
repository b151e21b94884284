"""A served broker for each test, and the bodies that Atropos' own clients send."""

import httpx
import pytest

from atropos_api.testing import served_broker

REGISTRATION = {
    "wandb_group": "group",
    "wandb_project": "project",
    "batch_size": 8,
    "max_token_len": 64,
    "checkpoint_dir": "checkpoints",
    "save_checkpoint_interval": 2,
    "starting_step": 0,
    "num_steps": 10,
}
ENVIRONMENT = {"max_token_length": 64, "desired_name": "env", "weight": 1.0, "group_size": 4}


class LegacyClient:
    """The calls of an Atropos trainer and environment."""

    def __init__(self, url):
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=20)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.http.close()

    def register(self, **changes):
        return self.http.post("/register", json=REGISTRATION | changes)

    def register_env(self, **changes):
        return self.http.post("/register-env", json=ENVIRONMENT | changes).json()

    def start(self, **changes):
        """Register a trainer that polls once, so that environments may register."""
        assert self.register(**changes).status_code == 200
        assert self.batch() is None

    def batch(self):
        response = self.http.get("/batch")
        assert response.status_code == 200, response.text
        return response.json()["batch"]

    def post(self, ident=0, size=4, env_id=0, **fields):
        return self.http.post("/scored_data", json=group(ident, size, env_id=env_id) | fields)

    def status_env(self, env_id):
        return self.http.request("GET", "/status-env", json={"env_id": env_id})

    def idents(self):
        """Return the idents of the groups in the next batch."""
        batch = self.batch()
        return None if batch is None else [item["tokens"][0][0] for item in batch]


def group(ident=0, size=4, *, length=3, env_id=0):
    tokens = [[ident] + [row] * (length - 1) for row in range(size)]
    return {"tokens": tokens, "masks": tokens, "scores": [float(row) for row in range(size)], "env_id": env_id}


@pytest.fixture
def make_group():
    return group


@pytest.fixture
def legacy_client():
    return LegacyClient


@pytest.fixture
def legacy(request):
    options = getattr(request, "param", {})
    with served_broker(**options) as url, LegacyClient(url) as client:
        yield client

"""Errors become answers whatever they name: fields come from the keys that a sender made up."""

import httpx
import msgspec
import pytest

from atropos_api.testing import make_group, make_memory_app

VALID = msgspec.json.encode(make_group(4))


@pytest.mark.anyio
@pytest.mark.parametrize("key", ["²", "٣", "9" * 5000])
async def test_a_key_of_odd_digits_is_refused_by_its_name_and_the_neighbour_is_taken_once(key):
    app = make_memory_app()
    odd = VALID[:-1] + f',"{key}":1e999}}'.encode()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1") as http:
        alone = await http.post("/scored_data", content=odd)
        among = await http.post("/scored_data_list", content=b"[%b,%b]" % (VALID, odd))
    assert (alone.status_code, among.status_code) == (422, 422)
    assert alone.json()["detail"][0]["loc"] == ["body", key]
    assert among.json()["detail"][0]["loc"] == ["body", 1, key]
    assert (among.json()["groups_processed"], app.context.broker.state.queue.groups) == (1, 1)

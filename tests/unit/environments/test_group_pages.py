"""Pages of groups: nothing on them runs, and each is for this machine alone."""

import json
import socket
import threading
import urllib.error
import urllib.request
from html.parser import HTMLParser

import pytest

from atropos_api.client import BrokerClient
from atropos_api.common.cliconfig import ConfigError
from atropos_api.testing import served_broker
from atropos_api.wire.groups import Group
from atropos_api.wire.messages import EnvironmentRequest
from environments.export import (
    ViewOptions,
    latest_of_broker,
    latest_of_file,
    make_server,
)
from environments.export import run as run_view
from environments.sdk.group_files import GroupsUnreadable, read_groups, render, write_page

HOSTILE = '</pre><script>alert(1)</script><img src=x onerror="alert(2)"><a href="javascript:alert(3)">x</a>'


class Page(HTMLParser):
    """A page as a browser would parse it: it collects elements, attributes and texts."""

    def __init__(self, source):
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.text = [], [], ""
        self.feed(source)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text += data


def test_what_a_model_writes_stays_text():
    chat = [{"role": HOSTILE, "content": HOSTILE}, {"role": "tool", "content": [{"type": "text", "text": HOSTILE}]}]
    page = Page(render([{"scores": [1.0, -1.0], "messages": [chat, HOSTILE]}], title=HOSTILE))
    assert not {"script", "img", "a", "iframe", "link"} & set(page.tags)
    assert not [name for name, value in page.attributes if name.startswith("on") or "javascript" in (value or "")]
    assert page.text.count("alert(1)") == 6
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in page.attributes


def test_a_page_loads_nothing_and_shows_groups_without_messages(tmp_path):
    path = tmp_path / "groups.jsonl"
    path.write_text(json.dumps({"tokens": [[1]], "masks": [[1]], "scores": [0.5], "more": 1}) + "\n\n")
    page = write_page(path)
    assert page == tmp_path / "groups.html"
    assert not [value for name, value in Page(page.read_text()).attributes if name in {"src", "href"}]
    assert "0.5" in page.read_text()


def test_a_page_shows_a_groups_prompt_once_and_marks_what_the_model_wrote():
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How many?"}]
    chats = [[*prompt, {"role": "assistant", "content": text}] for text in ("Three.", "Four.")]
    source = render([{"scores": [1.0, 0.0], "messages": chats}], title="t")
    assert [Page(source).text.count(text) for text in ("Be brief.", "How many?", "Three.", "Four.")] == [1, 1, 1, 1]
    assert source.count('<pre class="turn sampled">') == 2
    longer = [*chats[0], {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."}]
    text = Page(render([{"scores": [1.0, 0.0], "messages": [longer, chats[0]]}], title="t")).text
    assert [text.count(word) for word in ("How many?", "Three.", "Sure?")] == [1, 2, 1]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[1]",
        '{"tokens": []}',
        '{"scores": [null]}',
        '{"scores": ["1"]}',
        '{"scores": [NaN], "tokens": "x"}',
        '{"scores": [1], "tokens": [[-5]]}',
        '{"scores": [1, 0], "tokens": [[1], [2]], "masks": [[1]]}',
        '{"scores": [1, 0], "messages": [[]]}',
        b'{"scores": [1], "messages": ["\xff"]}',
    ],
)
def test_a_line_that_is_not_a_group_is_named(tmp_path, line):
    path = tmp_path / "groups.jsonl"
    path.write_bytes(b'{"scores": [1]}\n%b\n' % (line if isinstance(line, bytes) else line.encode()))
    with pytest.raises(GroupsUnreadable, match=r"groups\.jsonl:2"):
        list(read_groups(path))


def test_of_a_line_that_its_writer_did_not_end_the_groups_before_are_read(tmp_path):
    path = tmp_path / "groups.jsonl"
    path.write_text('{"scores": [1]}\n{"scores": [0')
    assert list(read_groups(path)) == [{"scores": [1]}]
    path.write_text('{"scores": [1]}\n{"scores": [0]}')
    assert list(read_groups(path)) == [{"scores": [1]}, {"scores": [0]}]
    path.write_text('{"model')
    with pytest.raises(GroupsUnreadable, match=r"groups\.jsonl:1"):
        list(read_groups(path))


def test_a_page_is_written_over_nothing_that_is_there(tmp_path):
    path = tmp_path / "groups.jsonl"
    path.write_text('{"scores": [1]}\n')
    (tmp_path / "groups.html").write_text("mine")
    assert write_page(path) == tmp_path / "groups_1.html"
    assert (tmp_path / "groups.html").read_text() == "mine"


def test_the_page_of_a_growing_file_is_for_this_machine_alone(tmp_path):
    path = tmp_path / "groups.jsonl"
    path.write_text("")
    source = latest_of_file(path, 2)
    server = make_server(source, title="groups", port=0, refresh_seconds=5)
    assert server.server_address[0] == "127.0.0.1"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        address = f"http://127.0.0.1:{server.server_port}/"
        assert "No groups yet" in urllib.request.urlopen(address).read().decode()
        with path.open("a") as file:
            file.writelines(f'{{"scores": [{n}]}}\n' for n in range(4))
        page = urllib.request.urlopen(address).read().decode()
        assert page.index("mean 3") < page.index("mean 2")
        assert "mean 1" not in page
        with pytest.raises(urllib.error.HTTPError, match="421"):
            urllib.request.urlopen(urllib.request.Request(address, headers={"Host": "evil.example"})).close()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("argv", [[], ["x.jsonl", "--api-url", "http://x"]])
def test_a_page_needs_one_source(argv):
    with pytest.raises(ConfigError, match="name one of them"):
        run_view(argv)


def test_a_port_that_is_taken_is_one_line(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with pytest.raises(ConfigError, match=f"--port {port} cannot be bound .*0 for any"):
            run_view([str(tmp_path / "g.jsonl"), "--port", port])


def test_the_page_is_not_at_the_inference_servers_port():
    assert ViewOptions().port == 9009


def test_a_proxy_is_not_asked_for_the_latest_groups_of_a_broker(monkeypatch):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with served_broker(token="a-token-of-ours") as url:
        assert latest_of_broker(url, 2, token="a-token-of-ours")() == []


def test_the_latest_groups_of_a_broker_with_a_token_are_shown():
    group = Group(tokens=[[1, 2], [1, 3], [1, 4]], masks=[[-100, 2], [-100, 3], [-100, 4]], scores=[1.0, 0.0, 0.5])
    with served_broker(token="a-token-of-ours") as url, BrokerClient(url, token="a-token-of-ours") as client:
        assert latest_of_broker(url, 2, token="a-token-of-ours")() == [], "none has come yet, which is no failure"
        info = client.register_environment(EnvironmentRequest(name="e", group_size=3, max_token_length=64))
        client.submit(info.environment_id, [group], idempotency_key="once")
        assert [shown["scores"] for shown in latest_of_broker(url, 2, token="a-token-of-ours")()] == [group.scores]
        with pytest.raises(GroupsUnreadable, match="401"):
            latest_of_broker(url, 2)()


def test_a_service_that_speaks_no_http_is_one_line_on_the_page():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet():
            with listener.accept()[0] as caller:
                caller.recv(1000)
                caller.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises(GroupsUnreadable, match=r"no group could be fetched .*SSH-2"):
            latest_of_broker(f"http://127.0.0.1:{listener.getsockname()[1]}", 2)()
        thread.join()

"""`/ui` and its feed over HTTP: what they say, to whom, and that names stay names."""

import json
import re
from collections.abc import Iterator

import pytest

from tests.harness.processes import ProcessRunner
from tests.harness.readiness import http_ready
from tests.harness.waiting import eventually
from tests.router.front.rig import Answer, Rig, call

SECRET_TEXT = "xyzzy plugh"
HOSTILE = "<script>document.title='hacked'</script>"
FILES = ("/ui", "/ui/", "/ui/app.js", "/ui/charts.js", "/ui/style.css", "/ui/icon.svg")
FEEDS = ("/ui/feed", "/ui/fleet", "/ui/requests")


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """A router that has answered some requests, and refused some."""
    directory = tmp_path_factory.mktemp("ui")
    with ProcessRunner("ui", directory) as runner:
        rig = Rig(runner, directory)
        rig.start_workers(2)
        extra = [f"--static-workers={HOSTILE.replace('=', '')}=127.0.0.1:1 other"]
        rig.start_router(*extra, brain="real")
        for number in range(6):
            assert rig.complete(prompt=f"{SECRET_TEXT} {number}", max_tokens=2).status == 200
        assert rig.complete(model=HOSTILE).status == 404
        assert rig.call("POST", "/v1/completions", b"{").status == 400
        yield rig


def get(rig: Rig, path: str, **headers: str) -> Answer:
    return call(rig.admin_port, "GET", path, headers=headers)


@pytest.mark.parametrize("path", [*FILES, *FEEDS])
def test_every_answer_forbids_foreign_code_frames_and_readers(shown: Rig, path: str) -> None:
    answer = get(shown, path)
    assert answer.status == 200
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "require-trusted-types-for 'script'" in policy
    assert "frame-ancestors 'none'" in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cross-origin-resource-policy"] == "same-origin"


def test_the_page_needs_nothing_from_elsewhere_and_has_nothing_inline(shown: Rig) -> None:
    page = get(shown, "/ui").body.decode()
    assert not re.findall(r"<script(?![^>]* src=)|<style| style=| on[a-z]+=", page)
    for path in FILES:
        text = get(shown, path).body.decode()
        assert not re.findall(r"https?://(?!www\.w3\.org/|\$\{location)", text), path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil", "[::2]",
             "127.0.0.1@evil", "10.0.0.1", "0x7f.0.0.1", ""],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/ui", "/ui/feed", "/fleet", "/metrics"])
def test_no_name_but_this_machine_s_own_is_answered(shown: Rig, host: str, path: str) -> None:
    assert get(shown, path, host=host).status == 403


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8001", "127.0.0.1:1", "127.9.9.9", "[::1]:8"]
)
def test_names_of_this_machine_are_answered(shown: Rig, host: str) -> None:
    assert get(shown, "/ui/feed", host=host).status == 200


def test_the_page_is_not_on_the_public_port(shown: Rig) -> None:
    assert shown.call("GET", "/ui").status == 404
    assert shown.call("GET", "/ui/feed").status == 404


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/ui/nothing", 404), ("/ui/app.js/x", 404), ("/ui/%2e%2e/feed.py", 404),
        ("/ui/..%2ffeed.py", 404), ("/ui/static", 404), ("/ui/request?number=99999", 404),
        ("/ui/request?number=-1", 400), ("/ui/requests?limit=x", 400),
        ("/ui/feed?point=%F0%9F%98%80", 400), ("/ui/fleet?text=" + "a" * 2000, 400),
        ("/ui/requests?" + "&".join(f"a{n}=1" for n in range(40)), 400),
        ("/ui/fleet?offset=999999999", 200), ("/ui/requests?before=999999999999", 200),
        ("/ui/fleet?limit=999999999", 200),
    ],
)  # fmt: skip
def test_nonsense_is_refused_in_good_order(shown: Rig, path: str, status: int) -> None:
    assert get(shown, path).status == status


def test_posts_of_a_page_are_refused_and_nothing_but_get_is_served(shown: Rig) -> None:
    port = shown.admin_port
    assert call(port, "POST", "/ui/feed", {}, headers={"origin": "http://127.0.0.1"}).status == 400
    assert call(port, "POST", "/ui/feed", {}).status == 404


def test_no_word_of_a_prompt_or_answer_is_in_any_feed(shown: Rig) -> None:
    number = get(shown, "/ui/requests").json["rows"][0]["number"]
    for path in (*FEEDS, *(f"/ui/request?number={n}" for n in range(1, number + 1))):
        body = get(shown, path).body.decode()
        assert "xyzzy" not in body
        assert "plugh" not in body


def test_each_request_is_told_with_its_reasons(shown: Rig) -> None:
    told = get(shown, "/ui/requests?limit=500").json
    assert told["count"] == told["kept"] == len(told["rows"]) == 8
    by_status = {row["status"]: row for row in told["rows"]}
    assert set(by_status) == {200, 404, 400}
    assert by_status[404]["model"] == HOSTILE
    answered = by_status[200]
    assert answered["worker"] in {"w0", "w1"}
    assert (answered["policy"], answered["knowledge"]) == ("cache_aware", "load_only")
    why = get(shown, f"/ui/request?number={answered['number']}").json
    assert why["candidates_count"] == 2
    assert [one["worker"] for one in why["candidates"] if one["chosen"]] == [answered["worker"]]


def test_pages_of_requests_go_on_where_the_last_ended(shown: Rig) -> None:
    numbers, before = [], 0
    while rows := get(shown, f"/ui/requests?limit=3&before={before}").json["rows"]:
        numbers += [row["number"] for row in rows]
        before = numbers[-1]
        if before == 1:
            break
    assert numbers == list(range(8, 0, -1))


def test_requests_and_holders_are_found_by_their_names(shown: Rig) -> None:
    errors = get(shown, "/ui/requests?only=errors").json["rows"]
    assert {row["status"] for row in errors} == {404, 400}
    assert len(get(shown, "/ui/requests?text=404").json["rows"]) == 1
    assert get(shown, "/ui/fleet?text=W1").json["count"] == 1
    fleet = get(shown, "/ui/fleet?limit=2").json
    assert (fleet["count"], len(fleet["rows"])) == (3, 2)


def test_the_overview_tells_totals_points_and_events(shown: Rig) -> None:
    def counted() -> bool:
        return bool(get(shown, "/ui/feed").json["totals"]["requests"] == 8)

    eventually(counted, 30, "all requests are counted")
    told = get(shown, "/ui/feed").json
    assert (told["totals"]["answered"], told["totals"]["refused"]) == (6, 2)
    assert told["fleet"]["states"] == {"candidate": 3}
    assert told["router"]["policy"] == "cache_aware"
    assert told["index"]["mode"] == "none"
    assert [event["kind"] for event in told["events"]] == ["router started"]
    again = get(shown, f"/ui/feed?event={told['events_count']}").json
    assert again["events"] == []
    lengths = {len(column) for column in told["series"]["columns"].values()}
    assert len(lengths) == 1


def test_each_of_several_processes_says_whose_requests_it_shows(rig: Rig) -> None:
    rig.start_workers(1)
    rig.start_router("--workers=2", brain="real")

    def both() -> bool:
        pages = (f"http://127.0.0.1:{rig.admin_port + n}/ready" for n in range(2))
        return all(http_ready(page)() for page in pages)

    eventually(both, 30, "both processes serve their admin pages")
    for number in range(2):
        told = call(rig.admin_port + number, "GET", "/ui/feed").json["router"]
        assert (told["process"], told["processes"]) == (number, 2)
        assert told["admin_ports"] == [rig.admin_port, rig.admin_port + 1]
        assert told["instance"].endswith(f".{number}")


def test_the_feed_is_json_without_nan(shown: Rig) -> None:
    for path in FEEDS:
        json.loads(get(shown, path).body, parse_constant=lambda text: pytest.fail(text))

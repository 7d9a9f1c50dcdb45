"""`cache-admin serve` as people run it: a process over a real redis-server and a folder, its metrics, its
probes, its end, and its page in a real browser."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis as raw_redis

from kvstore.admin.serve.reports import ServingReport
from kvstore.build import load_settings, open_index
from kvstore.index.port import Outcome
from kvstore.index.sessions import Hint
from kvstore.index.sharding.index import ShardedIndex
from kvstore.keys import NO_SALT, NamespaceId, namespace_id, session_id
from kvstore.rules.units import size
from schemas.records import OutcomeOp
from tests.admin.conftest import Admin, Filled, fill, kv_slots, kv_space
from tests.admin.serve.process import ServeProcess
from tests.servers.browser import Browser
from tests.servers.redis import RedisServer
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.servers, pytest.mark.slow]

#: What a model may be called; in a tenant and in a request as well.
HOSTILE = "<img src=x onerror=\"document.title='pwned'\"><script>document.title='pwned'</script>&amp;"


@dataclass
class World:
    """A cache with something in it, on a redis-server of its own, and a server over it."""

    redis: RedisServer
    filled: Filled
    index: ShardedIndex
    hostile: NamespaceId
    serve: ServeProcess


def tell(
    index: ShardedIndex, name: NamespaceId, asked: int, served: int, reason: str, *, op: OutcomeOp = "match"
) -> None:
    """What became of one request."""
    index.tell(name, [Outcome(time.time(), HOSTILE, op, asked, served, reason, served, b"")])


def end(redis: RedisServer, index: ShardedIndex, name: NamespaceId) -> None:
    """Ends a session that alone has used the first segment in the order."""
    session, [first] = session_id(NO_SALT, "chat"), index.order(name, 1)
    with raw_redis.Redis(port=redis.port) as raw:
        raw.hset(f"kvs:{{{name}}}:owner", first.segment, session)
    index.session(name, session, [first.segment], time.time(), Hint(end=True))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("serve")
    with RedisServer(folder / "redis") as redis:
        filled = fill(folder / "cache", redis.url)
        strange = kv_space(model=HOSTILE, tenant=HOSTILE)
        filled.save(strange, kv_slots(2, seed=7))
        index = open_index(load_settings(filled.settings, {}))
        assert isinstance(index, ShardedIndex)
        name = namespace_id(strange)
        end(redis, index, NamespaceId(filled.kv_id))
        # Before the server begins: it reads what became of requests at first and then now and then.
        tell(index, name, 20, 10, "corrupt", op="load")
        with index, ServeProcess(folder / "serve", filled.options) as serve:
            serve.until(lambda: serve.get("/readyz")[0] == 200)
            serve.until(lambda: (state := serve.report().janitor) is not None and state.rounds)
            made = World(redis, filled, index, name, serve)
            tell(index, NamespaceId(filled.kv_id), 100, 65, "absent")
            [first] = index.order(name, 1)
            index.evict(name, [first.segment], delete_after_s=time.time() + 600, rule="admin")
            # A sample that has what was told since the server began.
            serve.until(lambda: any(point.asked for point in serve.report().history.points))
            serve.until(lambda: serve.report().events.events)
            yield made


def test_what_api_refuses(world: World) -> None:
    for query in ("?window_s=", "?window_s=9", "?window_s=86401", "?window_s=-1", "?window_s=1e9"):
        status, text = world.serve.get(f"/api/status{query}")
        assert (status, "window_s" in text) == (400, True), query
    assert world.serve.get(f"/api/status?window_s={'9' * 5000}")[0] == 400
    assert world.serve.report("?window_s=900").history.window_s == 900


def test_two_servers_work_at_once_and_each_ends_by_itself(world: World, tmp_path: Path) -> None:
    environment = {"KVSTORE_JANITOR__INTERVAL_S": "0.2"}
    redis = RedisServer(tmp_path / "redis").start()
    try:
        options = ["--index", redis.url, "--payloads", f"file://{world.filled.folder}"]
        with (
            ServeProcess(tmp_path / "a", options, environment) as first,
            ServeProcess(tmp_path / "b", options, environment) as second,
        ):
            for server in (first, second):
                server.until(lambda server=server: server.report().janitor.rounds >= 3)
            assert first.end(signal.SIGTERM) == 0
            assert "stopped" in first.log()
            rounds = second.report().janitor.rounds  # type: ignore[union-attr]
            second.until(lambda: second.report().janitor.rounds > rounds)  # type: ignore[union-attr]
            assert second.end(signal.SIGINT) == 0
        assert redis.command("HGET", "kvs:quotas", "janitor") == b"$-1"
    finally:
        redis.kill()


@pytest.mark.parametrize("how", ["gone", "hangs"])
def test_without_its_index_it_goes_on_answering_and_ends_when_told(
    private_redis: RedisServer, tmp_path: Path, how: str
) -> None:
    filled = fill(tmp_path / "cache", private_redis.url)
    with ServeProcess(tmp_path / "serve", filled.options, {"KVSTORE_REDIS__TIMEOUT_S": "3"}) as serve:
        serve.until(lambda: (total := serve.report().status.total) and total.segments == 5)
        private_redis.kill() if how == "gone" else private_redis.pause()
        report = serve.until(lambda: (now := serve.report()).faults and now)
        assert report.status.index.state == "unreachable"
        began = time.monotonic()
        for path in ("/", "/metrics", "/api/status", "/healthz") * 10:
            assert serve.get(path)[0] == 200, path
        assert time.monotonic() - began < PATIENCE_S / 2  # each on its own would wait for three seconds
        assert (total := serve.report().status.total) is not None and total.segments == 5
        assert 'kvstore_up{backend="index"} 0.0' in serve.get("/metrics")[1]
        began = time.monotonic()
        assert serve.end(signal.SIGTERM) == 0
        assert time.monotonic() - began < 30.0
        assert "Traceback" not in serve.log()


def test_payloads_that_hang_hold_up_neither_the_index_nor_the_end(
    private_redis: RedisServer, tmp_path: Path
) -> None:
    filled = fill(tmp_path / "cache", private_redis.url)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        bucket = f"s3://bucket/x?endpoint=http://127.0.0.1:{silent.getsockname()[1]}&region=here"
        keys = {"KVSTORE_S3__ACCESS_KEY_ID": "a", "KVSTORE_S3__SECRET_ACCESS_KEY": "b"}
        keys |= {"KVSTORE_S3__STALL_TIMEOUT_S": "60", "KVSTORE_S3__READ_TIMEOUT_S": "60"}
        options = ["--index", private_redis.url, "--payloads", bucket]
        with ServeProcess(tmp_path / "serve", options, keys) as serve:
            serve.until(lambda: (total := serve.report().status.total) and total.segments == 5)
            serve.until(lambda: serve.report().status.index.state == "ok")
            status, why = serve.get("/readyz")
            assert status == 503
            assert why.startswith("no answer from payloads (s3://bucket/x")
            assert serve.get("/healthz")[0] == 200
            filled.save(filled.kv, kv_slots(4, first=12), depth=12)
            serve.until(lambda: (total := serve.report().status.total) and total.segments == 6)
            began = time.monotonic()
            assert serve.end(signal.SIGTERM) == 0
            assert time.monotonic() - began < 30.0
            assert "not waiting for: payloads" in serve.log()
            assert "Traceback" not in serve.log()


def test_it_waits_for_an_index_that_nobody_has_made(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    with ServeProcess(tmp_path / "serve", ["--payloads", f"file://{folder}"]) as serve:
        serve.until(lambda: serve.get("/readyz")[0] == 200)
        report = serve.report()
        assert (report.status.index.state, report.janitor, folder.exists()) == ("absent", None, False)
        fill(folder)
        serve.until(lambda: (total := serve.report().status.total) and total.segments == 5)
        serve.until(lambda: (state := serve.report().janitor) is not None and state.rounds)
        assert serve.get("/healthz") == (200, "ok\n")


# -- the page ------------------------------------------------------------------------------------------------

_LOADED = "return !document.body.classList.contains('loading') && !document.body.classList.contains('stale')"
#: The rows of a table: what is written under each heading, and the number behind it where there is one.
_ROWS = """
return [...document.getElementById(arguments[0]).tBodies[0].rows].map((row) => Object.fromEntries(
  [...row.cells].map((cell) => [cell.dataset.label, [cell.textContent, cell.querySelector('data')?.value]])));
"""


@pytest.fixture
def page(world: World, browser: Browser) -> Browser:
    browser.size(1280, 900)
    browser.colours("light")
    browser.open(world.serve.url)
    browser.until(_LOADED)
    return browser


def shown(page: Browser, name: str) -> tuple[str, str]:
    """A figure: what is written, and the number behind it."""
    return tuple(
        page.run(f"const one = document.querySelector('#{name} data'); return [one.textContent, one.value]")
    )


def test_the_page_says_what_the_verbs_say(world: World, page: Browser, admin: Admin) -> None:
    status = admin("status", "--json", *world.filled.options).json
    stored = status["total"]["stored_bytes"]
    assert shown(page, "tile-stored") == (size(stored), str(stored))
    assert shown(page, "tile-blocks") == ("14", "14")
    assert shown(page, "tile-served") == ("65.0 %", "0.65")
    rows = {row["Namespace"][0]: row for row in page.run(_ROWS, "namespaces")}
    assert len(rows) == len(status["namespaces"]) == 3
    for line in status["namespaces"]:
        row, usage = rows[line["id"][:8]], line["usage"]
        assert row["Stored"] == [size(usage["stored_bytes"]), str(usage["stored_bytes"])]
        assert (row["Segments"][1], row["Blocks"][1]) == (str(usage["segments"]), str(usage["blocks"]))
        names = [row[title][0] for title in ("Model", "Tenant", "Kind")]
        assert names == [line["model"], line["tenant"], line["kind"]]
    tiers = page.run(_ROWS, "tiers")
    assert (tiers[0]["Stored"][1], tiers[0]["Of"][1]) == (str(stored), str(status["capacity_bytes"]))
    assert page.run("return document.getElementById('state').textContent") == "all well"
    # Both of one moment: the page asks as it asks for itself.
    report = ServingReport.model_validate_json(
        page.run("return fetch('api/status').then((answer) => answer.text())")
    )
    evictions = page.run(_ROWS, "evictions")
    [eviction] = report.events.events
    assert [row["Rule"][0] for row in evictions] == [eviction.rule] == ["admin"]
    assert evictions[0]["Segment"][0] == eviction.segment
    [session] = report.sessions.sessions
    [row] = page.run(_ROWS, "sessions")
    assert row["Session"][0] == session.session[:12] == session_id(NO_SALT, "chat").hex()[:12]
    assert (row["State"][0], row["Alone uses"][1]) == ("ended", str(session.stored_bytes))
    said = page.run("return document.getElementById('sessions-says').textContent")
    assert said.startswith("1 session: 0 live, 0 retained, 1 ended. 0 B retained of ")
    assert size(report.retainable_bytes) in said
    coldest = page.run(_ROWS, "coldest")
    assert [row["Segment"][0] for row in coldest] == [line.segment for line in report.top.coldest]
    assert [row["Used"][0] == "ended" for row in coldest] == [True] + [False] * (len(coldest) - 1)
    assert report.janitor is not None
    steps = page.run(_ROWS, "steps")
    assert [row["Step"][0] for row in steps] == [step.step for step in report.janitor.steps]
    assert page.run("return document.getElementById('rules').textContent").endswith("admin 1.")


def test_charts_are_drawn_labelled_and_there_as_tables(world: World, page: Browser) -> None:
    page.until("return document.querySelectorAll('#chart-missed svg rect.fill').length > 0")
    points = world.serve.report().history.points
    label = page.run("return document.querySelector('#chart-missed svg').getAttribute('aria-label')")
    assert "absent 35" in label
    for name in ("ratio", "stored"):
        assert page.run(f"return document.querySelectorAll('#chart-{name} svg .fill').length") > 0, name
    page.run("document.querySelector('#chart-stored summary').click()")
    rows = page.until(
        "const rows = document.querySelectorAll('#chart-stored tbody tr');"
        "return [...rows].map((row) => row.cells[1].textContent)"
    )
    assert len(rows) >= len(points) - 1
    assert rows[0] == size(points[-1].stored_bytes)
    # The bar of what was missed has the height that its number asks for.
    bar, top, bottom = page.run(
        "const svg = document.querySelector('#chart-missed svg');"
        "const bars = [...svg.querySelectorAll('rect.c0')].map((one) => Number(one.getAttribute('height')));"
        "const grid = [...svg.querySelectorAll('.grid')].map((one) => Number(one.getAttribute('y1')));"
        "return [Math.max(...bars), Math.min(...grid), Math.max(...grid)]"
    )
    labels = page.run(
        "const texts = document.querySelectorAll('#chart-missed text[text-anchor=end]');"
        "return [...texts].map((one) => Number(one.textContent))"
    )
    assert bar / (bottom - top) == pytest.approx(35 / max(labels), rel=0.02)
    # By keyboard.
    page.run(
        "const svg = document.querySelector('#chart-stored svg'); svg.focus();"
        "svg.dispatchEvent(new KeyboardEvent('keydown', { key: 'End', bubbles: true }))"
    )
    readout = page.run("return document.querySelector('#chart-stored output').textContent")
    assert readout.endswith(size(points[-1].stored_bytes))


def test_names_are_text(world: World, page: Browser) -> None:
    assert page.run("return document.title") == "kvstore"
    texts = page.run("return document.body.innerText")
    # As a model, a tenant and a request.
    assert texts.count(HOSTILE) >= 2
    assert HOSTILE[:60] in page.run(_ROWS, "faults")[0]["Segment or request"][0]
    assert page.run("return document.querySelectorAll('main img, main script, main [onerror]').length") == 0
    assert page.complaints() == []
    fetched = page.run("return performance.getEntriesByType('resource').map((one) => one.name)")
    assert fetched
    assert all(name.startswith(world.serve.url) for name in fetched)


def test_scripts_from_elsewhere_are_refused(page: Browser) -> None:
    page.run(
        "document.body.insertAdjacentHTML('beforeend', '<img src=\"data:,\" onerror=\"document.title=1\">');"
        "const code = document.createElement('script');"
        "code.textContent = 'document.title = 2';"
        "document.body.append(code);"
    )
    assert page.until("return document.title") == "kvstore"
    said = " ".join(page.complaints())
    assert "Content Security Policy" in said


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_it_is_readable_everywhere(page: Browser, tmp_path: Path, scheme: str, width: int) -> None:
    page.size(width, 800)
    page.colours(scheme)
    # Charts are drawn anew for their new width.
    page.until("return document.querySelector('figure svg').viewBox.baseVal.width <= arguments[0]", width)
    # A phone's browser makes the window as wide as what is too wide for it.
    wide, window = page.run("return [document.documentElement.scrollWidth, innerWidth]")
    assert (window, wide <= width) == (width, True)
    outside = page.run(
        "return [...document.querySelectorAll('main *')]"
        ".filter((one) => !one.closest('details, svg, thead, .bar'))"
        ".filter((one) => one.getBoundingClientRect().right > arguments[0] + 1)"
        ".map((one) => one.outerHTML.slice(0, 80))",
        width,
    )
    assert outside == []
    ink, ground = page.run(
        "const style = getComputedStyle(document.body); return [style.color, style.backgroundColor]"
    )
    assert contrast(ink, ground) > 7
    assert (luminance(ground) < 0.1) == (scheme == "dark")
    faint = page.run(_CONTRASTS)
    low = [(text, round(contrast(a, b), 2)) for text, a, b in faint if contrast(a, b) < 4.5]
    assert low == []
    assert page.screenshot(tmp_path / "page.png").stat().st_size > 10_000


#: Every piece of text with its colour and the colour behind it.
_CONTRASTS = """
const behind = (one) => {
  for (; one; one = one.parentElement) {
    const colour = getComputedStyle(one).backgroundColor;
    if (!colour.endsWith(', 0)')) return colour;
  }
};
return [...document.querySelectorAll('body *:not(svg *)')]
  .filter((one) => one.offsetParent)
  .filter((one) => [...one.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim()))
  .map((one) => [one.textContent.slice(0, 30), getComputedStyle(one).color, behind(one)]);
"""


def luminance(colour: str) -> float:
    """Of rgb(r, g, b), as the WCAG define it."""
    parts = [int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    """Of two colours, from 1 to 21."""
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_another_window_is_asked_for_and_remembered(world: World, page: Browser) -> None:
    page.run(
        "const select = document.getElementById('window'); select.value = '86400';"
        "select.dispatchEvent(new Event('change'))"
    )
    asked = (
        "return performance.getEntriesByType('resource').some((one) => one.name.endsWith('window_s=86400'))"
    )
    page.until(asked)
    page.open(world.serve.url + "#86400")
    page.run("location.reload()")
    page.until(_LOADED)
    assert page.run("return document.getElementById('window').value") == "86400"


def test_it_refreshes_itself_and_says_when_the_server_is_gone(
    world: World, browser: Browser, tmp_path: Path
) -> None:
    with ServeProcess(tmp_path / "serve", ["--no-janitor", *world.filled.options]) as serve:
        browser.size(1280, 900)
        browser.open(serve.url)
        browser.until("return document.querySelector('#tile-blocks data')?.value === '14'")
        world.filled.save(world.filled.kv, kv_slots(4, first=12), depth=12)
        browser.until("return document.querySelector('#tile-blocks data').value === '18'")
        assert browser.run("return document.getElementById('stale').hidden")
        assert serve.end(signal.SIGTERM) == 0
        browser.until("return document.body.classList.contains('stale')")
        text = browser.run("return document.getElementById('stale').innerText")
        assert text.startswith("This server does not answer. What you see is as of ")
        assert browser.run("return document.getElementById('state').textContent") == "no answer"
        # What was known is still there.
        assert browser.run("return document.querySelector('#tile-blocks data').value") == "18"


def test_it_says_when_the_index_is_gone(private_redis: RedisServer, browser: Browser, tmp_path: Path) -> None:
    filled = fill(tmp_path / "cache", private_redis.url)
    with ServeProcess(tmp_path / "serve", filled.options) as serve:
        browser.size(1280, 900)
        browser.open(serve.url)
        browser.until("return document.querySelector('#tile-blocks data')?.value === '14'")
        private_redis.kill()
        browser.until("return document.getElementById('state').textContent === 'trouble'")
        said = browser.run("return document.getElementById('attention').innerText")
        assert "The index does not answer" in said
        assert browser.run("return document.querySelector('#tile-blocks data').value") == "14"


def test_a_server_is_probed_from_outside(world: World, admin: Admin) -> None:
    address = world.serve.url.removeprefix("http://").rstrip("/")
    world.serve.until(lambda: world.serve.get("/readyz")[0] == 200)
    ran = admin("serve", "--probe", "--listen", address)
    assert (ran.code, ran.out) == (0, f"ready      {world.serve.url}readyz: ok\n")
    # One that listens everywhere is asked here, and no proxy of the environment is.
    everywhere = f"0.0.0.0:{address.rpartition(':')[2]}"
    env = {"http_proxy": "http://127.0.0.1:1"}
    probed = admin("serve", "--probe", "--json", "--listen", everywhere, env=env).json
    assert probed == {"url": f"{world.serve.url}readyz", "ready": True, "found": "ok"}
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        ran = admin("serve", "--probe", "--listen", f"127.0.0.1:{mute.getsockname()[1]}")
    assert ran.code == 5
    assert "no answer" in ran.out

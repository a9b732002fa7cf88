"""The report page in a real browser: nothing overflows, is cut, is loaded, or complains; it answers a person."""

import itertools
import json
import threading
from pathlib import Path

import pytest

import fedpriv
from fedpriv.cli.run import LivePage, serve_page
from fedpriv.show.page import write_report
from fedpriv.show.statement import StoredAudit, check_same_algorithm, load_audit, store_audit
from tests.conftest import small_tree
from tests.parts import in_parts
from tests.show.browser import CHROMIUM, look_at

needs_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")
OVERFLOW = "document.documentElement.scrollWidth - window.innerWidth"
CUT = """[...document.querySelectorAll("svg.chart text")].filter((text) => {
  const own = text.getBoundingClientRect(), all = text.closest("svg").getBoundingClientRect();
  return own.left < all.left - 1 || own.right > all.right + 1 || own.bottom > all.bottom + 1;
}).map((text) => text.textContent)"""
WIDE = """[...document.querySelectorAll("main > section > *, figure")].filter(
  (each) => each.getBoundingClientRect().right > window.innerWidth + 1)
  .map((each) => each.outerHTML)"""
POINT = """(() => {
  const svg = document.querySelector("figure svg"), circle = svg.querySelector("circle").getBoundingClientRect();
  svg.dispatchEvent(new PointerEvent("pointermove", { clientX: circle.x + 3, clientY: circle.y + 3 }));
  return [svg.parentElement.querySelector(".tip").textContent, svg.querySelector("circle").dataset.tip];
})()"""
HIDE = """(() => {
  document.querySelector("figure .legend button").click();
  return getComputedStyle(document.querySelector("figure svg .series")).display;
})()"""
BACK = "getComputedStyle(document.body).backgroundColor"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = {
        **small_tree(),
        "title": "A study of three silos with a title that is rather longer than a telephone is wide",
        "sweep": {"privacy.rho": [1.0, 4.0, 16.0], "algorithm.trust": ["untrusted", "trusted"], "seeds": 2},
    }
    return fedpriv.run(tree, out=tmp_path_factory.mktemp("browser") / "run").folder


@needs_a_browser
@pytest.mark.parametrize(("width", "dark"), in_parts(itertools.product([400, 1400], [False, True]), [(400, True)]))
def test_the_report_page_has_no_overflow_cut_text_remote_request_or_console_message(
    folder: Path, width: int, dark: bool
) -> None:
    page = write_report(folder)
    assert page.stat().st_size < 2_000_000
    seen = look_at(page.as_uri(), width, OVERFLOW, CUT, WIDE, BACK, dark=dark)
    overflow, cut, wide, back = seen.answers
    assert overflow <= 0
    loaded = [address for address in seen.requests if not address.startswith(("file:", "data:"))]
    assert [cut, wide, seen.complaints, loaded] == [[]] * 4
    assert (back == "rgb(255, 255, 255)") != dark


@needs_a_browser
@pytest.mark.slow
def test_a_chart_shows_its_values_as_a_tooltip_and_can_hide_a_line(folder: Path) -> None:
    (told, tip), hidden = look_at(write_report(folder).as_uri(), 1400, POINT, HIDE).answers
    assert told == tip != ""
    assert hidden == "none"


@needs_a_browser
@pytest.mark.slow
def test_the_printed_report_has_a_white_background_and_no_cut_text(folder: Path) -> None:
    seen = look_at(write_report(folder).as_uri(), 760, OVERFLOW, CUT, BACK, dark=True, printed=True)
    assert seen.answers == [pytest.approx(seen.answers[0]), [], "rgb(255, 255, 255)"]
    assert seen.answers[0] <= 0


@needs_a_browser
@pytest.mark.slow
def test_the_live_report_page_reloads_until_its_run_is_complete(tmp_path: Path) -> None:
    """The same page, served while the run goes, reloads itself when a cell is finished."""
    watched = LivePage()
    go = threading.Event()

    class Slow(fedpriv.RunObserver):
        def finished(self, place: int, finished: object) -> None:
            if place == 0:
                go.wait(30)

    tree = {**small_tree(), "sweep": {"federation.rounds": [4, 8]}}
    with serve_page(watched) as address:
        run = threading.Thread(
            target=lambda: fedpriv.run(tree, out=tmp_path / "run", observers=[watched, Slow()], progress=False)
        )
        run.start()
        later = """new Promise((done) => setInterval(() => {
          if (document.body.textContent.includes("INCOMPLETE") === false) done("complete"); }, 200))"""
        first = look_at(address, 1400, "document.body.textContent.includes('1 of 2 cells')", BACK)
        go.set()
        run.join()
        last = look_at(address, 1400, later)
    assert first.answers[0] is True
    assert last.answers == ["complete"]
    assert first.complaints == last.complaints == []


@pytest.mark.slow
def test_the_live_page_server_refuses_requests_with_a_foreign_host_header() -> None:
    import http.client

    with serve_page(LivePage()) as address:
        port = int(address.rstrip("/").rpartition(":")[2])
        said = {}
        for host in (f"127.0.0.1:{port}", "elsewhere.example"):
            connection = http.client.HTTPConnection("127.0.0.1", port)
            connection.request("GET", "/", headers={"Host": host})
            said[host] = connection.getresponse().status
    assert list(said.values()) == [200, 403]


@pytest.mark.slow
def test_an_audit_is_stored_and_shown(folder: Path, tmp_path: Path) -> None:
    scenario = fedpriv.load(folder)[0].scenario
    check_same_algorithm(folder, scenario)
    with pytest.raises(fedpriv.InputError, match="no cell there has the algorithm"):
        check_same_algorithm(folder, {**scenario, "algorithm": {"name": "dp-sgd"}})
    outcome = {
        "claimed_mu": 1.0, "mu": 0.81, "epsilon": 2.5, "claimed_epsilon": 4.4, "delta": 1e-5, "trials": 4096,
        "statistic": "canaries", "confidence": 0.99, "rounds": 12, "silos": 3, "trust": "untrusted",
        "stands": True, "sees": {"canaries": 0.8399, "canaries, first step": 0.7},
    }  # fmt: skip
    store_audit(folder, outcome)
    kept = load_audit(folder)
    assert isinstance(kept, StoredAudit)
    assert (kept.mu, kept.stands) == (0.81, True)
    page = write_report(folder, tmp_path / "page.html").read_text(encoding="utf-8")
    sizes = "would see σ × 0.83 (canaries), σ × 0.70 (canaries, first step)"
    assert [part in page for part in ("the claim stands", "at least μ = 0.81", sizes)] == [True] * 3
    whole = json.loads((folder / "audit.json").read_text(encoding="utf-8"))
    for damaged in ({}, {**whole, "mu": None}, {**whole, "trials": "many"}, {**whole, "sees": [0.5]}):
        (folder / "audit.json").write_text(json.dumps(damaged), encoding="utf-8")
        with pytest.raises(fedpriv.InputError, match=r"not an audit of fedpriv.*$"):
            write_report(folder)
    (folder / "audit.json").unlink()

"""The pages in a real browser without a network, and as PDF; figures of long runs stay small."""

import math
import re
import shutil
import subprocess
import sys

import pytest
from PIL import Image

from mindtune.controller.errors import ConfigError
from mindtune.controller.reports.figure_style import for_html, thinned
from mindtune.controller.reports.page import Figure
from mindtune.controller.reports.time_figures import FATES, Line, Mark, Panel, time_series
from mindtune.controller.reports.write import write_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
WIDTHS = (390, 1600)


def browse(page, folder, *arguments):
    """Open a page in a browser that reaches nothing but files."""
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
         f"--user-data-dir={folder / 'profile'}", "--host-resolver-rules=MAP * ~NOTFOUND",
         *arguments, page.as_uri()],
        cwd=folder, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return done.stdout


@pytest.mark.chromium
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
@pytest.mark.parametrize("language", ["en", "zh"])
def test_nothing_is_cut_off_in_a_browser_without_a_network(rich_pages, tmp_path, language):
    source = rich_pages[language]
    # The page itself forbids scripts; its copy measures what a reader would have to scroll for.
    text = source.read_text(encoding="utf-8")
    text = re.sub('<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    measure = (
        "<script>addEventListener('load', () => { const wide = document.documentElement; "
        "const svgs = [...document.querySelectorAll('figure svg')]; const out = [];"
        "for (const svg of svgs) { const box = svg.getBoundingClientRect(); "
        "for (const t of svg.querySelectorAll('text')) { const b = t.getBoundingClientRect(); "
        "if (b.left < box.left - 1 || b.right > box.right + 1 || b.top < box.top - 1 || "
        "b.bottom > box.bottom + 1) out.push(t.textContent); } }"
        "document.title = JSON.stringify([wide.scrollWidth, wide.clientWidth, svgs.length, out]);"
        "});</script></body>"
    )
    copy = tmp_path / "copy.html"
    copy.write_text(text.replace("</body>", measure), encoding="utf-8")
    for width in WIDTHS:
        dom = browse(copy, tmp_path, f"--window-size={width},900", "--dump-dom")
        told = re.search(r"<title>\[(\d+),(\d+),(\d+),\[(.*?)\]\]</title>", dom)
        assert told, dom[:300]
        assert int(told[1]) <= int(told[2]), f"the page is wider than {width} pixels"
        assert int(told[3]) == text.count("<svg") > 8
        assert told[4] == "", "texts of figures that stand outside of them"


@pytest.mark.chromium
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_the_page_is_drawn_as_it_stands(rich_pages, tmp_path):
    browse(rich_pages["en"], tmp_path, "--window-size=1100,900", "--screenshot=shot.png")
    with Image.open(tmp_path / "shot.png") as shot:
        colours = shot.convert("RGB").getcolors(2**24)
    assert len(colours) > 50, "style sheet and figures were let through by the page's own policy"


def test_a_page_loads_nothing_and_forbids_it(rich_pages):
    text = rich_pages["en"].read_text(encoding="utf-8")
    assert "default-src 'none'" in text
    assert "training.hub_token" in text
    assert "hunter2" not in text
    assert "<script" not in text
    assert not re.search(r"(?:src|href)=\"(?!#|data:image/png)", text)
    assert "url(http" not in text
    assert not re.search(r"<(?:g|path|text)[^>]* style=", text), "as attributes they are let in"


def test_a_pdf_holds_its_fonts_in_both_languages(study_folder, tmp_path):
    pytest.importorskip("typst")
    log = tmp_path / "log.jsonl"
    log.write_text("".join(f'{{"step": {step}, "loss": {5 / step}}}\n' for step in range(1, 9)))
    for source, language, word in ((study_folder, "en", "Trials"), (log, "zh", "时间轴")):
        path = write_report(source, tmp_path / f"{language}.pdf", language=language)
        content = path.read_bytes()
        assert content.startswith(b"%PDF-")
        assert content.count(b"/FontFile") > 0
        assert path.stat().st_size < 3_000_000
        if shutil.which("pdftotext"):
            text = subprocess.run(
                ["pdftotext", path, "-"], capture_output=True, text=True, check=True
            ).stdout
            assert word in text
            assert "\ufffd" not in text


def test_a_pdf_takes_hostile_names_and_sets_commands_as_such(study_folder, rich_run, tmp_path):
    pytest.importorskip("typst")
    folder = tmp_path / "hostile"
    shutil.copytree(rich_run, folder)
    records = folder / "decisions.jsonl"
    hostile = "a\\u001b[2J $x$ #let <b> \\ud800\\uffff"
    records.write_text(records.read_text().replace("gradient_norm", hostile))
    assert write_report(folder, tmp_path / "r.pdf").read_bytes().startswith(b"%PDF-")
    path = write_report(study_folder, tmp_path / "s.pdf")
    if shutil.which("pdftotext"):
        text = subprocess.run(
            ["pdftotext", path, "-"], capture_output=True, text=True, check=True
        ).stdout
        assert "mindtune export STUDY_DIR" in text
        assert "`" not in text


def test_without_the_extra_a_pdf_is_refused_by_name(study_folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "typst", None)
    with pytest.raises(ConfigError, match=r"pip install 'mindtune\[pdf\]'"):
        write_report(study_folder, tmp_path / "r.pdf")


def test_a_long_run_is_drawn_small_and_keeps_its_spike():
    steps = range(1, 100_001)
    values = [2.0 + (step % 7) / 10 for step in steps]
    values[77_776] = 1e6
    values[50_000] = math.nan
    kept = thinned(values)
    assert 77_776 in kept
    assert 1900 <= len(kept) <= 2000
    marks = [Mark(step, FATES["kept"]) for step in range(1, 100_001, 500)]
    svg = time_series([Panel("loss", [Line(steps, values)], marks=marks)], step_label="step")
    assert len(svg) < 200_000


def test_a_restart_begins_a_line_of_its_own():
    steps = [1, 2, 3, 4, 2, 3, 4, 5]
    svg = time_series([Panel("loss", [Line(steps, [1.0] * 8)])], step_label="step")
    whole = time_series([Panel("loss", [Line(range(8), [1.0] * 8)])], step_label="step")
    lines = [text.count('stroke="#2f74c0"') for text in (svg, whole)]
    assert lines[0] > lines[1]


def test_colours_of_axes_follow_the_page_and_those_of_data_do_not():
    svg = time_series([Panel("loss", [Line([1, 2], [1.0, 2.0])])], step_label="step")
    text = str(for_html(Figure(svg, "")))
    assert "var(--ink, #1c1f24)" in text
    assert "DejaVu" in svg
    assert "DejaVu" not in text, "and the texts have the page's fonts"
    assert "#2f74c0" in text
    assert "var(--data" not in text

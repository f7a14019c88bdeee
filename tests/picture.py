"""Take docs/page.png: the page while a tiny model of random weights is heard. It needs a quiet machine: there is no
picture with a gap, or of speech that is made more slowly than it is heard.

    python tests/picture.py
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers import ROOT
from page_helpers import ARGUMENTS, CHROMIUM, expect, set_fields, sync_playwright, wait_for_end
from serving_helpers import RunningServer, load_speech, never_end

from qwen3_tts_cuda_graphs.bench.random_checkpoint import write_checkpoint

TRIES = 5
TEXT = "Each frame of speech is eighty milliseconds long. [pause 0.5] While you listen to one, the next is being made."


def take(browser, port: int) -> bool:
    """Whether it shows what it should."""
    page = browser.new_page(viewport={"width": 1100, "height": 640})
    page.goto(f"http://127.0.0.1:{port}/")
    expect(page.locator("#status")).to_have_text("Ready.")
    set_fields(page, text=TEXT, max_new_tokens=40, seed=1)
    page.evaluate("document.querySelectorAll('details').forEach((part) => { part.open = false; })")
    page.click("#speak")
    wait_for_end(page)
    expect(page.locator("#parts button").last).to_have_attribute("aria-current", "true")  # it is being heard
    page.wait_for_timeout(1000)
    print(page.inner_text("#status"), page.inner_text("#gaps"), "gaps")
    is_good = page.inner_text("#gaps") == "0" and float(page.inner_text("#real-time").removesuffix("×")) > 1
    if is_good:
        page.evaluate("scrollTo(0, 0)")
        page.mouse.move(0, 0)
        page.screenshot(path=ROOT / "docs/page.png")
    return is_good


def main() -> int:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        write_checkpoint(Path(folder, "tiny"), "tiny", "custom_voice")
        speech = load_speech(Path(folder, "tiny"), Path(folder, "voices"))
        never_end(speech)
        with RunningServer(speech) as server:
            browser = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
            is_good = any(take(browser, server.port) for _ in range(TRIES))
            browser.close()
        speech.close()
    print("docs/page.png" if is_good else "the machine is busy: try again later")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())

"""A Chromium, and actions on the page in it."""

import os
import re
import shutil

import numpy as np
from serving_helpers import wait_until

try:
    from playwright.sync_api import expect, sync_playwright
except ImportError:
    expect = sync_playwright = None

# The headless one takes a third less CPU time.
NAMES = "chromium-headless-shell", "chromium", "google-chrome"
CHROMIUM = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
ARGUMENTS = [
    "--no-sandbox",  # CI is root in a container, and the only page is ours
    "--use-fake-device-for-media-stream",  # a microphone that beeps
    "--use-fake-ui-for-media-stream",
    "--disable-audio-output",  # with a device the audio clock stopped on a busy machine
]
SECONDS = 60  # that any wait may take


def open_all(page):
    """Open everything that is folded."""
    page.evaluate("document.querySelectorAll('details').forEach((part) => { part.open = true; })")


def set_fields(page, **fields):
    page.evaluate("document.querySelectorAll('#settings, #program').forEach((part) => { part.open = true; })")
    for name, value in fields.items():
        page.fill(f"#{name}", str(value))


def reload(page):
    page.reload()
    status(page).to_have_text("Ready.")


def wait_for_end(page):
    expect(page.locator("#status")).to_have_text(re.compile("s of speech"))


def wait_for_frames(page, count):
    """Wait until this many frames have been scheduled for playback."""
    wait_until(lambda: page.wait_for_timeout(20) or len(samples(page)) == count * 1920)


def samples(page):
    return np.array(page.evaluate("heard.chunks.flatMap((chunk) => chunk.samples)"), np.float32)


def wait_for_sound(page):
    """Wait until the first samples have been played."""
    wait_until(lambda: page.evaluate("heard.context?.currentTime > heard.chunks[0]?.when"))


def mistake(page, field):
    """The message next to a field."""
    return expect(page.locator(f"#{field} + .mistake"))


def button(page, name):
    return page.get_by_role("button", name=name)


def alert(page):
    """Where an error is shown: next to its field, or at the top of the page."""
    return page.locator("[role=alert]:not(:empty)")


def speak(page, **fields):
    """Speak a text to its end. An earlier one is played to its end first: until then the button says Stop."""
    set_fields(page, **fields)
    expect(page.locator("#speak")).to_contain_text("Speak")
    page.click("#speak")
    wait_for_end(page)


def type_live(page, text):
    page.click("#live")
    page.keyboard.type(text)
    page.keyboard.press("Enter")


def status(page):
    return expect(page.locator("#status"))

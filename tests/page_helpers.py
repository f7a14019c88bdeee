"""A Chromium, and what is done on the page in it."""

import os
import re
import shutil

try:
    from playwright.sync_api import expect, sync_playwright
except ImportError:
    expect = sync_playwright = None

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
ARGUMENTS = [
    "--no-sandbox",  # CI is root in a container, and the only page is ours
    "--use-fake-device-for-media-stream",  # a microphone that beeps
    "--use-fake-ui-for-media-stream",
]


def set_fields(page, **fields):
    page.evaluate("document.querySelectorAll('#settings, #program').forEach((part) => { part.open = true; })")
    for name, value in fields.items():
        page.fill(f"#{name}", str(value))


def wait_for_end(page):
    expect(page.locator("#status")).to_have_text(re.compile("s of speech"))

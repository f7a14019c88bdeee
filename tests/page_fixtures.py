"""Fixtures: the page in a Chromium, and a record of the audio that it plays."""

import pytest
from page_helpers import ARGUMENTS, CHROMIUM, SECONDS, expect, status, sync_playwright

# Records the audio that is played, without the page's knowledge.
WATCH = """
    window.heard = { chunks: [], silenced: 0 };
    const { start } = AudioBufferSourceNode.prototype;
    AudioBufferSourceNode.prototype.start = function (when) {
        heard.context = this.context;
        heard.chunks.push({ when, duration: this.buffer.duration, samples: [...this.buffer.getChannelData(0)] });
        return start.apply(this, arguments);
    };
    const { disconnect } = GainNode.prototype;
    GainNode.prototype.disconnect = function () {
        heard.silenced += 1;
        return disconnect.apply(this, arguments);
    };
"""


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("needs a Chromium: apt-get install chromium, or set $CHROMIUM")
    if sync_playwright is None:
        pytest.skip("needs playwright: ./setup.sh none --test")
    expect.set_options(timeout=1000 * SECONDS)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def problems():
    """Applies to every test: errors within the page, and requests to other hosts."""
    problems = []
    yield problems
    assert problems == []


@pytest.fixture
def open_page(browser, server, problems):
    """open_page(...) -> Page, in a new context unless one is given"""
    contexts = []

    def open_page(at=server, is_ready=True, context=None, **options):
        if context is None:
            context = new_context(browser, **options)
            contexts.append(context)
        page = context.new_page()
        own = (*(f"{kind}://127.0.0.1:{at.port}{at.below}/" for kind in ("http", "ws")), "blob:", "data:")
        page.on("request", lambda request: request.url.startswith(own) or problems.append(request.url))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: is_problem(message) and problems.append(message.text))
        page.goto(f"http://127.0.0.1:{at.port}{at.below}/")
        if is_ready:
            status(page).to_have_text("Ready.")
        return page

    yield open_page
    for context in contexts:
        context.close()


def new_context(browser, **options):
    context = browser.new_context(viewport={"width": 1280, "height": 900}, **options)
    context.set_default_timeout(1000 * SECONDS)
    context.add_init_script(WATCH)
    return context


def is_problem(message):
    """Chromium itself logs every response whose status is not 200."""
    is_refusal = message.text.startswith(("Failed to load resource", "WebSocket connection to"))
    return message.type in ("error", "warning") and not is_refusal


@pytest.fixture(scope="module")
def shared_context(browser):
    """A new context takes Chromium three times as long as a new page. Pages find nothing of earlier ones in it."""
    context = new_context(browser)
    forget = "indexedDB.deleteDatabase('qwen3-tts'); localStorage.clear()"
    context.add_init_script(f"if (location.protocol !== 'about:') {{ {forget} }}")
    yield context
    context.close()


@pytest.fixture
def page(open_page, shared_context):
    page = open_page(context=shared_context)
    yield page
    page.close()

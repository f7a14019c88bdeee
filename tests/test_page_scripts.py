"""Scripts on the page: which part is marked, a click on a part, the options, and subtitles."""

import contextlib
import json
import re

import numpy as np
import pytest
from page_helpers import (
    alert,
    expect,
    mistake,
    reload,
    samples,
    set_fields,
    speak,
    status,
    type_live,
    wait_for_end,
    wait_for_sound,
)
from serving_helpers import never_end, serving, wait_until, wait_until_free

pytest_plugins = "page_fixtures"

SCRIPT = "The first. [pause 0.8] The second."
FRAMES = 12  # of each part: 0.96 s
TIMES = [(0, 0.96), (1.76, 2.72)]  # seconds


def parts(page):
    return page.locator("#parts button")


def watch_parts(page):
    """Record each part when it becomes the current one, with the position of the playback by the audio clock."""
    page.evaluate("""() => {
        window.changes = [];
        new MutationObserver((records) => {
            const part = document.querySelector("#parts [aria-current=true]");
            if (records.some(({ type }) => type === "attributes")) {
                const now = heard.context.currentTime;
                changes.push([part ? part.lastChild.textContent : null, now - heard.chunks[0].when]);
            }
        }).observe(document.getElementById("parts"), { subtree: true, attributeFilter: ["aria-current"] });
    }""")


def requests_of(page):
    """The bodies of the page's requests for speech, from now on."""
    bodies = []
    page.on("request", lambda request: request.url.endswith("/speech") and bodies.append(request.post_data_json))
    return bodies


def saved_subtitles(page):
    with page.expect_download() as download:
        page.get_by_role("button", name="Save SRT").first.click()
    assert download.value.suggested_filename == "speech.srt"
    return download.value.path().read_text()


def test_the_part_that_is_heard_is_marked(page):
    """All audio has arrived long before it is played: the audio clock decides."""
    watch_parts(page)
    speak(page, text=SCRIPT, seed=1, max_new_tokens=FRAMES + 1)
    expect(parts(page)).to_have_text([re.compile("The first.$"), re.compile("The second.$")])
    expect(page.locator("#progress")).to_be_empty()  # it has been played
    expect(page.locator("#parts [aria-current]")).to_have_count(0)
    assert len(samples(page)) == round(24000 * TIMES[1][1])
    (first, began), (second, went_on), (none, ended) = page.evaluate("changes")
    assert [first, second, none] == ["The first.", "The second.", None]
    late = 0.5 + 1.1 * int(page.inner_text("#gaps"))  # drawn on a busy machine; a gap lasts up to a second
    assert 0 <= began < late and TIMES[1][0] <= went_on < TIMES[1][0] + late and ended >= TIMES[1][1]
    assert "2.7 s of speech" in page.inner_text("#status")


def test_a_click_plays_from_there(page, speech):
    """The audio that has arrived is played again, exact to the sample, both when it is complete and while more
    arrives."""
    speak(page, text=SCRIPT, seed=1, max_new_tokens=FRAMES + 1)
    whole, count = samples(page), page.evaluate("heard.chunks.length")
    figures = page.locator(".figures").inner_text()
    for number in (1, 0):  # with the keyboard, too
        silenced = page.evaluate("heard.silenced")
        parts(page).nth(number).press("Enter")
        expect(parts(page).nth(number)).to_have_attribute("aria-current", "true")
        assert page.evaluate("heard.silenced") > silenced  # one sound at a time
        expect(page.locator("#speak")).to_contain_text("Stop")
        again = np.array(page.evaluate("heard.chunks.at(-1).samples"), np.float32)
        np.testing.assert_array_equal(again, whole[round(24000 * TIMES[number][0]) :])
    assert page.evaluate("heard.chunks.length") == count + 2
    parts(page).first.press("Enter")  # on a busy machine it may have ended meanwhile
    page.keyboard.press("Escape")
    status(page).to_have_text("Stopped.")
    expect(page.locator("#parts [aria-current]")).to_have_count(0)
    assert page.locator(".figures").inner_text() == figures
    assert page.locator("#spoken li").count() == 1

    page.evaluate("heard.chunks.length = 0")
    set_fields(page, max_new_tokens=150)
    page.click("#speak")
    wait_for_sound(page)
    assert speech.in_flight == 1
    wait_until(lambda: page.wait_for_timeout(20) or page.evaluate("speech.player.position()") > 0.3)
    again = parts(page).first.evaluate("(part) => { part.click(); return speech.player.position(); }")
    assert again < 0.3
    wait_until(lambda: page.wait_for_timeout(20) or parts(page).count() == 2)  # it continues
    parts(page).last.click()
    expect(parts(page).last).to_have_attribute("aria-current", "true")
    wait_for_end(page)
    page.keyboard.press("Escape")
    expect(page.locator("#spoken li")).to_have_count(2)
    wait_until_free(speech)


def test_a_plain_text_is_one_line(page):
    speak(page, text="Two sentences. But one part.\nAnd a line.", max_new_tokens=3)
    expect(parts(page)).to_have_count(1)
    expect(parts(page).locator("small")).to_be_hidden()
    assert parts(page).bounding_box()["height"] == 44
    speak(page, text="Another.", max_new_tokens=3)
    expect(parts(page)).to_have_text([re.compile("Another.$")])


def test_subtitles(open_page):
    """Exact times of the parts, also after a reload. A stopped part ends where it was stopped."""
    page = open_page()
    cues = [
        "1\n00:00:00,000 --> 00:00:00,960\nThe first.\n\n",
        "2\n00:00:01,760 --> 00:00:02,720\nThe second.\n\n",
    ]
    speak(page, text=SCRIPT, seed=1, max_new_tokens=FRAMES + 1)
    assert saved_subtitles(page) == "".join(cues)
    wait_until(lambda: page.evaluate("document.querySelector('#spoken li').entry.id !== undefined"))  # it is stored
    page.reload()
    assert saved_subtitles(page) == "".join(cues)

    set_fields(page, text="It is stopped.", max_new_tokens=400)
    page.click("#speak")
    wait_for_sound(page)
    page.keyboard.press("Escape")
    expect(page.locator("#spoken li")).to_have_count(2)
    seconds = page.evaluate("speech.player.seconds")
    [end] = re.fullmatch(r"1\n00:00:00,000 --> 00:00:(\S+)\nIt is stopped.\n\n", saved_subtitles(page)).groups()
    assert abs(float(end.replace(",", ".")) - seconds) < 0.001
    clock = "[5, 65, 3725].map((seconds) => [clock(seconds), clock(seconds + 0.25, true)])"
    exact = ["00:00:05,250", "00:01:05,250", "01:02:05,250"]
    assert page.evaluate(clock) == [*map(list, zip(["0:05", "1:05", "1:02:05"], exact))]


def test_the_options_reach_the_request(open_page, tmp_path):
    """They are also shown in the program, which runs, and survive a reload."""
    page = open_page()
    bodies = requests_of(page)
    set_fields(page, text="Speaker: nginx [pause 0.1] here.", seed=1, max_new_tokens=4)
    assert not {"script", "notation", "limit_speech", "lexicon"} & {*json.loads(shown_body(page))}
    set_fields(page, lexicon="# names\nnginx = engine x\n\n  Qwen\tkwen = quen")
    lexicon = {"nginx": "engine x", "Qwen": "kwen = quen"}
    page.check("#limit_speech")
    for name, value, count in (("script", True, 2), ("notation", False, 1)):
        page.check(f"#{name}")
        asked = {name: value, "limit_speech": True, "lexicon": lexicon}
        assert asked.items() <= json.loads(shown_body(page)).items()
        speak(page)
        assert asked.items() <= bodies[-1].items() and bodies[-1]["stream_format"] == "sse"
        expect(parts(page)).to_have_count(count)
        reload(page)
        assert page.is_checked(f"#{name}") and page.is_checked("#limit_speech")
        assert page.input_value("#lexicon").startswith("# names\nnginx = engine x")
        assert page.locator("#settings").get_attribute("open") is not None
        set_fields(page, seed=1, max_new_tokens=4)
        page.get_by_text("Python", exact=True).click()
        with contextlib.chdir(tmp_path):
            exec(page.inner_text("#request"), {})
        assert (tmp_path / "speech.wav").read_bytes()[:4] == b"RIFF"
        page.uncheck(f"#{name}")


def shown_body(page):
    page.get_by_text("curl", exact=True).click()
    return re.search(r"-d '(\{.*\})'", page.inner_text("#request"), re.DOTALL)[1]


@pytest.mark.parametrize(
    "field, fields, message",
    [
        ("text", {"text": "One.\nTwo. [paus 1]"}, "Line 2: there is no tag [paus 1]: did you mean [pause ...]?"),
        ("text", {"text": "[voice nobody] Hello."}, "Line 1: there is no voice 'nobody'"),
        ("lexicon", {"lexicon": "nginx engine x"}, "The lexicon has nginx engine x = : write word = how to say it"),
        ("lexicon", {"lexicon": f"{'a' * 101}=b"}, "has 101 characters, at most 100 are possible"),
    ],
)
def test_mistakes_are_shown_at_their_field(page, field, fields, message):
    set_fields(page, **fields, max_new_tokens=3)
    page.click("#speak")
    mistake(page, field).to_contain_text(message)
    expect(page.locator("#speak")).to_contain_text("Speak")
    page.fill(f"#{field}", "")
    expect(alert(page)).to_have_count(0)
    if field == "text":  # in arriving text, when the text before it has been spoken
        type_live(page, fields["text"].replace("\n", " "))
        mistake(page, "live").to_contain_text(message.partition(": ")[2])


def test_each_voice_finds_its_model(open_page, checkpoint, tmp_path):
    """The page sent the chosen voice's model: a play with a voice of another model was refused."""
    with serving([checkpoint("base"), checkpoint("custom_voice")], tmp_path) as server:
        page = open_page(server)
        speak(page, text="[voice speaker] One.\n[voice ryan] Two.", max_new_tokens=FRAMES + 1, seed=1)
        expect(parts(page)).to_have_count(2)
        type_live(page, "[voice speaker] One. [pause 0.1] [voice ryan] Two.")
        expect(page.locator("#spoken li")).to_have_count(2)
        expect(parts(page)).to_have_text([re.compile("One.$"), re.compile("Two.$")])


def test_parts_of_what_is_typed(open_page, checkpoint, tmp_path):
    """A sentence grows while it is typed, and a second one follows in the same list, with its position in the audio."""
    with serving(checkpoint(), tmp_path / "voices") as server:
        never_end(server.speech)
        page = open_page(server)
        set_fields(page, seed=1, max_new_tokens=FRAMES + 1)
        page.evaluate("speech.player.isPlaying = () => true")  # a slow machine pauses in between
        page.check("#limit_speech")
        type_live(page, SCRIPT)
        wait_until(lambda: page.wait_for_timeout(20) or page.locator("#spoken li").count() == 1)
        expect(parts(page)).to_have_text([re.compile("0:00The first.$"), re.compile("0:0[12]The second.$")])
        cues = read_cues(saved_subtitles(page))
        assert [text for _, _, text in cues] == ["The first.", "The second."] and cues[0][0] == 0
        assert cues[1][0] - cues[0][1] == pytest.approx(0.8, abs=0.002)
        total = len(samples(page)) / 24000
        assert cues[1][1] == pytest.approx(total, abs=0.002)

        type_live(page, "One more.")
        wait_until(lambda: page.wait_for_timeout(20) or page.locator("#spoken li").count() == 2)
        expect(parts(page).last).to_have_text(re.compile("One more.$"))
        assert parts(page).count() == 3
        [(start, end, text)] = read_cues(saved_subtitles(page))  # a separate file begins at 0
        assert (start, text) == (0, "One more.")
        assert end == pytest.approx(len(samples(page)) / 24000 - total, abs=0.002)
        sound = samples(page)
        parts(page).last.click()
        again = np.array(page.evaluate("heard.chunks.at(-1).samples"), np.float32)
        np.testing.assert_array_equal(again, sound[round(24000 * total) :])


def read_cues(srt):
    """(start, end, text)"""
    found = re.findall(r"\d+\n00:00:(\S+) --> 00:00:(\S+)\n(.*)\n\n", srt)
    return [(float(start.replace(",", ".")), float(end.replace(",", ".")), text) for start, end, text in found]

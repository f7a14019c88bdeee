"""The page at `/`, in a real Chromium with a real server of a tiny model.

Most tests are skipped without a Chromium: `apt-get install chromium`, or name one in $CHROMIUM.
"""

import base64
import contextlib
import json
import re
import shutil
import subprocess
import time

import numpy as np
import pytest
import soundfile
from helpers import ROOT
from page_helpers import (
    SECONDS,
    alert,
    button,
    expect,
    mistake,
    open_all,
    reload,
    samples,
    set_fields,
    speak,
    status,
    type_live,
    wait_for_end,
    wait_for_frames,
    wait_for_sound,
)
from serving_helpers import LocalService, RunningServer, pcm, wait_until, wait_until_free
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from qwen3_tts_cuda_graphs.serving.settings import Settings

pytest_plugins = "page_fixtures"


def chunks(page):
    return page.evaluate("heard.chunks.length")


def texts(page):
    """Those in the history."""
    return page.locator("#spoken li p:first-child")


def assert_heard(page, server, **asked):
    """The played audio is what the server generates for the same request."""
    spoken = server.pcm(input=page.input_value("#text"), **asked)
    np.testing.assert_allclose(samples(page), pcm(spoken), atol=1e-6)


def save(page, name, item=0):
    with page.expect_download() as download:
        page.locator("#spoken li").nth(item).get_by_role("button", name=name).click()
    return soundfile.read(download.value.path(), dtype="int16")


# ---- Speaking a text


def test_it_is_heard_while_it_is_made(page, speech):
    """A page that waits for the whole response would play the same audio later."""
    page.click("#speak")
    wait_for_sound(page)
    assert speech.in_flight == 1  # 40 s of speech: most of the response has not arrived yet
    expect(page.locator("#speak")).to_contain_text("Stop")
    expect(page.locator("#first-audio")).to_have_text(re.compile(r"^\d+ms$"))
    before = page.inner_text("#seconds")
    expect(page.locator("#seconds")).not_to_have_text(before)
    assert speech.in_flight == 1


def test_what_is_heard_is_what_the_server_made(page, server):
    """All samples are played once and in order, without gaps except where the next chunk had not arrived; and the saved
    file has the same samples."""
    speak(page, seed=1, max_new_tokens=13)
    assert_heard(page, server, max_new_tokens=13)
    expected = samples(page)
    assert len(expected) == 12 * 1920

    times = page.evaluate("heard.chunks.map(({ when, duration }) => [when, when + duration])")
    gaps = [begin - end for (_, end), (begin, _) in zip(times, times[1:])]
    assert min(gaps, default=0) > -1e-9
    assert sum(gap > 1e-9 for gap in gaps) == int(page.inner_text("#gaps"))
    assert page.inner_text("#seconds") == "1.0s"
    assert float(page.inner_text("#real-time").removesuffix("×")) > 0
    assert "1.0 s of speech" in page.inner_text("#status")
    assert page.get_attribute("#waveform", "aria-label") == "Waveform of 1.0 seconds of speech"

    audio, rate = save(page, "Save WAV")
    assert rate == 24000 and np.array_equal(audio, np.round(expected * 32767).astype(np.int16))


def test_what_was_spoken_is_kept(open_page):
    """Also after a reload: its text, voice and seed, its audio, and its files."""
    page = open_page()
    set_fields(page, max_new_tokens=13)
    for text, seed in {"First.": 7, "Second.": ""}.items():
        set_fields(page, text=text, seed=seed)
        page.click("#speak")
        expect(texts(page).first).to_have_text(text)
        expect(page.locator("#speak")).to_contain_text("Speak")
        wait_until(lambda: page.evaluate("document.querySelector('#spoken li').entry.id !== undefined"))  # it is stored
    page.reload()
    expect(texts(page)).to_have_text(["Second.", "First."])
    drawn = re.compile(r"voice speaker, seed \d+$")  # if none was given: a random one, which can be requested again
    expect(page.locator("#spoken .hint")).to_have_text([drawn, "voice speaker, seed 7"])
    # It can be played and sought. Playwright's wait_for_function polls with `eval`, which the page forbids.
    wait_until(lambda: page.evaluate("document.querySelector('#spoken audio').duration > 0.9"))
    wav, rate = save(page, "Save WAV", item=1)
    mp3, mp3_rate = save(page, "Save MP3", item=1)
    assert rate == mp3_rate == 24000 and len(wav) == 12 * 1920 and abs(len(mp3) - len(wav)) < 2500
    page.locator("#spoken li").first.get_by_role("button", name="Forget").click()
    expect(texts(page)).to_have_text(["First."])
    page.reload()
    expect(texts(page)).to_have_text(["First."])


def test_speed_and_seed_are_the_servers(page, server):
    """With the seed of the history the same speech is generated again."""
    set_fields(page, max_new_tokens=5, speed="0.25")
    expect(page.locator("#speed-shown")).to_have_text("0.25\u00d7")
    page.locator("#speed").press("ArrowRight")
    page.click("#speak")
    wait_for_end(page)
    seed = int(page.locator("#spoken .hint").first.inner_text().split()[-1])
    assert_heard(page, server, seed=seed, max_new_tokens=5, speed=0.3)
    expect(page.locator("#request")).to_contain_text('"speed": 0.3')
    set_fields(page, speed="1")
    expect(page.locator("#request")).not_to_contain_text("speed")


def test_from_too_early_to_a_reload(open_page, checkpoint, tmp_path):
    """A page that is opened too early waits, then adapts to the model: one with preset speakers uses instructions and
    does not clone. The entered text survives a reload."""
    speech = LocalService(str(checkpoint("custom_voice")), "cpu", settings=Settings(voices=tmp_path, max_streams=1))
    with contextlib.closing(speech), RunningServer(speech) as server:
        page = open_page(server, is_ready=False)
        status(page).to_have_text("The server is starting: try again in a moment.")
        speech.load()
        status(page).to_have_text("Ready.")
        presets = speech.models[0].presets
        assert page.locator("#voice option").all_inner_texts() == presets
        assert not page.is_visible("#add-voice")
        chosen = dict(voice=presets[1], language="german")
        for name, value in chosen.items():
            page.select_option(f"#{name}", value)
        speak(page, instructions="whisper", seed=1, max_new_tokens=3)
        assert_heard(page, server, **chosen, instructions="whisper", max_new_tokens=3)
        wanted = dict(text="My text.\n\u00e4\U0001f600", speed="1.5", instructions="whisper")
        set_fields(page, **wanted)
        reload(page)
        assert {name: page.input_value(f"#{name}") for name in wanted | chosen} == wanted | chosen


def test_who_speaks_before_the_page_is_ready_reads_of_the_speech(page):
    """The answer of /health arrived after the speech, and "Ready." replaced its status."""
    held = []
    page.route("**/health", lambda route: held.append(route))
    page.reload()
    speak(page, max_new_tokens=3)
    with page.expect_response("**/health"):
        held[0].continue_()
    page.wait_for_timeout(100)  # it has been read
    status(page).to_have_text(re.compile("s of speech"))


def test_without_storage_it_works(open_page):
    """If cookies are forbidden, browsers throw on any access to the storage."""
    page = open_page(is_ready=False)
    forbid = "get() { throw new DOMException('no', 'SecurityError'); }"
    stores = ("localStorage", "sessionStorage", "indexedDB")
    page.add_init_script("".join(f"Object.defineProperty(window, '{name}', {{ {forbid} }});" for name in stores))
    reload(page)
    speak(page, text="Hello.", max_new_tokens=3)
    expect(texts(page)).to_have_text(["Hello."])


def test_characters_and_progress_are_shown(page, speech):
    """Counted as by the server: an emoji is one character."""
    most = speech.settings.max_text
    page.fill("#text", "\U0001f600" * most)
    expect(page.locator("#characters")).to_have_text(f"{most:,} of {most:,} characters")
    expect(page.locator("#characters.too-many")).to_have_count(0)
    page.locator("#text").press("End")
    page.keyboard.type("!")
    expect(page.locator("#characters.too-many")).to_have_text(f"{most + 1:,} of {most:,} characters")
    page.click("#speak")
    mistake(page, "text").to_contain_text(f"The text has {most + 1} characters")
    page.fill("#text", "Hello there.")
    expect(alert(page)).to_have_count(0)  # the user is correcting it
    page.click("#speak")
    expect(page.locator("#progress")).to_have_text(re.compile(r"^[1-9]\d* s heard of \d+ s made so far\.$"))
    page.click("#speak")
    expect(page.locator("#progress")).to_be_empty()
    wait_until_free(speech)


def test_what_the_page_says_and_reads(page):
    """Random weights and slow speech are reported. The network may split an event, even within a character; without the
    last event the speech is incomplete."""
    expect(page.locator("#noise")).to_contain_text("random weights: it can only make noise")
    expect(page.locator("#noise")).to_be_visible()
    summary = """(seconds) => {
        Object.assign(speech, { asked: 0, lastChunk: 2000, firstAudio: 300, hasSpeed: true });
        speech.player.seconds = seconds;
        return speech.summary();
    }"""
    assert page.evaluate(summary, 4) == "4.0 s of speech, the first after 300 ms, made at 2.0 times real time."
    slowly = "0.5 s of speech, the first after 300 ms, made more slowly than it is heard: 4.0 s for each second."
    assert page.evaluate(summary, 0.5) == slowly
    read = """async (bytes) => {
        const body = new ReadableStream({ start(stream) {
            bytes.forEach((byte) => stream.enqueue(Uint8Array.of(byte)));
            stream.close();
        } });
        const read = [];
        try {
            for await (const { text } of eventsOf(new Response(body))) {
                read.push(text);
            }
        } catch ({ message }) {
            read.push(message);
        }
        return read;
    }"""
    event, done = 'data: {"text": "\u00e4\U0001f600"}\n\n', 'data: {"type": "speech.audio.done", "text": "end"}\n\n'
    assert page.evaluate(read, [*(2 * event + done).encode()]) == 2 * ["\u00e4\U0001f600"] + ["end"]
    broken = "The server broke off the speech: its log says why"
    assert page.evaluate(read, [*(event + done[:-1]).encode()]) == ["\u00e4\U0001f600", broken]


def test_the_waveform_grows(page):
    inked = """() => {
        const { width, height } = document.getElementById("waveform");
        const copy = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
        copy.drawImage(document.getElementById("waveform"), 0, 0);
        const { data } = copy.getImageData(0, 0, width, height);
        return data.filter((value, i) => i % 4 === 3 && value > 0).length;
    }"""
    sizes = [page.evaluate(inked)]
    page.click("#speak")
    for _ in range(2):
        count = chunks(page)
        wait_until(lambda least=count + 2: chunks(page) >= least)
        page.wait_for_timeout(100)
        sizes.append(page.evaluate(inked))
    assert sizes[0] < sizes[1] < sizes[2]


@pytest.mark.parametrize("how", ["button", "escape", "again", "play", "typed"])
def test_stop_stops(page, speech, how):
    """The sound ends at once, and the server stops generating."""
    if how == "typed":
        type_live(page, "Hello there. ")
    else:
        page.click("#speak")
    wait_for_sound(page)
    assert speech.in_flight == 1
    silenced = page.evaluate("heard.silenced")
    if how == "button":
        page.click("#speak")
    elif how in ("escape", "typed"):
        page.keyboard.press("Escape")
    elif how == "play":  # an earlier speech
        page.evaluate("spoken.add({ text: 'Before.' }, wavFile([new Int16Array(24000)]))")
        page.evaluate("document.querySelector('#spoken audio').play()")
    else:
        set_fields(page, max_new_tokens=3)
        page.locator("#text").focus()
        page.keyboard.press("Control+Enter")
        wait_for_end(page)
    assert page.evaluate("heard.silenced") > silenced
    stopped = time.monotonic()
    wait_until_free(speech)
    assert time.monotonic() - stopped < 5  # the speech has 40 s
    if how != "again":
        status(page).to_have_text("Stopped.")
        count = chunks(page)
        page.wait_for_timeout(300)
        assert chunks(page) == count
    expect(page.locator("#speak")).to_contain_text("Speak")
    expect(page.locator("#error")).to_be_empty()


# ---- Errors


def as_sentence(answer):
    """A message of the server as the page shows it."""
    assert answer.status == 400
    message = answer.error["message"]
    return f"{message[0].upper()}{message[1:]}."


def test_mistakes_are_shown_as_a_sentence(page, server, speech):
    """With the server's words. Quoted input is shown as text, never as HTML."""
    mistakes = [
        ("text", "  ", {"input": "  "}),
        ("temperature", "-1", {"temperature": -1}),
        ("seed", "many", {"seed": "many"}),
        ("top_k", "<b>7</b>", {"top_k": "<b>7</b>"}),
    ]
    for field, value, request in mistakes:
        before = page.input_value(f"#{field}")
        set_fields(page, **{field: value})
        page.click("#speak")
        mistake(page, field).to_have_text(as_sentence(server.speak(**request)))
        assert page.locator(".mistake *").count() == 0
        expect(page.locator(f"#{field}")).to_be_focused()
        expect(page.locator("#speak")).to_contain_text("Speak")
        set_fields(page, **{field: before})
    speak(page, max_new_tokens=3)
    expect(alert(page)).to_have_count(0)
    wait_until_free(speech)


def test_speech_that_breaks_off_is_an_error(page, speech):
    """Half a text must not look complete. The reason is in the server's last event, which Chromium drops if the
    connection is closed before it was read."""
    set_fields(page, text="a" * 480, max_new_tokens=500)  # more than there are positions
    page.route("**/v1/audio/speech", as_one_utterance)
    page.click("#speak")
    reasons = "The speech was cut off after 22 frames, before its end: .*|The server broke off the speech: its log .*"
    expect(alert(page)).to_have_text(re.compile(f"^({reasons})$"))
    wait_until_free(speech)


def as_one_utterance(route):
    """The page has no field for non_streaming_mode."""
    route.continue_(post_data=json.dumps(route.request.post_data_json | {"non_streaming_mode": True}))


# ---- Voices


def choose_file(page, data, name="me.wav", kind="audio/wav"):
    page.set_input_files("#file", {"name": name, "mimeType": kind, "buffer": data})


def add_voice(page, name, called=None):
    page.fill("#voice-name", name)
    button(page, "Add this voice").click()
    called = called or name
    expect(page.locator("#voice-status")).to_have_text(f"The voice {called} was added and chosen.")
    assert page.input_value("#voice") == called


def server_is_gone(page, path, **options):
    """The page's requests to this path fail."""
    page.route(f"**/v1/audio/{path}", lambda route: route.abort("connectionaborted"), **options)


def test_a_file_becomes_a_voice(page, server, speech, wav):
    page.click("#add-voice summary")
    choose_file(page, wav)
    page.fill("#transcript", "what it says")
    add_voice(page, "uploaded")
    [voice] = [voice for voice in server.ask("GET", "/v1/audio/voices").json["voices"] if voice["id"] == "uploaded"]
    assert voice["ref_text"] == "what it says" and voice["seconds"] == 2.0

    speak(page, seed=1, max_new_tokens=3)
    assert_heard(page, server, voice="uploaded", max_new_tokens=3)

    page.on("dialog", lambda dialog: dialog.accept())
    server_is_gone(page, "voices/uploaded", times=1)
    button(page, "Remove the voice uploaded").click()
    expect(page.locator(".joined .mistake")).to_contain_text("The server cannot be reached")
    server_is_gone(page, "speech")
    page.click("#speak")
    expect(page.locator("#error")).to_have_text("The server cannot be reached: is it running?")
    page.click("#remove-voice")
    status(page).to_have_text("The voice uploaded was removed.")
    assert "uploaded" not in speech.voice_names()
    expect(alert(page)).to_have_count(0)  # the error of the previous attempt
    expect(page.locator("#remove-voice")).to_be_hidden()


def test_a_voice_that_somebody_else_has_removed(page, server, wav):
    with server.registered("theirs", wav):
        page.reload()
        page.select_option("#voice", "theirs")
    page.click("#speak")
    expect(page.locator(".joined .mistake")).to_contain_text("There is no voice 'theirs'")
    page.on("dialog", lambda dialog: dialog.accept())
    page.click("#remove-voice")
    status(page).to_have_text("The voice theirs was removed.")
    expect(alert(page)).to_have_count(0)
    assert page.locator("#voice option").all_inner_texts() == ["speaker"]


def test_names_with_blanks(page, server, wav):
    page.click("#add-voice summary")
    for given, name in (
        ("  My Voice ", "my-voice"),
        ("Jos\u00e9\u00a0\u3000M\u00fcller", "jose-muller"),
        ("../Anna's\tvoice (2)", "anna-s-voice-2"),
        ("a_b-c", "a_b-c"),
    ):
        page.fill("#voice-name", given)
        note = "Letters a to z, digits, - and _, at most 64." if name == given else f"It will be called {name}."
        expect(page.locator("#name-hint")).to_have_text(note)
        choose_file(page, wav)
        add_voice(page, given, called=name)
        assert server.forget(name) == 200


def test_a_recording_becomes_a_voice(page, server, speech):
    page.click("#add-voice summary")
    page.click("#record")
    expect(page.locator("#record")).to_have_text("Stop recording (1 s)")
    page.wait_for_timeout(500)
    page.click("#record")
    expect(page.locator("#sample")).to_be_visible()
    add_voice(page, "recorded")
    [voice] = [voice for voice in speech.voices() if voice["name"] == "recorded"]
    assert 1.3 < voice["seconds"] < 4
    server.forget("recorded")


def test_a_voice_needs_a_recording_and_a_name(page, wav):
    add = button(page, "Add this voice")
    page.click("#add-voice summary")
    add.click()
    expect(alert(page)).to_have_text("There is no recording yet: record one, or choose a file.")
    choose_file(page, wav)
    add.click()
    expect(alert(page)).to_have_text("The voice has no name yet: give it one.")
    mistake(page, "voice-name").to_have_count(1)
    for name, problem in {"\u5c0f\u660e": "cannot be used", "x" * 65: "cannot be used", "Speaker": "already"}.items():
        page.fill("#voice-name", name)
        add.click()
        mistake(page, "voice-name").to_contain_text(problem)
        expect(page.locator("#voice-name")).to_be_focused()
    page.fill("#voice-name", "me")
    page.fill("#transcript", "words" * 1000)
    add.click()
    mistake(page, "transcript").to_contain_text("The transcript has 5000 characters")
    page.fill("#transcript", "")
    choose_file(page, b"not audio")
    add.click()
    mistake(page, "file").to_contain_text("This file is not audio that can be read")
    choose_file(page, b"not audio", "me.m4a", "audio/mp4")
    expect(alert(page)).to_contain_text("This file is not audio that the browser can read")


def test_without_a_microphone_there_is_a_sentence(page):
    """Browsers offer no microphone to pages over plain HTTP from another machine."""
    page.evaluate("Object.defineProperty(navigator, 'mediaDevices', { value: undefined })")
    page.click("#add-voice summary")
    page.click("#record")
    expect(alert(page)).to_contain_text("Browsers record only on pages over HTTPS")


# ---- Speak as you type


def test_words_are_sent_while_they_are_typed(page, speech):
    sent, sockets = [], []

    def watch(socket):
        sockets.append(socket)
        socket.on("framesent", lambda frame: sent.append(json.loads(frame)))

    page.on("websocket", watch)
    set_fields(page, seed=1, max_new_tokens=4)
    page.click("#live")
    page.keyboard.type("Hello there, wor", delay=10)
    wait_until(lambda: page.wait_for_timeout(20) or len(sent) == 3)
    kinds = ["session.config", "input.text", "input.text"]
    assert [message["type"] for message in sent] == kinds and sent[0]["seed"] == 1
    assert page.input_value("#live") == "wor" and page.inner_text("#said").strip() == "Hello there,"

    wait_for_frames(page, 3)
    page.keyboard.type("ld.")
    page.keyboard.press("Enter")
    wait_for_end(page)
    text = "".join(message["text"] for message in sent if message["type"] == "input.text")
    assert text == "Hello there, world." and sent[-1]["type"] == "input.done"
    assert len(samples(page)) == 3 * 1920
    assert page.inner_text("#real-time") == "–"  # it would depend on the typing
    expect(alert(page)).to_contain_text("characters of the text were not spoken")

    page.evaluate("speech.player.isPlaying = () => true")  # as after a longer sentence
    silenced = page.evaluate("heard.silenced")
    page.keyboard.type("Again.")
    page.keyboard.press("Enter")
    wait_for_frames(page, 6)
    assert len(sockets) == 1
    assert page.evaluate("heard.silenced") == silenced  # the first sentence was not interrupted
    wait_until_free(speech)


def test_a_typists_pause_is_no_gap(page):
    """Silence counts as a gap only if no text was sent since the last audio."""
    sockets = []

    def speak(socket):
        sockets.append(socket)
        socket.on_message(lambda message: "input.text" in message and socket.send(bytes(2400 * 2)))

    page.route_web_socket(re.compile("/v1/audio/speech/stream$"), speak)
    reload(page)
    page.click("#live")
    for number, word in enumerate(("One ", "two ", "three "), 1):
        page.keyboard.type(word)
        expect(page.locator("#seconds")).to_have_text(f"{0.1 * number:.1f}s")
        page.wait_for_timeout(400)
    assert page.inner_text("#gaps") == "0"
    for gaps in ("1", "2"):
        sockets[0].send(bytes(2400 * 2))
        expect(page.locator("#gaps")).to_have_text(gaps)
        page.wait_for_timeout(600)


# ---- Keys, and the request to copy


def test_a_key_is_asked_for_and_used(open_page, speech):
    """Only the page itself is sent with its 401, so that it can ask for the key."""
    key = "k\u00e4y/+ 1"
    with RunningServer(speech, api_key=key) as server:
        assert server.ask("GET", "/", headers={"Accept": "text/html"}).status == 401
        page = open_page(server, is_ready=False)
        mistake(page, "key").to_have_text(re.compile("^This server needs a key: enter"))
        expect(page.locator("#key")).to_be_focused()
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        mistake(page, "key").to_have_text(re.compile("^The server does not know this key: check"))
        page.fill("#key", key)
        page.keyboard.press("Enter")
        status(page).to_have_text("Ready.")
        expect(page.locator("#key-form")).to_be_hidden()
        stored = page.evaluate("[Object.values(sessionStorage), Object.values(localStorage), document.cookie]")
        assert stored == [[key], ["speaker"], ""]

        speak(page, max_new_tokens=3)
        type_live(page, "Hello.")
        wait_for_frames(page, 4)
        expect(page.locator("#request")).to_contain_text('"Authorization: Bearer $QWEN3_TTS_API_KEY"')
        assert key not in page.inner_text("#request")

        page.evaluate("sessionStorage.setItem('qwen3-tts-key', 'old')")
        page.reload()
        type_live(page, "Hello.")
        mistake(page, "key").to_contain_text("The server does not know this key")


def test_below_a_path_of_a_proxy(open_page, problems, speech, tmp_path):
    """All requests stay below it (`problems` has the others), and so does the copied program."""
    with RunningServer(speech, below="/tts") as server, contextlib.chdir(tmp_path):
        page = open_page(server)
        for address in ("/tts/?x=1#y", "/tts", "/tts?x=1"):  # some proxies add no slash
            page.goto(f"http://127.0.0.1:{server.port}{address}")
            status(page).to_have_text("Ready.")
        problems.clear()  # the browser requests it before the slash is added
        speak(page, max_new_tokens=3)
        assert save(page, "Save MP3")[1] == 24000
        type_live(page, "Hello.")
        wait_for_frames(page, 4)
        assert f"curl 'http://127.0.0.1:{server.port}/tts/v1/audio/speech' " in page.inner_text("#request")
        page.get_by_text("Python", exact=True).click()
        exec(page.inner_text("#request"), {})
        assert (tmp_path / "speech.wav").read_bytes()[:4] == b"RIFF"
        for address in ("/tts/docs", "/tts/docs/"):
            page.goto(f"http://127.0.0.1:{server.port}{address}")
            page.click("text=Back to the page")
            status(page).to_have_text("Ready.")
        page.click("text=for programs")
        expect(page.locator("h1")).to_have_text("Qwen3-TTS for programs")
    wait_until_free(speech)


def test_a_websocket_can_send_its_key_as_a_subprotocol(speech):
    """The WebSockets of browsers cannot send an Authorization header."""
    key = "k\u00e4y/+ 1"
    with RunningServer(speech, api_key=key) as server:
        right = base64.urlsafe_b64encode(key.encode()).decode().rstrip("=")
        with connect(server.websocket_address, subprotocols=["speech", f"bearer.{right}"]) as websocket:
            assert websocket.subprotocol == "speech"
        for wrong in (["speech"], ["speech", "bearer."], ["speech", f"bearer.{right[:-1]}"], [f"bearer{right}"]):
            with pytest.raises(InvalidStatus, match="401"):
                connect(server.websocket_address, subprotocols=wrong)


def test_the_request_can_be_run(open_page, server, tmp_path):
    """The copied program, with a text that needs escaping in shells and Python."""
    text = 'It\'s "50 $HOME"; `ls` \\n {x} @me \U0001f600 \u00e4\nnext line'
    page = open_page(permissions=["clipboard-read", "clipboard-write"])
    set_fields(page, text=text, seed=1, max_new_tokens=4, top_p=0.9)
    page.select_option("#language", "english")
    asked = dict(voice="speaker", max_new_tokens=4, top_p=0.9, language="english", response_format="wav")
    audio = server.speak(input=text, **asked).body
    assert audio[:4] == b"RIFF"

    def copied(kind):
        page.get_by_text(kind, exact=True).click()
        expect(page.locator("#copy")).to_have_text("Copy")  # "Copied" is from the previous time
        page.click("#copy")
        expect(page.locator("#copy")).to_have_text("Copied")
        return page.evaluate("navigator.clipboard.readText()")

    with contextlib.chdir(tmp_path):
        exec(copied("Python"), {})  # in this process, which has imported openai
        assert (tmp_path / "speech.wav").read_bytes() == audio
        if not shutil.which("curl"):
            pytest.skip("needs curl")
        (tmp_path / "speech.wav").unlink()
        subprocess.run(["bash", "-c", copied("curl")], check=True, timeout=SECONDS)
        assert (tmp_path / "speech.wav").read_bytes() == audio


# ---- Accessibility


def test_it_can_be_used_with_the_keyboard_alone(page, speech):
    """Every control is reached in reading order, and none needs a mouse."""
    open_all(page)
    order = []
    while not order or order[-1] not in ("copy", ""):
        page.keyboard.press("Tab")
        order.append(page.evaluate("(({ id, value, innerText }) => id || value || innerText)(document.activeElement)"))
        assert len(order) < 60, order
    wanted = "text voice language speed speak seed max_new_tokens record file voice-name live copy".split()
    assert [element for element in order if element in wanted] == wanted, order

    page.locator("#text").focus()
    page.keyboard.press("Control+Enter")
    wait_for_sound(page)
    page.locator("#speak").focus()
    page.keyboard.press("Enter")
    wait_until_free(speech)
    assert page.evaluate("document.activeElement.id") == "speak"  # the position is kept
    page.locator("input[value=curl]").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#request")).to_contain_text("from openai import OpenAI")


def test_every_control_has_a_name_of_its_own(page, server, wav):
    """As a screen reader finds it in the accessibility tree."""
    server.register("theirs", wav)
    page.reload()
    page.select_option("#voice", "theirs")
    page.evaluate("['First.', 'Second.'].forEach((text) => spoken.add({ text }, wavFile([new Int16Array(24000)])))")
    open_all(page)
    session = page.context.new_cdp_session(page)
    nodes = session.send("Accessibility.getFullAXTree")["nodes"]
    kinds = "button textbox combobox slider radio Audio".split()
    named = [node["name"]["value"] for node in nodes if node.get("role", {}).get("value") in kinds]
    player = ("play", "mute", "show more", "audio time", "volume")  # the browser's own controls within an <audio>
    names = [name for name in named if not name.startswith(player)]
    assert all(names) and len(set(names)) == len(names) > 20, names
    wanted = {"Text", "Speak", "Speed", "Remove the voice theirs", "Save WAV: First.", "Copy the request"}
    assert wanted <= set(names), names
    server.forget("theirs")


def test_it_fits_a_phone(open_page):
    """Nothing is wider than 360 pixels, and all controls are large enough for fingers."""
    page = open_page(is_ready=True, has_touch=True, is_mobile=True, screen={"width": 360, "height": 740})
    page.set_viewport_size({"width": 360, "height": 740})
    set_fields(page, text="word" * 200, temperature="-" + "9" * 300)
    open_all(page)
    page.tap("#speak")
    expect(alert(page)).to_have_count(1)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    sizes = """() => [...document.querySelectorAll("button, input, select, textarea, summary, .segments label")]
        .filter((element) => element.offsetParent && element.type !== "radio")
        .map((element) => [element.id || element.textContent, element.getBoundingClientRect().height])"""
    for name, height in page.evaluate(sizes):
        assert height >= 44, name

    page.reload()
    set_fields(page, max_new_tokens=3)
    page.evaluate("document.getElementById('settings').open = false")
    page.tap("#speak")
    wait_for_end(page)
    page.evaluate("scrollTo(0, 0)")
    for part in (page.locator("#spoken audio"), button(page, "Save WAV")):
        box = part.bounding_box()
        assert box["y"] + box["height"] <= 740, box
    assert page.evaluate("document.documentElement.scrollWidth") == 360


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_can_be_told_apart(page, scheme):
    """WCAG AA: 4.5 to 1 for text, 3 to 1 for the edges of controls and the waveform."""
    page.emulate_media(color_scheme=scheme)
    names = ["page", "surface", "ink", "muted", "field", "accent", "on-accent", "error", "error-surface"]
    read = "(name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`)"
    colours = {name: luminance(page.evaluate(read, name)) for name in names}
    pairs = [("ink", "surface"), ("ink", "page"), ("muted", "surface"), ("muted", "page"), ("accent", "surface")]
    for one, other in [*pairs, ("on-accent", "accent"), ("error", "error-surface")]:
        assert contrast(colours[one], colours[other]) >= 4.5, (one, other)
    assert contrast(colours["field"], colours["surface"]) >= 3
    assert (colours["page"] > 0.5) == (scheme == "light")


def luminance(colour):
    channels = [int(colour.strip()[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    return (max(one, other) + 0.05) / (min(one, other) + 0.05)


def test_with_reduced_motion_it_is_redrawn_rarely(open_page):
    page = open_page(reduced_motion="reduce")
    page.evaluate("""() => {
        window.drawn = 0;
        const { clearRect } = CanvasRenderingContext2D.prototype;
        CanvasRenderingContext2D.prototype.clearRect = function () {
            window.drawn += 1;
            return clearRect.apply(this, arguments);
        };
    }""")
    page.click("#speak")
    wait_for_sound(page)
    page.evaluate("window.drawn = 0")
    page.wait_for_timeout(1200)
    assert 1 <= page.evaluate("window.drawn") <= 4


# ---- Safe by default


@pytest.mark.parametrize(
    "path, kind", [("/", "html"), ("/docs", "html"), ("/page.css", "css"), ("/page.js", "javascript")]
)
def test_the_page_comes_with_a_strict_policy(server, path, kind):
    """And it is sent again only if it has changed."""
    answer = server.ask("GET", path)
    assert answer.status == 200 and answer.headers["Content-Type"] == f"text/{kind}; charset=utf-8"
    policy = answer.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'self' 'sha256-") and "unsafe" not in policy
    assert answer.headers["X-Content-Type-Options"] == "nosniff" and answer.headers["Cache-Control"] == "no-cache"
    again = server.ask("GET", path, headers={"If-None-Match": f'W/{answer.headers["ETag"]}, "other"'})
    assert again.status == 304 and again.body == b"" and again.headers["ETag"] == answer.headers["ETag"]
    assert server.ask("GET", path, headers={"If-None-Match": '"other"'}).body == answer.body


PAGE_FILES = sorted((ROOT / "qwen3_tts_cuda_graphs/serving/page").glob("*.*[!y]"))


@pytest.mark.parametrize("path", PAGE_FILES, ids=lambda path: path.name)
def test_the_page_needs_nothing_from_elsewhere(path):
    """No URL of another host or of this host's root, and nothing that parses text as HTML."""
    source = path.read_text()
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg')", source)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", source)
    linked = re.findall(r"\b(?:src|href)=\"(?!data:)(.*?)\"|\burl\((.*?)\)", source)
    assert {one or other for one, other in linked} <= {"page.css", "page.js", "docs", "./"}

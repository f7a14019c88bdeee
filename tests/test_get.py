"""Speech by URL: the parameters of a GET, access to it, and signed addresses."""

import json
import time
from urllib.parse import parse_qsl, quote, urlencode

import pytest
from serving_helpers import JSON, SHORT, RunningServer

PATH = "/v1/audio/speech"
WORDS = {"input": "Hello there.", **SHORT}
KEY = "a secret key"
WITH_KEY = {"Authorization": f"Bearer {KEY}"}
BROWSER = {"User-Agent": "Mozilla/5.0 (X11; Linux x86_64) Chrome/140.0"}


def get(server, headers=(), method="GET", **fields):
    return server.ask(method, f"{PATH}?{urlencode(WORDS | fields)}", headers=dict(headers))


def sign(server, headers=(), **fields):
    return server.ask("POST", f"{PATH}/url", json.dumps(WORDS | fields), JSON | dict(headers))


@pytest.fixture(scope="module")
def closed_server(speech):
    """It requires a key."""
    with RunningServer(speech, api_key=KEY) as server:
        yield server


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": "pcm", "voice": "speaker", "language": "en", "temperature": 0.7, "top_k": 5},
        {"response_format": "pcm_16000", "speed": 1.5, "speaker": "speaker"},
        {"response_format": "wav", "stream": False, "sample_rate": 8000, "seed": 3},
        {"response_format": "pcm", "input": "Schöne Grüße, 你好 & 1+1=2?"},
        {"response_format": "pcm", "stream_format": "sse", "non_streaming_mode": True},
        {"response_format": "pcm", "lexicon": {"Hello": "Good-bye & 你好"}, "timestamps": True},
    ],
)
def test_the_same_as_a_post(server, fields):
    """Numbers and booleans are parsed from the URL, and a signed URL gives the same speech."""
    plain = server.speak(**fields)
    in_address = {name: value if isinstance(value, str) else json.dumps(value) for name, value in fields.items()}
    for answer in (get(server, **in_address), server.ask("GET", sign(server, **fields).json["url"])):
        assert answer.status == plain.status == 200
        assert answer.body == plain.body
        for header in ("Content-Type", "X-Sample-Rate", "Content-Length", "X-Ignored"):
            assert answer.headers[header] == plain.headers[header]


def test_head_says_what_would_come(server):
    """Players request the headers first. Nothing is spoken."""

    def requests():
        return [line for line in server.ask("GET", "/metrics").body.splitlines() if b"qwen3_tts_requests_total" in line]

    before = requests()
    answer = get(server, method="HEAD", response_format="ulaw_8000")
    assert (answer.status, answer.body) == (200, b"")
    assert (answer.headers["Content-Type"], answer.headers["X-Sample-Rate"]) == ("audio/ulaw", "8000")
    assert requests() == before
    assert get(server, method="HEAD", speed=9).status == 400


@pytest.mark.parametrize(
    "fields, param, words",
    [
        ({"speed": "9"}, "speed", "must be from 0.25 to 4"),
        ({"speed": "fast"}, "speed", 'is "fast": it must be a valid number'),
        ({"seed": "1.5"}, "seed", "is 1.5: it must be a valid integer"),
        ({"temperature": "NaN"}, "temperature", 'is "NaN": it must be a valid number'),
        ({"stream": "maybe"}, "stream", 'is "maybe": it must be a valid boolean'),
        ({"top_k": "[" * 5000}, "top_k", "it must be a valid integer"),
        ({"input": " "}, "input", "the text is empty"),
        ({"voice": "nobody"}, "voice", "nobody"),
        ({"response_format": "opus_44100"}, "sample_rate", "choose 8000, 16000, 24000 or 48000"),
        ({"ref_audio": "UklGRg=="}, "ref_audio", "too large for an address: POST /v1/audio/speech, or register a"),
        ({"speaker_embedding": "[1.0]"}, "speaker_embedding", "too large for an address"),
    ],
)
def test_the_checks_of_a_post(server, fields, param, words):
    answer = get(server, **fields)
    assert answer.status == 400 and words in answer.error["message"] and answer.error["param"] == param


@pytest.mark.parametrize(
    "query, words",
    [
        ("", "input is missing"),
        ("text=Hi", "input is missing: give it; these fields are unknown: text (did you mean input?)"),
        ("input=a&input=b", "input is given twice"),
        ("input=%ff", "UTF-8 cannot encode"),
        ("&".join(f"a{number}=1" for number in range(101)), "more than 100 parameters"),
    ],
)
def test_addresses_that_cannot_be_read(server, query, words):
    answer = server.ask("GET", f"{PATH}?{query}")
    assert answer.status == 400 and words in answer.error["message"]


def test_nothing_is_no_value(server):
    """Empty parameters, as forms send them."""
    plain = server.speak(response_format="pcm")
    answer = get(server, response_format="pcm", temperature="", speed="", voice="", sample_rate="", unknown="1")
    assert answer.body == plain.body and answer.headers["X-Ignored"] == "unknown"


# ---- Access


@pytest.fixture(scope="module")
def local_server(speech):
    with RunningServer(speech, only_this_machine=True, cors_origins=("http://good.example",)) as server:
        yield server


@pytest.mark.parametrize(
    "headers, status",
    [
        ({}, 200),  # a program
        ({"User-Agent": "TwilioProxy/1.1"}, 200),
        (BROWSER | {"Sec-Fetch-Site": "none"}, 200),  # typed into the address bar
        (BROWSER | {"Sec-Fetch-Site": "same-origin"}, 200),
        (BROWSER | {"Sec-Fetch-Site": "same-site"}, 403),  # a page from another port of this machine
        (BROWSER | {"Sec-Fetch-Site": "cross-site"}, 403),  # <audio src> of any web page
        (BROWSER | {"Sec-Fetch-Site": "cross-site", "Referer": "http://good.example/page"}, 200),
        (BROWSER | {"Sec-Fetch-Site": "cross-site", "Referer": "http://good.example.evil.example/"}, 403),
        (
            BROWSER | {"Referer": "http://evil.example/page"},
            403,
        ),  # over http in a network browsers send no Sec-Fetch-Site
        (BROWSER | {"Referer": "http://{host}/page"}, 200),
        (BROWSER, 403),  # a page may suppress the Referer
        ({"User-Agent": "AppleCoreMedia/1.0.0"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "http://good.example"}, 200),
        ({"Host": "evil.example"}, 403),
    ],
)
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_other_web_pages_may_not(local_server, headers, status, method):
    """A POST of theirs is refused, too. They may load addresses that this server has signed."""
    headers = {name: value.format(host=f"127.0.0.1:{local_server.port}") for name, value in headers.items()}
    answer = get(local_server, headers, method, response_format="pcm")
    assert answer.status == status
    if status == 403 and method == "GET" and "Host" not in headers:
        assert "or ask POST /v1/audio/speech/url for an address" in answer.error["message"]
    signed = local_server.ask(method, sign(local_server, response_format="pcm").json["url"], headers=headers)
    assert signed.status == (403 if "Host" in headers else 200)


def test_a_page_cannot_have_an_address_signed(server):
    """Neither with a form, which cannot send JSON, nor with a script."""
    answer = server.ask("POST", f"{PATH}/url", json.dumps(WORDS), {"Content-Type": "text/plain"})
    assert answer.status == 415
    assert sign(server, {"Origin": "http://evil.example"}).status == 403


def test_the_key_is_never_in_an_address(closed_server):
    """Without a signature the header is required, and a signed address does not contain the key."""
    assert get(closed_server).status == get(closed_server, method="HEAD").status == 401
    assert get(closed_server, api_key=KEY).status == get(closed_server, key=KEY).status == 401
    assert sign(closed_server).status == 401
    plain = get(closed_server, WITH_KEY, response_format="pcm")
    assert plain.status == 200
    signed = sign(closed_server, WITH_KEY, response_format="pcm")
    assert signed.status == 200 and set(signed.json) == {"url", "expires_at"}
    assert 295 < signed.json["expires_at"] - time.time() <= 300
    assert signed.json["url"].startswith(f"{PATH}?") and quote(KEY) not in signed.json["url"]
    for _ in range(2):  # a player requests a lost part again
        answer = closed_server.ask("GET", signed.json["url"])
        assert (answer.status, answer.body) == (200, plain.body)
    assert closed_server.ask("HEAD", signed.json["url"]).status == 200
    assert closed_server.ask("POST", signed.json["url"], json.dumps(WORDS), JSON).status == 401


@pytest.mark.parametrize(
    "change",
    [
        {"input": "Another text."},
        {"voice": "alloy"},
        {"seed": "2"},
        {"max_new_tokens": "400"},
        {"expires": "99999999999"},
        {"expires": ""},
        {"signature": "0" * 64},
        {"signature": ""},
        {"signature": "é"},
        {"more": "1"},
        {"seed": None},
        {"expires": None},
    ],
    ids=str,
)
def test_an_address_that_was_changed(closed_server, change):
    """The signature covers all parameters, including the time. A wrong one is refused even with the key."""
    signed = dict(parse_qsl(sign(closed_server, WITH_KEY).json["url"].partition("?")[2]))
    changed = {name: value for name, value in (signed | change).items() if value is not None}
    for headers in ({}, WITH_KEY):
        answer = closed_server.ask("GET", f"{PATH}?{urlencode(changed)}", headers=headers)
        assert answer.status == 403 and answer.error["code"] == "invalid_signature"
    same = dict(reversed(signed.items()))
    assert closed_server.ask("HEAD", f"{PATH}?{urlencode(same)}").status == 200  # the order does not matter
    twice = urlencode([*signed.items(), ("input", "Another text.")])
    assert closed_server.ask("GET", f"{PATH}?{twice}").error["code"] == "invalid_signature"
    unsigned = urlencode({name: value for name, value in signed.items() if name != "signature"})
    assert closed_server.ask("GET", f"{PATH}?{unsigned}").status == 401


def test_an_address_expires(closed_server):
    url = sign(closed_server, WITH_KEY, expires_in=1).json["url"]
    assert closed_server.ask("HEAD", url).status == 200
    time.sleep(1.2)
    answer = closed_server.ask("GET", url)
    assert answer.status == 403 and answer.error["code"] == "expired"
    assert "ask POST /v1/audio/speech/url" in answer.error["message"]


def test_keys_of_other_servers(speech, closed_server):
    """An address signed with another key, or by a server without a key, is refused."""
    urls = []
    for key in ("another key", None):
        with RunningServer(speech, api_key=key) as other:
            urls.append(sign(other, {"Authorization": f"Bearer {key}"}).json["url"])
    assert [closed_server.ask("GET", url).status for url in urls] == [403, 403]
    with RunningServer(speech, api_key=f"{KEY}\n") as again:  # after a restart it is
        assert again.ask("HEAD", sign(closed_server, WITH_KEY).json["url"]).status == 200


@pytest.mark.parametrize(
    "fields, param, words",
    [
        ({"expires_in": 0}, "expires_in", "is 0, it must be from 1 to 3600 s"),
        ({"expires_in": 3601}, "expires_in", "must be from 1 to 3600 s"),
        ({"expires_in": "60"}, "expires_in", "it must be a valid integer"),
        ({"ref_audio": "UklGRg=="}, "ref_audio", "too large for an address"),
        ({"input": ""}, "input", "the text is empty"),
        ({"speed": 9}, "speed", "must be from 0.25 to 4"),
    ],
)
def test_mistakes_are_told_before_an_address_is_signed(server, fields, param, words):
    answer = sign(server, **fields)
    assert answer.status == 400 and words in answer.error["message"] and answer.error["param"] == param


def test_a_text_that_is_too_long_for_an_address(speech):
    """The longest text allowed by default fits, in any script. A longer one gets an error instead of an address that
    would be refused."""
    with RunningServer(speech) as server:
        url = sign(server, input="😀" * 4096).json["url"]
        assert server.ask("HEAD", url).status == 200
    with RunningServer(speech, max_text=10_000) as server:
        answer = sign(server, input="😀" * 6000)
        assert answer.status == 400 and "at most 60000 are possible: POST /v1/audio/speech" in answer.error["message"]


def test_below_a_path(speech):
    """With a proxy that serves everything below a path, the address is appended to the server's base URL."""
    with RunningServer(speech, below="/tts") as server:
        signed = server.ask("POST", f"/tts{PATH}/url", json.dumps(WORDS), JSON).json["url"]
        assert server.ask("GET", f"/tts{signed}").status == 200
        assert server.ask("GET", f"/tts{PATH}?{urlencode(WORDS)}").status == 200

"""The page at `/` (index.html), and its description of the interface at `/docs` (docs.html).

Their headers let them run their own script and call their own server, nothing else.
"""

import base64
import hashlib
import re
from pathlib import Path

from starlette.responses import Response

HEADERS = {
    "Cache-Control": "no-cache",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "microphone=(self), camera=(), geolocation=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def policy_of(page: str) -> str:
    policy = {
        "default-src": "'none'",
        "script-src": hashes_of(page, "script"),
        "style-src": hashes_of(page, "style"),
        "connect-src": "'self'",
        "img-src": "data:",  # the icon
        "media-src": "blob:",  # a recording before it is sent, and what was spoken
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in policy.items())


def hashes_of(page: str, tag: str) -> str:
    """The SHA-256 of each inline script or style. A browser runs those and no others."""
    contents = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() for content in contents]
    return " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"


PAGES = {
    path: Path(__file__).with_name(file).read_text(encoding="utf-8")
    for path, file in {"/": "index.html", "/docs": "docs.html"}.items()
}
POLICIES = {path: policy_of(page) for path, page in PAGES.items()}


def page_response(path: str = "/", status: int = 200) -> Response:
    return Response(PAGES[path], status, HEADERS | {"Content-Security-Policy": POLICIES[path]}, "text/html")

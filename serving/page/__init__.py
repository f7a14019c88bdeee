"""The page at `/`: index.html, and headers that let it run its own script and call its own server, nothing else."""

import base64
import hashlib
import re
from pathlib import Path

from starlette.responses import Response

PAGE = Path(__file__).with_name("index.html").read_text(encoding="utf-8")


def hashes_of(tag: str) -> str:
    """For the policy: the SHA-256 of each inline script or style. A browser runs those and no others."""
    contents = re.findall(rf"<{tag}>(.*?)</{tag}>", PAGE, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() for content in contents]
    return " ".join(f"'sha256-{digest}'" for digest in digests)


POLICY = {
    "default-src": "'none'",
    "script-src": hashes_of("script"),
    "style-src": hashes_of("style"),
    "connect-src": "'self'",
    "img-src": "data:",  # the icon
    "media-src": "blob:",  # a recording, before it is sent
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}
HEADERS = {
    "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in POLICY.items()),
    "Cache-Control": "no-cache",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "microphone=(self), camera=(), geolocation=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def page_response(status: int = 200) -> Response:
    return Response(PAGE, status, HEADERS, "text/html")

"""The page at `/` (index.html, page.css, page.js), and the description of the interface at `/docs` (docs.html).

All their URLs are relative, as a proxy may serve them below a path. Their headers allow only their own script, and
requests to their own server.
"""

import base64
import hashlib
import re
from pathlib import Path

from starlette.responses import Response

TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
FILES = {
    path: Path(__file__).with_name(name)
    for path, name in {"/": "index.html", "/docs": "docs.html", "/page.css": "page.css", "/page.js": "page.js"}.items()
}
CONTENTS = {path: file.read_bytes() for path, file in FILES.items()}


def sha256(content: bytes) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}"


INLINE = re.search(rb"<script>(.*?)</script>", CONTENTS["/"])[1]  # adds the slash that relative URLs need
POLICY = {
    "default-src": "'none'",
    "script-src": f"'self' '{sha256(INLINE)}'",
    "style-src": "'self'",
    "connect-src": "'self'",
    "img-src": "data:",  # the icon
    "media-src": "blob:",  # a recording before it is sent, and the speech in the history
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}
HEADERS = {
    "Cache-Control": "no-cache",  # always revalidate: the files must be of the same version
    "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in POLICY.items()),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "microphone=(self), camera=(), geolocation=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def page_response(path: str = "/", status: int = 200, known: str = "") -> Response:
    """known: the request's If-None-Match"""
    etag = f'"{sha256(CONTENTS[path])}"'
    headers = HEADERS | {"ETag": etag}
    if etag in known:
        return Response(status_code=304, headers=headers)
    return Response(CONTENTS[path], status, headers, TYPES[FILES[path].suffix])

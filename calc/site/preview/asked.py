"""Requests to the preview, and the reasons for refusing them: it writes files, and any page of any site may ask it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from posixpath import normpath
from typing import Any

from mkdocs.livereload import _Handler

METHODS = ("GET", "HEAD")
LOCAL = ("localhost", "127.0.0.1", "::1")
HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^\[\]:@/]+))(?::\d*)?", re.I)
BROKEN = re.compile(r"%(?![0-9a-f]{2})", re.I)
RELOAD = re.compile(r"/livereload/[0-9]{1,18}/[0-9]{1,18}")


class Refused(Exception):
    """A request that gets no page; the text is the HTTP status in reply."""


class Handler(_Handler):
    """A request as it came in, and the local address that received it."""

    def get_environ(self) -> dict[str, Any]:
        """The WSGI environment, with the raw path, the local address and a printable referrer."""
        environ: dict[str, Any] = super().get_environ()
        return environ | {
            "REQUEST_URI": self.path,
            "LOCAL_ADDR": self.connection.getsockname()[0],
            "HTTP_REFERER": _printable(environ.get("HTTP_REFERER", "")),
        }

    def log_request(self, code: Any = "-", size: Any = "-") -> None:
        """Logs to a terminal, with control characters spelled out so that the terminal obeys none of them."""
        self.requestline = _printable(self.requestline)
        super().log_request(code, size)  # type: ignore[no-untyped-call]


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def place(environ: Mapping[str, Any], bound: str) -> str:
    """The requested file, relative to the top of the site; empty for the script that waits for changes.

    Raises Refused for a request that is not for the site. `bound` is the name or address that the preview was told to
    listen on.
    """
    if environ["REQUEST_METHOD"] not in METHODS:
        raise Refused("405 Method Not Allowed")
    if not _known(environ.get("HTTP_HOST"), (*LOCAL, bound, environ["LOCAL_ADDR"])):
        raise Refused("403 Forbidden")
    path = _path(environ)
    if path.startswith("/livereload/"):
        if not RELOAD.fullmatch(path):
            raise Refused("400 Bad Request")
        return ""
    return normpath(f"{path}index.html" if path.endswith("/") else path).lstrip("/")


def _known(host: str | None, names: Collection[str]) -> bool:
    """True if a request names this machine: another site would read pages through a foreign name that leads here.

    A browser always sends its host, so a request without one is accepted.
    """
    if host is None:
        return True
    found = HOST.fullmatch(host)
    return found is not None and (found[1] or found[2]).casefold() in {name.casefold() for name in names}


def _path(environ: Mapping[str, Any]) -> str:
    try:
        path = str(environ["PATH_INFO"]).encode("latin-1").decode("utf-8")
    except UnicodeError:
        raise Refused("400 Bad Request") from None
    if not path.startswith("/") or "\0" in path or BROKEN.search(environ["REQUEST_URI"].partition("?")[0]):
        raise Refused("400 Bad Request")
    return path

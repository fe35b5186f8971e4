"""A web server on loopback for what is published, which notes what it was asked for."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Server(ThreadingHTTPServer):
    """Offers a folder; `asked` holds the paths of all requests."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        self.asked: list[str] = []
        super().__init__(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(SimpleHTTPRequestHandler):
    def do_GET(self) -> None:
        del self.headers["if-modified-since"]  # always the content: conda's client does not expect 304 of a sharded index
        super().do_GET()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
        server = self.server
        assert isinstance(server, Server)
        server.asked.append(self.path)


@contextlib.contextmanager
def offering(folder: Path, kind: type[Server] = Server) -> Iterator[Server]:
    """Serve `folder` for the length of a test."""
    with kind(folder) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()

"""A web server on loopback for what is published, which notes what it was asked for."""

from __future__ import annotations

import asyncio
import contextlib
import email.parser
import email.policy
import functools
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from rattler.index import index_fs


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


class PackageServer(Server):
    """Takes uploads as prefix.dev does. A process of its own: the uploader holds the interpreter while it waits."""

    refuse = ""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder
        self.RequestHandlerClass = functools.partial(Uploads, directory=str(folder))


class Uploads(Handler):
    def do_POST(self) -> None:
        server = self.server
        assert isinstance(server, PackageServer)
        body = self.rfile.read(int(self.headers["content-length"]))
        head = f"content-type: {self.headers['content-type']}\r\n\r\n".encode()
        message = email.parser.BytesParser(policy=email.policy.HTTP).parsebytes(head + body)
        (part,) = [p for p in message.iter_parts() if p.get_filename()]
        name = str(part.get_filename())
        status = 201 if self.headers["authorization"] == "Bearer secret" else 401
        if (server.folder / "refuse").exists() and (server.folder / "refuse").read_text() in name:
            status = 403
        lost = (server.folder / "lost").exists() and (server.folder / "lost").read_text() in name
        target = server.folder / "channel" / ("noarch" if "cubins" in name else "linux-64") / name
        if target.exists() and status == 201:
            status = 409
        if status == 201:
            content = part.get_payload(decode=True)
            assert isinstance(content, bytes)
            target.write_bytes(content)
            other = server.folder / "other"  # that somebody else publishes at this moment
            if other.exists():
                target.write_bytes(other.read_bytes())
            asyncio.run(index_fs(server.folder / "channel", force=True))
            status = 409 if other.exists() else 500 if lost else 201
        self.send_response(status)
        self.send_header("content-length", "0")
        self.end_headers()
        with (server.folder / "log").open("a") as log:
            log.write(f"{self.path} {name} {status}\n")

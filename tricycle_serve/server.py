"""uvicorn, told to be careful: connections that do nothing end, and so does everything when somebody says so."""

from __future__ import annotations

import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_CONNECTIONS = 500
LOOK = 5.0  # seconds between two looks at a connection
MOST_SILENT = 30.0  # seconds without a request, or in the middle of its headers
MOST_STUCK = 60.0  # seconds in which a client takes nothing of what waits for it
BUFFER = 2**17  # bytes on their way to a client; what else there is for it waits in its `Work`
LEAVING = 3  # seconds that answers get to end when the server does


class CarefulProtocol(H11Protocol):
    """uvicorn's HTTP, which ends connections of clients that hold them for nothing."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._waiting = 0  # bytes that the client had not taken at the last look
        self._stuck = self._silent = 0.0
        self._next_look: Any = None
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
        else:
            self._look_again()

    def _look_again(self) -> None:
        self._next_look = self.loop.call_later(LOOK, self._look)

    def _look(self) -> None:
        waiting = self.transport.get_write_buffer_size()
        self._stuck = self._stuck + LOOK if 0 < self._waiting <= waiting else 0.0
        self._waiting = waiting
        at_work = self.cycle is not None and not self.cycle.response_complete
        self._silent = 0.0 if at_work else self._silent + LOOK
        if self._stuck >= MOST_STUCK or (self._silent >= MOST_SILENT and not waiting):
            self.transport.abort()
        else:
            self._look_again()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._next_look is not None:
            self._next_look.cancel()
        super().connection_lost(exc)


class Server(uvicorn.Server):
    """A server of an ASGI application.

    Args:
        on_exit: called when a signal says that it is time to leave, in the middle of whatever the main thread does: it
            must wait for no lock that this may hold.
    """

    def __init__(self, app: Any, on_exit: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=CarefulProtocol,
                ws="none",
                loop="asyncio",
                lifespan="off",
                access_log=False,
                log_level="critical",  # what clients do wrong is told to them
                server_header=False,
                timeout_keep_alive=int(MOST_SILENT),
                timeout_graceful_shutdown=LEAVING,
            )
        )
        self._on_exit = on_exit

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._on_exit()
        super().handle_exit(sig, frame)


def listen(host: str, port: int) -> socket.socket:
    """A socket that waits for connections; a port of 0 is any that is free.

    Raises:
        OSError: one line about why there is none.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise OSError(f"--host {host}: {error.strerror or error}") from None
    try:
        if hasattr(socket, "SO_REUSEADDR") and not hasattr(socket, "SO_EXCLUSIVEADDRUSE"):  # Windows means more by it
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise OSError(f"--host {host} --port {port}: {error.strerror or error}; --port names another port") from None
    return listener

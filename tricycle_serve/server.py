"""The uvicorn server, with limits for idle and blocked connections and a fast shutdown."""

from __future__ import annotations

import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 500
CHECK_INTERVAL_SECONDS = 5.0
IDLE_TIMEOUT_SECONDS = 30.0  # without a request, or with an incomplete request header
WRITE_TIMEOUT_SECONDS = 60.0  # without progress of the client in reading the response
SEND_BUFFER_BYTES = 2**17  # of each socket; further output waits in the `EngineRequest`
SHUTDOWN_GRACE_SECONDS = 3  # for open responses


class TimeoutProtocol(H11Protocol):
    """uvicorn's HTTP protocol with a limit for connections, an idle timeout and a write timeout."""

    def connection_made(self, transport: Any) -> None:
        """Limit the socket's send buffer, start periodic timeout checks; abort if there are too many connections."""
        super().connection_made(transport)
        self._n_unsent_bytes = 0  # at the last check
        self._blocked_seconds = self._idle_seconds = 0.0
        self._check_timer: Any = None
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
        else:
            self._schedule_check()

    def _schedule_check(self) -> None:
        """Have timeouts checked again after CHECK_INTERVAL_SECONDS."""
        self._check_timer = self.loop.call_later(CHECK_INTERVAL_SECONDS, self._check_timeouts)

    def _check_timeouts(self) -> None:
        """Abort a connection that was blocked or idle for too long; else schedule the next check."""
        n_unsent_bytes = self.transport.get_write_buffer_size()
        is_blocked = 0 < self._n_unsent_bytes <= n_unsent_bytes
        self._blocked_seconds = self._blocked_seconds + CHECK_INTERVAL_SECONDS if is_blocked else 0.0
        self._n_unsent_bytes = n_unsent_bytes
        is_responding = self.cycle is not None and not self.cycle.response_complete
        self._idle_seconds = 0.0 if is_responding else self._idle_seconds + CHECK_INTERVAL_SECONDS
        is_idle = self._idle_seconds >= IDLE_TIMEOUT_SECONDS and not n_unsent_bytes
        if self._blocked_seconds >= WRITE_TIMEOUT_SECONDS or is_idle:
            self.transport.abort()
        else:
            self._schedule_check()

    def resume_writing(self) -> None:
        """Note that the client has read, because the next events may fill the buffer again before the next check."""
        self._n_unsent_bytes = 0
        super().resume_writing()

    def on_response_complete(self) -> None:
        """Note that the client is active, because a short response may begin and end between two checks."""
        self._idle_seconds = 0.0
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the periodic check."""
        if self._check_timer is not None:
            self._check_timer.cancel()
        super().connection_lost(exc)


class Server(uvicorn.Server):
    """A server of an ASGI application.

    Args:
        on_exit: called in the signal handler at SIGINT and SIGTERM. The handler interrupts the main thread, so
            `on_exit` must not wait for a lock that the main thread may hold.
    """

    def __init__(self, app: Any, on_exit: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=TimeoutProtocol,
                ws="none",
                loop="asyncio",
                lifespan="off",
                access_log=False,
                log_level="critical",  # clients receive their errors in responses
                server_header=False,
                timeout_keep_alive=int(IDLE_TIMEOUT_SECONDS),
                timeout_graceful_shutdown=SHUTDOWN_GRACE_SECONDS,
            )
        )
        self._on_exit = on_exit

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Call `on_exit`, then uvicorn's handler, which begins to shut down."""
        self._on_exit()
        super().handle_exit(sig, frame)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address and listening, or OSError; port 0 selects any free port.

    Raises:
        OSError: one line with the flag and the reason.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise OSError(f"--host {host}: {error.strerror or error}") from None
    try:
        # On Windows, SO_REUSEADDR would let other programs take over the port.
        if hasattr(socket, "SO_REUSEADDR") and not hasattr(socket, "SO_EXCLUSIVEADDRUSE"):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise OSError(f"--host {host} --port {port}: {error.strerror or error}; --port names another port") from None
    return listener

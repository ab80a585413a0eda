"""Addresses of SQLite databases, as libraries that open them through SQLAlchemy take them."""

from __future__ import annotations

from pathlib import Path


def sqlite_url(path: Path) -> str:
    """Return the URL of a database file, with the characters of its path escaped that mean something in a URL.

    Raises:
        ValueError: the installed SQLAlchemy has no escapes in such URLs (before 2.1), and the path needs one.
    """
    import sqlalchemy

    name = path.resolve().as_posix()
    url = sqlalchemy.URL.create("sqlite", database=name).render_as_string()
    if sqlalchemy.make_url(url).database != name:
        got = f"SQLAlchemy {sqlalchemy.__version__}, which would open another file"
        raise ValueError(f"{path}: expected SQLAlchemy 2.1 or later for a database in a folder of this name, got {got}")
    return url

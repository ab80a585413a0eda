"""URLs of SQLite databases for libraries that open databases with SQLAlchemy (Optuna, MLflow)."""

from __future__ import annotations

from pathlib import Path


def sqlite_url(path: Path) -> str:
    """Return the SQLAlchemy URL of a SQLite file; ValueError if it needs escapes and SQLAlchemy is older than 2.1."""
    import sqlalchemy

    name = path.resolve().as_posix()
    url = sqlalchemy.URL.create("sqlite", database=name).render_as_string()
    if sqlalchemy.make_url(url).database != name:
        got = f"SQLAlchemy {sqlalchemy.__version__}, which would open another file"
        raise ValueError(f"{path}: expected SQLAlchemy 2.1 or later for a database in a folder of this name, got {got}")
    return url

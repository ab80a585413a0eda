"""Training is killed, starved and lied to, and must end as if nothing had happened. See docs/reliability.md."""

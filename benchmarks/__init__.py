"""Timing against other libraries. Nothing here passes or fails."""

"""CodeParrot: Python files from GitHub, cleaned and deduplicated, from the Hugging Face hub."""

from __future__ import annotations

from tricycle_datasets.corpus import HubCorpus


class CodeParrot(HubCorpus):
    __doc__ = HubCorpus.__doc__

    hub_path = "codeparrot/codeparrot-clean"
    text_field = "content"

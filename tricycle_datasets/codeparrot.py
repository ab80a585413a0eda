"""The CodeParrot corpus: cleaned and deduplicated Python files from GitHub, streamed from the Hugging Face hub."""

from __future__ import annotations

from tricycle_datasets.corpus import HubCorpus


class CodeParrot(HubCorpus):
    """The CodeParrot corpus: Python files from GitHub. For the arguments see `HubCorpus`."""

    hub_path = "codeparrot/codeparrot-clean"
    text_field = "content"

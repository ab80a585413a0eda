"""The FineWeb corpus: filtered English web pages (10-billion-token sample), streamed from the Hugging Face hub."""

from __future__ import annotations

from tricycle_datasets.corpus import HubCorpus


class FineWeb(HubCorpus):
    """The FineWeb corpus: English web pages. For the arguments see `HubCorpus`."""

    hub_path = "HuggingFaceFW/fineweb"
    hub_config = "sample-10BT"

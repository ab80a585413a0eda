"""FineWeb: filtered English web pages (the sample of 10 billion tokens), from the Hugging Face hub."""

from __future__ import annotations

from tricycle_datasets.corpus import HubCorpus


class FineWeb(HubCorpus):
    __doc__ = HubCorpus.__doc__

    hub_path = "HuggingFaceFW/fineweb"
    hub_config = "sample-10BT"

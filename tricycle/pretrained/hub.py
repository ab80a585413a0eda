"""Models by name, from huggingface.co or from what was downloaded before, through the library `huggingface_hub`."""

from __future__ import annotations

import re
from pathlib import Path

NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?")  # model, owner/model, owner/model@revision
FILES = [
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "modules.json",
    "1_Pooling/config.json",
]


def download(name: str) -> Path:
    """The folder of a model in the cache of `huggingface_hub`, which is filled where it has to be.

    What people know of that library holds: HF_HOME and HF_HUB_CACHE say where the cache is, HF_HUB_OFFLINE=1 forbids to
    look anywhere else, `hf auth login` opens models that ask for it.

    Args:
        name: "owner/model", as on huggingface.co; a branch, tag or commit may follow after "@".

    Raises:
        ModuleNotFoundError: the library is not installed.
        FileNotFoundError: no such model, or no way to it; says what to do.
    """
    try:
        from huggingface_hub import constants, snapshot_download
        from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"{name}: there is no such folder or file, and to look for a model of that name on huggingface.co takes "
            'huggingface_hub: pip install "tricycle-gpt[pretrained]"'
        ) from None
    repository, _, revision = name.partition("@")
    try:
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=FILES))
    except GatedRepoError:
        reason = f"its owners ask for consent: give it on https://huggingface.co/{repository}, then run: hf auth login"
    except RepositoryNotFoundError:
        reason = "huggingface.co has no model of that name that is open to you"
    except LocalEntryNotFoundError:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "huggingface.co cannot be reached"
        reason = (
            f"no model of that name in {constants.HF_HUB_CACHE}, while {why}: where there is a network, run "
            f"`hf download {repository}`, copy the folder that it names, and give that"
        )
    except (OSError, ValueError) as error:  # of a connection, or of a name
        reason = " ".join(str(error).split())[:200] or type(error).__name__
    raise FileNotFoundError(f"{name}: there is no such folder or file here, and {reason}")

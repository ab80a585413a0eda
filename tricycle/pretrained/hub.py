"""Download of models from huggingface.co by name, through the library `huggingface_hub` and its cache."""

from __future__ import annotations

import re
from pathlib import Path

NAME_PATTERN = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(@[\w./-]+)?")  # model, owner/model, owner/model@revision
FILE_PATTERNS = """config.json generation_config.json model*.safetensors model.safetensors.index.json tokenizer.json
    tokenizer_config.json special_tokens_map.json *chat_template*.jinja vocab.json vocab.txt merges.txt source.spm
    tokenizer.model modules.json 1_Pooling/config.json sentence_bert_config.json
    config_sentence_transformers.json""".split()


def download(name: str) -> Path:
    """Download missing files of "owner/model[@revision]"; return its cached folder; FileNotFoundError if this fails.

    The settings of `huggingface_hub` apply: HF_HOME and HF_HUB_CACHE set the folder of the cache, HF_HUB_OFFLINE=1
    forbids downloads, and `hf auth login` gives access to gated models.

    Args:
        name: "owner/model", as on huggingface.co; a branch, tag or commit may follow after "@".

    Raises:
        ModuleNotFoundError: the library is not installed.
        FileNotFoundError: no such model, or it cannot be downloaded; the message says what to do.
    """
    try:
        from huggingface_hub import constants, snapshot_download
        from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"{name}: there is no such folder or file, and a download from huggingface.co needs "
            'huggingface_hub: pip install "tricycle-gpt[pretrained]"'
        ) from None
    repository, _, revision = name.partition("@")
    try:
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=FILE_PATTERNS))
    except GatedRepoError:
        reason = f"it is a gated model: accept its terms on https://huggingface.co/{repository}, then run hf auth login"
    except RepositoryNotFoundError:
        reason = "huggingface.co has no model of that name, or you have no access to it"
    except LocalEntryNotFoundError:
        cause = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "huggingface.co cannot be reached"
        reason = (
            f"there is no model of that name in {constants.HF_HUB_CACHE}, and {cause}: where there is a network, run "
            f"`hf download {repository}`, copy the folder that it prints, and pass the path of the copy"
        )
    except (OSError, ValueError) as error:  # a connection error, or an invalid name
        reason = " ".join(str(error).split())[:200] or type(error).__name__
    raise FileNotFoundError(f"{name}: there is no such folder or file here, and {reason}")
